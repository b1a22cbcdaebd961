"""Cuts: every layer on exactly one stage, the coordinator first, and nothing tried twice."""

from itertools import pairwise
from math import comb

import pytest

from splitinfer.placement.cuts import MOST, Cut, near, on_grid, orders, stride_of


@pytest.mark.parametrize(("num_machines", "num_layers"), [(1, 5), (2, 12), (3, 12), (4, 9), (4, 3)])
def test_every_cut_once_and_every_layer_once(num_machines: int, num_layers: int):
    every = orders(num_machines, num_layers, uses_all=False)
    cuts = list(on_grid(every, num_layers))
    assert len(set(cuts)) == len(cuts) == sum(comb(num_layers - 1, len(order) - 1) for order in every)
    for cut in cuts:
        stages = list(cut.stages())
        assert stages[0][:2] == (0, 0)
        assert stages[-1][2] == num_layers
        assert all(a[2] == b[1] for a, b in pairwise(stages))
        assert all(end > start for _, start, end in stages)
        assert len(set(cut.machines)) == len(cut.machines)


def test_orders_have_all_machines_or_some():
    assert orders(3, 12, uses_all=True) == [(0, 1, 2), (0, 2, 1)]
    assert set(orders(3, 12, uses_all=False)) == {(0,), (0, 1), (0, 2), (0, 1, 2), (0, 2, 1)}
    assert orders(3, 2, uses_all=True) == []


def test_a_grid_keeps_the_number_of_cuts_in_bounds():
    for num_machines, num_layers in ((2, 66), (3, 66), (4, 66), (5, 120)):
        every = orders(num_machines, num_layers, uses_all=False)
        stride = stride_of(every, num_layers)
        assert 0 < sum(1 for _ in on_grid(every, num_layers, stride)) <= MOST
        assert (stride == 1) == (num_machines <= 3)


def test_near_are_all_cuts_around():
    around = list(near([Cut((0, 1, 2), (4, 4, 4)), Cut((0, 1, 2), (5, 4, 3))], 1))
    assert len(set(around)) == len(around)
    assert {cut.layers for cut in around} == {
        (a, b - a, 12 - b) for ends in ((4, 8), (5, 9)) for a in range(ends[0] - 1, ends[0] + 2)
        for b in range(ends[1] - 1, ends[1] + 2)
    }  # fmt: skip
    assert {cut.layers for cut in near([Cut((0, 1), (6, 6))], 4)} == {(2, 10), (6, 6), (10, 2)}
    assert all(min(cut.layers) > 0 for cut in near([Cut((0, 1), (1, 2))], 3))
