"""Two machines as one stage: what it gives by formula, whether it fits, and what a plan says of it."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from splitinfer.config import find_layout
from splitinfer.core.link_transport import JACCL
from splitinfer.machine.costs import Costs
from splitinfer.machine.profile import LayerProfile, LinkProfile, MachineProfile, ModelProfile, Profiles
from splitinfer.placement.asked import Aim, Asked
from splitinfer.placement.comparison import layout_text
from splitinfer.placement.cuts import Cut
from splitinfer.placement.document import compared, layout_of, name_in_words, shortage
from splitinfer.placement.formulas import Formulas
from splitinfer.placement.pairs import sum_of, with_pairs
from splitinfer.placement.plan import Planner, plan
from tests.placement.rigs import GB, MODEL, rig
from tests.sim import pipelines

LAYERS, ALONE = 64, 0.062  # of Qwen3.6-27B, seconds of a token on one machine
_LAYER, _NORMS, _HEAD = 230_000_000, 50_000, 700_000_000  # bytes in four bits and a half
_HALF = LayerProfile("attention", (_LAYER - _NORMS) // 2 + _NORMS, 1024, sums=2)


def two_macs(sum_seconds: float, per_row: float = 0.0) -> Profiles:
    """Two equal machines, as oMLX#2423 has them: 16.1 tokens a second of one, 128 sums a token of two."""
    half = ModelProfile("qwen3.6-27b", (_HALF,) * LAYERS, _HEAD, _HEAD // 2, hidden_row=10240)
    layers = (LayerProfile("attention", _LAYER, 2048),) * LAYERS
    model = replace(half, layers=layers, head=_HEAD, half=half)
    second = ALONE / (LAYERS * _LAYER + _HEAD)  # a byte
    rows = {rows: _LAYER * second * max(1, rows / 16) for rows in (1, 16, 512)}
    one = MachineProfile("m0", {"attention": Costs.through(rows)}, head=Costs(((1, _HEAD * second),)))
    link = LinkProfile("m0", "m1", 0.0002, 1e9, Costs.line(sum_seconds, per_row))
    return Profiles(model, (one, replace(one, name="m1", address="tcp://m1:5577")), (link,))


@pytest.mark.parametrize(("microseconds", "at_least", "at_most"), [(20, 1.7, 1.85), (30, 1.7, 1.8), (940, 0.38, 0.43)])
def test_the_published_case(microseconds: int, at_least: float, at_most: float):
    """1.78 times one machine with sums of tens of microseconds over RDMA, and 0.41 times over TCP."""
    formulas = Formulas(with_pairs(two_macs(microseconds * 1e-6)), Asked())
    alone, both = (formulas.one(Cut((place,), (LAYERS,)), None) for place in (0, 2))
    assert alone == pytest.approx(1 / ALONE)
    assert at_least <= both / alone <= at_most


def test_a_step_of_two_ranks_passes_three_links_and_hosts():
    """To the first rank, a process beside the coordinator, on to the second, and back from there."""
    profiles, asked, both = two_macs(20e-6), Asked(acceptance=None), Cut((2,), (LAYERS,))
    machines = tuple(replace(each, host=0.001) for each in profiles.machines)
    links = tuple(replace(link, latency=0.0) for link in profiles.links)
    took, least = (
        1 / Formulas(with_pairs(each), asked).one(both, None)
        for each in (replace(profiles, machines=machines), replace(profiles, links=links))
    )
    assert took - least == pytest.approx(3 * profiles.links[0].latency + 3 * 0.001)


@pytest.mark.parametrize(("microseconds", "is_faster"), [(20, True), (100, True), (500, False), (2000, False)])
def test_a_plan_says_which_is_faster(microseconds: int, is_faster: bool):
    found = plan(two_macs(microseconds * 1e-6), Asked())
    best, ways = found.best[Aim.CHAT], found.ways[Aim.CHAT]
    assert ways.pipeline is not None
    assert ways.tensor_parallel is not None
    assert (best.cut == ways.tensor_parallel.cut) == is_faster
    (said,) = compared(found, best)
    assert said.startswith(f"Tensor parallel {'is faster' if is_faster else 'would not be clearly faster'}: ")
    assert f"; over this link sums cost {2 * LAYERS * microseconds / 1000:.3g} ms a token." in said
    pays = re.search(rf"Each takes {microseconds:,} µs; for one stream they would pay at (.*) µs\.$", said)
    assert (pays is None) == is_faster
    assert pays is None or 150 < float(pays[1]) < 250
    assert f"; a pipeline {ways.pipeline.figures.one:.3g}; " in said


def test_sums_by_latency_and_bandwidth_where_none_was_measured():
    profiles = two_macs(0)
    profiles = replace(profiles, links=(LinkProfile("m0", "m1", 0.0001, 1e9),))
    assert [sum_of(profiles, "m1", "m0").rows(n) for n in (1, 512)] == pytest.approx(
        [0.0002 + 10240e-9, 0.0002 + 512 * 10240e-9]
    )


def test_the_slower_machine_decides_and_memory_is_that_of_a_half():
    """Each machine holds half of the layers, and all of the embedding; the plan finds no other cut that fits."""
    profiles = two_macs(20e-6)
    first, second = profiles.machines
    slow = replace(profiles, machines=(first, second.slower(1.5)))
    formulas = Formulas(with_pairs(slow), Asked())
    assert 1.2 <= formulas.one(Cut((2,), (LAYERS,)), None) * ALONE <= 2 / 1.5
    free = 10 * GB
    small = replace(profiles, machines=(replace(first, free_bytes=free), replace(second, free_bytes=free)))
    planner = Planner(small, Asked(context=512))
    both = Cut((2,), (LAYERS,))
    assert planner.memory.fits(both, 512, 1)
    assert not planner.memory.fits(Cut((0,), (LAYERS,)), 512, 1)
    weights = planner.memory.weights(0, LAYERS, is_half=True)
    assert weights == LAYERS * _HALF.weights + _HEAD + _HEAD // 2
    assert set(planner.memory.lacks(both, 512, 1)) == {0, 1}
    assert "would need" in shortage(small, Asked(context=10**7), Aim.CONTEXT)


def test_a_pair_within_a_longer_pipeline():
    """Any two of three machines may be one stage; the third is one of its own, or has no layers."""
    half = replace(MODEL, layers=(LayerProfile("layer", GB // 4, 2048, sums=2),) * 12)
    profiles = replace(rig((1, 1, 1), hop=0.00001), model=replace(MODEL, half=half))
    planner = Planner(profiles, Asked())
    named = {tuple(planner.profiles.machines[m].name for m in cut.machines) for cut in planner.cuts}
    assert {("m0+m1",), ("m0+m2",), ("m0+m1", "m2"), ("m0+m2", "m1"), ("m0", "m1+m2")} <= named
    assert ("m1+m2",) not in named  # the coordinator is in the first stage
    first, second, third = profiles.machines
    local = replace(profiles, machines=(first, second, replace(third, address="local")))
    assert [each.across for each in with_pairs(local).machines[3:]] == [("m0", "m1"), ("m2", "m1")]
    assert ("m0", "m2+m1") in {
        tuple(with_pairs(local).machines[m].name for m in cut.machines) for cut in Planner(local, Asked()).cuts
    }
    best = planner.ways(Aim.CHAT).tensor_parallel
    assert best is not None
    assert name_in_words(planner.profiles, best.cut) == "m0+m1 12"


def test_a_model_that_cannot_be_divided_is_cut_by_layers():
    profiles = rig((1, 1))
    found = plan(replace(profiles, model=replace(MODEL, half=None)), Asked())
    assert found.ways[Aim.CHAT].tensor_parallel is None
    assert list(compared(found, found.best[Aim.CHAT])) == []


def test_the_layout_of_a_pair(tmp_path: Path):
    """It is written as the layout's schema has it; ranks are workers, also that of this machine."""
    key, cable = "a" * 64, "tcp://169.254.1.2:5577"
    first, second = two_macs(20e-6).machines
    profiles = replace(two_macs(20e-6), machines=(first, replace(second, key=key, address=cable)))
    found = plan(profiles, Asked())
    layout = layout_of(found, found.best[Aim.CHAT])
    (tmp_path / "pair.yaml").write_text(layout_text(found, found.best[Aim.CHAT], "By a test."))
    assert replace(find_layout(str(tmp_path / "pair.yaml")), name=layout.name).stages == layout.stages
    (stage,) = layout.stages
    assert (stage.num_layers, stage.across) == (LAYERS, ("local", f"{cable}#{key}"))


def test_sums_in_the_clear_are_not_chosen():
    """Nor are two workers of one machine, which share its device."""
    first, second = two_macs(20e-6).machines
    found = plan(replace(two_macs(20e-6), machines=(first, replace(second, is_exposed=True))), Asked())
    best, shared = found.best[Aim.CHAT], found.ways[Aim.CHAT].tensor_parallel
    assert shared is not None
    assert best.cut != shared.cut
    (said,) = compared(found, best)
    assert said.startswith("Tensor parallel was not chosen: 2")
    assert said.endswith("They are not encrypted, and m1 is not at a cable; --insecure-sums allows it.")
    here = replace(two_macs(20e-6), machines=(first, replace(second, address="local")))
    assert with_pairs(here) == here


def test_sums_over_rdma_need_no_permission_and_are_written():
    """Though the address, over which nothing but commands goes, is no cable's."""
    profiles = two_macs(20e-6)
    first, second = profiles.machines
    link = replace(profiles.links[0], sums_over=JACCL)
    found = plan(replace(profiles, machines=(first, replace(second, is_exposed=True)), links=(link,)), Asked())
    (stage,) = layout_of(found, found.best[Aim.CHAT]).stages
    assert (stage.sums, stage.across) == (JACCL, ("local", "tcp://m1:5577"))


@pytest.mark.parametrize("microseconds", [20, 100, 500, 2000])
@pytest.mark.parametrize(
    ("acceptance", "near"), [(None, 0.05), pytest.param(0.7, 0.2, marks=pytest.mark.nightly)], ids=["plain", "drafts"]
)
def test_beside_the_live_scheduler_in_virtual_time(microseconds: int, acceptance: float | None, near: float):
    """A plan's figures are near what the scheduler gives, so the faster way is the one that it says."""
    half = replace(MODEL, layers=(LayerProfile("layer", GB // 4, 2048, sums=2),) * 12)
    links = (LinkProfile("m0", "m1", 0.0001, 1e9, Costs.line(microseconds * 1e-6, 0)),)
    profiles = replace(rig((1, 1)), model=replace(MODEL, half=half), links=links)
    asked = Asked(prompt=512, answer=64, streams=4, acceptance=acceptance)
    planner = Planner(profiles, asked)
    for aim in (Aim.CHAT, Aim.THROUGHPUT):
        ways = planner.ways(aim)
        cuts = [way.cut for way in (ways.pipeline, ways.tensor_parallel) if way is not None]
        by_formula = [planner.score(aim, cut) for cut in cuts]
        live = [pipelines.live(planner, aim, cut) for cut in cuts]
        assert by_formula == pytest.approx(live, rel=near)
        assert len(cuts) == 2
        assert (by_formula[0] < by_formula[1]) == (live[0] < live[1]) or max(live) < 1.1 * min(live)


@pytest.mark.parametrize(("share", "expected"), [(0.9, 0.9), (0.1, 0.5), (1.5, 1.0)])
def test_measured_halves_count_within_what_they_can_cost(share: float, expected: float):
    """The time of small layers and experts is not all reading: a half of one takes more than half as long."""
    profiles = two_macs(0)
    halves = {"attention": profiles.machines[0].layers["attention"].scaled(share)}
    machines = tuple(replace(each, halves=halves) for each in profiles.machines)
    pair = with_pairs(replace(profiles, machines=machines)).machines[-1]
    assert pair.layers["attention"].rows(1) == pytest.approx(
        expected * machines[0].layers["attention"].rows(1), rel=0.01
    )
