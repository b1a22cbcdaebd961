"""Samples as figures, steps as spans: worked out by hand."""

from typing import Any

import pytest

from splitinfer.core.kv.budget import KVBudget, StageKV
from splitinfer.core.layout import Layout, StageSpec
from splitinfer.core.metrics.gaps import Cause, Visit
from splitinfer.core.metrics.records import Rows, StepRecord
from splitinfer.engine.figures.health import PipelineHealth, StageHealth, StageState
from splitinfer.server.page.figures import PipelineSeen, Sample, figures_document, pipeline_document, seen
from splitinfer.server.page.timeline import LETTERS, TimelineSpan, joined, kind_of, spans_of, written

LAYOUT = Layout((StageSpec("studio", 0, 4), StageSpec("mini", 4, 6, "tcp://10.0.0.7:5577", key="ab" * 32)), name="two")
HEALTH = PipelineHealth((StageHealth("studio", 0, 4, StageState.READY), StageHealth("mini", 4, 6, StageState.READY)))
BUDGET = KVBudget((StageKV(1000, 1), StageKV(500, 1)))


def stats(busy: float, link: float, tokens: int, useful: int, generated: int, **more: Any) -> dict[str, Any]:
    """What the engine says after ``busy`` seconds of computing on each stage, and ``link`` of waiting on the second."""
    nothing = dict.fromkeys((str(cause) for cause in Cause), 0.0)
    return {
        "active_seconds": busy + link, "generated_tokens": generated, "computed_tokens": tokens,
        "useful_tokens": useful, "running": 2, "waiting": 1, "max_running": 32, "preemptions": 0, "cut": 1,
        "speculation": None,
        "ttft_seconds": {"count": 3, "p50": 0.25}, "itl_seconds": {"count": 0, "p50": 0.0}, "stages": [
            {"name": "studio", "bytes_sent": 100 * tokens, "kv_bytes": 300, "kv_bytes_stored": 50, "busy_seconds": busy,
             "idle_seconds": nothing},
            {"name": "mini", "bytes_sent": 0, "busy_seconds": busy, "idle_seconds": {**nothing, "link": link}},
        ], **more,
    }  # fmt: skip


def step(number: int, rows: Rows, useful: int, start: float, gap: float = 0.0) -> StepRecord:
    """0.1 s on each stage, 0.02 s between."""
    visits = (
        Visit(start, start, start, start, start + 0.1),
        Visit(start + 0.1, start + 0.1, start + 0.12, start + 0.12, start + 0.22),
    )
    gaps = ({Cause.DOWNSTREAM: gap}, {Cause.UPSTREAM: 0.05, Cause.LINK: 0.02})
    return StepRecord(number, 1, rows, useful, (), visits, (), gaps, start + 0.22, start + 0.23)


def between(before: dict[str, Any], after: dict[str, Any], steps: list[StepRecord], **more: Any) -> PipelineSeen:
    cut = LAYOUT, more.pop("health", HEALTH), BUDGET
    return seen(Sample(100.0, before, *cut), Sample(110.0, after, *cut), steps, **more)


def test_figures_are_of_the_time_between_two_samples():
    """Of 8 s under way 6 s computed; 40 rows, 30 of them useful; 20 tokens in 10 s."""
    found = between(stats(4, 1, 60, 60, 50), stats(10, 3, 100, 90, 70), [step(1, Rows(8), 8, 105.0)])
    assert found.under_way == pytest.approx(0.8)
    assert (found.stages[0].duty, found.stages[1].duty) == pytest.approx((1.0, 0.75))
    assert found.stages[1].gaps == {Cause.LINK: pytest.approx(0.25)}
    assert (found.generated_per_second, found.computed_per_second) == pytest.approx((2.0, 4.0))
    assert found.void == pytest.approx(0.25)
    assert (found.links[0].way_ms, found.links[0].bytes_per_second) == (pytest.approx(20.0), pytest.approx(400.0))
    assert (found.rows, found.running, found.waiting, found.acceptance) == (Rows(8), 2, 1, None)
    assert (found.ttft_ms, found.itl_ms) == (250.0, None)
    assert [stage.kv_budget for stage in found.stages] == [1000, 500]


def test_each_machine_of_a_stage_across_two_has_its_own_share():
    def of(busy: float, *ranks: float) -> dict[str, Any]:
        known = {"name": "mini/0", "device": "gpu", "weight_bytes": 7, "free_bytes_when_loaded": 9}
        stage = {"sum_seconds": 2e-5, "ranks": [{**known, "busy_seconds": one} for one in ranks]}
        counted = stats(busy, 1 + busy / 4, 1, 1, 1)
        counted["stages"][1] |= stage
        return counted

    found = between(of(0, 0.0, 0.0), of(4, 3.0, 2.5), [])
    assert found.stages[1].ranks == pytest.approx([0.6, 0.5])
    assert between(of(0, 3.0, 2.5), of(4, 1.0, 3.5), []).stages[1].ranks == pytest.approx([0.0, 0.2])  # begun anew
    made = pipeline_document("m", 4096, Sample(0.0, of(4, 3.0, 2.5), LAYOUT, HEALTH, BUDGET), {})
    assert (made["stages"][1]["sum_ms"], len(made["stages"][1]["ranks"])) == (pytest.approx(0.02), 2)
    assert made["stages"][0]["ranks"] == figures_document(found)["stages"][0]["ranks"] == []


def test_acceptance_is_of_the_verdicts_between_two_samples():
    first = {"drafter": "ngram", "tried_at": [10, 5], "accepted_at": [5, 0]}
    last = {"drafter": "ngram", "tried_at": [16, 9], "accepted_at": [8, 1]}
    before, after = stats(1, 1, 1, 1, 1, speculation=first), stats(2, 2, 2, 2, 2, speculation=last)
    assert [between(each, after, []).acceptance for each in (before, after)] == [pytest.approx(4 / 10), None]


def test_documents_have_figures_and_no_addresses():
    made = pipeline_document(
        "m", 4096, Sample(0.0, stats(1, 1, 1, 1, 1), LAYOUT, HEALTH, BUDGET), {"prefill_share": 0.3}
    )
    assert made["dials"] == {"prefill_share": 0.3}
    assert made["links"] == [{"from": "studio", "to": "mini", "transport": "tcp", "codec": "none"}]
    assert [stage["layers"] for stage in made["stages"]] == [[0, 4], [4, 6]]
    assert "10.0.0.7" not in str(made)
    assert "abab" not in str(made)
    lost = PipelineHealth(HEALTH.stages, "stage mini, for up to 60 s")
    failed = PipelineHealth(HEALTH.stages, failure="it failed")
    one = stats(1, 1, 1, 1, 1)
    states = [between(one, one, [], health=health, is_draining=drains) for health, drains in (
        (HEALTH, False), (HEALTH, True), (lost, False), (failed, True))]  # fmt: skip
    assert [figures_document(each)["state"] for each in states] == ["ok", "draining", "waiting", "failed"]


def test_the_kind_of_a_step():
    cases = [(Rows(8), 8, "prefill"), (Rows(0, 2), 2, "decode"), (Rows(8, 1), 9, "mixed"), (Rows(), 0, "free"),
             (Rows(0, 1, 3), 2, "draft"), (Rows(0, 0, 3), 0, "void"), (Rows(8), 0, "void"),
             (Rows(4, 1, 3), 5, "mixed")]  # fmt: skip
    assert [kind_of(step(0, rows, useful, 0.0)) for rows, useful, _ in cases] == [kind for *_, kind in cases]
    assert len(set(LETTERS.values())) == len(LETTERS)


def test_spans_do_not_overlap_whatever_the_clocks_say():
    steps = [step(0, Rows(0, 1), 1, 1.0), step(1, Rows(0, 1), 1, 1.05), step(2, Rows(0, 1), 1, 1.02)]
    spans = spans_of(steps, 0)
    assert [(span.start, span.end) for span in spans] == [pytest.approx((1.0, 1.1)), pytest.approx((1.1, 1.15))]


def test_too_many_spans_become_few_and_keep_their_time():
    spans = [TimelineSpan(i / 100, i / 100 + 0.004, "decode", "link", 0.004) for i in range(500)]
    spans[250] = TimelineSpan(2.5, 2.504, "prefill", "", 0.004)
    few = joined(spans, 40)
    assert (len(few), few[0].cause) == (3, "link"), "of one kind each"
    assert sum(span.busy for span in few) == pytest.approx(500 * 0.004)
    assert (few[0].start, few[-1].end) == (spans[0].start, spans[-1].end)
    mixed = [TimelineSpan(i / 10, i / 10 + 0.01, ("decode", "void")[i % 2], "", 0.01) for i in range(100)]
    assert 1 <= len(joined(mixed, 40)) <= 40
    assert joined(spans[:40], 40) == spans[:40]
    (row,) = written(
        joined([TimelineSpan(0, 0.1, "decode", "", 0.1), TimelineSpan(0.3, 0.4, "decode", "link", 0.1)], 1), 1.0
    )
    assert row == [-1000.0, 400.0, "d", "", 200.0], "a joined one says how much of it was computing"
