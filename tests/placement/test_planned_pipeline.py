"""A cut as a machine: stages cost what their layers and what is beside them cost, hops what links take."""

import math
from dataclasses import replace

import pytest

from splitinfer.core.costs.shape import Shape
from splitinfer.core.costs.stage import StageCosts
from splitinfer.machine.machine import Hop
from splitinfer.machine.profile import LayerProfile, LinkProfile
from splitinfer.placement.asked import Asked
from splitinfer.placement.cuts import Cut
from splitinfer.placement.pipeline import HEAD_ROWS, costs_of, pipeline_of
from splitinfer.placement.screen import Screen
from tests.placement.rigs import FIRST, LAYER, MODEL, rig

_SLIDING = StageCosts.line(0.002, 0.0001, 1e-8)
_KINDS = replace(MODEL, layers=(LayerProfile("layer", 1), LayerProfile("sliding", 1), LayerProfile("sliding", 1)))
_MACHINE = replace(FIRST, layers={"layer": LAYER, "sliding": _SLIDING}, embedding=StageCosts.line(0.0001, 0.00001))


@pytest.mark.parametrize("shape", [Shape(1, 500), Shape(8, 4000), Shape(HEAD_ROWS), Shape(300, 0, 90_000)])
def test_a_stage_costs_the_sum_of_its_parts(shape: Shape):
    full, sliding, step = LAYER.at(shape), _SLIDING.at(shape), _MACHINE.step
    before = _MACHINE.embedding.at(replace(shape, decode_context=0, chunk_context=0))
    head = _MACHINE.head.at(Shape(min(shape.rows, HEAD_ROWS)))
    for start, end, expected in (
        (0, 1, step + full + before),
        (1, 2, step + sliding),
        (1, 3, step + 2 * sliding + head),
        (0, 3, step + full + 2 * sliding + before + head),
    ):
        assert costs_of(_KINDS, _MACHINE, start, end).at(shape) == pytest.approx(expected)


def test_formulas_and_pipelines_have_the_same_stages():
    machines = (_MACHINE, replace(_MACHINE.slower(3), name="m1", address="tcp://m1:1"))
    profiles = replace(rig((1, 3)), model=_KINDS, machines=machines)
    cut, asked = Cut((0, 1), (1, 2)), Asked(streams=6)
    machine, screen = pipeline_of(profiles, cut), Screen(profiles, asked)
    at = asked.prompt + asked.answer // 2
    assert screen.seconds(cut, 1) == pytest.approx([each.at(Shape(1, at)) for each in machine.stages])
    assert screen.seconds(cut, 6) == pytest.approx([each.at(Shape(3, 3 * at)) for each in machine.stages])


def test_hops_have_the_latency_and_bytes_of_their_link():
    links = (LinkProfile("m0", "m1", 0.001, 1e6), LinkProfile("m1", "m0", 0.003), LinkProfile("m1", "m2", 0.002))
    profiles = replace(rig((1, 1, 1)), links=(*links, LinkProfile("m2", "m0", 0.004, math.inf)))
    row = MODEL.hidden_row / 1e6
    assert pipeline_of(profiles, Cut((0, 1), (6, 6))).hops == (Hop(0.001, row), Hop(0.003))
    assert pipeline_of(profiles, Cut((0, 1, 2), (6, 3, 3))).hops == (Hop(0.001, row), Hop(0.002), Hop(0.004))
    assert pipeline_of(profiles, Cut((0,), (12,))).hops == (Hop(),)


def test_what_a_pipeline_has_of_its_coordinator():
    machine = pipeline_of(rig((2, 1)), Cut((0, 1), (9, 3)))
    assert (machine.host, machine.draft, machine.launches_ahead) == (2 * FIRST.host, 2 * FIRST.draft, True)
    assert machine.buffers == (18, 6)
    assert machine.cut == "9-3"
