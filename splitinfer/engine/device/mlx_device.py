"""MLX's own devices. Arrays are evaluated in the order of their launches, on the launching thread's stream.

``mx.eval`` of arrays that are already scheduled only waits for their event, and releases the interpreter's lock. So a
thread that has launched nothing may wait for them.

A GPU does not say when it began a step. It began when the step was launched, or when the launch before was done: the
queue is in order.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import mlx.core as mx

from splitinfer.engine.device.device import Span, Ticket, Work
from splitinfer.errors import DeviceFailed

P = ParamSpec("P")
R = TypeVar("R")

# What MLX and the drivers below it say when there is no memory: Metal, MLX's allocators, CUDA, C++.
_NO_MEMORY = (
    "insufficient memory",
    "out of memory",
    "unable to allocate",
    "attempting to allocate",  # more than Metal's largest buffer
    "resource limit exceeded",
    "bad_alloc",
)


class MlxDevice:
    """MLX's default device. ``computes_at_launch``: whether it is a CPU."""

    def __init__(self, *, computes_at_launch: bool) -> None:
        self._computes_at_launch = computes_at_launch
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    @property
    def computes_at_launch(self) -> bool:
        """Whether a launch takes as long as computing it."""
        return self._computes_at_launch

    def launch(self, outputs: Sequence[mx.array], pending: Sequence[mx.array], work: Work, began: float) -> Ticket:
        """See ``Device``. On a CPU building the graph counts as computing: both take the processor."""
        launched = began if self._computes_at_launch else time.monotonic()
        with device_errors():
            mx.async_eval(*outputs, *pending)  # type: ignore[no-untyped-call]
        return Ticket(outputs, launched)

    def wait(self, ticket: Ticket) -> Span:
        """See ``Device``."""
        return ticket.once(lambda: self._wait(ticket))

    def _wait(self, ticket: Ticket) -> Span:
        with device_errors():
            mx.eval(*ticket.outputs)
        ended = time.monotonic()
        with self._lock:
            span = Span(min(max(ticket.launched, self._free_at), ended), ended)
            self._free_at = max(self._free_at, ended)
        return span

    def stay_awake(self) -> None:
        """See ``Device``."""
        if not self._computes_at_launch:
            with device_errors():
                mx.async_eval(mx.zeros((1,)) + 1)  # type: ignore[no-untyped-call] # an array of this thread


def memory_errors(function: Callable[P, R]) -> Callable[P, R]:
    """Translate what MLX raises in a function when there is no memory left for an array; other errors are not the
    device's."""

    @wraps(function)
    def translated(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (RuntimeError, MemoryError) as error:
            if not _is_no_memory(error):
                raise
            raise _failed(error) from error

    return translated


@contextmanager
def device_errors() -> Iterator[None]:
    """Translate what MLX raises when the device fails, or has no memory left."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        raise _failed(error) from error


def _is_no_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in _NO_MEMORY)


def _failed(error: Exception) -> DeviceFailed:
    text, no_memory = " ".join(str(error).split()) or type(error).__name__, _is_no_memory(error)
    what = "has no memory left" if no_memory else "failed"
    return DeviceFailed(f"the device {what} ({text:.200})", no_memory)
