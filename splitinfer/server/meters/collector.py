"""All metric families as Prometheus reads them. The only module that needs prometheus-client.

Names, labels and bounds with ``vllm:`` follow vLLM 0.33.0 (``vllm/v1/metrics/loggers.py``,
``vllm/v1/spec_decode/metrics.py``). ``docs/operate/meters.md`` explains them for this server and lists the missing
ones.

The text is in version 0.0.4, which every Prometheus accepts, whichever version it asks for: in OpenMetrics,
prometheus-client 0.26.0 writes ``vllm_x`` for a sample ``vllm:x``, and no dashboard finds that.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from splitinfer.core.metrics.histogram import BETWEEN_TOKENS, FIRST_TOKEN, TOKENS, Histogram
from splitinfer.core.sequence import FinishReason
from splitinfer.engine.figures.health import UNKNOWN_STAGE, PipelineHealth, StageState
from splitinfer.server.meters.http import HttpMeters

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


# -- names, and what each says: where it is in ``LLM.stats``, and in words -----------------------------

_GAUGES = {
    "vllm:num_requests_running": ("running", "Requests that the stages work on."),
    "vllm:num_requests_waiting": ("waiting", "Requests in the queue."),
    "splitinfer:max_running": ("max_running", "The most requests that share the stages."),
    "splitinfer:kept_blocks": ("stored_blocks", "Blocks of KV kept in memory for later requests."),
}
_COUNTERS = {  # without the ``_total`` at the end of their samples' names
    "vllm:prompt_tokens": ("prompt_tokens", "Tokens of prompts that were read, kept ones included."),
    "vllm:prompt_tokens_cached": ("cached_tokens", "Prompt tokens whose KV was kept from before."),
    "vllm:prefix_cache_queries": ("prompt_tokens", "Prompt tokens that were looked up among the kept ones."),
    "vllm:prefix_cache_hits": ("cached_tokens", "Prompt tokens that were found there."),
    "vllm:generation_tokens": ("generated_tokens", "Tokens of answers."),
    "vllm:num_preemptions": ("preemptions", "Times that a running request gave up its KV."),
    "splitinfer:active_seconds": ("active_seconds", "Seconds with any request under way."),
    "splitinfer:computed_tokens": ("computed_tokens", "Rows that went through the stages."),
    "splitinfer:rejoins": ("rejoins", "Times that all stages were back."),
    "splitinfer:kept_tokens_read": ("fetched_tokens", "Tokens whose KV was read from disk."),
    "splitinfer:kept_tokens_swapped": (
        "swapped_tokens",
        "Tokens whose KV requests that gave it up wrote to disk.",
    ),
}
_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": ("first_token", "From a request's submission to its first token."),
    "vllm:inter_token_latency_seconds": ("between_tokens", "Between two steps that brought a request tokens."),
    "vllm:request_time_per_output_token_seconds": ("each_token", "A request's mean time for a token behind its first."),
    "vllm:e2e_request_latency_seconds": ("whole", "From a request's submission to its end."),
    "vllm:request_queue_time_seconds": ("queue", "From a request's submission to its first step."),
    "vllm:request_prefill_time_seconds": ("prefill", "From a request's first step to its first token."),
    "vllm:request_decode_time_seconds": ("decode", "From a request's first token to its last."),
    "vllm:request_inference_time_seconds": ("inference", "From a request's first step to its last token."),
    "vllm:request_prompt_tokens": ("prompt", "Tokens of prompts."),
    "vllm:request_generation_tokens": ("generated", "Tokens of answers."),
    "vllm:request_prefill_kv_computed_tokens": ("computed_prompt", "Tokens of prompts that were not kept from before."),
    "vllm:request_params_max_tokens": ("max_tokens", "The most tokens that requests asked for."),
    "vllm:request_num_preemptions": ("preemptions", "Times that a request gave up its KV."),
    "vllm:request_params_n": ("choices", "Answers to a prompt."),
    "vllm:request_max_num_generation_tokens": ("longest", "Tokens of a prompt's longest answer."),
    "vllm:iteration_tokens_total": ("step_rows", "Rows of a step."),
}
_REJECTIONS = "vllm:admission_rejections"  # of no engine: none had them yet
_BOUNDS = {"first_token": FIRST_TOKEN, "between_tokens": BETWEEN_TOKENS}  # where more are counted by
_STAGE_COUNTERS = {
    "splitinfer:stage_busy_seconds": ("busy_seconds", "Seconds in which a stage computed."),
    "splitinfer:stage_steps": ("steps", "Steps of a stage."),
    "splitinfer:stage_copied_bytes": ("bytes_copied", "Bytes of kept KV that requests began with."),
    "splitinfer:stage_copy_seconds": ("copy_seconds", "Seconds in which these were copied."),
    "splitinfer:stage_experts_wanted": ("experts_wanted", "Experts that layers needed, if some are on disk."),
    "splitinfer:stage_experts_found": ("experts_found", "Those that were in memory."),
    "splitinfer:stage_experts_read_bytes": ("experts_read", "Bytes of the others, read from disk."),
    "splitinfer:stage_experts_wait_seconds": ("experts_waiting", "Seconds of waiting for these."),
}
_STAGE_GAUGES = {
    "splitinfer:stage_weight_bytes": ("weight_bytes", "Bytes of a stage's weights."),
    "splitinfer:stage_free_bytes_when_loaded": ("free_bytes_when_loaded", "Bytes free once a stage was loaded."),
    "splitinfer:stage_kv_budget_bytes": ("kv_budget_bytes", "Bytes that a stage has for KV."),
    "splitinfer:stage_kv_bytes": ("kv_bytes", "Bytes of running requests' KV."),
    "splitinfer:stage_kv_kept_bytes": ("kv_bytes_stored", "Bytes of KV kept for later requests."),
    "splitinfer:stage_sum_seconds": ("sum_seconds", "Seconds of a sum of two ranks, when they were loaded."),
}
_LINK_COUNTERS = {
    "splitinfer:link_sent_bytes": ("bytes_sent", "Bytes of hidden states sent to the next stage."),
    "splitinfer:link_unfit_rows": ("rows_unfit", "Rows that the codec could not represent."),
}
_DRAFT_COUNTERS = {
    "splitinfer:drafts": ("drafted", "Drafts that were made."),
    "splitinfer:drafts_sent": ("sent", "Drafts in steps."),
    "splitinfer:drafts_accepted": ("accepted", "Drafts that were right."),
    "splitinfer:draft_blocks": ("blocks", "Blocks of drafts in steps."),
    "splitinfer:draft_blocks_void": ("void_blocks", "Blocks behind a wrong draft."),
    "vllm:spec_decode_num_drafts": ("blocks", "Blocks of drafts in steps."),
    "vllm:spec_decode_num_draft_tokens": ("sent", "Drafts in steps."),
    "vllm:spec_decode_num_accepted_tokens": ("accepted", "Drafts that were right."),
}

_DRAFTS_BY_PLACE = {
    "splitinfer:drafts_tried": ("tried_at", "Drafts that came to a verdict, by place in the block."),
    "vllm:spec_decode_num_accepted_tokens_per_pos": ("accepted_at", "Drafts that were right, by place in the block."),
}

# -- families ----------------------------------------------------------------------------------------

Value = float | Mapping[Any, float]
"""One number, or one for each value of a label, or of several."""


def kv_usage(stats: Mapping[str, Any]) -> float:
    """Return the share of the memory for KV that running requests take, on the fullest stage; 0 without a bound."""
    stages = [stage for stage in stats["stages"] if stage.get("kv_budget_bytes")]
    return max((stage["kv_bytes"] / stage["kv_budget_bytes"] for stage in stages), default=0.0)


@dataclass(frozen=True)
class Readings(Collector):
    """All that is told of a model, read at one moment; as families, whose samples all have the label ``model_name``,
    and vLLM's an ``engine``. ``model``: its name for clients; ``context``: tokens; ``version``: ours; ``layout``: its
    name; ``stats``, ``requests``: as ``LLM.stats`` and ``LLM.request_figures`` return them; ``running``: requests that
    ask for an answer, now."""

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

    def collect(self) -> Iterator[Metric]:
        for name, (key, about) in _GAUGES.items():
            yield self._gauge(name, about, self.stats[key])
        for name, (key, about) in _COUNTERS.items():
            yield self._counter(name, about, self.stats[key])
        yield from self._requests()
        yield from self._pipeline()
        yield from self._stages()
        yield from self._links()
        yield from self._drafts()

    def _gauge(self, name: str, about: str, value: Value, *labels: str) -> Metric:
        return self._filled(GaugeMetricFamily, name, about, value, labels)

    def _counter(self, name: str, about: str, value: Value, *labels: str) -> Metric:
        return self._filled(CounterMetricFamily, name, about, value, labels)

    def _filled(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        about: str,
        value: Value,
        labels: Sequence[str],
    ) -> Metric:
        shared = self._shared(name)
        family = kind(name, about, labels=[*shared, *labels])
        for words, number in value.items() if isinstance(value, Mapping) else [((), value)]:
            own = (words,) if isinstance(words, str) else words
            family.add_metric([*shared.values(), *own], float(number))
        return family

    def _histogram(self, name: str, about: str, value: Histogram, bounds: Sequence[float]) -> Metric:
        shared = self._shared(name)
        family = HistogramMetricFamily(name, about, labels=[*shared])
        buckets = zip(map(floatToGoString, bounds), value.up_to(bounds), strict=True)
        family.add_metric([*shared.values()], [*buckets, ("+Inf", value.count)], value.total)
        return family

    def _shared(self, name: str) -> dict[str, str]:
        of_engine = name.startswith("vllm:") and name != _REJECTIONS
        return {"model_name": self.model} | ({"engine": "0"} if of_engine else {})

    def _requests(self) -> Iterator[Metric]:
        stats, http = self.stats, self.http
        prompts, cached = stats["prompt_tokens"], stats["cached_tokens"]
        sources = {"local_compute": prompts - cached, "local_cache_hit": cached, "external_kv_transfer": 0}
        ended = {str(reason): stats["finished"].get(reason, 0) for reason in (*FinishReason, "repetition")}
        rejections = {"max_num_queued_reqs": http.turned_away, "max_num_queued_tokens": 0}
        yield self._counter("vllm:prompt_tokens_by_source", "The same, by where their KV came from.", sources, "source")
        yield self._counter("vllm:request_success", "Requests that have ended, by reason.", ended, "finished_reason")
        yield self._counter(_REJECTIONS, "Requests for which there was no room.", rejections, "reason")
        about = "Requests for answers under way, waiting ones included."
        yield self._gauge("splitinfer:http_requests_running", about, self.running)
        counted = {**self.requests, "choices": http.choices, "longest": http.longest}
        for name, (key, about) in _HISTOGRAMS.items():
            bounds = _BOUNDS.get(key, counted[key].bounds)
            if bounds == TOKENS:
                bounds = tuple(bound for bound in bounds if bound <= self.context)
            yield self._histogram(name, about, counted[key], bounds)

    def _pipeline(self) -> Iterator[Metric]:
        version = {(self.version, self.layout): 1.0}
        about = "The share of the memory for KV that running requests take on the fullest stage, from 0 to 1."
        yield self._gauge("vllm:kv_cache_usage_perc", about, kv_usage(self.stats))
        about = "1; the version and the layout's name."
        yield self._gauge("splitinfer:info", about, version, "version", "layout")
        about = "The most tokens of a prompt and its answer."
        yield self._gauge("splitinfer:context_tokens", about, self.context)
        about = "1 while no new request is taken, as the server was told to end."
        yield self._gauge("splitinfer:draining", about, self.is_draining)
        about = "1 while other machines hold the layers of a worker that is away."
        yield self._gauge("splitinfer:without_worker", about, self.health.absent is not None)

    def _stages(self) -> Iterator[Metric]:
        stages, health = self.stats["stages"], self.health.stages
        layers = {stage.name: stage.end - stage.start for stage in health}
        states = {stage.name: float(stage.state is StageState.READY) for stage in health}
        names = (*(stage["name"] for stage in stages), UNKNOWN_STAGE)
        losses = {name: self.stats["losses"].get(name, 0) for name in names}
        idle = {(stage["name"], cause): each for stage in stages for cause, each in stage["idle_seconds"].items()}
        yield self._gauge("splitinfer:stage_layers", "Layers of a stage.", layers, "stage")
        about = "1 if a stage can compute; 0 while its worker is lost."
        yield self._gauge("splitinfer:stage_up", about, states, "stage")
        about = "Times that a worker was lost, or a device failed."
        yield self._counter("splitinfer:stage_losses", about, losses, "stage")
        for name, (key, about) in _STAGE_GAUGES.items():
            if known := {stage["name"]: stage[key] for stage in stages if key in stage}:
                yield self._gauge(name, about, known, "stage")
        for name, (key, about) in _STAGE_COUNTERS.items():
            yield self._counter(name, about, {stage["name"]: stage[key] for stage in stages}, "stage")
        about = "Seconds in which a stage stood still with requests under way."
        yield self._counter("splitinfer:stage_idle_seconds", about, idle, "stage", "cause")
        ranks = [(stage["name"], rank) for stage in stages for rank in stage.get("ranks", ())]
        if busy := {(name, rank["name"]): rank["busy_seconds"] for name, rank in ranks}:
            about = "Seconds in which a rank computed or waited in sums, since it was loaded."
            yield self._counter("splitinfer:rank_busy_seconds", about, busy, "stage", "rank")

    def _links(self) -> Iterator[Metric]:
        links = {(here["name"], there["name"]): here for here, there in pairwise(self.stats["stages"])}
        if not links:
            return
        for name, (key, about) in _LINK_COUNTERS.items():
            yield self._counter(name, about, {ends: here[key] for ends, here in links.items()}, "stage", "next")
        codecs = {(*ends, str(here.get("codec", ""))): 1.0 for ends, here in links.items()}
        yield self._gauge("splitinfer:link_info", "1; the codec of a link.", codecs, "stage", "next", "codec")
        about = "What a step takes from one stage to the next."
        yield self._gauge("splitinfer:link_hop_seconds", about, self.stats["costs"]["hop"])

    def _drafts(self) -> Iterator[Metric]:
        drafts = self.stats["speculation"]
        if drafts is None:
            return
        for name, (key, about) in _DRAFT_COUNTERS.items():
            yield self._counter(name, about, drafts[key])
        for name, (key, about) in _DRAFTS_BY_PLACE.items():
            yield self._counter(name, about, {str(at): count for at, count in enumerate(drafts[key])}, "position")


@dataclass(frozen=True)
class ServerReadings(Collector):
    """The figures of all models in memory, each family once, and the ``responses`` by route and status. ``model``: the
    label of these; empty where requests choose among models."""

    model: str
    responses: Mapping[tuple[str, int], int]
    models: Sequence[Readings]

    def collect(self) -> Iterator[Metric]:
        about = "Requests that are over; 499: the client has gone."
        labels = ("model_name", "route", "status")
        responses = CounterMetricFamily("splitinfer:http_responses", about, labels=labels)
        for (route, status), count in self.responses.items():
            responses.add_metric([self.model, route, str(status)], float(count))
        families: dict[str, Metric] = {responses.name: responses}
        for family in chain.from_iterable(readings.collect() for readings in self.models):
            if family.name in families:
                families[family.name].samples += family.samples
            else:
                families[family.name] = family
        yield from families.values()
