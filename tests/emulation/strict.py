"""What the CPU lets pass and MLX on a GPU does not, caught on an emulated accelerator (``SPLITINFER_STRICT_DEVICE=1``,
as in all tests).

An array that was launched belongs to whoever waits for the launch. MLX gives up its event without a lock, so another
thread that evaluates or reads it meanwhile may use memory that was freed. On CUDA an array that the host reads moves to
other memory, and a launch that was given the old place reads garbage. A launch that fails says so to whoever waits for
it. None of this can be seen where arrays are computed at their launch, so every touch is compared with the rules:

    outputs of a launch     the host may read them when it is done; no other launch may use them
    pending of a launch     other launches may use them; the host never reads or evaluates them
    its end                 one thread waits for it
"""

import io
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from splitinfer.engine.device.device import Ticket
from splitinfer.models.border import tensors

VARIABLE = "SPLITINFER_STRICT_DEVICE"


class Touched(Exception):
    """An array was touched by what may not; the message says by what, and on which thread."""


class Strict:
    """The arrays of a process's launches, and who may touch them."""

    def __init__(self) -> None:
        self._outputs: dict[int, weakref.ref[mx.array]] = {}  # by id
        self._pending: dict[int, weakref.ref[mx.array]] = {}
        self._in_flight: set[int] = set()  # those of ``_outputs`` whose launch is not known to be done
        self._waiting: set[int] = set()  # ids of tickets
        self._lock = threading.RLock()  # an array may be freed while it is held
        self._thread = threading.local()

    @contextmanager
    def launching(self, outputs: Sequence[mx.array], pending: Sequence[mx.array]) -> Iterator[None]:
        """Launch within this.

        Raises:
            Touched: it uses an array that the host reads.
        """
        with self._lock:
            alive = {f"output_{key}": ref() for key, ref in self._outputs.items()}
        named = {name: array for name, array in alive.items() if array is not None}
        if named:
            text = io.StringIO()
            mx.export_to_dot(text, *outputs, *pending, **named)
            if any(f'"{name}" ->' in text.getvalue() for name in named):
                raise _touched("used by a later launch", "the host reads it, so on CUDA it moves")
        self._thread.launches = True
        try:
            yield
        finally:
            self._thread.launches = False

    def launched(self, ticket: Ticket, pending: Sequence[mx.array]) -> None:
        """Note the arrays of a launch."""
        with self._lock:
            for array in ticket.outputs:
                self._outputs[id(array)] = self._ref(array, self._outputs)
                self._in_flight.add(id(array))
            for array in pending:
                self._pending[id(array)] = self._ref(array, self._pending)

    def _ref(self, array: mx.array, arrays: dict[int, weakref.ref[mx.array]]) -> weakref.ref[mx.array]:
        key = id(array)

        def gone(ref: weakref.ref[mx.array]) -> None:
            with self._lock:
                if arrays.get(key) is ref:
                    del arrays[key]
                    self._in_flight.discard(key)

        return weakref.ref(array, gone)

    @contextmanager
    def waiting(self, ticket: Ticket) -> Iterator[None]:
        """Wait for a launch within this.

        Raises:
            Touched: another thread does.
        """
        with self._lock:
            if id(ticket) in self._waiting:
                raise _touched("waited for", "another thread waits for the same launch")
            self._waiting.add(id(ticket))
        try:
            yield
        finally:
            with self._lock:
                self._waiting.discard(id(ticket))
                self._in_flight -= {id(array) for array in ticket.outputs}

    def touching(self, what: str, arrays: Any) -> None:
        """Check that arrays (a tree of them) may be touched by the host.

        Raises:
            Touched: they may not.
        """
        for _, array in [] if getattr(self._thread, "launches", False) else tree_flatten(arrays):
            with self._lock:
                is_in_flight, is_pending = id(array) in self._in_flight, id(array) in self._pending
            if is_in_flight:
                raise _touched(what, "its launch is not done, and it belongs to whoever waits for that")
            if is_pending:
                raise _touched(what, "later launches use it, so on CUDA it would move under them")


def _touched(what: str, why: str) -> Touched:
    return Touched(f"an array was {what} on the thread {threading.current_thread().name!r}: {why}")


@cache
def strict_device() -> Strict | None:
    """The rules of this process, if its emulated devices are to be strict; from then on MLX's functions look there."""
    if os.environ.get(VARIABLE) != "1":
        return None
    found = Strict()

    def watched(function: Callable[..., Any], what: str) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            found.touching(what, args)
            return function(*args, **named)

        return call

    for owner, name, what in (
        (mx, "eval", "evaluated"), (mx, "async_eval", "evaluated"), (mx.array, "tolist", "read"),
        (mx.array, "item", "read"), (tensors, "memory_of", "read"),
    ):  # fmt: skip
        setattr(owner, name, watched(getattr(owner, name), what))
    return found
