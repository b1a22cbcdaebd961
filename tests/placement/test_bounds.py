"""What cannot be true is not shown: physics, trials that differ, and what lies far beyond what was measured."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitinfer.core.layout import Layout, lay_out
from splitinfer.llm.rebalance import LiveFigures, rebalance
from splitinfer.machine.costs import Costs
from splitinfer.machine.profile import Load, MachineProfile, Profiles, Trials
from splitinfer.placement.asked import Aim, Asked
from splitinfer.placement.bounds import assumed, doubts, impossible, spread_of, why_not
from splitinfer.placement.comparison import Comparison, beside
from splitinfer.placement.cuts import Cut
from splitinfer.placement.document import as_dict
from splitinfer.placement.formulas import Formulas
from splitinfer.placement.plan import Planner, plan
from tests.placement.rigs import rig

GOOD = Trials(few=1.05, many=1.1, longest=2176)
PLAIN = Asked(context=8192)


def measured(ratio: tuple[float, ...] = (1, 1), *trials: Trials) -> Profiles:
    found = rig(ratio)
    machines = [replace(each, trials=one) for each, one in zip(found.machines, (*trials, *(GOOD,) * 9), strict=False)]
    return replace(found, model=replace(found.model, draft=None), machines=tuple(machines))


def shown(profiles: Profiles, now: Cut | None = None) -> Comparison:
    return beside(plan(profiles, PLAIN, [Aim.CHAT]), Aim.CHAT, now)


@given(
    st.lists(st.floats(0.1, 10), min_size=1, max_size=3), st.floats(0, 0.01), st.integers(1, 16),
    st.sampled_from([64, 128, 512]), st.data(),
)  # fmt: skip
def test_no_formula_goes_beyond_what_physics_allows(
    ratio: list[float], hop: float, streams: int, budget: int, data: st.DataObject
):
    profiles, asked = rig(ratio, hop), Asked(context=8192, streams=streams, token_budget=budget)
    formulas = Formulas(profiles, asked)
    cut = data.draw(st.sampled_from(Planner(profiles, asked).cuts))
    assert impossible(formulas, cut) == ""


@pytest.mark.parametrize(
    ("figure", "wrong", "why"),
    [
        ("one", lambda *_: 1e4, "faster than the best of its machines alone"),
        ("many", lambda *_: 1e5, "more than 1 times its best machine alone"),
        ("prompt", lambda _self, _cut, tokens: 1e3 / tokens, "a longer prompt would take less time"),
    ],
)  # fmt: skip
def test_what_cannot_be_true_is_neither_shown_nor_advised(
    figure: str, wrong: Any, why: str, monkeypatch: pytest.MonkeyPatch
):
    found = plan(measured((1,)), PLAIN, [Aim.CHAT])
    monkeypatch.setattr(Formulas, figure, wrong)
    assert {row[1] for row in beside(found, Aim.CHAT).rows[1:]} == {f"not known: {why}"}
    figures = as_dict(found, {})["best"]["chat"]["figures"]
    assert {name for name, value in figures.items() if value is not None} == {"longest"}
    live = LiveFigures(measured((1, 3)), Layout(lay_out([("m0", 6, None), ("m1", 6, "tcp://m1:1")]), "m"), PLAIN)
    advice = rebalance(live, Aim.CHAT)
    assert not advice.is_worth_it
    assert advice.text.startswith("No cut is advised: ")


@pytest.mark.parametrize(
    ("trials", "why", "doubt"),
    [
        (GOOD, "", ""),
        (replace(GOOD, few=2.3), "trials differ on m1", "the same step took up to 2.3 times as long as before"),
        (replace(GOOD, many=0), "trials differ on m1", "m1 was too slow to be measured twice"),
        (replace(GOOD, longest=500), "measured up to 500 tokens", ""),
        (
            replace(GOOD, load=Load(1.7, 2, "mypy")), "m1 was busy",
            "m1 was busy: other programs used 1.7 of its 2 processors, most of all mypy.",
        ),
        (replace(GOOD, load=Load(1.5, 2)), "", "m1 was busy: other programs used 1.5 of its 2 processors."),
        (replace(GOOD, load=Load(0.7, 2)), "", ""),
    ],
)  # fmt: skip
def test_a_figure_without_agreement_is_not_shown_and_a_busy_machine_is_named(trials: Trials, why: str, doubt: str):
    profiles = measured((1, 1), GOOD, trials)
    assert why_not(profiles.machines, 128, 4096, reads=True) == why
    said = " ".join(doubts(profiles))
    assert doubt in said
    assert bool(said) == (not trials.are_good) == said.endswith("measure again: --measure.") == bool(doubt)
    found = shown(profiles)
    assert said in found.sentence
    assert found.rows[-1][1].count("s (") == 1, "the range of a figure that is known"
    assert (why in found.rows[-1][2]) == (not why or "not known" in found.rows[-1][2])
    planned = as_dict(plan(profiles, replace(PLAIN, uses_all=True), [Aim.CHAT]), {})["best"]["chat"]
    assert (planned["figures"]["ttft"] is None) == bool(why)
    assert (
        (planned["figures"]["one"] is None) == (not trials.tell) == (not any("Each token" in s for s in planned["why"]))
    )


def test_a_machine_whose_speed_is_not_known_is_taken_to_be_as_fast_as_the_others():
    """Not 12 times as fast, as it was measured beside a machine that was held up."""
    profiles, asked = measured((12, 1), replace(GOOD, few=3.0)), replace(PLAIN, uses_all=True)
    best = plan(profiles, asked, [Aim.THROUGHPUT]).best[Aim.THROUGHPUT]
    assert best.cut.layers in {(6, 6), (7, 5)}
    assert plan(measured((12, 1)), asked, [Aim.THROUGHPUT]).best[Aim.THROUGHPUT].cut.layers == (1, 11)
    assert "the cut takes it to be as fast as the quickest" in " ".join(doubts(profiles))


def test_rows_are_not_extrapolated_far():
    short = replace(measured().machines[0], layers={"layer": Costs.through({1: 0.1, 8: 0.2})})
    assert why_not([short], 32, 1, reads=False) == ""
    assert why_not([short], 33, 1, reads=False) == "measured up to 8 at once"
    single = replace(short, layers={"layer": Costs.through({1: 0.1})})
    assert [why_not([single], rows, 1, reads=False) for rows in (1, 2)] == ["", "measured up to 1 at once"]
    described = replace(short, trials=Trials())
    assert why_not([described], 10**6, 10**6, reads=True) == ""
    assert (spread_of([short]), spread_of([described])) == (1.1, 1.0)


def test_machines_that_may_be_alike_and_were_measured_far_apart_are_doubted():
    assert not list(doubts(measured((1, 2.9))))
    said = ["m0 took 3.2 times as long for a layer as m1; --measure measures again."]
    assert list(doubts(measured((3.2, 1)))) == said
    assert not list(doubts(measured((3.2, 1), Trials()))), "one of them was described"
    assert (
        assumed(measured((1, 3.2, 9), GOOD, Trials(), replace(GOOD, few=0))).machines[2].step
        == rig((1,)).machines[0].step
    )


def test_two_machines_as_one_stage_have_the_worse_of_both_trials():
    busy, slow = replace(GOOD, load=Load(2, 2, "mypy")), replace(GOOD, few=1.4, many=1.02, longest=100, age=9.0)
    assert busy.and_those(slow) == slow.and_those(busy) == Trials(1.4, 1.1, 100, busy.load, 9.0)
    assert not GOOD.and_those(replace(GOOD, many=0)).agree
    assert Trials().and_those(Trials()) == Trials()


def test_the_age_of_figures_is_said():
    old = measured((1, 1), replace(GOOD, age=2100.0), GOOD)
    assert shown(old).sentence.endswith("Measured: m0 35 min ago; --measure does it again.")


def test_the_cut_in_force_has_a_column_and_the_best_for_chat_has_the_shortest_turn():
    profiles = measured((1, 2))
    found = shown(profiles, Cut((0, 1), (3, 9)))
    assert found.headings[1] == "now: m0 3, m1 9"
    best = plan(profiles, PLAIN, [Aim.CHAT]).best[Aim.CHAT]
    turns = [Formulas(profiles, PLAIN).turn(cut) for cut in Planner(profiles, PLAIN).cuts]
    assert best.figures.turn <= 1.01 * min(turns)
    assert found.rows[2][0] == "chat: 1,024 + 512 tokens"


def test_described_machines_have_no_ranges():
    assert isinstance(rig((1,)).machines[0], MachineProfile)
    assert "(" not in shown(replace(rig((1, 1)), model=measured().model)).rows[1][1]
