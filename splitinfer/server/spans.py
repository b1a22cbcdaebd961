"""A request's span, as a value: when it was in which phase, and how large it was. Pure.

    began            submitted         first step      first token      last token, ended
      |--- preparing ---|---- queued ----|--- prefill ---|---- decode ----|
                                    or, anywhere, given up: by its client, by a deadline, by the server's end

Names of attributes are those of OpenTelemetry's semantic conventions for generative AI (in development; as in
opentelemetry-semantic-conventions 0.66b2), beside ``splitinfer.*`` for the phases.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

GIVEN_UP = "given up"
_PARENT = ("traceparent", "tracestate")  # W3C Trace Context
_COMPLETIONS = "/v1/completions"

Attribute = str | int | float | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request; those of a prompt count once, whatever the number of choices. ``reasoning``: of those that
    were generated, the ones of reasoning. ``tried``, ``right``: drafts that came to a verdict, and those of them that
    became tokens."""

    prompt: int
    cached: int = 0
    generated: int = 0
    reasoning: int = 0
    tried: int = 0
    right: int = 0


@dataclass(frozen=True, slots=True)
class Arrival:
    """How a request came. ``route``: its pattern; ``began``: seconds on the monotonic clock."""

    route: str
    request_id: str
    began: float
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ChoiceTimes:
    """One choice: seconds on the monotonic clock, ``None`` where it did not come to that. ``reason``: why it ended;
    ``None``: it was not read to its end."""

    submitted: float
    begun: float | None = None
    first: float | None = None
    last: float | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class RequestSpan:
    """A span. ``events``: what began when, in order, in seconds on the monotonic clock. ``parent``: headers by which
    the client says of which trace it is a part."""

    name: str
    began: float
    ended: float
    events: tuple[tuple[str, float], ...]
    attributes: Mapping[str, Attribute]
    has_failed: bool
    parent: Mapping[str, str]


def span_of(arrival: Arrival, model: str, choices: Sequence[ChoiceTimes], usage: Usage, ended: float) -> RequestSpan:
    """The span of a request, which is over. A phase begins with the first choice that comes to it.

    model: its name for clients.
    """
    begun, first, last = (_known(getattr(each, name) for each in choices) for name in ("begun", "first", "last"))
    submitted = min(each.submitted for each in choices)
    reasons = tuple(each.reason or "abort" for each in choices)
    marks = {"queued": submitted, "prefill": min(begun, default=None), "decode": min(first, default=None)}
    events = [(name, at) for name, at in marks.items() if at is not None]
    if "abort" in reasons:
        events.append((GIVEN_UP, ended))
    attributes: dict[str, Attribute] = {
        "http.request.method": "POST",
        "http.route": arrival.route,
        "gen_ai.operation.name": "text_completion" if arrival.route == _COMPLETIONS else "chat",
        "gen_ai.provider.name": "splitinfer",
        "gen_ai.request.model": model,
        "gen_ai.request.choice.count": len(choices),
        "gen_ai.response.finish_reasons": reasons,
        "gen_ai.usage.input_tokens": usage.prompt,
        "gen_ai.usage.cache_read.input_tokens": usage.cached,
        "gen_ai.usage.output_tokens": usage.generated,
        "splitinfer.request_id": arrival.request_id,
        "splitinfer.preparing_seconds": submitted - arrival.began,
    }
    edges = [("queue", submitted, marks["prefill"]), ("prefill", marks["prefill"], marks["decode"])]
    edges.append(("decode", marks["decode"], max(last, default=None)))
    for name, since, until in edges:
        if since is not None:
            attributes[f"splitinfer.{name}_seconds"] = (ended if until is None else until) - since
    name = f"POST {arrival.route}"
    parent = {name: arrival.headers[name] for name in _PARENT if name in arrival.headers}
    return RequestSpan(name, arrival.began, ended, tuple(events), attributes, "error" in reasons, parent)


def _known(times: Iterable[float | None]) -> list[float]:
    return [time for time in times if time is not None]
