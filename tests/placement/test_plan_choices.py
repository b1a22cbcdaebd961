"""A plan is the best of all cuts that fit, by the simulator; formulas and simulator agree."""

from dataclasses import replace
from itertools import product
from random import Random

import pytest

from splitinfer.machine.profile import DraftProfile
from splitinfer.placement import simulate
from splitinfer.placement.asked import Aim, Asked
from splitinfer.placement.cuts import Cut, on_grid, stride_of
from splitinfer.placement.pipeline import pipeline_of, unmeasured
from splitinfer.placement.plan import Best, Planner, plan
from splitinfer.placement.screen import Screen
from tests.placement.rigs import GB, rig

_ASKED = Asked(prompt=512, answer=64, streams=4, uses_all=True, simulated=4)
_ALL = list(on_grid([(0, 1)], 12))


def best_of(planner: Planner, aim: Aim) -> Best:
    found = planner.best(aim)
    assert found is not None
    return found


@pytest.mark.parametrize("ratio", [(1, 1), (1, 3), (2, 1), (1, 2, 1), (1,)])
@pytest.mark.parametrize("hop", [0.0001, 0.003])
def test_formulas_without_drafts_are_what_is_simulated(ratio: tuple[int, ...], hop: float):
    profiles = rig(ratio, hop)
    screen, budget = Screen(profiles, _ASKED), _ASKED.budget(profiles)
    for layers in {1: [(12,)], 2: [(9, 3), (4, 8)], 3: [(5, 3, 4)]}[len(ratio)]:
        cut = Cut(tuple(range(len(ratio))), layers)
        machine = pipeline_of(profiles, cut)
        turn = simulate.turn(machine, _ASKED, budget, None)
        assert screen.one(cut) == pytest.approx(turn.rate, rel=0.01)
        assert screen.turn(cut) == pytest.approx(turn.seconds, rel=0.02)
        assert screen.prompt(cut, 4096) == pytest.approx(simulate.long_prompt(machine, budget), rel=0.06)
        assert screen.many(cut) == pytest.approx(simulate.many(machine, _ASKED, None), rel=0.05)


@pytest.mark.parametrize(("like", "at_once"), [(None, 0), ("layer", 0), ("layer", 7)], ids=[
    "on the coordinator", "on the last stage", "blocks on the last stage",
])  # fmt: skip
def test_formulas_with_drafts_are_near_what_is_simulated(like: str | None, at_once: int):
    """The live choice does not reach the formula's on every cut, so near is not as near as without drafts."""
    asked = replace(_ASKED, acceptance=0.7)
    profiles = rig((1, 2))
    drafter = DraftProfile("some/draft", GB // 2, 4096, like, at_once)
    profiles = replace(profiles, model=replace(profiles.model, draft=drafter))
    screen, cut = Screen(profiles, asked), Cut((0, 1), (6, 6))
    machine = pipeline_of(profiles, cut)
    assert screen.one(cut) == pytest.approx(simulate.turn(machine, asked, 512, 0.7).rate, rel=0.2)
    assert screen.many(cut) == pytest.approx(simulate.many(machine, asked, 0.7), rel=0.2)


_RIGS = [
    pytest.param(*found, marks=() if found == ((1, 2), 0.0001, (5 * GB, 8 * GB), None) else pytest.mark.nightly)
    for found in product(((1, 1), (1, 2), (1, 4), (3, 1)), (0.0001, 0.003), (None, (5 * GB, 8 * GB)), (None, 0.7))
]


@pytest.mark.parametrize(("ratio", "hop", "free", "acceptance"), _RIGS)
def test_the_plan_is_the_best_of_all_cuts(
    ratio: tuple[int, int],
    hop: float,
    free: tuple[int, int] | None,
    acceptance: float | None,
):
    profiles = rig(ratio, hop, free)
    asked = replace(_ASKED, acceptance=acceptance, simulated=6)
    planner = Planner(profiles, asked, _ALL)
    for aim in (Aim.CHAT, Aim.THROUGHPUT):
        fitting = [cut for cut in _ALL if planner.memory.fits(cut, asked.context, asked.sequences(aim))]
        most = max(planner.value(aim, cut) for cut in fitting)
        best = best_of(planner, aim)
        assert best.cut in fitting
        assert planner.value(aim, best.cut) >= 0.985 * most
    longest = max(planner.memory.longest(cut) for cut in _ALL)
    assert best_of(planner, Aim.CONTEXT).figures.longest >= 0.99 * longest


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(1, 9))
def test_the_choice_among_random_machines_is_that_of_simulating_every_cut(seed: int):
    """Formulas and rough figures decide which cuts are simulated in full; no turn is lost by it. Odd seeds draft."""
    random = Random(seed)
    ratio = [random.choice((0.5, 1, 1.5, 2, 3)) for _ in range(2)]
    asked = replace(_ASKED, uses_all=False, acceptance=random.choice((0.5, 0.8)) if seed % 2 else None, simulated=20)
    planner = Planner(rig(ratio, random.choice((0.0001, 0.001, 0.004))), asked)
    most = max(planner.value(Aim.CHAT, cut) for cut in planner.cuts)
    assert planner.value(Aim.CHAT, best_of(planner, Aim.CHAT).cut) >= 0.99 * 0.995 * most


def test_three_machines_of_which_one_is_slow():
    """The machine in the middle of the list is slow: it gets few layers, in whichever place is better."""
    every = Planner(rig((1, 3, 1)), replace(_ASKED, streams=12))
    cuts = list(on_grid([(0, 1, 2), (0, 2, 1)], 12))
    assert sorted(every.cuts, key=str) == sorted(cuts, key=str)
    found = best_of(every, Aim.THROUGHPUT)
    most = max(every.score(Aim.THROUGHPUT, cut) for cut in cuts)
    assert every.score(Aim.THROUGHPUT, found.cut) >= 0.97 * most
    layers = dict(zip(found.cut.machines, found.cut.layers, strict=True))
    assert layers[1] < min(layers[0], layers[2])


def test_who_comes_first_in_the_list_of_workers_does_not_matter():
    profiles, asked = rig((1, 2, 3), free=(6 * GB, 6 * GB, 6 * GB)), replace(_ASKED, simulated=2)
    for aim in Aim:
        cuts = []
        for each in (profiles, profiles.only(["m0", "m2", "m1"])):
            cut = best_of(Planner(each, asked), aim).cut
            cuts.append([(each.machines[m].name, count) for m, count in zip(cut.machines, cut.layers, strict=True)])
        assert cuts[0] == cuts[1]


def test_a_machine_gets_no_layers_where_that_is_better():
    profiles = rig((1, 8), hop=0.003)
    for uses_all in (False, True):
        planner = Planner(profiles, replace(_ASKED, uses_all=uses_all))
        assert len(best_of(planner, Aim.CHAT).cut.machines) == 1 + uses_all


def test_a_second_machine_is_not_taken_for_next_to_nothing():
    """The second one is quicker by so much that a step more on it just pays: by less than 1 %."""
    planner = Planner(rig((1, 0.927), hop=0.0), replace(_ASKED, uses_all=False, prompt=1))
    alone, both = Cut((0,), (12,)), Cut((0, 1), (1, 11))
    assert planner.value(Aim.CHAT, alone) < planner.value(Aim.CHAT, both) < planner.value(Aim.CHAT, alone) / 0.99
    assert best_of(planner, Aim.CHAT).cut == alone


def test_what_memory_forces_is_told():
    profiles = rig((1, 4), free=(4 * GB, 40 * GB))
    best = best_of(Planner(profiles, _ASKED), Aim.CHAT)
    assert best.faster is not None
    assert best.gain > 1.1
    memory = Planner(profiles, _ASKED).memory
    assert not memory.fits(best.faster, _ASKED.context, 1)
    assert best_of(Planner(rig((1, 4)), _ASKED), Aim.CHAT).faster is None


def test_an_aim_that_cannot_be_met_is_left_out():
    found = plan(rig((1, 1), free=(4 * GB, 5 * GB)), replace(_ASKED, streams=64))
    assert set(found.best) == {Aim.CHAT, Aim.CONTEXT}
    assert plan(rig((1, 1), free=(GB, GB)), _ASKED).best == {}


def test_a_grid_finds_what_all_cuts_have(monkeypatch: pytest.MonkeyPatch):
    profiles = rig((1, 2, 3))
    model = replace(profiles.model, layers=profiles.model.layers * 4)
    whole = Planner(replace(profiles, model=model), _ASKED)
    every = whole.cuts
    monkeypatch.setattr("splitinfer.placement.plan.stride_of", lambda orders, layers: stride_of(orders, layers, 100))
    rough = Planner(whole.profiles, _ASKED).cuts
    assert len(set(rough)) == len(rough) < len(every) / 2
    assert set(rough) < set(every)
    for aim in (Aim.CHAT, Aim.THROUGHPUT):
        most = max(whole.score(aim, cut) for cut in every)
        assert max(whole.score(aim, cut) for cut in rough) >= 0.99 * most


def test_a_link_that_was_not_measured_is_like_the_slowest():
    profiles = rig((1, 1, 1), hop=0.002)
    without = replace(profiles, links=profiles.links[:1])
    cut = Cut((0, 1, 2), (4, 4, 4))
    assert pipeline_of(without, cut).hops == pipeline_of(profiles, cut).hops
    assert unmeasured(without, cut) == [("m1", "m2"), ("m2", "m0")]
    assert unmeasured(profiles, cut) == []
