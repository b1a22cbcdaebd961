"""Streams on a machine so quick that many tokens come in a second."""

import pytest

from splitinfer.core.costs.shape import Shape
from splitinfer.core.costs.stage import StageCosts
from splitinfer.core.speculation.flight import OFF
from splitinfer.machine.machine import Hop, Machine
from splitinfer.sim import drafts
from splitinfer.sim.drafts import Choice, Crowd


@pytest.mark.parametrize("seconds", [1e-5, 1e-4, 1e-2])
def test_the_rate_of_streams_on_a_quick_machine(seconds: float):
    costs = StageCosts.line(seconds, 0.0)
    machine = Machine((costs, costs), (Hop(), Hop()), (6, 6))
    rate = drafts.run(Crowd(machine, (0.0,) * 4, 40), Choice(groups=2, flight=OFF)).rate
    assert rate == pytest.approx(2 / costs.at(Shape(2)), rel=0.1)
