"""The documents of `/health` and `/v1/models`. Pure. They hold no secret, because `/health` needs no key."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from splitinfer.core.layout import Layout
from splitinfer.engine.figures.health import PipelineHealth
from splitinfer.server.problem import Problem


def state_of(health: PipelineHealth, *, is_draining: bool) -> str:
    """Return the state of a server in a word."""
    if health.failure is not None:
        return "failed"
    return "draining" if is_draining else "ok" if health.can_answer else "waiting"


def health_document(health: PipelineHealth, num_running: int, *, is_draining: bool) -> tuple[int, dict[str, Any]]:
    """Return the status of HTTP and the document: 200 while requests are answered, else 503 with the reason."""
    reason = health.failure
    if reason is None and is_draining:
        reason = "the server was told to end, and takes no new request"
    if reason is None and health.waits_for is not None:
        reason = f"requests wait for {health.waits_for}"
    stages = [
        {"name": stage.name, "layers": [stage.start, stage.end], "state": str(stage.state)} for stage in health.stages
    ]
    document = {"status": state_of(health, is_draining=is_draining), "running": num_running, "stages": stages}
    document |= {"waits_for": health.waits_for, "absent": health.absent}
    return (200, document) if reason is None else (503, {**document, "reason": reason})


@dataclass(frozen=True, slots=True)
class Offer:
    """A model that clients may name. ``model``: its folder, or its name at the hub. ``layout``: in force; ``None`` if
    the model is not loaded. ``context``: the pipeline's, or the model's own while it is not loaded. ``rests_until``:
    when the model is unloaded if nobody uses it, in seconds since 1970; ``None``: never. ``defaults``: sampling fields
    for requests that do not set them, if known."""

    name: str
    model: str
    context: int
    layout: Layout | None = None
    rests_until: float | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)


def model_document(offer: Offer, started: int) -> dict[str, Any]:
    """Return the model as both APIs list it. ``started``: seconds since 1970.

    OpenAI's API has no field for the context. Clients read OpenRouter's (``context_length``), vLLM's
    (``max_model_len``), or ``context_window`` (freellmapi #309, turnstone #252, Fastllm-proxy #24); Anthropic's is
    ``max_input_tokens``. llama.cpp's ``meta.n_ctx_train`` is left out: it is the model's own, and may be more.
    """
    name, context, layout = offer.name, offer.context, offer.layout
    stages = [] if layout is None else [{"name": one.name, "layers": [one.start, one.end]} for one in layout.stages]
    return {
        "id": name,
        "object": "model",
        "created": started,
        "owned_by": "splitinfer",
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(started, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "context_length": context,
        "context_window": context,
        "max_model_len": context,
        "max_input_tokens": context,
        "max_tokens": context,
        "default_parameters": dict(offer.defaults),  # OpenRouter's name
        "loaded": layout is not None,
        "layout": None if layout is None else {"name": layout.name, "stages": stages},
    }


def named(offers: Sequence[Offer], name: str) -> Offer:
    """Return the model with that name, which may end with Ollama's tag ``:latest``.

    Raises:
        Problem: 404, no model has that name.
    """
    wanted = (name, name.removesuffix(":latest"))
    found = next((each for each in offers if each.name in wanted), None)
    if found is None:
        known = ", ".join(repr(each.name) for each in offers)
        raise Problem(404, f"there is no model {name!r:.80} here, but {known}", code="model_not_found")
    return found


def models_document(models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"]}
    return {"object": "list", "data": list(models), "has_more": False, **ends}
