"""What is recorded of steps: useful rows, causes of gaps, windows, times of tokens."""

import json
from collections import deque
from dataclasses import replace
from typing import Any

import pytest
from engine.door import Open, ask
from processes import until

from splitinfer.core.metrics.clocks import ClockReading, Clocks
from splitinfer.core.metrics.gaps import Cause
from splitinfer.core.metrics.recent import RecentSteps, Rows, SeenStep
from splitinfer.core.plan import SampledSlice, SampledToken, Slice, StageFigures, StepPlan, StepResult
from splitinfer.core.sampling_params import SamplingParams
from splitinfer.core.scheduler.in_flight import StepInFlight
from splitinfer.core.sequence import FinishReason, Sequence
from splitinfer.engine.coordinator.figures import Figures

AHEAD = 1000.0  # seconds by which the worker's clock is ahead


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


_in_flight: deque[StepInFlight] = deque()


def launch(figures: Figures, plan: StepPlan) -> None:
    """Tell of a launch."""
    _in_flight.append(StepInFlight.of(plan))
    figures.launched(_in_flight[-1])


def come_back(figures: Figures, result: StepResult, heard: float) -> None:
    """Tell of the result of the oldest step."""
    step = _in_flight.popleft()
    assert step.plan.step == result.step
    figures.returned(step, result, heard)


def metrics() -> Figures:
    _in_flight.clear()
    made = Figures(["front", "back"], 0.0)
    made.opened(Clocks([ClockReading(AHEAD, 0.001)]), 0.0)
    return made


def submit(figures: Figures, seq_id: int, num_prompt: int, now: float = 0.0) -> Sequence:
    """Tell of a request with a prompt of that many tokens."""
    made = Sequence(seq_id, [1] * num_prompt, SamplingParams(), 0)
    figures.submitted(made, now, now)
    return made


def window_of(figures: Figures, now: float, *, reset: bool = False) -> dict[str, Any]:
    return figures.as_dict(["front", "back"], now, reset=reset)["window"]


def test_a_lone_stream():
    """Submitted at 0; three steps that begin at 0.5, 3.5 and 6.5, each planned 0.5 s after the result before.

    Front: 0.5 host, then twice 1.25 downstream, 0.25 link, 0.5 host. Back: 1.5 upstream, 0.25 link, then twice
    1.75 upstream and 0.25 link. Tokens at 3, 6 and 9.
    """
    figures = metrics()
    figures.blocked()
    figures.heard(0.0)
    request = submit(figures, 7, 3)
    for step, (begin, slices) in enumerate(((0.5, (7, 0, 3)), (3.5, (7, 3, 1)), (6.5, (7, 4, 1)))):
        launch(figures, plan(step, slices))
        figures.blocked()
        come_back(figures, two_stages(step, begin), heard=begin + 2.5)
        figures.token(7, begin + 2.5)
    figures.ended(request, FinishReason.LENGTH, 9.0)
    window = window_of(figures, 10.0)
    front, back = window["stages"]
    assert {cause: gap["seconds"] for cause, gap in front["gaps"].items() if gap["count"]} == pytest.approx(
        {"host": 1.5, "downstream": 2.5, "link": 0.5}
    )
    assert {cause: gap["seconds"] for cause, gap in back["gaps"].items() if gap["count"]} == pytest.approx(
        {"upstream": 5.0, "link": 0.75}
    )
    assert front["duty_percent"] == pytest.approx(100 * 3 / 7.5)
    assert back["duty_percent"] == pytest.approx(100 * 3 / 8.75)
    assert back["goodput_duty_percent"] == back["duty_percent"]
    assert (window["steps"], window["computed_tokens"], window["useful_tokens"]) == (3, 5, 5)
    assert window["seconds"] == 10
    for times, count in (("ttft_seconds", 1), ("itl_seconds", 2)):
        percentiles = dict.fromkeys(("p50", "p90", "p99", "max"), pytest.approx(3.0, rel=0.03))
        assert window[times] == {"count": count, **percentiles}


def test_rows_that_nobody_wanted_any_more_and_rows_computed_again_are_not_useful():
    """7 of 21 rows are: 8 came after their request's end; of the other's 13, 4 were computed again, and then 2."""
    figures = metrics()
    submit(figures, 1, 8)
    second = submit(figures, 2, 8)
    steps = [plan(0, (1, 0, 4), (2, 0, 8)), plan(1, (1, 0, 4)), plan(2, (1, 2, 5))]
    for each in steps:
        launch(figures, each)
    figures.ended(second, FinishReason.ABORT, 1.0)
    for each in steps:
        begin = 3.0 * each.step
        come_back(figures, two_stages(each.step, begin), begin + 2.5)
    window = window_of(figures, 10.0)
    assert (window["computed_tokens"], window["useful_tokens"]) == (21, 4 + 0 + 3)
    front = window["stages"][0]
    assert front["goodput_duty_percent"] == pytest.approx(front["duty_percent"] * 7 / 21)


def test_void_drafts_take_nothing_from_the_tokens_that_come_in_their_place():
    """The first draft is wrong, and the block behind it void; the positions that it had are computed anew, and kept."""
    figures = metrics()
    submit(figures, 1, 8)
    parts = [Slice(1, 0, (1,) * 8, 1), Slice(1, 8, (2, 3, 3, 3), 4, 3), Slice(1, 12, (3, 3, 3), 3, 3)]
    parts += [Slice(1, 9, (4,), 1), Slice(1, 10, (5, 6, 7), 3, 2)]
    sampled = [1, 1, 0, 1, 3]
    for step, (part, count) in enumerate(zip(parts, sampled, strict=True)):
        launch(figures, StepPlan(step, slices=(part,)))
        given = (SampledSlice(1, (SampledToken(4),) * count),)
        come_back(figures, replace(two_stages(step, 3.0 * step), sampled=given), 3.0 * step + 2.5)
    window = window_of(figures, 20.0)
    assert (window["computed_tokens"], window["useful_tokens"]) == (8 + 4 + 3 + 1 + 3, 8 + 1 + 0 + 1 + 3)


def test_a_reset_begins_another_window():
    figures = metrics()
    submit(figures, 1, 2)
    launch(figures, plan(0, (1, 0, 2)))
    come_back(figures, two_stages(0, 0.5), 3.0)
    figures.token(1, 3.0)
    launch(figures, plan(1, (1, 2, 1)))
    assert window_of(figures, 4.0, reset=True)["steps"] == 1
    come_back(figures, two_stages(1, 3.5), 6.0)
    window = window_of(figures, 7.0)
    assert (window["number"], window["seconds"], window["steps"], window["ttft_seconds"]["count"]) == (2, 3, 1, 0)
    assert window["stages"][0]["busy_seconds"] == pytest.approx(0.5), "from 4 on, of a step from 3.5 to 4.5"


def test_gaps_since_the_start_outlive_their_window():
    figures = metrics()
    submit(figures, 1, 2)
    idle: list[dict[str, float]] = []
    for step, begin in enumerate((0.5, 3.5)):
        launch(figures, plan(step, (1, step, 1)))
        come_back(figures, two_stages(step, begin), begin + 2.5)
        window_of(figures, begin + 2.5, reset=step == 0)
        idle = [stage["idle_seconds"] for stage in figures.as_dict(["front", "back"], 9.0)["stages"]]
    assert idle[1]["upstream"] > window_of(figures, 9.0)["stages"][1]["gaps"]["upstream"]["seconds"] > 0
    assert window_of(figures, 9.0)["stages"][1]["gaps"]["link"]["seconds"] == pytest.approx(0.25)
    assert idle[1]["link"] == pytest.approx(0.5)


def test_while_a_stage_is_lost_nobody_stands_still():
    """A step from 0.5; the worker is lost at 4 and back at 100; the next step begins at 101. 1 s of host."""
    figures = metrics()
    submit(figures, 1, 2)
    launch(figures, plan(0, (1, 0, 2)))
    come_back(figures, two_stages(0, 0.5), 3.0)
    launch(figures, plan(1, (1, 2, 1)))
    figures.lost(4.0)
    _in_flight.clear()
    submit(figures, 2, 2, 50.0)
    figures.resumed(Clocks([ClockReading(AHEAD, 0.001)]), 100.0)
    launch(figures, plan(2, (1, 0, 3)))
    come_back(figures, two_stages(2, 101.0), 103.5)
    front = window_of(figures, 110.0)["stages"][0]
    assert front["gaps"]["host"]["seconds"] == pytest.approx(0.5 + 1.0)
    assert front["gaps"]["nothing_to_do"]["seconds"] == pytest.approx(4 - 1.5)


# -- of a real pipeline ----------------------------------------------------------------------------


def check(window: dict[str, object]) -> None:
    """What must hold of any window of a pipeline that is at rest."""
    json.dumps(window, allow_nan=False)
    for stage in window["stages"]:  # type: ignore[attr-defined]
        whole = stage["busy_seconds"] + stage["gap_seconds"]
        assert stage["gap_seconds"] == pytest.approx(sum(gap["seconds"] for gap in stage["gaps"].values()))
        assert stage["duty_percent"] == pytest.approx(100 * stage["busy_seconds"] / whole)
        assert 0 < stage["goodput_duty_percent"] <= stage["duty_percent"] <= 100
        assert whole <= window["seconds"]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("cuts", "options"),
    [([2, 2], {}), ([4], {}), pytest.param([1, 2, 1], {"scheme": "tcp"}, marks=pytest.mark.nightly)],
)
def test_a_real_pipeline(cuts: list[int], options: dict[str, Any], pipeline: Open):
    with pipeline("llama", cuts, token_budget=16, prefix_cache=False, **options) as there:
        there.llm.stats(reset=True)
        outputs = there.outputs(*(ask(40, prompt=i, max_tokens=6) for i in range(4)))
        stats = there.llm.stats(reset=True)
        window = stats["window"]
        check(window)
        num_tokens = sum(len(output.token_ids) for output in outputs)
        assert (window["ttft_seconds"]["count"], window["itl_seconds"]["count"]) == (4, num_tokens - 4)
        assert 4 * 40 < window["useful_tokens"] <= window["computed_tokens"] == stats["computed_tokens"]
        first, *others = window["stages"]
        assert first["gaps"]["upstream"]["count"] == 0
        assert all(each["gaps"]["downstream"]["count"] == 0 for each in others)
        assert others or not first["gaps"]["downstream"]["count"] + first["gaps"]["link"]["count"]
        assert all(abs(each["clock_offset_seconds"]) < 0.05 for each in others), "they share a process"
        assert [stats[key] for key in ("waiting", "running", "preemptions")] == [0, 0, 0]
        assert there.stats["window"]["steps"] <= 1, "but for the step that frees, the window is new"
        assert there.stats["generated_tokens"] == num_tokens, "the counters are not"


def test_what_was_computed_is_kept_and_counted(pipeline: Open):
    with pipeline("llama", [2, 2]) as there:
        there.outputs(replace(ask(20, max_tokens=3), session="tale"))
        stats = there.stats
        assert stats["stored_blocks"] == 1
        block = [256 * stage["kv_bytes_per_token"] for stage in stats["stages"]]
        # One block, and what is left.
        assert [stage["kv_bytes_stored"] for stage in stats["stages"]] == [2 * size for size in block]
        there.llm.forget("tale")
        until(lambda: not any(stage["kv_bytes_stored"] for stage in there.stats["stages"]), "all is freed", 10)


# -- single steps, for whoever looks ---------------------------------------------------------------


def test_steps_are_shown_with_their_rows_and_gaps_while_somebody_looks():
    """A prompt of 3, then a block of a token and two drafts, void; before and after them steps that nobody sees."""
    figures, recent = metrics(), RecentSteps()
    submit(figures, 7, 3)
    block = StepPlan(2, slices=(Slice(7, 3, (1, 2, 3), 3, num_drafts=2),))
    looks = {1: recent, 3: None}
    for each in (plan(0, (7, 0, 1)), plan(1, (7, 1, 2)), block, plan(3, (7, 3, 1))):
        if each.step in looks:
            figures.watch(looks[each.step])
        launch(figures, each)
        come_back(figures, two_stages(each.step, 3.0 * each.step + 0.5), heard=3.0 * each.step + 3)
        figures.count()
    prompt_step, draft_step = recent.take()
    assert (prompt_step.rows, prompt_step.rows.kind, prompt_step.useful) == (Rows(prefill=2), "prefill", 2)
    assert (draft_step.rows, draft_step.is_void) == (Rows(decode=1, draft=2), True)
    assert draft_step.visits[1].end - draft_step.visits[1].start == pytest.approx(1.0)
    assert draft_step.gaps[1] == pytest.approx({Cause.UPSTREAM: 1.75, Cause.LINK: 0.25})
    assert recent.take() == []


def test_steps_that_nobody_takes_are_bounded():
    recent = RecentSteps(most=2)
    steps = [SeenStep(number, Rows(), 0, (), ()) for number in range(3)]
    for each in steps:
        recent.put(each)
    assert recent.take() == steps[1:]
