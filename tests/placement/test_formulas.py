"""Stages cost what their layers and what is beside them cost, hops what links take."""

import math
from dataclasses import replace

import pytest

from splitinfer.core.costs.shape import Shape
from splitinfer.machine.costs import Costs
from splitinfer.machine.profile import LayerProfile, LinkProfile
from splitinfer.placement.asked import Asked
from splitinfer.placement.cuts import Cut
from splitinfer.placement.formulas import HEAD_ROWS, Formulas, costs_of, hop_of
from tests.placement.rigs import FIRST, LAYER, MODEL, rig

_SLIDING = Costs(((1, 0.0021), (2, 0.0022)), 1e-8)
_KINDS = replace(MODEL, layers=(LayerProfile("layer", 1), LayerProfile("sliding", 1), LayerProfile("sliding", 1)))
_MACHINE = replace(FIRST, layers={"layer": LAYER, "sliding": _SLIDING})


@pytest.mark.parametrize("shape", [Shape(1, 500), Shape(8, 4000), Shape(HEAD_ROWS), Shape(300, 0, 90_000), Shape(700)])
def test_a_stage_costs_the_sum_of_its_parts(shape: Shape):
    full, sliding, step = LAYER.at(shape), _SLIDING.at(shape), _MACHINE.step
    head = _MACHINE.head.rows(min(shape.rows, HEAD_ROWS))
    for start, end, expected in (
        (0, 1, step + full),
        (1, 2, step + sliding),
        (1, 3, step + 2 * sliding + head),
        (0, 3, step + full + 2 * sliding + head),
    ):
        assert costs_of(_KINDS, _MACHINE, start, end).at(shape) == pytest.approx(expected)


def test_formulas_have_the_same_stages():
    machines = (_MACHINE, replace(_MACHINE.slower(3), name="m1", address="tcp://m1:1"))
    profiles = replace(rig((1, 3)), model=_KINDS, machines=machines)
    asked = Asked(streams=6)
    at, formulas = asked.prompt + asked.answer // 2, Formulas(profiles, asked)
    stages = [costs_of(_KINDS, machines[0], 0, 1), costs_of(_KINDS, machines[1], 1, 3)]
    for streams, rows in ((1, 1), (6, 3)):
        found = formulas.seconds(Cut((0, 1), (1, 2)), streams)
        assert found == pytest.approx([each.at(Shape(rows, rows * at)) for each in stages])


def test_two_stages_of_one_device_take_turns():
    """A further process on the coordinator's machine makes nothing faster; on another machine it does."""
    apart, asked = rig((1, 1), hop=0.0), Asked(acceptance=None, streams=64)
    first, second = apart.machines
    shared = replace(apart, machines=(first, replace(second, address="local")))
    alone, halves = Cut((0,), (12,)), Cut((0, 1), (6, 6))
    one = Formulas(apart, asked)
    for name, profiles, is_faster in (("another", apart, True), ("local", shared, False)):
        two = Formulas(profiles, asked)
        many, prompt = (
            two.many(halves, None) / one.many(alone, None),
            one.prompt(alone, 4096) / two.prompt(halves, 4096),
        )
        assert (many > 1.3, prompt > 1.3) == (is_faster, is_faster), name
        assert is_faster or max(many, prompt) <= 1


def test_what_hosts_take_counts_once_for_every_cut():
    """Each stage launches a step and reads what it has computed, the coordinator plans it; no device computes."""
    quiet, asked = rig((1, 1)), Asked(acceptance=None)
    first, second = quiet.machines
    machines = (replace(first, host=0.002), replace(second, host=0.003))
    without, busy = Formulas(quiet, asked), Formulas(replace(quiet, machines=machines), asked)
    for cut, more in ((Cut((0,), (12,)), 0.004), (Cut((0, 1), (6, 6)), 0.007)):
        assert 1 / busy.one(cut, None) - 1 / without.one(cut, None) == pytest.approx(more)
        assert busy.prompt(cut, 4096) - without.prompt(cut, 4096) == pytest.approx(more)
        assert busy.seconds(cut, 1) == without.seconds(cut, 1)


def test_hops_have_the_latency_and_bytes_of_their_link():
    links = (LinkProfile("m0", "m1", 0.001, 1e6), LinkProfile("m1", "m0", 0.003), LinkProfile("m1", "m2", 0.002))
    profiles = replace(rig((1, 1, 1)), links=(*links, LinkProfile("m2", "m0", 0.004, math.inf)))
    assert [hop_of(profiles, a, b) for a, b in ((0, 1), (1, 0), (1, 2), (0, 2), (0, 0))] == [
        (0.001, MODEL.hidden_row / 1e6), (0.003, 0.0), (0.002, 0.0), (0.004, 0.0), (0.0, 0.0),
    ]  # fmt: skip
