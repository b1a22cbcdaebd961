"""Families as the text that Prometheus reads. The only module that needs prometheus-client.

The text is that of version 0.0.4, which every Prometheus takes, whatever it would rather have: in OpenMetrics'
prometheus-client 0.26.0 writes ``vllm_x`` for a sample ``vllm:x``, by which no dashboard finds it.
"""

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from splitinfer.core.metrics.distribution import Histogram
from splitinfer.server.meters.families import Family, Kind


class _Collected(Collector):
    """Families that were made before, as prometheus-client takes them."""

    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """The families."""
        return map(_metric, self._families)


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def text_of(families: Sequence[Family]) -> bytes:
    """The text."""
    return generate_latest(_Collected(families))


def _metric(family: Family) -> Metric:
    if family.kind is Kind.HISTOGRAM:
        return _histogram(family)
    made: Metric = (CounterMetricFamily if family.kind is Kind.COUNTER else GaugeMetricFamily)(family.name, family.help)
    suffix = "_total" if family.kind is Kind.COUNTER else ""
    for labels, value in family.samples:
        assert not isinstance(value, Histogram)
        made.add_sample(family.name + suffix, dict(labels), float(value))
    return made


def _histogram(family: Family) -> Metric:
    made = HistogramMetricFamily(family.name, family.help)
    for labels, value in family.samples:
        assert isinstance(value, Histogram)
        for bound, count in _buckets(value):
            made.add_sample(f"{family.name}_bucket", {**labels, "le": bound}, count)
        made.add_sample(f"{family.name}_count", dict(labels), value.count)
        made.add_sample(f"{family.name}_sum", dict(labels), value.total)
    return made


def _buckets(histogram: Histogram) -> Iterator[tuple[str, int]]:
    bounds = (*map(floatToGoString, histogram.bounds), "+Inf")
    return zip(bounds, histogram.cumulative, strict=True)
