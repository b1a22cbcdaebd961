"""Threads that use MLX, and those that share a processor with them.

On a processor MLX computes on one more thread for each that uses it, and wakes that for every operation. Where a stage
is pinned to a processor of its own, all its threads share that one: the one that computes, the one that waits for
frames, ZeroMQ's own. So a thread that has just handed over an event or a frame yields at once, or it would go on for a
time slice of milliseconds; and the thread on which MLX computes is of the class for batch work, or Linux would take
the processor from the one that hands operations over, dozens of times a step.

MLX keeps streams and compiled functions per thread, and frees them after Python's ``join``, when the interpreter may be
shutting down: that aborts. So a thread gives them up itself, at its end.
"""

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import mlx.core as mx

from splitinfer.machine.selection import emulated_machine
from splitinfer.models.memory import on_gpu

_PROCESSORS = os.cpu_count() or 1


def has_own_processor() -> bool:
    """Whether this process is pinned to one of several processors, and computes there rather than on a GPU, which may
    be an emulated one: there other threads than the loop's wait for the device, and send."""
    if not hasattr(os, "sched_getaffinity") or emulated_machine() is not None or on_gpu():
        return False
    return len(os.sched_getaffinity(0)) == 1 < _PROCESSORS


def yield_processor() -> None:
    """Let other threads of this processor run first."""
    # Not os.sched_yield: some Pythons hold the GIL in it, which a thread that delivers an event needs.
    _libc().sched_yield()


def yield_own_processor() -> None:
    """Call after a hand-over: lets the receiving threads run, where they share this thread's only processor."""
    if has_own_processor():
        yield_processor()


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


_TASKS = Path("/proc/self/task")
_LOOK_EVERY = 1.0  # seconds: processes are pinned after they were started


@contextmanager
def clears_streams() -> Iterator[None]:
    """Have a thread give up, at the end of what this decorates, what MLX keeps for it."""
    try:
        yield
    finally:
        mx.clear_streams()


class ComputingThread:
    """The thread on which MLX computes for the one that makes this, which must not have used MLX yet. Used on that."""

    def __init__(self) -> None:
        self._task = _start_computing()
        self._is_batch, self._next = False, 0.0

    def update(self, now: float) -> None:
        """Call often: have it preempt the other while they do not share one processor. ``now``: in seconds."""
        if self._task is None or now < self._next:
            return
        self._next, is_batch = now + _LOOK_EVERY, has_own_processor()
        if is_batch != self._is_batch:
            self._is_batch = is_batch
            with contextlib.suppress(OSError):  # it has ended
                _set_class(self._task, is_batch=is_batch)


def _start_computing() -> int | None:
    """Have MLX start the thread that computes for this one; its number, ``None`` where there are no classes, or where
    another than the usual one was chosen for this process."""
    if sys.platform != "linux" or on_gpu() or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return None
    before = set(_TASKS.iterdir())
    try:
        _set_class(0, is_batch=True)  # of this thread; one that it starts has it, too, and is known by that
        mx.eval(mx.zeros((1,)))
        started = [int(task.name) for task in set(_TASKS.iterdir()) - before]
        return next((task for task in started if _take_back(task)), None)
    except OSError:  # a system may forbid it
        return None
    finally:
        with contextlib.suppress(OSError):
            _set_class(0, is_batch=False)


def _take_back(task: int) -> bool:
    """Give a thread of the class for batch work the usual one; whether it was of that class."""
    with contextlib.suppress(OSError):  # it has ended
        if sys.platform == "linux" and os.sched_getscheduler(task) == os.SCHED_BATCH:
            _set_class(task, is_batch=False)
            return True
    return False


def _set_class(task: int, *, is_batch: bool) -> None:
    if sys.platform == "linux":
        os.sched_setscheduler(task, os.SCHED_BATCH if is_batch else os.SCHED_OTHER, os.sched_param(0))
