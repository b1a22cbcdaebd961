"""MLX's default device. A step's result is sent when the device is done with it; nothing estimates when that is.

    launching thread    build the graph ── launch ─▶ ticket ── build the next ...
    device                                   └─ started ........ ended
    waiting thread                                 wait(ticket) ─────┴─▶ span: the step's figures, then its result

On a device that ``computes_at_launch``, a step is done when ``launch`` returns, or soon after. Any other device may
hold the launching thread for most of a step, so code that needs a step's end waits on another thread. Arrays are
evaluated in the order of their launches. ``mx.eval`` of arrays that are already scheduled only waits for their event
and releases the interpreter's lock, so a thread that has launched nothing may wait for them. A GPU does not report when
it began a step: that was at its launch, or when the previous launch was done.
"""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, wraps
from itertools import pairwise
from typing import ParamSpec, TypeVar

import mlx.core as mx

from splitinfer.core.costs.shape import Shape
from splitinfer.errors import ConfigError, DeviceFailed
from splitinfer.machine.selection import emulated_machine
from splitinfer.models.memory import on_gpu
from splitinfer.system.gpu_roads import Road
from transports import AddressError
from transports.emulation import emulator

P = ParamSpec("P")
T = TypeVar("T")

_SWITCH = 0.0001  # seconds until a thread that waits for the interpreter's lock gets it; a result waits three times

# Parts of the errors for lack of memory of MLX and the drivers below it: Metal, MLX's allocators, CUDA, C++.
_NO_MEMORY = (
    "insufficient memory",
    "out of memory",
    "unable to allocate",
    "attempting to allocate",  # more than Metal's largest buffer
    "resource limit exceeded",
    "bad_alloc",
)


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a launch: a step of this shape, or a round of drafts."""

    shape: Shape
    is_draft: bool = False


def round_of(sequences: int) -> Work:
    """Return the work of a round of drafts, one draft for each of ``sequences``."""
    return Work(Shape(sequences), is_draft=True)


@dataclass(frozen=True, slots=True)
class DeviceSpan:
    """When the device computed, in seconds on the monotonic clock of this process."""

    started: float
    ended: float


@dataclass(slots=True)
class Ticket:
    """A launch. ``outputs``: the arrays that are evaluated when it is done. ``Device.wait`` uses the rest."""

    outputs: Sequence[mx.array]
    launched: float
    span: DeviceSpan | None = None
    failed: DeviceFailed | None = None
    waiting: threading.Lock = field(default_factory=threading.Lock)


_OF_SUMS = "[ring]", "[jaccl]"  # the beginnings of MLX's errors for a lost peer


def device_errors(*, of_memory: bool = False) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that translates MLX's errors to DeviceFailed: errors of a failed device and for lack of
    memory, or only the latter with ``of_memory``."""

    def translating(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def guarded(*args: P.args, **named: P.kwargs) -> T:
            try:
                return function(*args, **named)
            except (RuntimeError, MemoryError) as error:
                text = " ".join(str(error).split()) or type(error).__name__
                no_memory = isinstance(error, MemoryError) or any(words in text.lower() for words in _NO_MEMORY)
                if of_memory and not no_memory:
                    raise
                if text.startswith(_OF_SUMS):
                    raise DeviceFailed(f"the other rank went away in a sum ({text:.200})", lost_rank=True) from error
                what = "has no memory left" if no_memory else "failed"
                raise DeviceFailed(f"the device {what} ({text:.200})", no_memory) from error

        return guarded

    return translating


class Device:
    """MLX's default device, which computes launches in their order. One thread launches; any thread may wait.

    ``computes_at_launch``: whether a launch takes as long as computing it, as on a CPU, so that launching ahead would
    only delay results.
    """

    def __init__(self, *, computes_at_launch: bool) -> None:
        self.computes_at_launch = computes_at_launch
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    @device_errors()
    def launch(self, outputs: Sequence[mx.array], pending: Sequence[mx.array], work: Work, began: float) -> Ticket:
        """Launch the computation of arrays, and return its ticket.

        Args:
            outputs: the arrays that the host reads when the ticket is done. No later launch may read them: on CUDA an
                array that the host reads moves to other memory.
            pending: further arrays to compute, which only later launches read.
            work: the kind of work, for emulated devices, which derive their times from it.
            began: when the host began to prepare the launch, in seconds on the monotonic clock. On a CPU the span
                includes that time, because both use the processor.

        Raises:
            DeviceFailed: the device failed.
        """
        launched = began if self.computes_at_launch else time.monotonic()
        mx.async_eval(*outputs, *pending)  # type: ignore[no-untyped-call]
        return Ticket(outputs, launched)

    def wait(self, ticket: Ticket) -> DeviceSpan:
        """Wait until a launch is done, and return when the device computed it. Only the first thread waits for the
        device, the others wait for that thread: MLX frees a launched array's event without a lock, and reports an error
        to only one waiting thread.

        Raises:
            DeviceFailed: the device failed, as this thread or another one noticed.
        """
        with ticket.waiting:
            if ticket.failed is not None:
                raise ticket.failed
            if ticket.span is None:
                try:
                    ticket.span = self._wait(ticket)
                except DeviceFailed as failure:
                    ticket.failed = failure
                    raise
            return ticket.span

    @device_errors()
    def _wait(self, ticket: Ticket) -> DeviceSpan:
        mx.eval(*ticket.outputs)
        ended = time.monotonic()
        with self._lock:
            span = DeviceSpan(min(max(ticket.launched, self._free_at), ended), ended)
            self._free_at = max(self._free_at, ended)
        return span


# -- which device ----------------------------------------------------------------------------------


def open_device(stage: int, bounds: tuple[int, ...], num_ranks: int = 1, *, sums: bool = True) -> Device:
    """Return the device of stage ``stage``, which has the layers ``bounds[stage]`` to ``bounds[stage + 1]``, or the
    device of one of the ``num_ranks`` ranks that share these layers. ``sums``: whether steps include the ranks' sums.

    Raises:
        ConfigError: the machine file cannot be read or does not fit the layout, or no emulators are installed.
    """
    file = emulated_machine()
    if file is None:
        return default_device()
    try:
        emulated = emulator("device")
    except AddressError as error:
        raise ConfigError(str(error)) from error
    _share_the_interpreter()
    layers = [end - start for start, end in pairwise(bounds)]
    device: Device = emulated.open_device(
        file, stage, layers, num_ranks, sums=sums, computes_at_launch=not Road.WAITER.is_open
    )
    return device


@cache
def default_device() -> Device:
    """Return MLX's default device, the same one for all stages of this process."""
    if on_gpu():
        _share_the_interpreter()
    return Device(computes_at_launch=not (on_gpu() and Road.WAITER.is_open))


def _share_the_interpreter() -> None:
    """Let the thread that waits for a step continue soon although another thread builds the next step's graph."""
    sys.setswitchinterval(_SWITCH)
