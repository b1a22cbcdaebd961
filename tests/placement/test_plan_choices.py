"""A plan is the best of all cuts that fit: the best by formula is hardly worse than the best of all, as the live
scheduler has them in virtual time."""

from dataclasses import replace

import pytest

from splitinfer.machine.profile import DraftProfile, Profiles
from splitinfer.placement.asked import Aim, Asked
from splitinfer.placement.cuts import Cut, on_grid, stride_of
from splitinfer.placement.document import why
from splitinfer.placement.formulas import Formulas, hop_of
from splitinfer.placement.plan import Best, Planner, plan
from tests.placement.rigs import GB, rig
from tests.sim import pipelines

_ASKED = Asked(prompt=512, answer=64, streams=4, uses_all=True)
_ALL = list(on_grid([(0, 1)], 12))
_HOST = 0.0024  # seconds of the coordinator in a step, as between processes of this machine


def best_of(planner: Planner, aim: Aim) -> Best:
    found = planner.best(aim)
    assert found is not None
    return found


def _with_host(profiles: Profiles) -> Profiles:
    """Of a step the formulas count the coordinator's host twice: it plans, and it launches."""
    first, *others = profiles.machines
    return replace(profiles, machines=(replace(first, host=_HOST / 2), *others))


_LONG = {"prompt": 4096, "answer": 16}
_STREAMS = {"streams": 8}
_RIGS = [
    pytest.param(ratio, hop, aim, acceptance, more, marks=() if is_usual else pytest.mark.nightly)
    for ratio in ((1, 2), (1, 3), (2, 1), (3, 1), (1, 1), (1, 2, 3))
    for hop in (0.0001, 0.001)
    for aim, more in ((Aim.CHAT, {}), (Aim.CHAT, _LONG), (Aim.THROUGHPUT, _STREAMS))
    for acceptance in (None, 0.7)
    for is_usual in [ratio == (1, 3) and hop == 0.001 and (acceptance is None or more is not _LONG)]
]


@pytest.mark.parametrize(("ratio", "hop", "aim", "acceptance", "more"), _RIGS)
def test_the_best_by_formula_is_hardly_worse_than_the_best_of_all(
    ratio: tuple[int, ...], hop: float, aim: Aim, acceptance: float | None, more: dict[str, int]
):
    asked = replace(_ASKED, acceptance=acceptance, **more)
    planner = Planner(_with_host(rig(ratio, hop)), asked)
    # Of three machines, whose cuts are many, those that the formulas like best.
    tried = sorted(planner.cuts, key=lambda cut: planner.score(aim, cut), reverse=True)[:12]
    values = {cut: pipelines.live(planner, aim, cut, _HOST) for cut in tried}
    assert values[best_of(planner, aim).cut] >= 0.97 * max(values.values())


@pytest.mark.parametrize("ratio", [(1, 1), (1, 3), (2, 1), (1, 2, 1), (1,)])
@pytest.mark.parametrize("hop", [0.0001, 0.003])
def test_figures_without_drafts_are_what_is_simulated(ratio: tuple[int, ...], hop: float):
    profiles = rig(ratio, hop)
    formulas, budget = Formulas(profiles, _ASKED), _ASKED.budget(profiles)
    for layers in {1: [(12,)], 2: [(9, 3), (4, 8)], 3: [(5, 3, 4)]}[len(ratio)]:
        cut = Cut(tuple(range(len(ratio))), layers)
        machine = pipelines.pipeline_of(profiles, cut)
        assert formulas.one(cut, None) == pytest.approx(pipelines.rate(machine, _ASKED, budget, None), rel=0.01)
        assert formulas.turn(cut) == pytest.approx(pipelines.turn(machine, _ASKED, budget, None), rel=0.02)
        assert formulas.prompt(cut, 4096) == pytest.approx(pipelines.prompt(machine, budget, 4096), rel=0.06)
        assert formulas.many(cut, None) == pytest.approx(pipelines.many(machine, _ASKED, None), rel=0.05)


@pytest.mark.parametrize(("like", "at_once"), [(None, 0), ("layer", 0), ("layer", 7)], ids=[
    "on the coordinator", "on the last stage", "blocks on the last stage",
])  # fmt: skip
def test_figures_with_drafts_are_near_what_is_simulated(like: str | None, at_once: int):
    """The live choice does not reach the formula's on every cut, so near is not as near as without drafts."""
    profiles = rig((1, 2))
    drafter = DraftProfile("some/draft", GB // 2, 4096, like, at_once)
    profiles = replace(profiles, model=replace(profiles.model, draft=drafter))
    formulas, cut = Formulas(profiles, _ASKED), Cut((0, 1), (6, 6))
    machine = pipelines.pipeline_of(profiles, cut)
    assert formulas.one(cut, 0.7) == pytest.approx(pipelines.rate(machine, _ASKED, 512, 0.7), rel=0.2)
    assert formulas.many(cut, 0.7) == pytest.approx(pipelines.many(machine, _ASKED, 0.7), rel=0.2)


@pytest.mark.parametrize("free", [None, (5 * GB, 8 * GB)])
@pytest.mark.parametrize("acceptance", [None, 0.7])
def test_the_plan_is_the_best_of_the_cuts_that_fit(free: tuple[int, int] | None, acceptance: float | None):
    planner = Planner(rig((1, 2), 0.0001, free), replace(_ASKED, acceptance=acceptance), _ALL)
    for aim in (Aim.CHAT, Aim.THROUGHPUT):
        sequences = planner.asked.sequences(aim)
        fitting = [cut for cut in _ALL if planner.memory.fits(cut, planner.asked.context, sequences)]
        assert best_of(planner, aim).cut == max(fitting, key=lambda cut: planner.score(aim, cut))
    longest = max(planner.memory.longest(cut) for cut in _ALL)
    assert best_of(planner, Aim.CONTEXT).figures.longest >= 0.99 * longest


def test_of_cuts_that_are_as_good_the_most_even_is_chosen():
    planner = Planner(_with_host(rig((1, 1), 0.001)), replace(_ASKED, **_STREAMS))
    assert best_of(planner, Aim.THROUGHPUT).cut.layers == (6, 6)


def test_three_machines_of_which_one_is_slow():
    """The machine in the middle of the list is slow: it gets few layers, in whichever place is better."""
    every = Planner(rig((1, 3, 1)), replace(_ASKED, streams=12))
    assert sorted(every.cuts, key=str) == sorted(on_grid([(0, 1, 2), (0, 2, 1)], 12), key=str)
    found = best_of(every, Aim.THROUGHPUT)
    layers = dict(zip(found.cut.machines, found.cut.layers, strict=True))
    assert layers[1] < min(layers[0], layers[2])


def test_who_comes_first_in_the_list_of_workers_does_not_matter():
    profiles = rig((1, 2, 3), free=(6 * GB, 6 * GB, 6 * GB))
    for aim in Aim:
        cuts = []
        for each in (profiles, replace(profiles, machines=tuple(profiles.machines[i] for i in (0, 2, 1)))):
            cut = best_of(Planner(each, _ASKED), aim).cut
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
    assert planner.score(Aim.CHAT, alone) < planner.score(Aim.CHAT, both) < planner.score(Aim.CHAT, alone) / 0.99
    assert best_of(planner, Aim.CHAT).cut == alone


def test_what_memory_forces_is_told():
    planner = Planner(rig((1, 4), free=(4 * GB, 40 * GB)), _ASKED)
    best = best_of(planner, Aim.CHAT)
    assert best.faster is not None
    assert best.gain > 1.1
    assert not planner.memory.fits(best.faster, _ASKED.context, 1)
    assert "m0 11, m1 1 would be" in " ".join(why(planner.plan(), best))
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
    assert [hop_of(each, 1, 2) for each in (without, profiles)] == [(0.002, pytest.approx(8192 / 1e9))] * 2
    found = Planner(without, _ASKED, [Cut((0, 1, 2), (4, 4, 4))]).plan([Aim.CHAT])
    assert "The link from m1 to m2 counts as the slowest" in " ".join(why(found, found.best[Aim.CHAT]))
