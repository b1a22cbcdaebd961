"""What is recorded of steps and requests: useful rows, causes of gaps, times of tokens, phases of requests."""

import json
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
from engine.door import Open, ask
from hypothesis import given
from hypothesis import strategies as st

from splitinfer.core.layout import Layout, StageSpec
from splitinfer.core.metrics.gaps import Arrivals, Cause
from splitinfer.core.metrics.records import Rows, StepRecord
from splitinfer.core.plan import SampledSlice, SampledToken, Slice, StageFigures, StepPlan, StepResult
from splitinfer.core.sampling_params import SamplingParams
from splitinfer.core.scheduler.in_flight import StepInFlight, TokenEvent
from splitinfer.core.sequence import FinishReason, Sequence
from splitinfer.engine.figures.figures import Figures

AHEAD = 1000.0  # seconds by which the worker's clock is ahead
LAYOUT = Layout((StageSpec("front", 0, 2), StageSpec("back", 2, 4, "tcp://there:1")))


def plan(step: int, *slices: tuple[int, int, int]) -> StepPlan:
    """A plan of (sequence, start, number of tokens)."""
    return StepPlan(step, slices=tuple(Slice(s, start, (1,) * n, 0) for s, start, n in slices))


def two_stages(step: int, begin: float) -> StepResult:
    """1 s on each stage, 0.25 s on each link: the result is heard 2.5 s after ``begin``."""
    there = begin + 1.25 + AHEAD
    return StepResult(
        step,
        (),
        (
            StageFigures(0, begin, begin + 1, sent=begin + 1, bytes_sent=64),
            StageFigures(1, there, there + 1, received=there, sent=there + 1),
        ),
    )


class Told:
    """Figures, and the steps in flight."""

    def __init__(self) -> None:
        self.figures, self._in_flight = Figures(LAYOUT, 0.0), deque[StepInFlight]()
        self.figures.opened(LAYOUT, 0.0)

    def submit(self, seq_id: int, num_prompt: int, now: float = 0.0) -> Sequence:
        made = Sequence(seq_id, [1] * num_prompt, SamplingParams(max_tokens=9), 0)
        self.figures.submitted(made, now, now)
        return made

    def launch(self, plan: StepPlan, at: float = 0.0) -> None:
        self._in_flight.append(StepInFlight(plan, launched_at=at))

    def come_back(self, result: StepResult, begin: float, *tokens: int) -> None:
        """The oldest step began at ``begin``, and its result brings these sequences tokens."""
        events = [TokenEvent(seq_id, SampledToken(4), None) for seq_id in tokens]
        self.figures.returned(self._in_flight.popleft(), result, events, begin + 2.5, begin + 2.5)

    def step(self, plan: StepPlan, begin: float, *tokens: int, sampled: Seq[SampledSlice] = ()) -> None:
        self.launch(plan, begin)
        self.come_back(replace(two_stages(plan.step, begin), sampled=tuple(sampled)), begin, *tokens)

    def stats(self, now: float = 10.0) -> dict[str, Any]:
        return self.figures.as_dict(now)

    def idle(self) -> list[dict[str, float]]:
        return [{cause: each for cause, each in s["idle_seconds"].items() if each} for s in self.stats()["stages"]]

    def totals(self) -> dict[str, tuple[int, float]]:
        """Count and sum of all that was counted at all."""
        read = self.figures.histograms()
        return {name: (each.count, pytest.approx(each.total)) for name, each in read.items() if each.count}


def test_a_lone_stream():
    """Submitted at 0; three steps that begin at 0.5, 3.5 and 6.5, each planned 0.5 s after the result before.

    Front: 0.5 host, then twice 1.25 downstream, 0.25 link, 0.5 host. Back: 1.5 upstream, 0.25 link, then twice
    1.75 upstream and 0.25 link. Tokens at 3, 6 and 9.
    """
    told = Told()
    request = told.submit(7, 3)
    for step, (begin, slices) in enumerate(((0.5, (7, 0, 3)), (3.5, (7, 3, 1)), (6.5, (7, 4, 1)))):
        told.step(plan(step, slices), begin, 7)
    told.figures.ended(request, FinishReason.LENGTH, 9.0)
    front, back = told.idle()
    assert front == pytest.approx({"host": 1.5, "downstream": 2.5, "link": 0.5})
    assert back == pytest.approx({"upstream": 5.0, "link": 0.75})
    stats = told.stats()
    assert [stage["busy_seconds"] for stage in stats["stages"]] == pytest.approx([3, 3])
    assert (stats["stages"][0]["steps"], stats["computed_tokens"], stats["useful_tokens"]) == (3, 5, 5)
    assert (stats["active_seconds"], stats["away_seconds"]) == pytest.approx((9.0, 4.5))
    for times, count in (("ttft_seconds", 1), ("itl_seconds", 2)):
        percentiles = dict.fromkeys(("p50", "p90", "p99", "max"), pytest.approx(3.0, rel=0.03))
        assert stats[times] == {"count": count, **percentiles}


def test_rows_that_nobody_wanted_any_more_and_rows_computed_again_are_not_useful():
    """7 of 21 rows are: 8 came after their request's end; of the other's 13, 4 were computed again, and then 2."""
    told = Told()
    told.submit(1, 8)
    second = told.submit(2, 8)
    steps = [plan(0, (1, 0, 4), (2, 0, 8)), plan(1, (1, 0, 4)), plan(2, (1, 2, 5))]
    told.figures.ended(second, FinishReason.ABORT, 1.0)
    for each in steps:
        told.step(each, 3.0 * each.step)
    stats = told.stats()
    assert (stats["computed_tokens"], stats["useful_tokens"]) == (21, 4 + 0 + 3)


def test_void_drafts_take_nothing_from_the_tokens_that_come_in_their_place():
    """The first draft is wrong, and the block behind it void; the positions that it had are computed anew, and kept."""
    told = Told()
    told.submit(1, 8)
    parts = [Slice(1, 0, (1,) * 8, 1), Slice(1, 8, (2, 3, 3, 3), 4, 3), Slice(1, 12, (3, 3, 3), 3, 3)]
    parts += [Slice(1, 9, (4,), 1), Slice(1, 10, (5, 6, 7), 3, 2)]
    counts = [1, 1, 0, 1, 3]
    for step, (part, count) in enumerate(zip(parts, counts, strict=True)):
        given_ = [SampledSlice(1, (SampledToken(4),) * count)]
        told.step(StepPlan(step, slices=(part,)), 3.0 * step, *[1] * count, sampled=given_)
    stats = told.stats(20.0)
    assert (stats["computed_tokens"], stats["useful_tokens"]) == (8 + 4 + 3 + 1 + 3, 8 + 1 + 0 + 1 + 3)
    assert (stats["generated_tokens"], stats["itl_seconds"]["count"]) == (6, 3), "tokens of a step come together"


def test_while_a_stage_is_lost_nobody_stands_still():
    """A step from 0.5; the worker is lost at 4 and back at 100; the next step begins at 101. 1 s of host."""
    told = Told()
    told.submit(1, 2)
    told.step(plan(0, (1, 0, 2)), 0.5)
    told.figures.lost("back", 4.0)
    told.submit(2, 2, 50.0)
    told.figures.opened(LAYOUT, 100.0)
    told.step(plan(2, (1, 0, 3)), 101.0)
    assert told.idle()[0] == pytest.approx({"host": 0.5 + 1.0, "nothing_to_do": 4 - 1.5})
    assert (told.stats()["losses"], told.stats()["rejoins"]) == ({"back": 1}, 1)


def test_another_cut_begins_the_counters_of_stages_anew():
    told = Told()
    told.submit(1, 4)
    told.step(plan(0, (1, 0, 2)), 0.5)
    told.figures.paused(4.0)
    told.figures.opened(replace(LAYOUT, stages=(StageSpec("front", 0, 4),)), 5.0)
    stats = told.stats()
    assert (stats["cut"], stats["rejoins"], stats["computed_tokens"]) == (1, 0, 2)
    assert [(stage["name"], stage["steps"], stage["busy_seconds"]) for stage in stats["stages"]] == [("front", 0, 0)]


def test_the_life_of_a_request():
    """Submitted at 10, begun at 12, tokens at 13, two at 14 (a draft was right) and at 16, over at 16.5."""
    told = Told()
    request = told.submit(7, 4, 10.0)
    request.begun_at, request.num_cached = 12.0, 1
    for step, (now, rows, count) in enumerate(((13.0, 3, 1), (14.0, 2, 2), (16.0, 1, 1))):
        request.tokens += [2] * count
        told.step(plan(step, (7, step, rows)), now - 2.5, *[7] * count)
    told.figures.ended(request, FinishReason.LENGTH, 16.5)
    assert told.totals() == {
        "first_token": (1, 3.0),
        "between_tokens": (2, 3.0),
        "each_token": (1, 1.0),
        "whole": (1, 6.5),
        "queue": (1, 2.0),
        "prefill": (1, 1.0),
        "decode": (1, 3.0),
        "inference": (1, 4.0),
        "prompt": (1, 4),
        "computed_prompt": (1, 3),
        "generated": (1, 4),
        "max_tokens": (1, 9),
        "preemptions": (1, 0),
        "step_rows": (3, 6),
    }
    stats = told.stats()
    assert [stats[key] for key in ("prompt_tokens", "cached_tokens", "generated_tokens")] == [4, 1, 4]
    usual = told.figures.usual_request
    assert (usual.answer, usual.prompt) == (4, 3)


def test_a_phase_that_a_request_never_came_to_is_not_counted():
    told = Told()
    waiting, reading = told.submit(1, 4), told.submit(2, 4)
    reading.begun_at = 2.0
    for request in (waiting, reading):
        told.figures.ended(request, FinishReason.ABORT, 5.0)
    found = told.totals()
    assert (found["whole"], found["queue"], found["generated"]) == ((2, 10.0), (1, 2.0), (2, 0))
    assert not {"prefill", "decode", "inference", "each_token", "first_token"} & found.keys()
    assert told.stats()["prompt_tokens"] == 0, "no prompt was read to its end"


ways = st.floats(1e-4, 0.05)


def one_step(offsets: Seq[float], begin: float, there: Seq[float], back: float) -> tuple[list[StageFigures], float]:
    """A step's figures, each on its stage's clock, and when its result was heard; 10 ms on each stage."""
    figures, now = [], begin
    for i, (offset, way) in enumerate(zip([0.0, *offsets], [0.0, *there], strict=True)):
        received, ended = now + way + offset, now + way + offset + 0.01
        figures.append(StageFigures(i, received, ended, received=received, sent=ended))
        now = ended - offset
    return figures, now + back


@given(
    st.lists(st.tuples(st.floats(-100, 100), st.lists(ways, min_size=3, max_size=3)), min_size=1, max_size=4),
    st.lists(ways, min_size=3, max_size=3),
)
def test_no_frame_comes_before_it_was_sent_nor_is_it_put_wrong_by_more_than_all_ways(
    stages: list[tuple[float, list[float]]], back: list[float]
):
    """Whatever the steps before have shown."""
    true, arrivals = [offset for offset, _ in stages], Arrivals()
    for number in range(3):
        there = [each[number] for _, each in stages]
        figures, heard = one_step(true, 50.0 + number, there, back[number])
        sent = figures[0].sent
        for each, offset, received in zip(figures[1:], true, arrivals.of(figures, heard), strict=True):
            assert received >= sent - 1e-9
            assert abs(received - (each.received - offset)) <= sum(there) + back[number] + 1e-9
            sent = received + each.sent - each.received
        assert sent <= heard + 1e-9


def test_a_large_step_does_not_change_what_a_small_one_has_shown_and_drift_is_followed():
    """Clocks that run apart by 50 ppm, for an hour; all but every tenth step take 40 ms more to come there."""
    arrivals = Arrivals()
    for number in range(3600):
        true, more = 20.0 + 50e-6 * number, 0.04 if number % 10 else 0.0
        figures, heard = one_step([true], float(number), [0.001 + more], 0.001)
        assert arrivals.of(figures, heard) == pytest.approx([figures[1].received - true], abs=2e-3)


@pytest.mark.parametrize("cuts", [[1, 2, 1], pytest.param([4], marks=pytest.mark.nightly)])
def test_a_real_pipeline(cuts: list[int], pipeline: Open):
    with pipeline("llama", cuts, token_budget=16, prefix_cache=False) as there:
        outputs = there.outputs(*(ask(40, prompt=i, max_tokens=6) for i in range(4)))
        stats = there.stats
        json.dumps(stats, allow_nan=False)
        num_tokens = sum(len(output.token_ids) for output in outputs)
        assert (stats["ttft_seconds"]["count"], stats["itl_seconds"]["count"]) == (4, num_tokens - 4)
        assert (stats["prompt_tokens"], stats["generated_tokens"]) == (4 * 40, num_tokens)
        assert 4 * 40 < stats["useful_tokens"] <= stats["computed_tokens"]
        for stage in stats["stages"]:
            whole = stage["busy_seconds"] + sum(stage["idle_seconds"].values())
            assert 0 < stage["busy_seconds"] <= whole <= stats["active_seconds"] + 1e-3
        first, *others = (stage["idle_seconds"] for stage in stats["stages"])
        assert first["upstream"] == 0
        assert all(idle["downstream"] == 0 for idle in others)
        assert others or not first["downstream"] + first["link"]
        assert [stats[key] for key in ("waiting", "running", "preemptions")] == [0, 0, 0]


def test_steps_are_shown_with_their_rows_and_gaps_while_somebody_looks():
    """A prompt of 3, then a block of a token and two drafts, void; before and after them steps that nobody sees."""
    told, seen = Told(), list[StepRecord]()
    told.submit(7, 3)
    block = StepPlan(2, slices=(Slice(7, 3, (1, 2, 3), 3, num_drafts=2),))
    for each in (plan(0, (7, 0, 1)), plan(1, (7, 1, 2)), block, plan(3, (7, 3, 1))):
        told.figures.watch = seen.append if each.step in (1, 2) else None
        told.step(each, 3.0 * each.step + 0.5)
        told.figures.count()
    prompt_step, draft_step = seen
    assert (prompt_step.rows, prompt_step.rows.kind, prompt_step.useful) == (Rows(prefill=2), "prefill", 2)
    assert (draft_step.rows, draft_step.is_rejected) == (Rows(decode=1, draft=2), True)
    assert draft_step.visits[1].end - draft_step.visits[1].start == pytest.approx(1.0)
    assert draft_step.gaps[1] == pytest.approx({Cause.UPSTREAM: 1.75, Cause.LINK: 0.25})
