"""What is told of one moment, as values: metric families in Prometheus' sense. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from splitinfer.core.metrics.distribution import Histogram
from splitinfer.core.metrics.requests import RequestFigures
from splitinfer.engine.coordinator.health import PipelineHealth
from splitinfer.server.meters.http import HttpFigures

Value = float | Histogram
Labels = Mapping[str, str]


class Kind(StrEnum):
    """How a family's values change."""

    GAUGE = "gauge"
    COUNTER = "counter"  # never goes back; its samples' names end in ``_total``
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Family:
    """Samples of one name, each with other labels of the same names. ``name``: of a counter, without ``_total``."""

    name: str
    kind: Kind
    help: str
    samples: tuple[tuple[Labels, Value], ...]


@dataclass(frozen=True, slots=True)
class Readings:
    """All that is told, read at one moment. ``model``: its name for clients; ``context``: tokens; ``version``:
    splitinfer's; ``layout``: its name; ``stats``: as ``LLM.stats`` returns them."""

    model: str
    context: int
    version: str
    layout: str
    stats: Mapping[str, Any]
    requests: RequestFigures
    http: HttpFigures
    health: PipelineHealth


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes families whose samples share a prefix of the name and some labels."""

    prefix: str
    shared: Labels = field(default_factory=dict)

    def gauge(self, name: str, about: str, value: float | Mapping[str, float], label: str = "") -> Family:
        """A gauge: one value, or one for each value of ``label``."""
        return self._family(Kind.GAUGE, name, about, value, label)

    def counter(self, name: str, about: str, value: float | Mapping[str, float], label: str = "") -> Family:
        """A counter: one value, or one for each value of ``label``."""
        return self._family(Kind.COUNTER, name, about, value, label)

    def histogram(self, name: str, about: str, value: Histogram) -> Family:
        """A histogram."""
        return Family(self.prefix + name, Kind.HISTOGRAM, about, ((self.shared, value),))

    def several(self, kind: Kind, name: str, about: str, samples: list[tuple[Labels, float]]) -> Family:
        """A family whose samples have several labels of their own."""
        return Family(
            self.prefix + name, kind, about, tuple(({**self.shared, **labels}, value) for labels, value in samples)
        )

    def _family(self, kind: Kind, name: str, about: str, value: float | Mapping[str, float], label: str) -> Family:
        values = value.items() if isinstance(value, Mapping) else [("", value)]
        return self.several(kind, name, about, [({label: word} if label else {}, each) for word, each in values])
