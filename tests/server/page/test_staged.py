"""Situations that are staged in virtual time: the page says what was staged, and its numbers are those of the trace."""

from pathlib import Path
from typing import Any

import pytest
import trace_causes
from staged import Asked, Situation, Staged, look

from splitinfer.core.costs.stage import StageCosts
from splitinfer.core.kv.budget import KVBudget, StageKV
from splitinfer.core.metrics.gaps import Cause
from splitinfer.core.metrics.recent import SeenStep
from splitinfer.core.scheduler.policy import PolicyConfig, PolicyName
from splitinfer.core.speculation.flight import Flight
from splitinfer.machine.machine import Hop, Machine
from splitinfer.server.page.figures import Seen, is_later, seen
from splitinfer.server.page.timeline import spans_of
from splitinfer.server.page.words import Remark, remarks


def machine(
    *steps_ms: float, hop_ms: float = 0.0, per_row_ms: float = 0.0, row_ms: float = 0.0, **more: float
) -> Machine:
    """Stages whose steps take so long, and ``row_ms`` more for each row; hops take ``hop_ms`` and ``per_row_ms``."""
    stages = tuple(StageCosts.line(ms / 1e3, row_ms / 1e3) for ms in steps_ms)
    hops = (Hop(hop_ms / 1e3, per_row_ms / 1e3),) * len(stages)
    return Machine(stages, hops, (4,) * len(stages), **{name: value / 1e3 for name, value in more.items()})


EVEN = machine(10, 10)
TWO, FOUR, MANY = (tuple(Asked() for _ in range(count)) for count in (2, 4, 12))
LONG = Asked(prompt=100_000)
SMALL_KV = KVBudget((StageKV(3000, 1), StageKV(30_000, 1)))

SITUATIONS: dict[str, tuple[Situation, list[str]]] = {
    "nothing is asked": (Situation(EVEN, ()), ["rests"]),
    "it was asked once, long ago": (Situation(EVEN, (Asked(answer=20),)), ["rests"]),
    "one stream": (Situation(EVEN), ["one_stream"]),
    "one stream, three stages": (Situation(machine(10, 10, 10)), ["one_stream"]),
    "one stream over a slow link": (Situation(machine(10, 10, hop_ms=12)), ["one_stream", "link_back", "link_latency"]),
    "one stream, whose coordinator is busy": (Situation(machine(10, 10, host=8)), ["one_stream", "host_first"]),
    "one stream, whose worker is busy": (Situation(EVEN, lags=(0.0, 0.008, 0.0)), ["one_stream", "host"]),
    "two streams, three stages": (Situation(machine(10, 10, 10), TWO), ["few_streams"]),
    "as many streams as stages": (Situation(EVEN, TWO), ["full"]),
    "many streams": (Situation(EVEN, FOUR), ["full"]),
    "many streams, the first stage is slow": (Situation(machine(20, 8), FOUR), ["uneven"]),
    "many streams, the last stage is slow": (Situation(machine(8, 20), FOUR), ["uneven"]),
    "many streams over a slow link": (
        Situation(machine(10, 10, hop_ms=10), FOUR), ["link_back", "link_latency"]
    ),
    "many streams, the last worker is busy": (Situation(EVEN, FOUR, lags=(0.0, 0.01, 0.0)), ["host"]),
    "a long prompt": (Situation(machine(2, 2, row_ms=0.5), (LONG,)), ["prompt", "full"]),
    "a long prompt over a thin cable": (
        Situation(machine(2, 2, row_ms=0.3, per_row_ms=0.8), (LONG,)), ["prompt", "link_bytes"]
    ),
    "a long prompt beside answers": (
        Situation(machine(2, 2, row_ms=0.5), (*TWO, Asked(at=1.0, prompt=100_000))), ["prompt", "full"]
    ),
    "many streams, prompts by themselves": (
        Situation(
            machine(2, 2, row_ms=0.5),
            (*TWO, LONG),
            config={"policy_config": PolicyConfig(policy=PolicyName.PREFILL_FIRST)},
        ),
        ["prompt", "full"],
    ),
    "good drafts": (
        Situation(machine(10, 10, draft=1), flight=Flight(3, 3, 2), acceptance=0.95),
        ["one_stream_drafts", "host_first", "good_drafts"],
    ),
    "void drafts": (
        Situation(machine(10, 10, draft=1), flight=Flight(6, 6, 3), acceptance=0.1),
        ["one_stream_drafts", "host_first", "void_drafts"],
    ),
    "a drafter that is not asked": (Situation(EVEN, flight=Flight()), ["one_stream_no_drafts"]),
    "more are asked than may run": (
        Situation(EVEN, MANY, config={"max_running": 4}), ["full", "queue_full"]
    ),
    "little memory for KV": (
        Situation(EVEN, tuple(Asked(prompt=500, answer=400) for _ in range(12)), config={"kv": SMALL_KV}),
        ["full", "kv_full", "preempted", "queue"],
    ),
}  # fmt: skip


def seen_in(situation: Situation, trace: Path) -> tuple[Seen, Staged, list[SeenStep]]:
    looked = look(situation, trace)
    assert is_later(looked.before.stats, looked.after.stats)
    steps = looked.after.steps
    return seen(looked.before, looked.after, steps), looked.staged, steps


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def check_numbers(found: list[Remark], causes: list[trace_causes.Causes]) -> None:
    """What is said of causes, and how much, is what the trace has."""
    waiting = ("upstream", "downstream", "link")
    for each in found:
        stage = causes[each.stage] if each.stage is not None else None
        if each.code in ("link_back", "link_latency", "link_bytes"):
            assert stage is not None
            assert f"{percent(stage.share('link'))} of the time" in each.text
        elif each.code in ("host", "host_first"):
            assert stage is not None
            assert f"{percent(stage.share('host'))} of the time" in each.text
        elif each.code == "uneven":
            assert stage is not None
            assert stage.duty == max(one.duty for one in causes)
            assert all(percent(one.duty) in each.text for one in causes)
        elif each.code.startswith("one_stream"):
            mean = sum(one.share(cause) for one in causes for cause in waiting) / len(causes)
            assert f"each waits {percent(mean)} of the time" in each.text
    said = {(each.code.partition("_")[0], each.stage) for each in found if each.stage is not None}
    for cause in ("link", "host"):
        much = {i for i, one in enumerate(causes) if one.share(cause) >= 0.15}
        assert {stage for word, stage in said if word == cause} == much, cause


def check_timeline(steps: list[SeenStep], events: list[dict[str, Any]], num_stages: int) -> None:
    """The page's spans are the trace's, with what they were for."""
    for stage in range(num_stages):
        drawn, spans = trace_causes.by_step(events, 2 * stage), spans_of(steps, stage)
        traced = [one for step in steps if (one := drawn[step.number])["dur"] > 0]  # else it was left out as void
        assert [(span.start, span.end) for span in spans] == [
            (pytest.approx(trace_causes.begin(one), abs=2e-6), pytest.approx(trace_causes.end(one), abs=2e-6))
            for one in traced
        ]
        for span, one in zip(spans, traced, strict=True):
            assert (span.kind == "void") == (one["args"]["useful"] == 0)
            assert span.kind in ("void", "draft", one["cat"])


def check_void(figures: Seen, situation: Situation) -> None:
    """Where only one answer is under way, each row that is kept is a token that is given."""
    if situation.flight is not None and figures.rows.draft:
        kept = figures.generated_per_second / figures.computed_per_second
        assert figures.void == pytest.approx(1 - kept, abs=0.01)


@pytest.mark.parametrize("name", SITUATIONS)
def test_the_words_are_of_what_was_staged_and_the_numbers_of_the_trace(name: str, tmp_path: Path):
    situation, codes = SITUATIONS[name]
    path = tmp_path / "trace.json"
    figures, staged, steps = seen_in(situation, path)
    found = remarks(figures)
    assert [each.code for each in found] == codes
    events, spells = trace_causes.read(path), [(float(a), float(b)) for a, b in staged.spells]
    causes = trace_causes.causes(events, len(figures.stages), spells, staged.requests, {step.number for step in steps})
    for stage, own in zip(figures.stages, causes, strict=True):
        assert stage.duty == pytest.approx(own.duty, abs=1e-6)
        for cause in Cause:
            assert stage.gap(cause) == pytest.approx(own.share(str(cause)), abs=1e-6), (stage.name, cause)
    check_numbers(found, causes)
    check_void(figures, situation)
    check_timeline(steps, events, len(figures.stages))
