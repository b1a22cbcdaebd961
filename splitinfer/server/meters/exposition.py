"""All families as the text that Prometheus reads.

The text is that of version 0.0.4, which every Prometheus takes, whatever it would rather have: in OpenMetrics'
prometheus-client 0.26.0 writes ``vllm_x`` for a sample ``vllm:x``, by which no dashboard finds it.
"""

from collections.abc import Iterable

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from splitinfer.server.meters.pipeline import pipeline_families
from splitinfer.server.meters.readings import Readings
from splitinfer.server.meters.vllm import vllm_families

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Read(Collector):
    def __init__(self, readings: Readings) -> None:
        self._readings = readings

    def collect(self) -> Iterable[Metric]:
        return all_families(self._readings)


def all_families(readings: Readings) -> list[Metric]:
    return [*vllm_families(readings), *pipeline_families(readings)]


def text_of(readings: Readings) -> bytes:
    return generate_latest(_Read(readings))
