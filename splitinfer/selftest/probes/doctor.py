"""What ``splitinfer doctor`` finds on this machine: each requirement of RDMA, its state and its sentence."""

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import mlx.core as mx

from splitinfer.config import Layout
from splitinfer.doctor.commands import run_commands
from splitinfer.doctor.hidden_states import hidden_of
from splitinfer.doctor.machine import describe
from splitinfer.doctor.rdma import Seen, findings, verdict
from splitinfer.jobs.process import Report

_LAYOUT = Layout.from_dict({"model": "demo", "stages": [{"name": "here", "layers": 12}]})


def measure(_options: Mapping[str, Any], report: Report) -> None:
    """Report the findings."""
    outputs = run_commands()
    found = findings(Seen(outputs, platform.system(), bool(mx.distributed.is_available("jaccl")), os.environ))
    machine = describe(outputs)
    report(
        "doctor",
        {
            "verdict": asdict(verdict(found)),
            "findings": [asdict(one) for one in found],
            "wired_limit_mb": machine.wired_limit_mb,
            "kv_disk_free": machine.kv_disk_free,
            "backend": machine.backend,
            "hidden_dtype": hidden_of(_LAYOUT).dtype,
        },
    )
