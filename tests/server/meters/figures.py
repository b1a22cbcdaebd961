"""Figures of a pipeline of two stages, as ``LLM`` gives them, without any."""

import copy
from typing import Any

from splitinfer.core.layout import Layout, StageSpec
from splitinfer.core.metrics.histogram import Histogram
from splitinfer.engine.figures.health import PipelineHealth, StageHealth, StageState
from splitinfer.engine.figures.totals import Totals

DRAFTS = {
    "drafted": 30, "sent": 20, "accepted": 8, "blocks": 7, "void_blocks": 2,
    "tried_at": [7, 4, *[0] * 14], "accepted_at": [5, 3, *[0] * 14],
}  # fmt: skip
STAGE = {
    "busy_seconds": 2.0, "steps": 9, "bytes_sent": 640, "rows_unfit": 1, "bytes_copied": 64, "copy_seconds": 0.5,
    "experts_wanted": 8, "experts_found": 6, "experts_read": 4096, "experts_waiting": 0.25,
    "idle_seconds": {"upstream": 1.0, "downstream": 0.5, "link": 0.25, "host": 0.125, "nothing_to_do": 3.0},
}  # fmt: skip
STATS: dict[str, Any] = {
    "prompt_tokens": 8, "cached_tokens": 2,
    "running": 3, "waiting": 4, "max_running": 16, "active_seconds": 5.0, "computed_tokens": 50, "generated_tokens": 12,
    "finished": {"stop": 1, "abort": 2}, "preemptions": 1, "losses": {"back": 2}, "rejoins": 1, "stored_blocks": 6,
    "fetched_tokens": 256, "swapped_tokens": 512, "costs": {"hop": 0.004}, "speculation": None,
    "stages": [
        STAGE | {"name": "front", "kv_bytes": 10, "kv_budget_bytes": 100, "kv_bytes_stored": 5, "codec": "bf16"},
        STAGE | {
            "name": "back", "kv_bytes": 30, "kv_budget_bytes": 60, "kv_bytes_stored": 5, "sum_seconds": 2e-5,
            "ranks": [
                {"name": f"back/{i}", "device": "gpu", "weight_bytes": 7, "free_bytes_when_loaded": 9,
                 "busy_seconds": 2.0 + i} for i in range(2)
            ],
        },
    ],
}  # fmt: skip
HEALTH = PipelineHealth(
    (StageHealth("front", 0, 6, StageState.READY), StageHealth("back", 6, 12, StageState.LOST)), "stage back"
)


class Model:
    """What of ``LLM`` figures need; it answers nothing."""

    context_length, fingerprint, has_tokenizer = 300, "0", False
    layout = Layout((StageSpec("front", 0, 6), StageSpec("back", 6, 12, "tcp://10.0.0.7:5577")), name="two")

    def stats(self) -> dict[str, Any]:
        return copy.deepcopy(STATS)

    def request_figures(self) -> dict[str, Histogram]:
        return Totals().histograms

    def health(self) -> PipelineHealth:
        return HEALTH
