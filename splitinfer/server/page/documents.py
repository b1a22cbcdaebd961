"""The documents that the page gets: the pipeline as it is, and the figures of its last seconds. Pure.

Neither has an address or a key, and nothing of a request.
"""

from collections.abc import Mapping
from typing import Any

from splitinfer.server.page.figures import Sample, Seen


def pipeline_document(model: str, context: int, sample: Sample, dials: Mapping[str, Any]) -> dict[str, Any]:
    """What does not change from one second to the next: stages and links as they are, without addresses and keys.
    ``dials``: those that are set."""
    stats, layout = sample.stats, sample.cut.layout
    stages = [
        {
            "name": spec.name,
            "layers": [spec.start, spec.end],
            "state": str(state.state),
            "device": sums.get("device", ""),
            "weight_bytes": sums.get("weight_bytes", 0),
            "free_bytes": sums.get("free_bytes_when_loaded", 0),
            "kv_budget": kv,
        }
        for spec, state, sums, kv in zip(
            layout.stages, sample.cut.health.stages, stats["stages"], sample.cut.budgets, strict=True
        )
    ]
    links = [
        {
            "from": here.name,
            "to": there.name,
            "transport": "local" if there.is_local else there.link_transport.transport,
            "codec": sums.get("codec") or there.codec,
        }
        for here, there, sums in zip(layout.stages, layout.stages[1:], stats["stages"], strict=False)
    ]
    named = {"model": model, "layout": layout.name, "context": context, "dials": dict(dials)}
    return {**named, "stages": stages, "links": links}


def figures_document(seen_: Seen) -> dict[str, Any]:
    """The figures as the page gets them."""
    return {
        "seconds": round(seen_.seconds, 2),
        "under_way": round(seen_.under_way, 3),
        "running": seen_.running,
        "waiting": seen_.waiting,
        "max_running": seen_.max_running,
        "generated_per_second": round(seen_.generated_per_second, 2),
        "computed_per_second": round(seen_.computed_per_second, 2),
        "void": round(seen_.void, 3),
        "drafter": seen_.drafter,
        "acceptance": None if seen_.acceptance is None else round(seen_.acceptance, 3),
        "ttft_ms": _rounded(seen_.ttft_ms),
        "itl_ms": _rounded(seen_.itl_ms),
        "state": _state(seen_),
        "waits_for": seen_.waits_for,
        "failure": seen_.failure,
        "stages": [
            {
                "duty": round(stage.duty, 3),
                "gaps": {str(cause): round(share, 3) for cause, share in stage.gaps.items() if share >= 0.0005},
                "kv": stage.kv_bytes,
                "kv_kept": stage.kv_kept,
                "kv_budget": stage.kv_budget,
            }
            for stage in seen_.stages
        ],
        "links": [
            {"way_ms": _rounded(link.way_ms), "bytes_per_second": round(link.bytes_per_second)} for link in seen_.links
        ],
    }


def _state(seen_: Seen) -> str:
    if seen_.failure is not None:
        return "failed"
    return "draining" if seen_.is_draining else "ok" if seen_.waits_for is None else "waiting"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
