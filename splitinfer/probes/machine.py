"""Describes this machine: its system, its device and its free memory."""

import contextlib
import math
import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import psutil

from splitinfer.core.kv.format import format_of
from splitinfer.engine.versions import device_name, machine_name, own_versions
from splitinfer.kvstore.files import default_folder
from splitinfer.models.blas import is_batch_invariant, preloaded_blas
from splitinfer.models.caches import quantised
from splitinfer.models.memory import free_bytes, on_gpu
from splitinfer.probes.child import ProbeReport
from splitinfer.probes.finding import STOP, Blame, Finding, Outcome, failed, passed
from splitinfer.system import apple

LEAST_FREE = 2e9  # bytes: less is not enough for a stage of any real model
DEMO_LAYERS = 12
_KV_HEADS, _HEADS, _DIM, _TOKENS = 2, 6, 64, 40
_MOST_OFF = 0.02  # of a row: several rounding errors of half precision
_WHEEL_BLAS = "the reference BLAS of MLX's wheel, whose time grows with every row of a batch"


def describe() -> dict[str, Any]:
    """Return this machine and its software, for a document of figures."""
    return {
        "processor": _processor(),
        "processors": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": asdict(own_versions()),
        "device": device_name(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def _processor() -> str:
    if sys.platform == "darwin":
        return apple.chip() or platform.processor()
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()


def description() -> dict[str, Any]:
    """Return this machine, for documents and pages. Memory and disk are in bytes; ``name`` and ``kv_folder`` are
    private."""
    described, info, folder, gpu = describe(), mx.device_info(), default_folder(), on_gpu()
    return {
        "name": machine_name(),
        "system": platform.system(),
        "system_version": platform.mac_ver()[0] or platform.release(),
        "chip": described["processor"],
        "processors": os.cpu_count() or 1,
        "load_average": described["load_average"],
        "device": described["device"],
        "backend": "cpu" if not gpu else "metal" if mx.metal.is_available() else "cuda",
        "blas": None if gpu else _blas(),
        "gpu": gpu,
        "exact": is_batch_invariant(),
        "memory_bytes": int(psutil.virtual_memory().total),
        "free_bytes": free_bytes(),
        "swap_used_bytes": psutil.swap_memory().used,
        "distributed": [name for name in ("jaccl", "ring") if mx.distributed.is_available(name)],
        "working_set_bytes": info.get("max_recommended_working_set_size"),
        "python": platform.python_version(),
        **{f"version_{name}": value for name, value in asdict(own_versions()).items()},
        "kv_folder": str(folder),
        "kv_disk_free": _disk_free(folder),
    }


def _blas() -> str | None:
    """Return the library that multiplies matrices on Linux's CPUs. Return None if the system does not tell."""
    try:
        return preloaded_blas(Path("/proc/self/maps").read_text(encoding="utf-8")) or _WHEEL_BLAS
    except OSError:
        return None


def _disk_free(folder: Path) -> int | None:
    """Return the bytes free where KV would be stored; the folder need not exist yet."""
    for place in (folder, *folder.parents):
        try:
            return shutil.disk_usage(place).free
        except FileNotFoundError:
            continue
        except OSError:
            break
    return None


# -- what computes, and what is free -----------------------------------------------------------------------------------


def about(_options: Mapping[str, Any], report: ProbeReport) -> None:
    """Report it, when the device has computed something."""
    mx.eval(mx.ones((8, 8)) @ mx.ones((8, 8)))
    report(*judge_about(description()))
    report.guarded("KV in 8 bits", lambda: judge_quantised(_quantised_attention()))


def _quantised_attention() -> list[float]:
    """Return how far attention over stored words, which has a kernel of its own on Metal, is from the same over their
    numbers, relative to the latter: of each format."""
    random = iter(mx.random.split(mx.random.key(5), 3))
    k, v = (mx.random.normal((1, _KV_HEADS, _TOKENS, _DIM), key=next(random)) for _ in range(2))
    q, found = mx.random.normal((1, _HEADS, 1, _DIM), key=next(random)), list[float]()
    for name in ("k8v8", "k8v4"):
        keys, values = quantised.QuantisedKVCache(cast(Any, format_of(name))).update_and_fetch(k, v)
        wanted = quantised.attention(q, keys.numbers(), values.numbers(), _DIM**-0.5, None)
        off = quantised.attention(q, keys, values, _DIM**-0.5, None) - wanted
        found.append(cast(float, (mx.linalg.norm(off) / mx.linalg.norm(wanted)).item()))
    return found


def judge_about(given: Mapping[str, Any]) -> list[Finding]:
    """Return this machine's devices, its free memory, and whether it does something else."""
    free = f"{given['free_bytes'] / 1e9:,.3g} GB of {given['memory_bytes'] / 1e9:,.3g} GB are free for a stage"
    load = f"load {given['load_average']:.3g}, {given['processors']} processors"
    is_busy = given["load_average"] > given["processors"]
    if given["free_bytes"] < LEAST_FREE:
        remedy = "close other programs, or give this machine fewer layers"
        memory = failed("free memory", Blame.MEMORY, f"only {free}", remedy)
    else:
        memory = passed("free memory", free)
    if not is_busy:
        return [_computes(given), memory, passed("load", load)]
    remedy = "ignore the speeds, and close other programs if a part runs out of time"
    numbers = {name: given[name] for name in ("load_average", "processors")}
    return [_computes(given), memory, Finding("load", Outcome.NOTE, f"busy ({load})", remedy, numbers=numbers)]


def _computes(given: Mapping[str, Any]) -> Finding:
    if given["system"] == "Darwin" and not given["gpu"]:
        sentence = "MLX computes on the processor, and not on this Mac's GPU"
        remedy = "use a native Python for Apple silicon (not under Rosetta), and install mlx again"
        return failed("device", Blame.DEVICE, sentence, remedy, given)
    exact = "bit for bit whatever rows come together" if given["exact"] else "up to rounding"
    return passed("device", f"MLX {given['version_mlx']} computes on {given['device']}, {exact}", given)


def largest(errors: Sequence[float]) -> float:
    """Return the largest error; a NaN if one is, which ``max`` may pass over.

    >>> largest([0.0, 0.5, 0.1]), largest([0.0, math.nan, 0.1])
    (0.5, nan)
    """
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def judge_quantised(errors: Sequence[float]) -> Finding:
    """Return whether attention over KV in 8 bits is right."""
    name, off = "KV in 8 bits", largest(errors)
    said = f"attention over it is off by {off:.2g} of a row"
    if not off <= _MOST_OFF:  # it may be NaN
        return failed(name, Blame.DEVICE, said, STOP, {"errors": errors})
    return passed(name, f"{said}, which is rounding", {"errors": errors})
