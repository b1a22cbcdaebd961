"""What a sound machine measures, to plant faults in: a GPU whose arithmetic rounds, and a processor's that does not."""

from collections.abc import Mapping
from typing import Any

from splitinfer.core.metrics.link_measurement import LinkMeasurement
from splitinfer.probes.links import LinkSeen

MAC: Mapping[str, Any] = {
    "name": "alices-studio", "kv_folder": "/Users/alice/kv", "system": "Darwin", "system_version": "26.2",
    "chip": "Apple M4 Max", "device": "Apple M4 Max",
    "backend": "metal", "gpu": True, "exact": False, "processors": 16,
    "memory_bytes": 128e9, "free_bytes": 90e9, "swap_used_bytes": 0, "working_set_bytes": 96e9,
    "distributed": ["jaccl", "ring"],
    "python": "3.12.4", "load_average": 1.5, "version_splitinfer": "0.1.0", "version_protocol": 9,
    "version_mlx": "0.32.4", "version_mlx_lm": "0.32.2",
}  # fmt: skip
LINUX: Mapping[str, Any] = {
    **MAC, "system": "Linux", "system_version": "6.8.0-45-generic", "chip": "AMD EPYC",
    "device": "cpu", "backend": "cpu", "gpu": False, "exact": True,
    "working_set_bytes": None,
}  # fmt: skip
ROUNDS = {"logits_move": 0.03, "largest_logit": 16.0, "epsilon": 2**-10, "exact": False}
EXACT = {"logits_move": 0.0, "largest_logit": 16.0, "epsilon": 2**-23, "exact": True}


def answer(**changes: Any) -> dict[str, Any]:
    return {
        "tokens": 32, "gaps": [0.0] * 32, "ttft_seconds": 0.02, "tokens_per_second": 90.0,
        "cached_tokens": 0, **changes,
    }  # fmt: skip


def other(gap: float) -> dict[str, Any]:
    """An answer whose fifth token is not mlx-lm's."""
    return answer(gaps=[0.0] * 4 + [gap] + [0.0] * 27)


def memory(**changes: Any) -> dict[str, Any]:
    at = {"active": 20_000_000, "resident": 300_000_000, "free": int(90e9)}
    found = {"before": {**at, "active": 8}, "loaded": at, "warm": at, "used": at, "closed": {**at, "active": 8}}
    wired = {"limit": 96e9, "recommended": 96e9}
    return {**found, "rounds": 12, "peak": 40_000_000, "wired": wired, **changes}


def link(problem: str = "", **changes: float) -> LinkSeen:
    figures = LinkMeasurement(**{"latency_p50": 2e-4, "latency_p99": 4e-4, "down": 1e9, "up": float("inf"), **changes})
    return LinkSeen("here", "worker", "tcp", "hidden states", None if problem else figures, problem)
