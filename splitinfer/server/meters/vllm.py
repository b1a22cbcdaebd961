"""The figures that vLLM has too, under its names, with its labels and bounds: those of vLLM 0.33.0
(``vllm/v1/metrics/loggers.py``, ``vllm/v1/spec_decode/metrics.py``). Pure.

What the names mean here is in ``docs/last/meters.md``, with those that are left out.
"""

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from splitinfer.core.sequence import FinishReason
from splitinfer.core.speculation.flight import MAX_ROWS
from splitinfer.server.meters.families import Writer
from splitinfer.server.meters.readings import Readings

_REASONS = (*FinishReason, "repetition")
_PHASES = {
    "time_to_first_token_seconds": ("first_token", "From a request's submission to its first token."),
    "inter_token_latency_seconds": ("between_tokens", "Between two steps that brought a request tokens."),
    "request_time_per_output_token_seconds": ("each_token", "A request's mean time for a token behind its first."),
    "e2e_request_latency_seconds": ("whole", "From a request's submission to its end."),
    "request_queue_time_seconds": ("queue", "From a request's submission to its first step."),
    "request_prefill_time_seconds": ("prefill", "From a request's first step to its first token."),
    "request_decode_time_seconds": ("decode", "From a request's first token to its last."),
    "request_inference_time_seconds": ("inference", "From a request's first step to its last token."),
}
_SIZES = {
    "request_prompt_tokens": ("prompt", "Tokens of prompts."),
    "request_generation_tokens": ("generated", "Tokens of answers."),
    "request_prefill_kv_computed_tokens": ("computed_prompt", "Tokens of prompts that were not kept from before."),
    "request_params_max_tokens": ("max_tokens", "The most tokens that requests asked for."),
}
_COUNTS = {
    "request_num_preemptions": ("preemptions", "Times that a request gave up its KV."),
    "iteration_tokens_total": ("step_tokens", "Rows of a step."),
}


def vllm_families(readings: Readings) -> list[Metric]:
    write = Writer("vllm:", {"model_name": readings.model, "engine": "0"})
    return [
        *_now(readings, write),
        *_tokens(readings, write),
        *_requests(readings, write),
        *_drafts(readings, write),
    ]


def kv_usage(readings: Readings) -> float:
    """The share of the memory for KV that running requests take, on the fullest stage; 0 without a bound."""
    stages = [stage for stage in readings.stats["stages"] if stage.get("kv_budget_bytes")]
    return max((stage["kv_bytes"] / stage["kv_budget_bytes"] for stage in stages), default=0.0)


def _now(readings: Readings, write: Writer) -> Iterator[Metric]:
    stats = readings.stats
    yield write.gauge("num_requests_running", "Requests that the stages work on.", stats["running"])
    yield write.gauge("num_requests_waiting", "Requests in the queue.", stats["waiting"])
    yield write.gauge(
        "kv_cache_usage_perc",
        "The share of the memory for KV that running requests take on the fullest stage, from 0 to 1.",
        kv_usage(readings),
    )


def _tokens(readings: Readings, write: Writer) -> Iterator[Metric]:
    prompts, cached = readings.requests.prompt_tokens, readings.requests.cached_tokens
    sources = {"local_compute": prompts - cached, "local_cache_hit": cached, "external_kv_transfer": 0}
    yield write.counter("prompt_tokens", "Tokens of prompts that were read, kept ones included.", prompts)
    yield write.counter("prompt_tokens_by_source", "The same, by where their KV came from.", sources, "source")
    yield write.counter("prompt_tokens_cached", "Those whose KV was kept from before.", cached)
    yield write.counter("prefix_cache_queries", "Tokens of prompts that were looked for among what is kept.", prompts)
    yield write.counter("prefix_cache_hits", "Those that were found there.", cached)
    yield write.counter("generation_tokens", "Tokens of answers.", readings.stats["generated_tokens"])


def _requests(readings: Readings, write: Writer) -> Iterator[Metric]:
    stats, histograms = readings.stats, readings.requests.histograms
    ended = {str(reason): stats["finished"].get(reason, 0) for reason in _REASONS}
    yield write.counter("request_success", "Requests that have ended, by reason.", ended, "finished_reason")
    yield write.counter("num_preemptions", "Times that a running request gave up its KV.", stats["preemptions"])
    rejections = {"max_num_queued_reqs": readings.http.turned_away, "max_num_queued_tokens": 0}
    alone = Writer(write.prefix, {"model_name": readings.model})  # no engine had them yet
    yield alone.counter("admission_rejections", "Requests for which there was no room.", rejections, "reason")
    for name, (key, about) in (_PHASES | _COUNTS).items():
        yield write.histogram(name, about, histograms[key])
    for name, (key, about) in _SIZES.items():
        yield write.histogram(name, about, histograms[key].up_to(readings.context))
    longest = readings.http.longest.read().up_to(readings.context)
    yield write.histogram("request_max_num_generation_tokens", "Tokens of a prompt's longest answer.", longest)
    yield write.histogram("request_params_n", "Answers to a prompt.", readings.http.choices.read())


def _drafts(readings: Readings, write: Writer) -> Iterator[Metric]:
    drafts = readings.stats["speculation"]
    if drafts is None:
        return
    places = {str(place): count for place, count in enumerate(drafts["accepted_at"][:MAX_ROWS])}
    yield write.counter("spec_decode_num_drafts", "Blocks of drafts in steps.", drafts["blocks"])
    yield write.counter("spec_decode_num_draft_tokens", "Drafts in steps.", drafts["sent"])
    yield write.counter("spec_decode_num_accepted_tokens", "Drafts that were right.", drafts["accepted"])
    yield write.counter(
        "spec_decode_num_accepted_tokens_per_pos", "Drafts that were right, by place in the block.", places, "position"
    )
