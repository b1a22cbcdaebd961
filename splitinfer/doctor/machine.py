"""Describes this machine, as far as it matters to a stage."""

import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import psutil

from splitinfer.doctor.findings.finding import Output
from splitinfer.doctor.findings.memory import parse_pages
from splitinfer.doctor.parsing import macos
from splitinfer.engine.versions import device_name, machine_name, own_versions
from splitinfer.kvstore.paths import default_folder
from splitinfer.models.batch_invariance import preloaded_blas
from splitinfer.models.memory import free_bytes, on_gpu
from splitinfer.wire.messages import Versions

WHEEL_BLAS = "the reference BLAS of MLX's wheel, whose time grows with every row of a batch"


@dataclass(frozen=True, slots=True)
class Machine:
    """This machine. Memory and disk are in bytes.

    memory_kinds, swap_used: on a Mac, each kind of memory that Activity Monitor shows, and what is in swap files.
    working_set: bytes that Metal recommends for the GPU, where it does.
    wired_limit_mb: the value of ``sysctl``, 0 for macOS's own choice.
    blas: the library that multiplies matrices on Linux's CPUs.
    """

    name: str
    system: str
    chip: str
    processors: int
    memory: int
    free: int
    backend: str
    device: str
    memory_kinds: dict[str, int] | None
    swap_used: int | None
    working_set: int | None
    wired_limit_mb: int | None
    blas: str | None
    versions: Versions
    python: str
    kv_folder: str
    kv_disk_free: int | None


def describe(outputs: Mapping[str, Output]) -> Machine:
    """The machine, from the outputs of ``commands`` and from this process."""
    info = mx.device_info()
    working_set = info.get("max_recommended_working_set_size")
    folder = default_folder()
    return Machine(
        name=machine_name(),
        system=_system(outputs),
        chip=str(info.get("device_name") or platform.processor() or platform.machine()),
        processors=os.cpu_count() or 1,
        memory=int(psutil.virtual_memory().total),
        free=free_bytes(),
        backend=_backend(),
        device=device_name(),
        memory_kinds=None if (pages := parse_pages(_text(outputs, "memory"))) is None else pages.by_category(),
        swap_used=macos.swap_used(_text(outputs, "swap")),
        working_set=working_set if isinstance(working_set, int) else None,
        wired_limit_mb=macos.wired_limit(_text(outputs, "wired_limit")),
        blas=_blas(),
        versions=own_versions(),
        python=platform.python_version(),
        kv_folder=str(folder),
        kv_disk_free=_disk_free(folder),
    )


def _text(outputs: Mapping[str, Output], name: str) -> str:
    """What a command printed; "" where it failed or was not run."""
    return outputs[name].text or "" if name in outputs else ""


def _system(outputs: Mapping[str, Output]) -> str:
    found = macos.version(_text(outputs, "macos"))
    if found is not None:
        return f"macOS {'.'.join(map(str, found))}"
    return f"{platform.system()} {platform.release()}"


def _backend() -> str:
    if not on_gpu():
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def _blas() -> str | None:
    """The BLAS in words; ``None`` where MLX uses none or the system does not tell."""
    if on_gpu() or platform.system() != "Linux":
        return None
    try:
        found = preloaded_blas(Path("/proc/self/maps").read_text(encoding="utf-8"))
    except OSError:
        return None
    return WHEEL_BLAS if found is None else found


def _disk_free(folder: Path) -> int | None:
    """Bytes free where KV would be stored; the folder need not exist yet."""
    for place in (folder, *folder.parents):
        try:
            return shutil.disk_usage(place).free
        except FileNotFoundError:
            continue
        except OSError:
            break
    return None
