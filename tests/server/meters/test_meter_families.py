"""Figures as families: what each name says, and that requests cannot make new series."""

from dataclasses import replace

import pytest
from asgi import told as told_of
from figures import DRAFTS, HEALTH, STATS, Model

from splitinfer.errors import QueueFull
from splitinfer.server.keys import NOBODY
from splitinfer.server.meters.collector import Readings, ServerReadings, kv_usage
from splitinfer.server.meters.http import OTHER, HttpMeters
from splitinfer.server.problem import Problem
from splitinfer.server.running import make_app
from splitinfer.server.service import Service

READINGS = Readings("demo", 300, "0.1.0", "two", STATS, Model().request_figures(), HttpMeters(), HEALTH)
WITH_DRAFTS = replace(READINGS, stats=STATS | {"speculation": DRAFTS})


def told(readings: Readings, name: str, **labels: str) -> float:
    (family,) = [family for family in readings.collect() if family.name == name]
    (value,) = [sample.value for sample in family.samples if labels.items() <= sample.labels.items()]
    return value


def test_the_fullest_stage_decides_how_full_memory_is():
    assert kv_usage(STATS) == 0.5
    unbounded = [{name: value for name, value in stage.items() if "kv" not in name} for stage in STATS["stages"]]
    assert kv_usage({"stages": unbounded}) == 0.0
    assert [*replace(READINGS, stats=STATS | {"stages": unbounded}).collect()]


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("splitinfer:stage_losses", {"stage": "back"}, 2),
        ("splitinfer:stage_losses", {"stage": "front"}, 0),  # there before the first, so that it is seen
        ("splitinfer:stage_losses", {"stage": "unknown"}, 0),
        ("splitinfer:stage_up", {"stage": "front"}, 1),
        ("splitinfer:stage_up", {"stage": "back"}, 0),
        ("splitinfer:stage_idle_seconds", {"stage": "front", "cause": "link"}, 0.25),
        *(("vllm:request_success", {"finished_reason": reason}, number) for reason, number in (
            ("stop", 1), ("length", 0), ("abort", 2), ("error", 0), ("repetition", 0))),
        ("vllm:spec_decode_num_drafts", {}, 7),
        ("vllm:spec_decode_num_draft_tokens", {}, 20),
        ("vllm:spec_decode_num_accepted_tokens", {}, 8),
        ("vllm:spec_decode_num_accepted_tokens_per_pos", {"position": "1"}, 3),
        ("vllm:spec_decode_num_accepted_tokens_per_pos", {"position": "15"}, 0),
        ("splitinfer:draft_blocks_void", {}, 2),
        ("splitinfer:stage_sum_seconds", {"stage": "back"}, 2e-5),
        ("splitinfer:rank_busy_seconds", {"stage": "back", "rank": "back/1"}, 3.0),
        ("splitinfer:link_sent_bytes", {"stage": "front", "next": "back"}, 640),
        ("splitinfer:link_info", {"codec": "bf16"}, 1),
    ],
)  # fmt: skip
def test_what_each_name_says(name: str, labels: dict[str, str], value: float):
    assert told(WITH_DRAFTS, name, **labels) == value


def test_what_there_is_not_is_not_told():
    assert not [family for family in READINGS.collect() if "draft" in family.name]
    alone = replace(READINGS, stats=STATS | {"stages": STATS["stages"][:1]})
    assert not [family for family in alone.collect() if "link" in family.name or "rank" in family.name]
    assert "10.0.0.7" not in str([*READINGS.collect()])


def test_who_is_turned_away_is_counted():
    model = Model()
    model.max_running, model.seconds_until_room = 4, lambda _nth: 1.0  # type: ignore[attr-defined]
    service = Service(model, "demo", max_running=1)
    with pytest.raises(Problem), service.admitted(NOBODY):
        raise QueueFull("no room")
    assert told(replace(READINGS, http=service.meters), "vllm:admission_rejections", reason="max_num_queued_reqs") == 1


@pytest.mark.parametrize("method", ["POST", "BREW", "ABC"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/requests/a/b", "/v1/models/%ff", "/nothing", "/"])
def test_series_stay_bounded_whatever_clients_send(method: str, path: str):
    service = Service(Model(), "demo")
    application = make_app(service)
    told_of(application, path, {"model": "other"}, ("User-Agent", path), method=method)
    ((route, status),) = service.meters.responses
    assert route in {each.path for each in application._app.routes} | {OTHER}
    assert status < 500
    readings = ServerReadings("demo", service.meters.responses, [READINGS])
    known = sum(len(family.samples) for family in READINGS.collect())
    assert sum(len(family.samples) for family in readings.collect()) == known + 1
