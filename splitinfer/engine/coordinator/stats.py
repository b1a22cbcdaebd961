"""What ``LLM.stats`` returns: counters, figures of the stages, and the scheduler's state, as one plain dictionary."""

from typing import Any

from splitinfer.core.layout import Layout
from splitinfer.core.scheduler.scheduler import Scheduler
from splitinfer.core.speculation.speculation import Speculation
from splitinfer.engine.coordinator.figures import Figures
from splitinfer.engine.coordinator.pipeline import Pipeline
from splitinfer.engine.drafts.drafters import Drafter


def stats_of(
    pipeline: Pipeline,
    layout: Layout,
    scheduler: Scheduler | None,
    drafter: Drafter | None,
    figures: Figures,
    now: float,
) -> dict[str, Any]:
    """Counters and per-stage figures, as plain numbers. ``scheduler``: ``None`` before the stages are loaded.
    ``layout``: the cut in force. ``now``: seconds on the monotonic clock."""
    stats = figures.as_dict(now)
    if scheduler is not None:
        stats |= _queue_stats(scheduler)
        stats["costs"] = scheduler.costs.as_dict()
        name = layout.draft if scheduler.config.drafts_at_end else None if drafter is None else drafter.name
        stats["speculation"] = _draft_stats(name, scheduler.speculation)
        for stage, memory in zip(stats["stages"], scheduler.kv.budget.stages, strict=False):
            stage["kv_budget_bytes"] = memory.budget_bytes
            stage["kv_bytes"] = memory.bytes_of(scheduler.kv_used)
            stage["kv_bytes_stored"] = memory.bytes_of(scheduler.kv_stored)
    for stage, codec in zip(stats["stages"], pipeline.codecs, strict=False):
        stage["codec"] = codec  # of the link to the next
    for stage, ready in zip(stats["stages"], pipeline.ready, strict=False):
        stage |= {
            "device": ready.device,
            "weight_bytes": ready.weight_bytes,
            "kv_bytes_per_token": ready.kv_bytes_per_token,
            "free_bytes_when_loaded": ready.free_bytes,
        }
    for rank in pipeline.ranks:
        if rank.ready is not None:
            stage = stats["stages"][rank.stage]
            stage["sum_seconds"] = max(stage.get("sum_seconds", 0.0), rank.ready.sum_seconds)
            stage.setdefault("ranks", []).append(
                {
                    "name": rank.spec.name,
                    "device": rank.ready.device,
                    "weight_bytes": rank.ready.weight_bytes,
                    "free_bytes_when_loaded": rank.ready.free_bytes,
                    "busy_seconds": rank.busy,
                }
            )
    return stats


def _draft_stats(drafter: str | None, speculation: Speculation | None) -> dict[str, Any] | None:
    """What was drafted, how much of it was right, and what it has cost; ``None`` where nobody drafts."""
    if drafter is None or speculation is None:
        return None
    costs = speculation.costs
    return {
        "drafter": drafter,
        **speculation.counts.as_dict(),
        "round_seconds": costs.drafts.measured,
        "draft_seconds": costs.drafting(1) if costs.drafts.num_seen else None,
        "link_seconds": costs.hop,
        "step_seconds_by_rows": [stage.measured for stage in costs.stages],
    }


def _queue_stats(scheduler: Scheduler) -> dict[str, Any]:
    """The scheduler's bounds, and how many are where now."""
    return {
        "policy": scheduler.config.policy_config.policy.value,
        "token_budget": scheduler.config.token_budget,
        "max_running": scheduler.config.max_running,
        "waiting": len(scheduler.waiting),
        "running": len(scheduler.running),
        "stored_blocks": len(scheduler.prefix_cache.tree),
        "fetched_tokens": scheduler.prefix_cache.num_fetched,
        "swapped_tokens": scheduler.prefix_cache.num_swapped,
        "read_seconds_per_token": scheduler.prefix_cache.seconds_per_token,
        "preemptions": scheduler.num_preemptions,
        "grouping": scheduler.chooser.as_dict(),
    }
