"""Chooses the BLAS that computes, on Linux.

MLX's Linux wheels bring the reference BLAS, whose time grows with every row: batches, chunks and drafts cannot pay
there. A preloaded OpenBLAS takes its place, with one thread for each process, because each process has one processor.
A library can only be preloaded at the start, so the benchmark restarts itself once.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

HINT = (
    "the reference BLAS takes as long for each row of a batch as for the first, so chunks and batches cannot pay; "
    "a GPU and OpenBLAS behave otherwise (Debian: apt install libopenblas0-pthread, found by itself)"
)
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
