"""Streams on a machine so quick that many tokens come in a second."""

from pathlib import Path

import pytest

from splitinfer.core.costs.shape import Shape
from splitinfer.core.speculation.flight import OFF, Flight
from splitinfer.machine.costs import Costs
from tests.emulation.files import read_machine
from tests.emulation.machine import Hop, Machine
from tests.sim import drafts
from tests.sim.drafts import Choice, Crowd


@pytest.mark.parametrize("seconds", [1e-5, 1e-4, 1e-2])
def test_the_rate_of_streams_on_a_quick_machine(seconds: float):
    costs = Costs.line(seconds, 0.0)
    machine = Machine((costs, costs), (Hop(), Hop()), (6, 6))
    rate = drafts.rate(Crowd(machine, (0.0,) * 4, 40), Choice(groups=2, flight=OFF))
    assert rate == pytest.approx(2 / costs.at(Shape(2)), rel=0.1)


def test_one_stream_chooses_its_blocks_again_behind_wrong_drafts():
    """A draft takes an eighth of a stage's step, so verdicts come while drafts are made."""
    crowd = Crowd(read_machine(Path("two-small")), (0.8,), by_place=True)
    best = max(drafts.rate(crowd, Choice(2, flight)) for flight in (Flight(3), Flight(5), Flight(3, 3, 2)))
    assert drafts.rate(crowd) > 0.95 * best
