"""Sends spans to a collector, by OTLP over HTTP. The only module that needs opentelemetry-sdk.

A thread of the SDK sends what has come, some hundred spans at a time; where the collector cannot be reached, spans are
dropped. The SDK's own variables hold, too: OTEL_EXPORTER_OTLP_HEADERS for a collector that wants a key,
OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER (OpenTelemetry's "Environment Variable Specification").
"""

import threading
import time
from urllib.parse import urlsplit, urlunsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from splitinfer.engine.versions import own_versions
from splitinfer.errors import ConfigError
from splitinfer.server.spans import RequestSpan

_TRACES = "/v1/traces"  # the path of OTLP over HTTP, for an address without one
_SECONDS = 2.0


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

    def ended(self, span: RequestSpan) -> None:
        ahead = time.time() - time.monotonic()  # spans have the time of day
        made = self._tracer.start_span(
            span.name,
            self._propagator.extract(span.parent),
            kind=SpanKind.SERVER,
            attributes=span.attributes,
            start_time=_nanoseconds(span.began + ahead),
        )
        for name, at in span.events:
            made.add_event(name, timestamp=_nanoseconds(at + ahead))
        if span.has_failed:
            made.set_status(StatusCode.ERROR)
        made.end(_nanoseconds(span.ended + ahead))

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


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
