"""Yielding, for a stage that is pinned to a processor of its own.

The threads of such a stage share one processor: the one that computes, the one that waits for frames, ZeroMQ's own.
The computing thread never blocks by itself, and the operating system lets it finish its time slice of some
milliseconds. So a thread that has just handed over an event or a frame yields at once.
"""

import ctypes
import os
from functools import cache

from splitinfer.machine.selection import emulated_machine
from splitinfer.models.memory import on_gpu


def has_own_processor() -> bool:
    """Whether this process is pinned to one of several processors, and computes there rather than on a GPU, which may
    be an emulated one: there other threads than the loop's wait for the device, and send."""
    if not hasattr(os, "sched_getaffinity") or emulated_machine() is not None or on_gpu():
        return False
    return len(os.sched_getaffinity(0)) == 1 < _processors()


def yield_processor() -> None:
    """Let other threads of this processor run first."""
    # Not os.sched_yield: some Pythons hold the GIL in it, which a thread that delivers an event needs.
    _libc().sched_yield()


def yield_own_processor() -> None:
    """Call after a hand-over: lets the receiving threads run, where they share this thread's only processor."""
    if has_own_processor():
        yield_processor()


@cache
def _processors() -> int:
    return os.cpu_count() or 1


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
