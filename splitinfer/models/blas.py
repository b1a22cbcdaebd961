"""Tells which BLAS computes this process's matrix products, and whether a row's result depends on the other rows.

The reference BLAS in MLX's Linux wheels sums each element of a product separately and in a fixed order, so a row
computed among many is bitwise the row computed alone. OpenBLAS, Accelerate and GPUs choose their kernel by shape, so
results differ by rounding.
"""

import re
import sys
from pathlib import Path

from splitinfer.models.memory import on_gpu

_A_BLAS = re.compile(r"/lib(open)?blas[^/]*\.so[^/]*$")


def preloaded_blas(maps: str) -> str | None:
    """Return the path of the BLAS that replaces the wheel's, found in a process's ``maps``, or ``None``."""
    paths = {line.split()[-1] for line in maps.splitlines() if "/" in line}
    found = sorted(path for path in paths if _A_BLAS.search(path) and "/mlx" not in path)
    return found[0] if found else None


def is_batch_invariant() -> bool:
    """Return whether a row's result is bitwise the same for any number of rows."""
    maps = _maps()
    return maps is not None and preloaded_blas(maps) is None


def has_openblas() -> bool:
    """Return whether OpenBLAS computes this process's products."""
    maps = _maps()
    return maps is not None and "openblas" in (preloaded_blas(maps) or "")


def _maps() -> str | None:
    """Return this process's table of mapped files. Return None on a GPU or if the system is not Linux."""
    if on_gpu() or sys.platform != "linux":
        return None
    try:
        return Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:
        return None
