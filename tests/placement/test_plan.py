"""A plan is the best of all cuts that fit, by the simulator; formulas and simulator agree."""

from dataclasses import replace

import pytest

from splitinfer.machine.profile import Profiles
from splitinfer.placement import simulate
from splitinfer.placement.asked import Aim, Asked
from splitinfer.placement.cuts import Cut, on_grid
from splitinfer.placement.pipeline import pipeline_of, unmeasured
from splitinfer.placement.plan import Planner, plan
from splitinfer.placement.screen import Screen
from tests.effort import thorough
from tests.placement.rigs import GB, rig

_ASKED = Asked(prompt=512, answer=128, uses_all=True)
_ALL = list(on_grid([(0, 1)], 12))


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


def test_formulas_with_drafts_rank_as_the_simulator_does():
    asked = replace(_ASKED, acceptance=0.7)
    profiles = rig((1, 2))
    screen = Screen(profiles, asked)
    for cut in (Cut((0, 1), (10, 2)), Cut((0, 1), (6, 6))):
        machine = pipeline_of(profiles, cut)
        assert screen.one(cut) == pytest.approx(simulate.turn(machine, asked, 512, 0.7).rate, rel=0.2)
        assert screen.many(cut) == pytest.approx(simulate.many(machine, asked, 0.7), rel=0.2)


_RIGS = [
    (ratio, hop, free, acceptance)
    for ratio in ((1, 1), (1, 2), (1, 4), (3, 1))
    for hop in (0.0001, 0.003)
    for free in (None, (5 * GB, 8 * GB))
    for acceptance in (None, 0.7)
]


@pytest.mark.parametrize(("ratio", "hop", "free", "acceptance"), thorough(_RIGS[1::5], _RIGS))
def test_the_plan_is_the_best_of_all_cuts(
    ratio: tuple[int, int], hop: float, free: tuple[int, int] | None, acceptance: float | None
):
    profiles = rig(ratio, hop, free)
    asked = replace(_ASKED, acceptance=acceptance, streams=4)
    found, every = plan(profiles, asked), Planner(profiles, asked)
    for aim in (Aim.CHAT, Aim.THROUGHPUT):
        fitting = [cut for cut in _ALL if every.memory.fits(cut, asked.context, asked.sequences(aim))]
        most = max(every.value(aim, cut) for cut in fitting)
        assert found.best[aim].cut in fitting
        assert every.value(aim, found.best[aim].cut) >= 0.99 * most
    longest = max(every.memory.longest(cut) for cut in _ALL)
    assert found.best[Aim.CONTEXT].figures.longest >= 0.99 * longest


def test_three_machines_in_the_better_order():
    """The link to the last machine is slow: what leads there should be taken once, not twice."""
    profiles = rig((1, 3, 1))
    found = plan(profiles, replace(_ASKED, streams=12))
    every = Planner(profiles, replace(_ASKED, streams=12))
    cuts = list(on_grid([(0, 1, 2), (0, 2, 1)], 12))
    best = max(every.screen.score(cut, Aim.THROUGHPUT) for cut in cuts)
    assert every.screen.score(found.best[Aim.THROUGHPUT].cut, Aim.THROUGHPUT) >= 0.97 * best
    layers = dict(zip(found.best[Aim.THROUGHPUT].cut.machines, found.best[Aim.THROUGHPUT].cut.layers, strict=True))
    assert layers[1] < min(layers[0], layers[2])


def test_who_comes_first_in_the_list_of_workers_does_not_matter():
    profiles, asked = rig((1, 2, 3), free=(6 * GB, 6 * GB, 6 * GB)), replace(_ASKED, acceptance=0.7)
    turned = profiles.only(["m0", "m2", "m1"])
    for aim in Aim:
        one, other = (_named(each, plan(each, asked).best[aim].cut) for each in (profiles, turned))
        assert one == other


def _named(profiles: Profiles, cut: Cut) -> list[tuple[str, int]]:
    return [(profiles.machines[m].name, count) for m, count in zip(cut.machines, cut.layers, strict=True)]


def test_a_machine_gets_no_layers_where_that_is_better():
    profiles = rig((1, 8), hop=0.003)
    found = plan(profiles, replace(_ASKED, uses_all=False))
    assert found.best[Aim.CHAT].cut == Cut((0,), (12,))
    assert len(plan(profiles, _ASKED).best[Aim.CHAT].cut.machines) == 2


def test_a_second_machine_is_not_taken_for_next_to_nothing():
    """The second one is a hundredth quicker, and there is a link to it."""
    profiles = rig((1, 0.99), hop=0.0)
    assert plan(profiles, replace(_ASKED, uses_all=False, prompt=1)).best[Aim.CHAT].cut.machines == (0,)


def test_what_memory_forces_is_told():
    profiles = rig((1, 4), free=(4 * GB, 40 * GB))
    best = plan(profiles, replace(_ASKED, streams=2)).best[Aim.CHAT]
    assert best.faster is not None
    assert best.gain > 1.1
    memory = Planner(profiles, _ASKED).memory
    assert not memory.fits(best.faster, _ASKED.context, 1)
    assert plan(rig((1, 4)), _ASKED).best[Aim.CHAT].faster is None


def test_an_aim_that_cannot_be_met_is_left_out():
    found = plan(rig((1, 1), free=(4 * GB, 4 * GB)), replace(_ASKED, streams=64))
    assert set(found.best) == {Aim.CHAT, Aim.CONTEXT}
    assert plan(rig((1, 1), free=(GB, GB)), _ASKED).best == {}


def test_a_grid_finds_what_all_cuts_have(monkeypatch: pytest.MonkeyPatch):
    profiles = rig((1, 2, 3))
    model = replace(profiles.model, layers=profiles.model.layers * 3)
    profiles = replace(profiles, model=model)
    asked = replace(_ASKED, simulated=3)
    whole = plan(profiles, asked)
    monkeypatch.setattr("splitinfer.placement.cuts.MOST", 40)
    monkeypatch.setattr("splitinfer.placement.cuts.stride_of.__defaults__", (40,))
    rough = plan(profiles, asked)
    assert rough.screened < whole.screened / 2
    every = Planner(profiles, asked)
    for aim in (Aim.CHAT, Aim.THROUGHPUT):
        assert every.value(aim, rough.best[aim].cut) >= 0.97 * every.value(aim, whole.best[aim].cut)


def test_a_link_that_was_not_measured_is_like_the_slowest():
    profiles = rig((1, 1, 1), hop=0.002)
    without = replace(profiles, links=profiles.links[:1])
    cut = Cut((0, 1, 2), (4, 4, 4))
    assert pipeline_of(without, cut).hops == pipeline_of(profiles, cut).hops
    assert unmeasured(without, cut) == [("m1", "m2"), ("m2", "m0")]
    assert unmeasured(profiles, cut) == []
