"""Devices that fail as a test wishes, in the place of a stage's own."""

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest

from splitinfer.engine.device.device import Device, DeviceSpan, Ticket, Work
from splitinfer.engine.stage import loader
from splitinfer.errors import DeviceFailed

Wish = Callable[[Sequence[mx.array]], Exception | None]


def never(_arrays: Sequence[mx.array]) -> None:
    """Nothing fails."""


@dataclass(slots=True, kw_only=True)
class _Failing(Ticket):
    """A launch that fails where it is waited for."""

    error: Exception


class FailingDevice(Device):
    """MLX's device, asynchronous or not. ``at_launch`` and ``at_wait`` get what a step writes, and return what is to be
    raised."""

    def __init__(self, *, computes_at_launch: bool, at_launch: Wish = never, at_wait: Wish = never) -> None:
        super().__init__(computes_at_launch=computes_at_launch)
        self._at_launch, self._at_wait = at_launch, at_wait

    def launch(self, outputs: Sequence[mx.array], pending: Sequence[mx.array], work: Work, began: float) -> Ticket:
        if (error := self._at_launch(pending)) is not None:
            raise error
        ticket = super().launch(outputs, pending, work, began)
        error = self._at_wait(pending)
        return ticket if error is None else _Failing(ticket.outputs, ticket.launched, error=error)

    def wait(self, ticket: Ticket) -> DeviceSpan:
        if isinstance(ticket, _Failing):
            raise ticket.error
        return super().wait(ticket)


class StuckDevice(FailingDevice):
    """Stands still at its ``number``-th step, for ever: its process lives on. The steps that it gets afterwards are
    computed, so that a process which is started again has no part in it."""

    def __init__(self, number: int) -> None:
        super().__init__(computes_at_launch=False)
        self._left = number
        self.goes_on = threading.Event()  # for the end of a test

    def wait(self, ticket: Ticket) -> DeviceSpan:
        if ticket.span is None:
            self._left -= 1
        if self._left == 0:
            self.goes_on.wait()
        return super().wait(ticket)


class HeldLoading(dict[int, Device]):
    """In the place of devices: once ``is_held``, a stage that is loaded waits until ``goes_on`` is set."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self._stage, self.is_held, self.waits, self.goes_on = stage, False, threading.Event(), threading.Event()

    def get(self, stage: int, default: Any = None) -> Any:
        if stage == self._stage and self.is_held:
            self.waits.set()
            self.goes_on.wait()
        return default


def nth(number: int, error: Exception) -> Wish:
    """Fail once, at the ``number``-th step with rows."""
    left = number

    def wish(arrays: Sequence[mx.array]) -> Exception | None:
        nonlocal left
        left -= bool(arrays)
        if left == 0:
            left = -1
            return copy.copy(error)  # which is raised, and then refers to arrays
        return None

    return wish


def beyond(num_bytes: int) -> Wish:
    """Have no memory for a step that writes to caches of more bytes."""

    def wish(arrays: Sequence[mx.array]) -> Exception | None:
        there = sum(array.nbytes for array in arrays)
        return DeviceFailed(f"the device has no memory left ({there} bytes)", True) if there > num_bytes else None

    return wish


def use(monkeypatch: pytest.MonkeyPatch, devices: Mapping[int, Device]) -> None:
    """Have stages that are loaded from now on compute on these devices; the others' are asynchronous."""
    monkeypatch.setattr(loader, "open_device", lambda stage, *_: devices.get(stage) or Device(computes_at_launch=False))
