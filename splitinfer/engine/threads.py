"""Begins and ends threads that use MLX.

On a processor MLX computes on one more thread for each that uses it, and wakes that for every operation. Where both
share a processor, as those of a pinned stage do, Linux then takes it from the thread that hands the operations over:
dozens of times a step, more often or less often by what the two have had of it before. A thread of the class for batch
work is woken without that. It runs when the other waits, once a step.

MLX keeps streams and compiled functions per thread. What a thread leaves behind is freed when the operating system's
thread ends, which is after Python's ``join``: freeing compiled functions then needs an interpreter that may be shutting
down, and aborts. So a thread gives them up itself, at its end.
"""

import contextlib
import os
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import mlx.core as mx

from splitinfer.models.memory import on_gpu

P = ParamSpec("P")


def clears_streams(run: Callable[P, None]) -> Callable[P, None]:
    """Have a thread that runs ``run`` compute without being preempted by that, and give up what MLX keeps for it."""

    @wraps(run)
    def running(*args: P.args, **named: P.kwargs) -> None:
        try:
            _begin_computing()
            run(*args, **named)
        finally:
            mx.clear_streams()

    return running


def _begin_computing() -> None:
    """Have MLX start the thread that computes for this one, in the class for batch work, which it inherits. Another
    class than the usual one was chosen for this process, and stays."""
    if not hasattr(os, "SCHED_BATCH") or on_gpu() or os.sched_getscheduler(0) != os.SCHED_OTHER:  # 0: this thread's
        return
    with contextlib.suppress(OSError):  # a system may forbid it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        try:
            mx.eval(mx.zeros((1,)))  # the first that it computes
        finally:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
