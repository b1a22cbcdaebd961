"""What computes here."""

import os
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from splitinfer.bench.shared import machine
from splitinfer.jobs.process import Report
from splitinfer.machine.selection import VARIABLE as ACCELERATOR
from splitinfer.models.memory import free_bytes, on_gpu


def measure(_options: Mapping[str, Any], report: Report) -> None:
    """Report it, when it has computed something."""
    mx.eval(mx.ones((8, 8)) @ mx.ones((8, 8)))
    described = {"gpu": on_gpu(), "accelerator": os.environ.get(ACCELERATOR), "free_bytes": free_bytes()}
    report("about", {**machine.describe(), **described, "device_info": _plain(mx.device_info())})


def _plain(info: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in info.items() if isinstance(value, str | int | float)}
