"""MLX's default device. A step's result leaves when the device is done with it, and nothing guesses when that is.

    launching thread    build the graph ── launch ─▶ ticket ── build the next ...
    device                                   └─ started ........ ended
    waiting thread                                 wait(ticket) ─────┴─▶ span: the step's figures, then its result

On a device that ``computes_at_launch`` the step is done when ``launch`` returns, or soon after. Any other may hold the
launching thread for most of a step, so whatever needs a step's end waits on another thread. Arrays are evaluated in the
order of their launches; ``mx.eval`` of arrays that are already scheduled only waits for their event, and releases the
interpreter's lock: so a thread that has launched nothing may wait for them. A GPU does not say when it began a step:
that was when it was launched, or when the launch before was done.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

import mlx.core as mx

from splitinfer.core.costs.shape import Shape
from splitinfer.errors import ConfigError, DeviceFailed
from splitinfer.machine.selection import emulated_machine
from splitinfer.models.memory import on_gpu
from splitinfer.system.gpu_roads import Road
from transports import AddressError
from transports.emulation import emulator

_SWITCH = 0.0001  # seconds until a thread that waits for the interpreter's lock gets it; reading a result waits thrice

# What MLX and the drivers below it say when there is no memory: Metal, MLX's allocators, CUDA, C++.
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
    """What is launched: a step of this shape, or one draft."""

    shape: Shape
    is_draft: bool = False


def round_of(sequences: int) -> Work:
    """Return the work of a round of drafts: one for each of some sequences."""
    return Work(Shape(sequences), is_draft=True)


@dataclass(frozen=True, slots=True)
class DeviceSpan:
    """When the device computed, in seconds on the monotonic clock of this process."""

    started: float
    ended: float


@dataclass(slots=True)
class Ticket:
    """A launch. ``outputs``: the arrays that are evaluated when it is done. ``span`` is set by ``Device.wait``."""

    outputs: Sequence[mx.array]
    launched: float
    span: DeviceSpan | None = None
    _failure: DeviceFailed | None = None
    _waiting: threading.Lock = field(default_factory=threading.Lock)

    def once(self, wait: Callable[[], DeviceSpan]) -> DeviceSpan:
        """Return the span, which ``wait`` returns. One thread waits at the device, and every other one for that thread:
        MLX gives up a launched array's event without a lock, and tells an error to one of those who wait.

        Raises:
            DeviceFailed: ``wait`` raised it, now or for another thread.
        """
        with self._waiting:
            if self._failure is not None:
                raise self._failure
            if self.span is None:
                try:
                    self.span = wait()
                except DeviceFailed as failure:
                    self._failure = failure
                    raise
            return self.span


class Device:
    """MLX's default device; computes launches in their order. One thread launches; any thread may wait.

    ``computes_at_launch``: whether a launch takes as long as computing it, as on a CPU, so that launching ahead would
    only delay results.
    """

    def __init__(self, *, computes_at_launch: bool) -> None:
        self.computes_at_launch = computes_at_launch
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    def launch(self, outputs: Sequence[mx.array], pending: Sequence[mx.array], work: Work, began: float) -> Ticket:
        """Have the device compute arrays.

        Args:
            outputs: what the host reads when the ticket is done. No later launch may read it: on CUDA an array that the
                host reads moves to other memory.
            pending: what has to be computed too, and is read by later launches only.
            work: what it is, for devices whose times follow from that.
            began: when the host began to prepare it, in seconds on the monotonic clock. On a CPU that counts as
                computing, too: both take the processor.

        Raises:
            DeviceFailed: the device did.
        """
        launched = began if self.computes_at_launch else time.monotonic()
        with device_errors():
            mx.async_eval(*outputs, *pending)  # type: ignore[no-untyped-call]
        return Ticket(outputs, launched)

    def wait(self, ticket: Ticket) -> DeviceSpan:
        """Wait until a launch is done.

        Raises:
            DeviceFailed: the device did.
        """
        return ticket.once(lambda: self._wait(ticket))

    def _wait(self, ticket: Ticket) -> DeviceSpan:
        with device_errors():
            mx.eval(*ticket.outputs)
        ended = time.monotonic()
        with self._lock:
            span = DeviceSpan(min(max(ticket.launched, self._free_at), ended), ended)
            self._free_at = max(self._free_at, ended)
        return span


_OF_SUMS = "[ring]", "[jaccl]"  # what MLX's errors of a lost peer begin with


@contextmanager
def device_errors(*, of_memory: bool = False) -> Iterator[None]:
    """Translate what MLX raises when the device fails, or has no memory left; only the latter, if the errors are to be
    those ``of_memory``. In a ``with`` block, or of a function."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        text = " ".join(str(error).split()) or type(error).__name__
        no_memory = isinstance(error, MemoryError) or any(words in text.lower() for words in _NO_MEMORY)
        if of_memory and not no_memory:
            raise
        if text.startswith(_OF_SUMS):
            raise DeviceFailed(f"the other rank went away in a sum ({text:.200})", lost_rank=True) from error
        what = "has no memory left" if no_memory else "failed"
        raise DeviceFailed(f"the device {what} ({text:.200})", no_memory) from error


# -- which device ----------------------------------------------------------------------------------


def open_device(stage: int, bounds: tuple[int, ...], num_ranks: int = 1, *, sums: bool = True) -> Device:
    """Return the device of stage ``stage``, whose layers are ``bounds[stage]`` to ``bounds[stage + 1]``, or of one of
    ``num_ranks`` ranks that have these together. ``sums``: whether its steps sum with the other's.

    Raises:
        ConfigError: the machine file cannot be read, or does not fit the layout; or there are no emulators here.
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
    """Return MLX's default device. A process has one, whatever it computes there."""
    if on_gpu():
        _share_the_interpreter()
    return Device(computes_at_launch=not (on_gpu() and Road.WAITER.is_open))


def _share_the_interpreter() -> None:
    """Let the thread that waits for a step go on soon, though another builds the next one's graph."""
    sys.setswitchinterval(_SWITCH)
