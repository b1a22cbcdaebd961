"""What a sound machine measures, to plant faults in: a GPU whose arithmetic rounds, and a processor's that does not."""

from collections.abc import Mapping
from typing import Any

from splitinfer.selftest.outcome import PartOutcome

MAC: Mapping[str, Any] = {
    "system": "Darwin", "system_version": "26.2", "architecture": "arm64", "chip": "Apple M4 Max",
    "device": "Apple M4 Max", "device_architecture": "applegpu_g16s", "backend": "metal", "gpu": True, "exact": False,
    "openblas": False, "computes_at_launch": False, "processors": 16, "memory_bytes": 128e9, "free_bytes": 90e9,
    "swap_used_bytes": 0, "working_set_bytes": 96e9, "buffer_limit": 499000, "python": "3.12.4", "load_average": 1.5,
    "version_splitinfer": "0.1.0", "version_protocol": 9, "version_mlx": "0.32.4", "version_mlx_lm": "0.32.2",
}  # fmt: skip
LINUX = {
    **MAC, "system": "Linux", "system_version": "6.8.0-45-generic", "architecture": "x86_64", "chip": "AMD EPYC",
    "device": "cpu", "device_architecture": "x86_64", "backend": "cpu", "gpu": False, "exact": True,
    "computes_at_launch": True, "working_set_bytes": None, "buffer_limit": None,
}  # fmt: skip
ROUNDS = {"logits_move": 0.03, "largest_logit": 16.0, "epsilon": 2**-10, "dtype": "float16", "exact": False}
EXACT = {"logits_move": 0.0, "largest_logit": 16.0, "epsilon": 2**-23, "dtype": "float32", "exact": True}


def answer(**changes: Any) -> dict[str, Any]:
    return {
        "tokens": 32, "compared": 32, "partings": [], "ttft_seconds": 0.02, "tokens_per_second": 90.0,
        "cached_tokens": 0, **changes,
    }  # fmt: skip


def parting(margin: float | None, **changes: Any) -> dict[str, Any]:
    return {"at": 4, "token": None if margin is None else 417, "wanted": 88, "margin": margin, **changes}


def road(rounding: Mapping[str, Any] = ROUNDS, *, gpu: bool = True, **changes: Any) -> dict[str, Any]:
    drafts = answer(drafts_sent=37, drafts_accepted=18)
    return {
        "rounding": dict(rounding), "opened": {"seconds": 1.0}, "greedy": answer(), "sampled": answer(),
        "greedy, drafts": drafts, "sampled, drafts": drafts, "kept KV": answer(cached_tokens=295, kept_before=0),
        "device": {
            "waiter": gpu, "token_budget": 512 if gpu else 128, "stages": ["Apple M4 Max" if gpu else "cpu"],
            "busy_seconds": [0.4], "steps": [50],
        },
        **changes,
    }  # fmt: skip


def branches(*, gpu: bool = True, **changes: Any) -> dict[str, Any]:
    rounding = {"error": 0.001, "own_rounding": 0.002} if gpu else {"error": 0.0, "own_rounding": 0.0}
    return {
        "device name": {"name": "Apple M4 Max" if gpu else "cpu", "own_processor": False},
        "sampler": {"taken": gpu, "equal": True, "rows": 5},
        "quantised attention": {"taken": gpu, "error": rounding["error"]},
        "kept dtype": {"dtype": "float16" if gpu else "float32", "float32": not gpu},
        "trials at loading": {"way": "rows", "kept_kv": True},
        "launching ahead": {
            "taken": gpu, "waiter": gpu, "completed": 6, "launched": 6, "error": 0.0, "seconds": 0.1,
        },
        "cohort": {"taken": gpu, "rows": 4, "way": "rows", "calls": 36, **rounding},
        "large steps": {"taken": gpu, "rows": 512 if gpu else 128, "error": rounding["error"]},
        "quantised cohort": {"taken": gpu, "rows": 4, "way": "rows", **rounding},
        **changes,
    }  # fmt: skip


def memory(**changes: Any) -> dict[str, Any]:
    at = {"active": 20_000_000, "resident": 300_000_000, "free": int(90e9)}
    found = {"before": {**at, "active": 8}, "loaded": at, "warm": at, "used": at, "closed": {**at, "active": 8}}
    return {
        "memory": {**found, "rounds": 12, "peak": 40_000_000, "wired": {"limit": 96e9, "recommended": 96e9}, **changes}
    }


def network(problem: str | None = None, system: str = "Darwin", **changes: Any) -> dict[str, Any]:
    versions = {"protocol": 9, "splitinfer": "0.1.0", "mlx": "0.32.4", "mlx_lm": "0.32.2"}
    link = {
        "worker_problem": "", "link_problem": "", "refused": False, "own_versions": versions,
        "welcome": {"device": "Apple M2", "free_bytes": 10e9, "versions": versions},
        "clock": {"offset": 0.01, "uncertainty": 1e-4},
        "figures": {"latency_p50": 2e-4, "latency_p99": 4e-4, "down": 1e9, "up": None},
    }  # fmt: skip
    found = {"system": {"system": system}, "connection": {"problem": problem, "seconds": 0.01}}
    return found if problem else {**found, "link": {**link, **changes}}


def costs() -> dict[str, Any]:
    return {
        "launch": {"launch_us": [7.0, 9.0, 30.0], "wait_us": [120.0, 150.0, 400.0], "count": 200},
        "demo, 1": {"rows": 1, "launch_ms": 1.0, "step_ms": 2.0},
        "8 x 2048, 4-bit, 512": {"rows": 512, "launch_ms": 1.0, "step_ms": 30.0},
    }


def doctor(state: str = "ok", backend: str = "metal", dtype: str = "bfloat16") -> dict[str, Any]:
    finding = {"about": "macOS", "state": state, "text": "macOS 26.2; RDMA needs 26.2", "remedy": "update macOS"}
    verdict = {"about": "RDMA", "state": state, "text": "can be used", "remedy": ""}
    advice = [{"area": "power", "severity": "warning", "text": "alices-studio sleeps after 10 minutes", "remedy": ""}]
    sees = {"backend": backend, "hidden_dtype": dtype, "wired_limit_mb": 0, "kv_disk_free": 500e9}
    return {"doctor": {"verdict": verdict, "requirements": [finding], "advice": advice, **sees}}


def exact(**changes: Any) -> dict[str, Any]:
    one = {
        "road": "2 rows together", "prompts": 1, "parted": 0, "first_token": None, "margin": None,
        "largest_margin": None, "positions": 8, "positions_that_differ": 0, "largest_logit_difference": 0.01,
    }  # fmt: skip
    margins = {"median": 1.5, "smallest": 0.1, "ties": 0.0}
    return {"exact": {"batch_invariant": False, "way": "rows", "margins": margins, "roads": [{**one, **changes}]}}


def sound(about: Mapping[str, Any] = MAC, **changes: Mapping[str, Any]) -> dict[str, PartOutcome]:
    """Outcomes of all parts; ``changes``: other findings of a part, by its name with "_" for " "."""
    gpu = about["gpu"]
    seen = doctor() if gpu else doctor("missing", "cpu", "float32")
    roads = {
        name: road(ROUNDS if gpu else EXACT, gpu=gpu) for name in ("one process", "tcp", "inproc", "curve", "ring")
    }
    found: dict[str, Mapping[str, Any]] = {
        "about": {"about": about}, **roads, "branches": branches(gpu=gpu), "network": network(),
        "worker, tcp": road(ROUNDS if gpu else EXACT, gpu=gpu), "memory": memory(), "doctor": seen,
        "costs": costs(), "exact": exact(),
    }  # fmt: skip
    found |= {name.replace("_", " "): value for name, value in changes.items()}
    return {name: PartOutcome(value, seconds=1.0, limit_s=20.0) for name, value in found.items()}
