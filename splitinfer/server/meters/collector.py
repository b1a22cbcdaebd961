"""All families as Prometheus reads them. The only module that needs prometheus-client.

Names, labels and bounds with ``vllm:`` are those of vLLM 0.33.0 (``vllm/v1/metrics/loggers.py``,
``vllm/v1/spec_decode/metrics.py``). What they mean here is in ``docs/last/meters.md``, with those that are left out.

The text is that of version 0.0.4, which every Prometheus takes, whatever it would rather have: in OpenMetrics'
prometheus-client 0.26.0 writes ``vllm_x`` for a sample ``vllm:x``, by which no dashboard finds it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from splitinfer.core.metrics.histogram import BETWEEN_TOKENS, FIRST_TOKEN, TOKENS, Histogram
from splitinfer.core.sequence import FinishReason
from splitinfer.core.speculation.flight import MAX_ROWS
from splitinfer.engine.coordinator.health import UNKNOWN_STAGE, PipelineHealth, StageState
from splitinfer.server.meters.http import HttpMeters

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Readings:
    """All that is told, read at one moment. ``model``: its name for clients; ``context``: tokens; ``version``:
    splitinfer's; ``layout``: its name; ``stats``, ``requests``: as ``LLM.stats`` and ``LLM.request_figures`` return
    them; ``running``: requests that ask for an answer, now."""

    model: str
    context: int
    version: str
    layout: str
    stats: Mapping[str, Any]
    requests: Mapping[str, Histogram]
    http: HttpMeters
    health: PipelineHealth
    running: int = 0
    is_draining: bool = False


def text_of(readings: Readings) -> bytes:
    return generate_latest(PipelineCollector(readings))


# -- names, and what each says -----------------------------------------------------------------------

_HISTOGRAMS = {
    "time_to_first_token_seconds": ("first_token", "From a request's submission to its first token."),
    "inter_token_latency_seconds": ("between_tokens", "Between two steps that brought a request tokens."),
    "request_time_per_output_token_seconds": ("each_token", "A request's mean time for a token behind its first."),
    "e2e_request_latency_seconds": ("whole", "From a request's submission to its end."),
    "request_queue_time_seconds": ("queue", "From a request's submission to its first step."),
    "request_prefill_time_seconds": ("prefill", "From a request's first step to its first token."),
    "request_decode_time_seconds": ("decode", "From a request's first token to its last."),
    "request_inference_time_seconds": ("inference", "From a request's first step to its last token."),
    "request_prompt_tokens": ("prompt", "Tokens of prompts."),
    "request_generation_tokens": ("generated", "Tokens of answers."),
    "request_prefill_kv_computed_tokens": ("computed_prompt", "Tokens of prompts that were not kept from before."),
    "request_params_max_tokens": ("max_tokens", "The most tokens that requests asked for."),
    "request_num_preemptions": ("preemptions", "Times that a request gave up its KV."),
    "request_params_n": ("choices", "Answers to a prompt."),
    "request_max_num_generation_tokens": ("longest", "Tokens of a prompt's longest answer."),
    "iteration_tokens_total": ("step_rows", "Rows of a step."),
}
_BOUNDS = {"first_token": FIRST_TOKEN, "between_tokens": BETWEEN_TOKENS}  # where more are counted by
_STAGE_COUNTERS = {
    "stage_busy_seconds": ("busy_seconds", "Seconds in which a stage computed."),
    "stage_steps": ("steps", "Steps of a stage."),
    "stage_copied_bytes": ("bytes_copied", "Bytes of kept KV that requests began with."),
    "stage_copy_seconds": ("copy_seconds", "Seconds in which these were copied."),
}
_STAGE_GAUGES = {
    "stage_weight_bytes": ("weight_bytes", "Bytes of a stage's weights."),
    "stage_free_bytes_when_loaded": ("free_bytes_when_loaded", "Bytes that were free once a stage was loaded."),
    "stage_kv_budget_bytes": ("kv_budget_bytes", "Bytes that a stage has for KV."),
    "stage_kv_bytes": ("kv_bytes", "Bytes of running requests' KV."),
    "stage_kv_kept_bytes": ("kv_bytes_stored", "Bytes of KV kept for later requests."),
}
_DRAFT_COUNTERS = {
    "drafts": ("drafted", "Drafts that were made."),
    "drafts_sent": ("sent", "Drafts in steps."),
    "drafts_accepted": ("accepted", "Drafts that were right."),
    "draft_blocks": ("blocks", "Blocks of drafts in steps."),
    "draft_blocks_void": ("void_blocks", "Blocks behind a wrong draft."),
    "draft_blocks_unsent": ("unsent_blocks", "Blocks that were void before they were sent."),
}
_VLLM_DRAFT_COUNTERS = {
    "spec_decode_num_drafts": ("blocks", "Blocks of drafts in steps."),
    "spec_decode_num_draft_tokens": ("sent", "Drafts in steps."),
    "spec_decode_num_accepted_tokens": ("accepted", "Drafts that were right."),
}

# -- families ----------------------------------------------------------------------------------------

Value = float | Mapping[Any, float]
"""One number, or one for each value of a label, or of several."""


@dataclass(frozen=True, slots=True)
class _Named:
    """Makes families whose names share a prefix, and their samples some labels. A counter's name is given without
    ``_total``, which its samples' names end in."""

    prefix: str
    shared: Mapping[str, str]

    def gauge(self, name: str, about: str, value: Value, *labels: str) -> Metric:
        return self._filled(GaugeMetricFamily, name, about, value, labels)

    def counter(self, name: str, about: str, value: Value, *labels: str) -> Metric:
        return self._filled(CounterMetricFamily, name, about, value, labels)

    def histogram(self, name: str, about: str, value: Histogram, bounds: Sequence[float]) -> Metric:
        family = HistogramMetricFamily(self.prefix + name, about, labels=[*self.shared])
        buckets = zip(map(floatToGoString, bounds), value.up_to(bounds), strict=True)
        family.add_metric([*self.shared.values()], [*buckets, ("+Inf", value.count)], value.total)
        return family

    def _filled(
        self,
        kind: Callable[..., GaugeMetricFamily] | Callable[..., CounterMetricFamily],
        name: str,
        about: str,
        value: Value,
        labels: Sequence[str],
    ) -> Metric:
        family = kind(self.prefix + name, about, labels=[*self.shared, *labels])
        for words, number in value.items() if isinstance(value, Mapping) else [((), value)]:
            own = (words,) if isinstance(words, str) else words
            family.add_metric([*self.shared.values(), *own], float(number))
        return family


def kv_usage(stats: Mapping[str, Any]) -> float:
    """The share of the memory for KV that running requests take, on the fullest stage; 0 without a bound."""
    stages = [stage for stage in stats["stages"] if stage.get("kv_budget_bytes")]
    return max((stage["kv_bytes"] / stage["kv_budget_bytes"] for stage in stages), default=0.0)


class PipelineCollector(Collector):
    """Everything in some readings."""

    def __init__(self, readings: Readings) -> None:
        self._readings, self._stats = readings, readings.stats
        self._vllm = _Named("vllm:", {"model_name": readings.model, "engine": "0"})
        self._own = _Named("splitinfer:", {"model_name": readings.model})

    def collect(self) -> Iterator[Metric]:
        yield from self._load()
        yield from self._requests()
        yield from self._pipeline()
        yield from self._stages()
        yield from self._links()
        if self._stats["speculation"] is not None:
            yield from self._drafts(self._stats["speculation"])
        yield from self._http()

    def _load(self) -> Iterator[Metric]:
        stats, vllm = self._stats, self._vllm
        yield vllm.gauge("num_requests_running", "Requests that the stages work on.", stats["running"])
        yield vllm.gauge("num_requests_waiting", "Requests in the queue.", stats["waiting"])
        yield vllm.gauge(
            "kv_cache_usage_perc",
            "The share of the memory for KV that running requests take on the fullest stage, from 0 to 1.",
            kv_usage(stats),
        )
        prompts, cached = stats["prompt_tokens"], stats["cached_tokens"]
        sources = {"local_compute": prompts - cached, "local_cache_hit": cached, "external_kv_transfer": 0}
        yield vllm.counter("prompt_tokens", "Tokens of prompts that were read, kept ones included.", prompts)
        yield vllm.counter("prompt_tokens_by_source", "The same, by where their KV came from.", sources, "source")
        yield vllm.counter("prompt_tokens_cached", "Those whose KV was kept from before.", cached)
        yield vllm.counter(
            "prefix_cache_queries", "Tokens of prompts that were looked for among what is kept.", prompts
        )
        yield vllm.counter("prefix_cache_hits", "Those that were found there.", cached)
        yield vllm.counter("generation_tokens", "Tokens of answers.", stats["generated_tokens"])

    def _requests(self) -> Iterator[Metric]:
        readings, stats, vllm = self._readings, self._stats, self._vllm
        ended = {str(reason): stats["finished"].get(reason, 0) for reason in (*FinishReason, "repetition")}
        yield vllm.counter("request_success", "Requests that have ended, by reason.", ended, "finished_reason")
        yield vllm.counter("num_preemptions", "Times that a running request gave up its KV.", stats["preemptions"])
        rejections = {"max_num_queued_reqs": readings.http.turned_away, "max_num_queued_tokens": 0}
        yield _Named("vllm:", {"model_name": readings.model}).counter(  # no engine had them yet
            "admission_rejections", "Requests for which there was no room.", rejections, "reason"
        )
        counted = {**readings.requests, "choices": readings.http.choices, "longest": readings.http.longest}
        for name, (key, about) in _HISTOGRAMS.items():
            bounds = _BOUNDS.get(key, counted[key].bounds)
            if bounds == TOKENS:
                bounds = tuple(bound for bound in bounds if bound <= readings.context)
            yield vllm.histogram(name, about, counted[key], bounds)

    def _pipeline(self) -> Iterator[Metric]:
        readings, stats, own = self._readings, self._stats, self._own
        about = {(readings.version, readings.layout): 1.0}
        yield own.gauge("info", "1; the version and the layout's name.", about, "version", "layout")
        yield own.gauge("context_tokens", "The most tokens of a prompt and its answer.", readings.context)
        yield own.gauge("max_running", "The most requests that share the stages.", stats["max_running"])
        yield own.counter("active_seconds", "Seconds with any request under way.", stats["active_seconds"])
        yield own.counter("computed_tokens", "Rows that went through the stages.", stats["computed_tokens"])
        yield own.counter("rejoins", "Times that all stages were back.", stats["rejoins"])
        yield own.gauge("kept_blocks", "Blocks of KV kept in memory for later requests.", stats["stored_blocks"])
        yield own.counter("kept_tokens_read", "Tokens whose KV was read from disk.", stats["fetched_tokens"])
        yield own.counter(
            "kept_tokens_swapped",
            "Tokens whose KV was written to disk for a request that gave it up.",
            stats["swapped_tokens"],
        )

    def _stages(self) -> Iterator[Metric]:
        stages, own, health = self._stats["stages"], self._own, self._readings.health.stages
        layers = {stage.name: stage.end - stage.start for stage in health}
        states = {stage.name: float(stage.state is StageState.READY) for stage in health}
        names = (*(stage["name"] for stage in stages), UNKNOWN_STAGE)
        losses = {name: self._stats["losses"].get(name, 0) for name in names}
        idle = {(stage["name"], cause): seconds for stage in stages for cause, seconds in stage["idle_seconds"].items()}
        yield own.gauge("stage_layers", "Layers of a stage.", layers, "stage")
        yield own.gauge("stage_up", "1 if a stage can compute; 0 while its worker is lost.", states, "stage")
        yield own.counter("stage_losses", "Times that a worker was lost, or a device failed.", losses, "stage")
        for name, (key, about) in _STAGE_GAUGES.items():
            if known := {stage["name"]: stage[key] for stage in stages if key in stage}:
                yield own.gauge(name, about, known, "stage")
        for name, (key, about) in _STAGE_COUNTERS.items():
            yield own.counter(name, about, {stage["name"]: stage[key] for stage in stages}, "stage")
        about = "Seconds in which a stage stood still with requests under way."
        yield own.counter("stage_idle_seconds", about, idle, "stage", "cause")

    def _links(self) -> Iterator[Metric]:
        links = {(here["name"], there["name"]): here for here, there in pairwise(self._stats["stages"])}
        if not links:
            return
        own, ends = self._own, ("stage", "next")
        sent = {names: here["bytes_sent"] for names, here in links.items()}
        unfit = {names: here["rows_unfit"] for names, here in links.items()}
        codecs = {(*names, str(here.get("codec", ""))): 1.0 for names, here in links.items()}
        yield own.counter("link_sent_bytes", "Bytes of hidden states sent to the next stage.", sent, *ends)
        yield own.counter("link_unfit_rows", "Rows that the codec could not represent.", unfit, *ends)
        yield own.gauge("link_info", "1; the codec of a link.", codecs, *ends, "codec")
        hop = self._stats["costs"]["hop"]
        yield own.gauge("link_hop_seconds", "What a step takes from one stage to the next.", hop)

    def _drafts(self, drafts: Mapping[str, Any]) -> Iterator[Metric]:
        for named, names in ((self._own, _DRAFT_COUNTERS), (self._vllm, _VLLM_DRAFT_COUNTERS)):
            for name, (key, about) in names.items():
                yield named.counter(name, about, drafts[key])
        tried = {str(place): count for place, count in enumerate(drafts["tried_at"])}
        right = {str(place): count for place, count in enumerate(drafts["accepted_at"][:MAX_ROWS])}
        yield self._own.counter(
            "drafts_tried", "Drafts that came to a verdict, by place in the block.", tried, "position"
        )
        yield self._vllm.counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafts that were right, by place in the block.",
            right,
            "position",
        )

    def _http(self) -> Iterator[Metric]:
        readings, own = self._readings, self._own
        responses = {(route, str(status)): count for (route, status), count in readings.http.responses.items()}
        yield own.counter(
            "http_responses", "Requests that are over; 499: the client has gone.", responses, "route", "status"
        )
        running = readings.running
        yield own.gauge("http_requests_running", "Requests for answers under way, waiting ones included.", running)
        yield own.gauge(
            "draining", "1 while no new request is taken, as the server was told to end.", readings.is_draining
        )
