"""Pins processes to processors, so that each has its own, and chooses the BLAS that computes, on Linux.

MLX's Linux wheels bring the reference BLAS, whose time grows with every row: batches, chunks and drafts cannot pay
there. A preloaded OpenBLAS takes its place, with one thread for each process, because each process has one processor.
A library can only be preloaded at the start, so the benchmark restarts itself once.
"""

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
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return []


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


# -- BLAS --------------------------------------------------------------------------------------------------------------

_MARK = "SPLITINFER_BENCH_BLAS"  # set in the restarted program, so that it does not restart again
_PLACES = (  # below /usr
    "lib/*/openblas-pthread/libblas.so.3",
    "lib/*/openblas*/libblas.so.3",
    "lib64/libopenblas.so.0",
    "lib/libopenblas.so.0",
)


def prefer_openblas() -> None:
    """Restart this program with OpenBLAS preloaded, where that is possible and has not been done."""
    if sys.platform != "linux":
        return
    found = [str(path) for place in _PLACES for path in sorted(Path("/usr").glob(place))]
    environment = preloading(os.environ, found[0] if found else None)
    if environment is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def preloading(environment: Mapping[str, str], found: str | None) -> dict[str, str] | None:
    """The environment to restart in; ``None`` where this one is right, or cannot be made right.

    A BLAS that the user preloaded stays, limited to one thread.
    """
    if _MARK in environment:
        return None
    preloaded = environment.get("LD_PRELOAD", "")
    if "blas" not in preloaded.lower():
        if found is None:
            return None
        preloaded = ":".join(filter(None, (found, preloaded)))
    return {**environment, "LD_PRELOAD": preloaded, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", _MARK: "1"}
