"""A span of each request, sent to a collector by OTLP over HTTP. The only module that needs opentelemetry-sdk.

    began            submitted         first step      first token      last token, ended
      |--- preparing ---|---- queued ----|--- prefill ---|---- decode ----|
                                    or, anywhere, given up: by its client, by a deadline, by the server's end

A phase begins with the first choice that comes to it. Names of attributes are those of OpenTelemetry's conventions for
generative AI (opentelemetry-semantic-conventions 0.66b2), beside ``splitinfer.*`` for the phases. A thread of the SDK
sends what has come; where the collector cannot be reached, spans are dropped. The SDK's own variables hold, too
(OTEL_EXPORTER_OTLP_HEADERS, OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER).
"""

import threading
import time
from collections.abc import Sequence
from urllib.parse import urlsplit, urlunsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.requests import Request

from splitinfer.engine.versions import own_versions
from splitinfer.errors import ConfigError
from splitinfer.server.answer import ChoiceTimes, Usage

_TRACES = "/v1/traces"  # the path of OTLP over HTTP, for an address without one
_SECONDS = 2.0
_COMPLETIONS = "/v1/completions"
_PARENT = ("traceparent", "tracestate")  # W3C Trace Context


class OtlpSpans:
    """Spans on their way to the collector at ``url``. ``seconds``: for one attempt to send, and at the end for all.

    Raises:
        ConfigError: that is no address of a collector.
    """

    def __init__(self, url: str, seconds: float = _SECONDS) -> None:
        self._seconds = seconds
        exporter = OTLPSpanExporter(endpoint=traces_url(url), timeout=seconds)
        about = {"service.name": "splitinfer", "service.version": own_versions().splitinfer}
        self._provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("splitinfer")
        self._propagator = TraceContextTextMapPropagator()

    def ended(self, request: Request, model: str, choices: Sequence[ChoiceTimes], usage: Usage, ended: float) -> None:
        """A request is over; times are seconds on the monotonic clock. ``model``: its name for clients."""
        route, began = request.state.route, request.state.began
        ahead = time.time() - time.monotonic()  # spans have the time of day

        def at(seconds: float) -> int:
            return int((seconds + ahead) * 1e9)

        marks, reasons = _marks(choices), [each.reason or "abort" for each in choices]
        span = self._tracer.start_span(
            f"POST {route}",
            self._propagator.extract({name: request.headers[name] for name in _PARENT if name in request.headers}),
            kind=SpanKind.SERVER,
            attributes={
                "http.request.method": "POST",
                "http.route": route,
                "gen_ai.operation.name": "text_completion" if route == _COMPLETIONS else "chat",
                "gen_ai.provider.name": "splitinfer",
                "gen_ai.request.model": model,
                "gen_ai.request.choice.count": len(choices),
                "gen_ai.response.finish_reasons": reasons,
                "gen_ai.usage.input_tokens": usage.prompt,
                "gen_ai.usage.cache_read.input_tokens": usage.cached,
                "gen_ai.usage.output_tokens": usage.generated,
                "splitinfer.request_id": request.state.request_id,
                "splitinfer.preparing_seconds": marks["queued"] - began,
            },
            start_time=at(began),
        )
        last = max((each.last for each in choices if each.last is not None), default=ended)
        untils = [*list(marks.values())[1:], last if "decode" in marks else ended]
        for (name, since), until in zip(marks.items(), untils, strict=True):
            span.add_event(name, timestamp=at(since))
            span.set_attribute(f"splitinfer.{'queue' if name == 'queued' else name}_seconds", until - since)
        if "abort" in reasons:
            span.add_event("given up", timestamp=at(ended))
        if "error" in reasons:
            span.set_status(StatusCode.ERROR)
        span.end(at(ended))

    def close(self) -> None:
        """Send what is left, within some seconds: the SDK would take them for each batch of a queue that is full."""
        closing = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
        closing.start()
        closing.join(self._seconds)


def traces_url(url: str) -> str:
    """Where spans go, for a collector's address.

    Raises:
        ConfigError: it is not an address.

    >>> traces_url("http://collector:4318"), traces_url("https://there.example/otlp/v1/traces")
    ('http://collector:4318/v1/traces', 'https://there.example/otlp/v1/traces')
    """
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise ConfigError(f"--otlp takes the address of a collector, as http://127.0.0.1:4318, not {url!r}")
    return urlunsplit(parts._replace(path=_TRACES)) if parts.path in ("", "/") else url


def _marks(choices: Sequence[ChoiceTimes]) -> dict[str, float]:
    """When each phase began that the request came to, in order."""
    begun = min((each.begun for each in choices if each.begun is not None), default=None)
    first = min((each.first for each in choices if each.first is not None), default=None)
    marks = {"queued": min(each.submitted for each in choices), "prefill": begun, "decode": first}
    return {name: at for name, at in marks.items() if at is not None}
