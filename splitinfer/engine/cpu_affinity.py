"""A processor that a stage has to itself, and shares with nobody but its own threads.

Such a stage's threads take turns: the one that computes, the one that waits for frames, ZeroMQ's own. The one that
computes never pauses by itself, and a scheduler lets it finish its slice of some milliseconds first. So whoever has
just handed something over gives way at once.
"""

import ctypes
import os
from functools import cache

from splitinfer.models.memory import on_gpu


def has_own_processor() -> bool:
    """Whether this process computes on a processor that was set aside for it: it is pinned to one of several."""
    return hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) == 1 < _processors() and not on_gpu()


def yield_processor() -> None:
    """Let other threads of this processor run first."""
    # Not os.sched_yield: some Pythons hold their lock in it, which a thread that brings an event needs.
    _libc().sched_yield()


def yield_own_processor() -> None:
    """After a hand-over: let the threads run that carry it on, where they would have to wait for a processor."""
    if has_own_processor():
        yield_processor()


@cache
def _processors() -> int:
    return os.cpu_count() or 1


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
