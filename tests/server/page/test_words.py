"""What is said of situations that cannot be staged, and in which words (``test_staged`` has the others)."""

from typing import Any

import pytest

from splitinfer.core.metrics.gaps import Cause
from splitinfer.core.metrics.recent import Rows
from splitinfer.server.page.figures import LinkSeen, Seen, StageSeen
from splitinfer.server.page.words import remarks

DECODE, PROMPT, DRAFTS = Rows(decode=50), Rows(prefill=900, decode=100), Rows(decode=10, draft=40)


def stage(name: str, duty: float, **gaps: float) -> StageSeen:
    return StageSeen(name, duty, {Cause(cause): share for cause, share in gaps.items()})


def seen(*stages: StageSeen, running: int = 1, rows: Rows = DECODE, **more: Any) -> Seen:
    links = [LinkSeen(1.5, 1e5) for _ in stages[1:]]
    return Seen(10.0, stages, links, under_way=1.0, running=running, rows=rows, max_running=4, **more)


ALTERNATING = (stage("studio", 0.5, downstream=0.5), stage("mini", 0.5, upstream=0.5))
BUSY = (stage("studio", 0.95, host=0.05), stage("mini", 0.9, upstream=0.1))
UNEVEN = (stage("studio", 0.95, host=0.05), stage("mini", 0.4, upstream=0.6))
SLOW_LINK = (stage("studio", 0.4, downstream=0.35, link=0.25), stage("mini", 0.4, upstream=0.35, link=0.25))
DRAFTED = {"drafter": "ngram", "rows": DRAFTS}

SITUATIONS = {
    "it has just begun": (seen(StageSeen("studio"), StageSeen("mini")), ["begins"]),
    "a worker is lost": (seen(*ALTERNATING, waits_for="stage mini, for up to 60 s"), ["lost"]),
    "other layers are loaded": (
        seen(*ALTERNATING, waits_for="another cut of the layers", is_changing=True), ["recut"]
    ),
    "it has failed": (seen(*ALTERNATING, failure="stage mini did not come back"), ["failed"]),
    "it drains": (seen(*ALTERNATING, is_draining=True), ["draining"]),
    "one stage": (seen(stage("studio", 0.95, host=0.05)), ["one_stage"]),
    "one answer": (seen(*ALTERNATING), ["one_stream"]),
    "one answer, bad drafts": (
        seen(*ALTERNATING, acceptance=0.3, void=0.6, **DRAFTED), ["one_stream_drafts", "void_drafts"]
    ),
    "one answer, middling drafts": (
        seen(*ALTERNATING, acceptance=0.6, void=0.3, **DRAFTED), ["one_stream_drafts", "some_void"]
    ),
    "one stage is slow": (seen(*UNEVEN, running=4), ["uneven"]),
    "a prompt": (seen(*UNEVEN[:1], stage("mini", 0.8, upstream=0.2), rows=PROMPT), ["prompt"]),
    "one answer over Wi-Fi": (seen(*SLOW_LINK), ["one_stream", "link_back", "link_latency"]),
    "more are asked than answered": (seen(*BUSY, running=4, waiting=3), ["full", "queue_full"]),
    "the tail of the answers": (
        seen(stage("studio", 0.3, nothing_to_do=0.7), stage("mini", 0.6, upstream=0.1), running=3), ["nothing"]
    ),
    "nothing limits it": (seen(stage("studio", 0.8, host=0.1), stage("mini", 0.8, link=0.1), running=4), ["fine"]),
}  # fmt: skip


@pytest.mark.parametrize("name", SITUATIONS)
def test_what_is_said_of(name: str):
    situation, codes = SITUATIONS[name]
    found = remarks(situation)
    assert [each.code for each in found] == codes
    for each in found:
        assert not each.text[0].islower()
        assert each.text.endswith(".")
        assert not each.help or each.help.endswith(".")


def said(name: str) -> str:
    return " ".join(f"{each.text} {each.help}".strip() for each in remarks(SITUATIONS[name][0]))


def test_the_words_have_the_names_and_numbers():
    assert "waits 50 % of the time for the others" in said("one answer")
    assert "draft:" in said("one answer")
    assert "Stage studio computes 95 % of the time, Stage mini 40 %" in said("one stage is slow")
    assert "Move layers from Stage studio to Stage mini" in said("one stage is slow")
    assert "Stage mini waits 25 % of the time" in said("one answer over Wi-Fi")
    assert "1.5 ms for each step" in said("one answer over Wi-Fi")
    assert "Only 30 % of the drafts are right: 60 %" in said("one answer, bad drafts")
    assert "3 requests wait: 4 are running, which is the maximum" in said("more are asked than answered")
    assert "stage mini, for up to 60 s" in said("a worker is lost")
    assert "prompts are 90 % of what the stages compute" in said("a prompt")


def test_each_saying_is_about_the_stage_it_names():
    for situation, _ in SITUATIONS.values():
        for each in remarks(situation):
            if each.stage is not None:
                assert situation.stages[each.stage].name in each.text


@pytest.mark.parametrize("cause", list(Cause))
@pytest.mark.parametrize("share", [0.0, 0.1, 0.2, 0.6, 1.0])
def test_there_is_always_something_to_say(cause: Cause, share: float):
    stages = [StageSeen(name, 1 - share, {cause: share}) for name in ("studio", "mini")]
    assert remarks(seen(*stages))
