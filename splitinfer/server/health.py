"""What `/health` and `/v1/models` say of the pipeline. Pure; nothing secret, as `/health` needs no key."""

from typing import Any

from splitinfer.core.layout import Layout
from splitinfer.engine.coordinator.health import PipelineHealth


def health_document(health: PipelineHealth, num_running: int, *, is_draining: bool) -> tuple[int, dict[str, Any]]:
    """The status of HTTP and the document: 200 while requests are answered, else 503 with the reason."""
    reason = health.failure
    if reason is None and is_draining:
        reason = "the server was told to end, and takes no new request"
    if reason is None and health.waits_for is not None:
        reason = f"requests wait for {health.waits_for}"
    word = "failed" if health.failure else "draining" if is_draining else "ok" if health.can_answer else "waiting"
    stages = [
        {"name": stage.name, "layers": [stage.start, stage.end], "state": str(stage.state)} for stage in health.stages
    ]
    document = {"status": word, "running": num_running, "stages": stages, "waits_for": health.waits_for}
    return (200, document) if reason is None else (503, {**document, "reason": reason})


def layout_summary(layout: Layout) -> dict[str, Any]:
    """Which stage holds which layers, without addresses and keys."""
    stages = [{"name": stage.name, "layers": [stage.start, stage.end]} for stage in layout.stages]
    return {"name": layout.name, "stages": stages}
