"""What an emulated device catches that the CPU lets pass: who touches an array that belongs to another, and how."""

from collections.abc import Callable

import mlx.core as mx
import pytest

from splitinfer.core.costs.shape import Shape
from splitinfer.engine.device.device import Ticket, Work
from splitinfer.machine.costs import Costs
from splitinfer.models.border import tensors
from tests.emulation.device import EmulatedDevice
from tests.emulation.machine import Hop, Machine
from tests.emulation.strict import Touched, strict_device

STEP = Work(Shape(1))


@pytest.fixture
def device() -> EmulatedDevice:
    strict = strict_device()
    assert strict is not None, "all tests are strict"
    return EmulatedDevice(Machine((Costs.through({1: 0.01}),), (Hop(),), (1,)), strict=strict)


def one() -> mx.array:
    return mx.ones((4,)) + 1


def launch(device: EmulatedDevice, output: mx.array, *pending: mx.array) -> Ticket:
    return device.launch([output], pending, STEP, 0.0)


TOUCHES: list[Callable[[mx.array], object]] = [
    lambda array: array.tolist(),
    tensors.numbers_of,
    tensors.to_buffer,
    lambda array: mx.eval({"of a tree": [array]}),
    lambda array: mx.async_eval(array),
]


@pytest.mark.parametrize("touch", TOUCHES, ids=["tolist", "numbers_of", "to_buffer", "eval", "async_eval"])
def test_a_launched_array_belongs_to_who_waits(touch: Callable[[mx.array], object], device: EmulatedDevice):
    output, pending = one(), one()
    ticket = launch(device, output, pending)
    with pytest.raises(Touched, match="on the thread 'MainThread': its launch is not done"):
        touch(output)
    device.wait(ticket)
    touch(output)
    with pytest.raises(Touched, match="later launches use it"):
        touch(pending)


def test_a_later_launch_uses_what_is_pending_and_nothing_that_the_host_reads(device: EmulatedDevice):
    output, pending = one(), one()
    launch(device, output, pending)
    launch(device, pending + 1, pending)
    with pytest.raises(Touched, match="used by a later launch"):
        launch(device, mx.exp(output * 2))
