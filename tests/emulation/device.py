"""An emulated accelerator: a device that computes while the host goes on, in the times of a machine file.

What is launched is computed at once, on the CPU, so the results are real. When they are done is what
``device_queue`` says: a queue in order, seconds by a step's rows and by what they attend to, a launch that is
held until most of the step's command buffers are complete, a clock that falls when the device is idle. Arrays of a
launch are held until it is done, as a GPU holds the buffers of its commands, so what a later launch overwrites is
copied where a GPU would copy it.

Where computing takes longer than the device would, the step is late, and counted (``late_steps``).

With ``strict`` rules an error is told where the launch is waited for, as a GPU tells it.
"""

import time
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import mlx.core as mx

from splitinfer.engine.device.device import Device, DeviceSpan, Ticket, Work, device_errors
from splitinfer.errors import DeviceFailed
from tests.emulation.device_queue import DeviceQueue
from tests.emulation.files import read_devices
from tests.emulation.late_steps import LATE_STEPS
from tests.emulation.machine import Machine
from tests.emulation.rounding import round_like
from tests.emulation.strict import Strict, strict_device

_COARSE = 0.0003  # seconds before a time up to which the operating system may be trusted to wake a thread


def open_device(
    file: Path, stage: int, layers: Sequence[int], num_ranks: int = 1, *, sums: bool = True, computes_at_launch: bool
) -> "EmulatedDevice":
    """The device of a stage of a layout with these numbers of layers, or of one of the ranks that have it together.

    Raises:
        ConfigError: the machine file cannot be read, or does not fit the layout.
    """
    machine = read_devices(file, layers)[stage]
    round_like(machine.device.rounds_like)
    machine = machine if num_ranks == 1 else machine.of_rank(num_ranks, sums=sums)
    return EmulatedDevice(machine, computes_at_launch=computes_at_launch, strict=strict_device())


@device_errors()
def _evaluate(*arrays: mx.array) -> None:
    mx.eval(*arrays)


class EmulatedDevice(Device):
    """One stage's device, with the times of ``machine``, which has this stage only. ``computes_at_launch``: whether the
    loops are to use it as one that does, and wait for each step before they launch the next."""

    def __init__(self, machine: Machine, *, computes_at_launch: bool = False, strict: Strict | None = None) -> None:
        super().__init__(computes_at_launch=computes_at_launch)
        self._machine, self._strict = machine, strict
        self._queue = DeviceQueue(machine.device)
        self._is_late = False  # a draft was; so is the step behind it
        self._held: deque[tuple[float, Sequence[mx.array]]] = deque()

    def launch(self, outputs: Sequence[mx.array], pending: Sequence[mx.array], work: Work, began: float) -> Ticket:
        """See ``Device``."""
        launched = time.monotonic()
        with self._lock:
            timing = self._queue.launch(launched, *self._cost(work))
        self._release(launched)
        failure = self._compute(outputs, pending)
        computed = time.monotonic()
        ended, done = timing.ended, timing.done
        is_late = computed > ended and work.shape.rows > 0
        if is_late:
            ended = done = computed
            with self._lock:
                self._queue.delay(computed)
        if not work.is_draft:
            LATE_STEPS.count(is_late or self._is_late)
        self._is_late = is_late and work.is_draft
        ticket = _Emulated(outputs, launched, done, DeviceSpan(timing.started, ended), failure)
        if self._strict is not None:
            self._strict.launched(ticket, pending)
        self._held.append((done, [*outputs, *pending]))
        sleep_until(timing.returns)
        return ticket

    def _compute(self, outputs: Sequence[mx.array], pending: Sequence[mx.array]) -> DeviceFailed | None:
        """Evaluate arrays; how that failed, if who waits is to be told."""
        if self._strict is None:
            _evaluate(*outputs, *pending)
            return None
        try:
            with self._strict.launching(outputs, pending):
                _evaluate(*outputs, *pending)
        except DeviceFailed as failure:
            return failure
        return None

    def _cost(self, work: Work) -> tuple[float, int]:
        """Seconds and command buffers."""
        if work.is_draft:
            return self._machine.draft_round(work.shape.rows), self._machine.draft_buffers
        if not work.shape.rows:
            return 0.0, 1
        return self._machine.stages[0].at(work.shape), self._machine.buffers_of(0)

    def _release(self, now: float) -> None:
        while self._held and self._held[0][0] <= now:
            self._held.popleft()

    def _wait(self, ticket: Ticket) -> DeviceSpan:
        assert isinstance(ticket, _Emulated)
        with nullcontext() if self._strict is None else self._strict.waiting(ticket):
            sleep_until(ticket.done)
        if ticket.failure is not None:
            raise ticket.failure
        return ticket.emulated


class _Emulated(Ticket):
    """A launch, and when it is done."""

    __slots__ = ("done", "emulated", "failure")

    def __init__(
        self,
        outputs: Sequence[mx.array],
        launched: float,
        done: float,
        emulated: DeviceSpan,
        failure: DeviceFailed | None,
    ) -> None:
        super().__init__(outputs, launched)
        self.done, self.emulated, self.failure = done, emulated, failure


def sleep_until(at: float) -> None:
    """Sleep, and for the last moment yield, so that the thread goes on within some microseconds of ``at``."""
    left = at - time.monotonic()
    if left > _COARSE:
        time.sleep(left - _COARSE)
    while time.monotonic() < at:
        time.sleep(0)
