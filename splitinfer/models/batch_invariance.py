"""Whether a row's result depends, here, on the rows beside it.

The reference BLAS in MLX's Linux wheels adds up each element of a product by itself and in one order, so a
row computed among many is the row computed alone, bit for bit. OpenBLAS, Accelerate and GPUs choose
another kernel for another shape, and results differ by rounding.
"""

import re
import sys
from pathlib import Path

from splitinfer.models.memory import on_gpu

_A_BLAS = re.compile(r"/lib(open)?blas[^/]*\.so[^/]*$")


def preloaded_blas(maps: str) -> str | None:
    """The BLAS that takes the place of the wheel's, from a process's table of mapped files."""
    paths = {line.split()[-1] for line in maps.splitlines() if "/" in line}
    found = sorted(path for path in paths if _A_BLAS.search(path) and "/mlx" not in path)
    return found[0] if found else None


def is_batch_invariant() -> bool:
    """Whether results are the same for any number of rows."""
    maps = _maps()
    return maps is not None and preloaded_blas(maps) is None


def has_openblas() -> bool:
    """Whether OpenBLAS computes the products here."""
    maps = _maps()
    return maps is not None and "openblas" in (preloaded_blas(maps) or "")


def _maps() -> str | None:
    """The files mapped into this process, where it is a BLAS of Linux that computes and the system tells which."""
    if on_gpu() or sys.platform != "linux":
        return None
    try:
        return Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:
        return None
