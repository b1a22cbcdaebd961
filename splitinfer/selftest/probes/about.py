"""What this machine is and computes on, as far as a document may say."""

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import mlx.core as mx
import psutil

from splitinfer.bench.shared.machine import describe
from splitinfer.engine.device.selection import open_device
from splitinfer.engine.versions import own_versions
from splitinfer.jobs.process import Report
from splitinfer.models.batch_invariance import has_openblas, is_batch_invariant
from splitinfer.models.memory import free_bytes, on_gpu, resource_limit
from splitinfer.selftest.probes.pipelines import DEMO_LAYERS


def measure(_options: Mapping[str, Any], report: Report) -> None:
    """Report it, when the device has computed something."""
    mx.eval(mx.ones((8, 8)) @ mx.ones((8, 8)))
    described, info = describe(), mx.device_info()
    gpu = on_gpu()
    report(
        "about",
        {
            "system": platform.system(),
            "system_version": platform.mac_ver()[0] or platform.release(),
            "architecture": platform.machine(),
            "chip": described["processor"],
            "device": described["device"],
            "device_architecture": info.get("architecture"),
            "backend": "cpu" if not gpu else "metal" if mx.metal.is_available() else "cuda",
            "gpu": gpu,
            "exact": is_batch_invariant(),
            "openblas": has_openblas(),
            "computes_at_launch": open_device(0, (0, DEMO_LAYERS)).computes_at_launch,
            "processors": os.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
            "free_bytes": free_bytes(),
            "swap_used_bytes": psutil.swap_memory().used,
            "working_set_bytes": info.get("max_recommended_working_set_size"),
            "buffer_limit": resource_limit(),
            "python": platform.python_version(),
            "load_average": described["load_average"],
            **{f"version_{name}": value for name, value in asdict(own_versions()).items()},
        },
    )
