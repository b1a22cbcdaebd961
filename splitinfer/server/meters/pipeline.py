"""The figures of a pipeline, for which vLLM has no names: stages, links, drafts, kept KV, lost workers, HTTP. Pure."""

from collections.abc import Iterator
from itertools import pairwise

from prometheus_client.metrics_core import Metric

from splitinfer.engine.coordinator.health import UNKNOWN_STAGE, StageState
from splitinfer.server.meters.families import Writer
from splitinfer.server.meters.readings import Readings

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
_STATES = {StageState.READY: 1.0, StageState.LOST: 0.0, StageState.STOPPED: 0.0}


def pipeline_families(readings: Readings) -> list[Metric]:
    write = Writer("splitinfer:", {"model_name": readings.model})
    parts = (_whole, _stages, _links, _losses, _kept, _drafts, _http)
    return [family for part in parts for family in part(readings, write)]


def _whole(readings: Readings, write: Writer) -> Iterator[Metric]:
    stats = readings.stats
    about = {"version": readings.version, "layout": readings.layout}
    yield write.gauges("info", "1; the version and the layout's name.", [(about, 1.0)])
    yield write.gauge("context_tokens", "The most tokens of a prompt and its answer.", readings.context)
    yield write.gauge("max_running", "The most requests that share the stages.", stats["max_running"])
    yield write.counter("active_seconds", "Seconds with any request under way.", stats["active_seconds"])
    yield write.counter("computed_tokens", "Rows that went through the stages.", stats["computed_tokens"])


def _stages(readings: Readings, write: Writer) -> Iterator[Metric]:
    stages = readings.stats["stages"]
    layers = {stage.name: stage.end - stage.start for stage in readings.health.stages}
    states = {stage.name: _STATES[stage.state] for stage in readings.health.stages}
    yield write.gauge("stage_layers", "Layers of a stage.", layers, "stage")
    yield write.gauge("stage_up", "1 if a stage can compute; 0 while its worker is lost.", states, "stage")
    for name, (key, about) in _STAGE_GAUGES.items():
        if known := {stage["name"]: stage[key] for stage in stages if key in stage}:
            yield write.gauge(name, about, known, "stage")
    for name, (key, about) in _STAGE_COUNTERS.items():
        yield write.counter(name, about, {stage["name"]: stage[key] for stage in stages}, "stage")
    idle = [
        ({"stage": stage["name"], "cause": cause}, seconds)
        for stage in stages
        for cause, seconds in stage.get("idle_seconds", {}).items()
    ]
    yield write.counters("stage_idle_seconds", "Seconds in which a stage stood still with requests under way.", idle)


def _links(readings: Readings, write: Writer) -> Iterator[Metric]:
    stages = readings.stats["stages"]
    links = [({"stage": here["name"], "next": there["name"]}, here) for here, there in pairwise(stages)]
    if not links:
        return
    sent = [(ends, here["bytes_sent"]) for ends, here in links]
    unfit = [(ends, here["rows_unfit"]) for ends, here in links]
    codecs = [({**ends, "codec": str(here.get("codec", ""))}, 1.0) for ends, here in links]
    yield write.counters("link_sent_bytes", "Bytes of hidden states sent to the next stage.", sent)
    yield write.counters("link_unfit_rows", "Rows that the codec could not represent.", unfit)
    yield write.gauges("link_info", "1; the codec of a link.", codecs)
    yield write.gauge(
        "link_hop_seconds", "What a step takes from one stage to the next.", readings.stats["costs"]["hop"]
    )


def _losses(readings: Readings, write: Writer) -> Iterator[Metric]:
    stats = readings.stats
    names = (*(stage["name"] for stage in stats["stages"]), UNKNOWN_STAGE)
    losses = {name: stats["losses"].get(name, 0) for name in names}
    yield write.counter("stage_losses", "Times that a worker was lost, or a device failed.", losses, "stage")
    yield write.counter("rejoins", "Times that all stages were back.", stats["rejoins"])


def _kept(readings: Readings, write: Writer) -> Iterator[Metric]:
    stats = readings.stats
    yield write.gauge("kept_blocks", "Blocks of KV kept in memory for later requests.", stats["stored_blocks"])
    yield write.counter("kept_tokens_read", "Tokens whose KV was read from disk.", stats["fetched_tokens"])
    yield write.counter(
        "kept_tokens_swapped",
        "Tokens whose KV was written to disk for a request that gave it up.",
        stats["swapped_tokens"],
    )


def _drafts(readings: Readings, write: Writer) -> Iterator[Metric]:
    drafts = readings.stats["speculation"]
    if drafts is None:
        return
    for name, (key, about) in _DRAFT_COUNTERS.items():
        yield write.counter(name, about, drafts[key])
    tried = {str(place): count for place, count in enumerate(drafts["tried_at"])}
    yield write.counter("drafts_tried", "Drafts that came to a verdict, by place in the block.", tried, "position")


def _http(readings: Readings, write: Writer) -> Iterator[Metric]:
    counted = readings.http.responses.items()
    responses = [({"route": route, "status": str(status)}, float(number)) for (route, status), number in counted]
    running, drains = readings.running, readings.is_draining
    yield write.counters("http_responses", "Requests that are over; 499: the client has gone.", responses)
    yield write.gauge("http_requests_running", "Requests for answers under way, waiting ones included.", running)
    yield write.gauge("draining", "1 while no new request is taken, as the server was told to end.", drains)
