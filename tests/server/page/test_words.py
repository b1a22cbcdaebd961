"""What the page says of a pipeline, and with which names and numbers."""

from dataclasses import replace
from typing import Any

import pytest

from splitinfer.core.metrics.gaps import Cause
from splitinfer.core.metrics.records import Rows
from splitinfer.engine.figures.health import PipelineHealth
from splitinfer.server.page.figures import PageLink, PipelineSeen, StageSeen
from splitinfer.server.page.words import remarks

DECODE, PROMPT, DRAFTS = Rows(decode=50), Rows(prefill=900, decode=100), Rows(decode=10, draft=40)


def stage(name: str, duty: float, **gaps: float) -> StageSeen:
    return StageSeen(name, duty, {Cause(cause): share for cause, share in gaps.items()})


def seen(*stages: StageSeen, running: int = 1, rows: Rows = DECODE, **more: Any) -> PipelineSeen:
    links = [PageLink(1.5, 1e5) for _ in stages[1:]]
    return PipelineSeen(10.0, stages, links, under_way=1.0, running=running, rows=rows, max_running=4, **more)


ALTERNATING = (stage("studio", 0.5, downstream=0.5), stage("mini", 0.5, upstream=0.5))
THREE = (*ALTERNATING, stage("air", 0.5, upstream=0.5))
BUSY = (stage("studio", 0.95, host=0.05), stage("mini", 0.9, upstream=0.1))
UNEVEN = (stage("studio", 0.95, host=0.05), stage("mini", 0.4, upstream=0.6))
SLOW_LINK = (stage("studio", 0.4, downstream=0.35, link=0.25), stage("mini", 0.4, upstream=0.35, link=0.25))
HELD_UP = (stage("studio", 0.5, downstream=0.3, host=0.2), stage("mini", 0.4, upstream=0.3, host=0.3))
NO_ROOM = (BUSY[0], replace(BUSY[1], kv=95, kv_budget=100))
DRAFTED = {"drafter": "ngram", "rows": DRAFTS}
LOST = PipelineHealth((), "stage mini, for up to 60 s")
CHANGING = PipelineHealth((), "another cut of the layers", is_changing=True)
AWAY = PipelineHealth((), absent="mini is gone. studio goes on alone")
FAILED = PipelineHealth((), failure="stage mini did not come back")

SITUATIONS: dict[str, tuple[PipelineSeen, list[str], str]] = {
    "it rests": (replace(seen(*ALTERNATING, running=0), under_way=0.0), ["rests"], "all stages are idle"),
    "it has just begun": (seen(StageSeen("studio"), StageSeen("mini")), ["begins"], "just begun"),
    "a worker is lost": (seen(*ALTERNATING, health=LOST), ["lost"],
                         "wait for stage mini, for up to 60 s. Their KV is recomputed, and no token is lost"),
    "other layers are loaded": (seen(*ALTERNATING, health=CHANGING), ["recut"], "another cut"),
    "a worker is left out": (seen(*ALTERNATING, health=AWAY), ["absent", "few_streams"], "mini is gone."),
    "it has failed": (seen(*ALTERNATING, health=FAILED), ["failed"], "mini did not come back"),
    "it drains": (seen(*ALTERNATING, is_draining=True), ["draining"], "new ones are refused"),
    "one stage": (seen(stage("studio", 0.95, host=0.05)), ["one_stage"], "Stage studio holds all layers"),
    "one answer": (seen(*ALTERNATING), ["few_streams"], "waits 50 % of the time for others."),
    "two answers, three stages": (seen(*THREE, running=2), ["few_streams"], "There are 2 answers for 3 stages"),
    "one answer, no drafts": (seen(*ALTERNATING, drafter="ngram"), ["few_streams"], "Drafts are off"),
    "one answer, bad drafts": (
        seen(*ALTERNATING, acceptance=0.3, void=0.6, **DRAFTED), ["few_streams", "drafts"],
        "30 % of the drafts are right; 60 % of what the stages compute is discarded. Try another"),
    "one answer, middling drafts": (
        seen(*ALTERNATING, acceptance=0.6, void=0.3, **DRAFTED), ["few_streams", "drafts"], "60 % of the"),
    "one answer, good drafts": (
        seen(*ALTERNATING, acceptance=0.9, void=0.1, **DRAFTED), ["few_streams", "drafts"], "90 % of the"),
    "one stage is slow": (
        seen(*UNEVEN, running=4), ["uneven"],
        "Stage studio computes 95 % of the time, stage mini 40 %: the others wait for stage studio. Move layers from "
        "stage studio to stage mini"),
    "a prompt": (seen(UNEVEN[0], stage("mini", 0.8, upstream=0.2), rows=PROMPT), ["prompt"],
                 "prompts are 90 % of what the stages compute"),
    "a prompt over a thin cable": (seen(*SLOW_LINK, rows=PROMPT), ["prompt", "link", "link"],
                                   "codec: int8 in the layout halves"),
    "one answer over Wi-Fi": (seen(*SLOW_LINK), ["few_streams", "link", "link"],
                              "Stage mini waits 25 % of the time for what is on its way to it, 1.5 ms for "),
    "busy processors": (seen(*HELD_UP, running=3), ["host", "host"],
                        "Stage mini is held up 30 % of the time by its own processor"),
    "many answers": (seen(*BUSY, running=4), ["full"], "the pipeline is full"),
    "more are asked than answered": (seen(*BUSY, running=4, waiting=3), ["full", "queue_full"],
                                     "3 requests wait: 4 are running, which is the maximum"),
    "little memory for KV": (
        seen(*NO_ROOM, running=3, waiting=1, preemptions=2), ["full", "kv_full", "preempted", "queue"],
        "Stage mini uses 95 % of its KV memory"),
    "nothing limits it": (seen(stage("studio", 0.8, host=0.1), stage("mini", 0.8, link=0.1), running=4), ["fine"],
                          "4 answers are running, and the stages compute 80 % of the time"),
}  # fmt: skip


@pytest.mark.parametrize("name", SITUATIONS)
def test_what_is_said_of(name: str):
    situation, codes, words = SITUATIONS[name]
    found = remarks(situation)
    assert [each.code for each in found] == codes
    assert words in " ".join(f"{each.text} {each.help}".strip() for each in found)
    for each in found:
        assert each.stage is None or situation.stages[each.stage].name in each.text


@pytest.mark.parametrize("cause", list(Cause))
@pytest.mark.parametrize("share", [0.0, 0.2, 0.6, 1.0])
def test_there_is_always_something_to_say(cause: Cause, share: float):
    assert remarks(seen(*(StageSeen(name, 1 - share, {cause: share}) for name in ("studio", "mini"))))
