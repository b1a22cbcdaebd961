"""What an emulated device catches that the CPU lets pass: who touches an array that belongs to another, and how."""

import threading
from collections.abc import Callable

import mlx.core as mx
import pytest

from splitinfer.core.costs.shape import Shape
from splitinfer.core.costs.stage import StageCosts
from splitinfer.engine.device.device import Ticket, Work
from splitinfer.engine.device.emulated import EmulatedDevice
from splitinfer.engine.device.strict import VARIABLE, Strict, Touched, strict_device
from splitinfer.errors import DeviceFailed
from splitinfer.machine.machine import Hop, Machine
from splitinfer.models import tensors

STEP = Work(Shape(1))


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> Strict:
    for owner, name in ((mx, "eval"), (mx, "async_eval"), (mx.array, "tolist"), (mx.array, "item")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back afterwards
    monkeypatch.setattr(tensors, "memory_of", tensors.memory_of)
    found = strict_device.__wrapped__()
    assert found is not None, "all tests are strict"
    return found


@pytest.fixture
def device(strict: Strict) -> EmulatedDevice:
    return EmulatedDevice(Machine((StageCosts.through({1: 0.05}),), (Hop(),), (1,)), strict=strict)


def one() -> mx.array:
    return mx.ones((4,)) + 1


def launch(device: EmulatedDevice, output: mx.array, *pending: mx.array) -> Ticket:
    return device.launch([output], pending, STEP, 0.0)


TOUCHES: list[Callable[[mx.array], object]] = [
    lambda array: array.tolist(),
    tensors.on_host,
    tensors.to_buffer,
    lambda array: mx.eval({"of a tree": [array]}),
    lambda array: mx.async_eval(array),
]


@pytest.mark.parametrize("touch", TOUCHES, ids=["tolist", "on_host", "to_buffer", "eval", "async_eval"])
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


def test_two_threads_that_wait_at_the_device_are_caught(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch):
    """Both may wait by the ticket, where one waits for the other."""
    caught: list[Exception] = []

    def wait(ticket: Ticket) -> None:
        try:
            device.wait(ticket)
        except Touched as error:
            caught.append(error)

    def both(ticket: Ticket) -> None:
        threads = [threading.Thread(target=wait, args=[ticket]) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    both(launch(device, one()))
    assert not caught
    monkeypatch.setattr(Ticket, "once", lambda _ticket, wait: wait())
    both(launch(device, one()))
    assert len(caught) == 1


def test_an_error_is_told_where_the_launch_is_waited_for(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_arrays: mx.array) -> None:
        raise RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory")

    with monkeypatch.context() as failing:
        failing.setattr(mx, "eval", refuse)
        ticket = launch(device, one())
    for _ in range(2):
        with pytest.raises(DeviceFailed, match="no memory left"):
            device.wait(ticket)


def test_what_is_gone_is_forgotten(device: EmulatedDevice, strict: Strict):
    for _ in range(3):
        device.wait(launch(device, one(), one()))
    device._held.clear()
    assert (strict._outputs, strict._pending, strict._in_flight) == ({}, {}, set())


def test_other_processes_have_no_rules(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(VARIABLE)
    assert strict_device.__wrapped__() is None
