"""Devices: when a launch returns, when it is done, what is held until then, and what is said when one fails."""

import threading
import time

import mlx.core as mx
import pytest

from splitinfer.core.costs.shape import Shape
from splitinfer.engine.device.device import Device, DeviceSpan, Work, device_errors
from splitinfer.errors import DeviceFailed

STEP = Work(Shape(1))


def one() -> mx.array:
    """An array that is still to be computed."""
    return mx.ones((4,)) + 1


@pytest.mark.parametrize("at_launch", [False, True])
def test_spans_of_mlx_follow_each_other(at_launch: bool) -> None:
    device = Device(computes_at_launch=at_launch)
    began = time.monotonic()
    outputs = [one(), one()]
    tickets = [device.launch([output], (), STEP, began) for output in outputs]
    first, second = (device.wait(ticket) for ticket in tickets)
    assert began <= first.started <= first.ended <= second.started <= second.ended <= time.monotonic()
    assert [output.tolist() for output in outputs] == [[2.0] * 4] * 2
    assert device.wait(tickets[1]) is second


@pytest.mark.parametrize("fails", [False, True])
def test_one_thread_waits_for_a_launch_and_the_others_for_it(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads may not call ``mx.eval`` of launched arrays at a time."""
    device, inside, calls = Device(computes_at_launch=False), list[None](), list[int]()
    ticket, found = device.launch([one()], (), STEP, 0.0), list[DeviceSpan | str]()

    def slow(*_arrays: mx.array) -> None:
        inside.append(None)
        calls.append(len(inside))
        time.sleep(0.05)
        inside.pop()
        if fails:
            raise RuntimeError("[METAL] Command buffer execution failed: x")

    monkeypatch.setattr(mx, "eval", slow)

    def wait() -> None:
        try:
            found.append(device.wait(ticket))
        except DeviceFailed as error:
            found.append(str(error))

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == [1]
    assert len(found) == 3
    assert len(set(map(str, found))) == 1
    assert isinstance(found[0], str) is fails, "an error is told to everybody"


@pytest.mark.parametrize(
    ("error", "text", "no_memory"),
    [
        (RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory (0008)"), "no memory left", True),
        (RuntimeError("[malloc] Unable to allocate 5 bytes."), "no memory left", True),
        (MemoryError(), r"no memory left \(MemoryError\)", True),
        (RuntimeError("[METAL] Command buffer\n  execution failed: x"), r"failed \(.METAL. Command buffer exec", False),
    ],
)  # fmt: skip
def test_what_mlx_raises_becomes_one_sentence(error: Exception, text: str, no_memory: bool) -> None:
    def failing() -> None:
        raise error

    with pytest.raises(DeviceFailed, match=f"the device (has )?{text}") as caught:
        device_errors()(failing)()
    assert caught.value.no_memory == no_memory
    with pytest.raises(DeviceFailed if no_memory else type(error)):
        device_errors(of_memory=True)(failing)()
