"""Metric families of Prometheus. A counter's name is given without ``_total``, which its samples' names end in."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

from splitinfer.core.metrics.distribution import Histogram

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes families whose samples share a prefix of the name and some labels. A value is one number, or one for each
    value of ``label``."""

    prefix: str
    shared: Labels

    def gauge(self, name: str, about: str, value: float | Mapping[str, float], label: str = "") -> Metric:
        return self.gauges(name, about, _labelled(value, label))

    def counter(self, name: str, about: str, value: float | Mapping[str, float], label: str = "") -> Metric:
        return self.counters(name, about, _labelled(value, label))

    def gauges(self, name: str, about: str, samples: Iterable[tuple[Labels, float]]) -> Metric:
        """A gauge whose samples have several labels of their own."""
        return self._family("gauge", name, about, samples)

    def counters(self, name: str, about: str, samples: Iterable[tuple[Labels, float]]) -> Metric:
        """A counter whose samples have several labels of their own."""
        return self._family("counter", name, about, samples)

    def histogram(self, name: str, about: str, value: Histogram) -> Metric:
        made = Metric(self.prefix + name, about, "histogram")
        bounds = (*map(floatToGoString, value.bounds), "+Inf")
        for bound, count in zip(bounds, value.cumulative, strict=True):
            made.add_sample(f"{made.name}_bucket", {**self.shared, "le": bound}, count)
        made.add_sample(f"{made.name}_count", {**self.shared}, value.count)
        made.add_sample(f"{made.name}_sum", {**self.shared}, value.total)
        return made

    def _family(self, kind: str, name: str, about: str, samples: Iterable[tuple[Labels, float]]) -> Metric:
        made = Metric(self.prefix + name, about, kind)
        for labels, value in samples:
            made.add_sample(made.name + "_total" * (kind == "counter"), {**self.shared, **labels}, float(value))
        return made


def _labelled(value: float | Mapping[str, float], label: str) -> list[tuple[Labels, float]]:
    return [({label: word}, each) for word, each in value.items()] if isinstance(value, Mapping) else [({}, value)]
