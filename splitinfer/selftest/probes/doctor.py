"""What ``splitinfer doctor`` finds on this machine, as its own document has it."""

from collections.abc import Mapping
from typing import Any

from splitinfer.config import Layout
from splitinfer.doctor.hidden_states import hidden_of
from splitinfer.doctor.report import as_document
from splitinfer.doctor.run import inspect
from splitinfer.jobs.process import Report

_TIMEOUT = 5.0  # seconds to reach a worker, of which there is none
_LAYOUT = Layout.from_dict({"model": "demo", "stages": [{"name": "here", "layers": 12}]})


def measure(_options: Mapping[str, Any], report: Report) -> None:
    """Report the requirements of RDMA, whatever else is advised, and what the doctor takes this machine for."""
    found = as_document(inspect(None, _TIMEOUT, lambda _: None))
    machine = found["machine"]
    report(
        "doctor",
        {
            "verdict": found["rdma"]["verdict"],
            "requirements": found["rdma"]["findings"],
            "advice": found.get("findings", []),
            "wired_limit_mb": machine["wired_limit_mb"],
            "kv_disk_free": machine["kv_disk_free"],
            "backend": machine["backend"],
            "hidden_dtype": hidden_of(_LAYOUT).dtype,
        },
    )
