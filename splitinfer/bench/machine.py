"""Pins processes to processors, so that each has its own."""

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import psutil

from splitinfer.core.layout import StageSpec


@cache
def free_processors() -> list[int]:
    """The processors that this process may be pinned to, as it was before it was pinned; none where the system cannot
    pin."""
    return sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []


def assign(stages: Sequence[StageSpec], processors: Sequence[int]) -> dict[str, int | None]:
    """A processor for each stage on this machine, in turn; ``None`` for other stages, or if there are no processors."""
    given: dict[str, int | None] = {}
    here = 0
    for stage in stages:
        is_here = stage.address is None or stage.is_local
        given[stage.name] = processors[here % len(processors)] if is_here and processors else None
        here += is_here
    return given


def pin(pid: int, processor: int) -> None:
    """Pin a process, with all its present and future threads, to one processor."""
    if sys.platform != "linux":
        return
    pinned: set[Path] = set()
    while True:  # a thread not yet pinned may start others meanwhile
        new = set(Path(f"/proc/{pid}/task").iterdir()) - pinned
        if not new:
            return
        for thread in new:
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), {processor})
        pinned |= new


def local_workers() -> dict[str, int]:
    """The process ids of the workers that this process has started, by name."""
    found = {}
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            words = child.cmdline()
            if "--child" in words and "--name" in words:
                found[words[words.index("--name") + 1]] = child.pid
    return found


def pin_stages(stages: Sequence[StageSpec], beside: Mapping[str, int] | None = None) -> dict[str, int | None]:
    """Pin each stage here, or each rank of it, to a processor of its own; the processor of each, by name.

    ``beside``: processes, by name, that run while the stages sleep, on the same processors.
    """
    processors, beside = free_processors(), beside or {}
    stages = [rank for stage in stages for rank in stage.ranks]
    given, pids = assign(stages, processors), {stages[0].name: os.getpid(), **local_workers(), **beside}
    given |= {name: processors[i % len(processors)] if processors else None for i, name in enumerate(beside)}
    for name, processor in given.items():
        if processor is not None:
            pin(pids[name], processor)
    return given
