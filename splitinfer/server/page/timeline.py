"""The last steps as coloured spans, one track for each stage. Pure.

A span is the time of a step on a stage, with its kind and the cause of the gap before it:

    prefill, decode, mixed    rows of prompts, of chosen tokens, of both
    draft                     a block of drafts; at least one was kept
    void                      nothing of it was kept
    free                      no rows: KV was saved, fetched or freed

If there are too many, close neighbours of one kind are joined, then neighbours of any kind.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from splitinfer.core.metrics.gaps import Cause
from splitinfer.core.metrics.records import StepRecord

MOST_SPANS = 40  # of a stage at a time
_LEAST_GAP = 20e-6  # seconds; a shorter time between two spans is no gap
LETTERS = {
    "prefill": "p",
    "decode": "d",
    "mixed": "m",
    "draft": "s",
    "void": "v",
    "free": "f",
    Cause.UPSTREAM: "u",
    Cause.DOWNSTREAM: "w",
    Cause.LINK: "l",
    Cause.HOST: "h",
    Cause.NOTHING: "n",
}
"""Kinds and causes as the page gets them. No two are the same."""


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """Computing of one kind: seconds on the coordinator's clock. ``cause``: of the gap before it, if there was one.
    ``busy``: seconds of it that it computed, which is less than its length where several steps became one."""

    start: float
    end: float
    kind: str
    cause: str
    busy: float


def kind_of(step: StepRecord) -> str:
    """Return what a step was for, as the page colours it."""
    if step.is_rejected:
        return "void"
    return "draft" if step.rows.draft and not step.rows.prefill else step.rows.kind


def spans_of(steps: Iterable[StepRecord], stage: int) -> list[TimelineSpan]:
    """Return a stage's spans, in order. Where a step began before the end of the one before, by its worker's clock, it
    is cut."""
    spans: list[TimelineSpan] = []
    for step in steps:
        visit, gaps = step.visits[stage], step.gaps[stage]
        start = max(visit.start, spans[-1].end) if spans else visit.start
        if visit.end > start:
            cause = str(max(gaps, key=lambda each: gaps[each])) if sum(gaps.values()) > _LEAST_GAP else ""
            spans.append(TimelineSpan(start, visit.end, kind_of(step), cause, visit.end - start))
    return spans


def joined(spans: Sequence[TimelineSpan], most: int = MOST_SPANS) -> list[TimelineSpan]:
    """Return at most ``most`` spans: join neighbours of one kind with the shortest gaps, then any neighbours."""
    found, gap = list(spans), _LEAST_GAP
    end = max((span.end - spans[0].start for span in spans), default=0.0)
    while len(found) > most:
        found = _join(found, gap, any_kind=gap > end)
        gap *= 4
    return found


def _join(spans: Sequence[TimelineSpan], gap: float, *, any_kind: bool) -> list[TimelineSpan]:
    made = [spans[0]]
    for span in spans[1:]:
        before = made[-1]
        if span.start - before.end <= gap and (any_kind or span.kind == before.kind):
            kind = before.kind if before.busy >= span.busy else span.kind
            made[-1] = replace(before, end=span.end, kind=kind, busy=before.busy + span.busy)
        else:
            made.append(span)
    return made


def written(spans: Iterable[TimelineSpan], now: float) -> list[list[Any]]:
    """Return spans in the page's form: milliseconds from ``now`` to the beginning, length, kind, cause, and the
    milliseconds of computing if they are fewer than the length.

    >>> written([TimelineSpan(9.5, 9.6, "decode", "link", 0.1), TimelineSpan(9.7, 9.9, "void", "", 0.1)], 10.0)
    [[-500.0, 100.0, 'd', 'l'], [-300.0, 200.0, 'v', '', 100.0]]
    """
    rows: list[list[Any]] = []
    for span in spans:
        length, busy = round(1e3 * (span.end - span.start), 2), round(1e3 * span.busy, 2)
        row = [round(1e3 * (span.start - now), 2), length, LETTERS[span.kind], LETTERS.get(span.cause, "")]
        rows.append(row if busy >= length else [*row, busy])
    return rows
