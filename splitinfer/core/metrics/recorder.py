"""Makes the records of steps and requests from what the loop tells. Pure: times are arguments.

A worker's monotonic clock begins anywhere. A step shows by how much it is ahead: the step was on its ways while no
stage had it, from the first stage's sending to the result's arrival, and each way is taken to be as long as the others.
That is wrong by as much as they differ, so the step that took least is gone by, until it is old: clocks drift apart.

A step of the first stage waits for the result that makes it possible: the first one heard since the launch before.
"""

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from splitinfer.core.metrics.gaps import ALWAYS, Activity, Cause, StageTime, Visit
from splitinfer.core.metrics.records import Gained, RequestRecord, Rows, StepRecord
from splitinfer.core.plan import Slice, StageFigures, StepPlan, StepResult
from splitinfer.core.scheduler.in_flight import StepInFlight
from splitinfer.core.sequence import FinishReason, Sequence

_NOT_WAITED_FOR = (ALWAYS, ALWAYS, ALWAYS)


@dataclass(slots=True)
class _UnderWay:
    """A request under way. ``last``: when its last token came; before, when it was submitted. ``computed``: positions
    that steps have brought so far."""

    sequence: Sequence
    submitted: float
    last: float
    first: float | None = None
    computed: int = 0


class Arrivals:
    """Puts the frames of steps on the first stage's clock."""

    def __init__(self) -> None:
        self._ahead: Seq[float] = ()  # by which each worker's clock is
        self._least = self._heard = 0.0

    def of(self, figures: Seq[StageFigures], heard: float) -> list[float]:
        """When each worker received a step whose result was heard at ``heard``: none before it was sent, and early
        enough for what follows. ``figures``: of all stages."""
        sent, workers = figures[0].sent, figures[1:]
        latest = heard - sum(each.sent - each.received for each in workers)
        ways = latest - sent
        self._least *= 1 + heard - self._heard
        self._heard = heard
        if ways <= self._least or len(self._ahead) != len(workers):
            self._least, self._ahead = ways, _clocks_ahead(workers, sent, ways / len(figures))
        found: list[float] = []
        for each, ahead in zip(workers, self._ahead, strict=True):
            found.append(min(max(each.received - ahead, sent), latest))
            sent, latest = (at + each.sent - each.received for at in (found[-1], latest))
        return found


def _clocks_ahead(workers: Seq[StageFigures], sent: float, way: float) -> list[float]:
    found: list[float] = []
    for each in workers:
        found.append(each.received - sent - way)
        sent = each.sent - found[-1]
    return found


class Recorder:
    """Knows the requests and steps under way of one pipeline. Used by one thread at a time."""

    def __init__(self, num_stages: int, now: float) -> None:
        self.under_way: dict[int, _UnderWay] = {}
        self._activity = Activity()
        self._is_whole = True
        self._cut = -1
        self.begin_cut(num_stages, now)

    def begin_cut(self, num_stages: int, now: float) -> None:
        """The stages are others from ``now`` on."""
        self._cut += 1
        self.stages = [StageTime(Cause.UPSTREAM if stage else Cause.DOWNSTREAM, now) for stage in range(num_stages)]
        self.resumed(now)

    @property
    def cut(self) -> int:
        """How many cuts were before this one."""
        return self._cut

    # -- requests ----------------------------------------------------------------------------

    def submitted(self, sequence: Sequence, at: float, now: float) -> None:
        """A request that was submitted at ``at`` has reached the loop."""
        self.under_way[sequence.seq_id] = _UnderWay(sequence, at, at)
        if self._is_whole:
            self._activity.begin(now)

    def ended(self, sequence: Sequence, reason: FinishReason, now: float) -> RequestRecord:
        """A request has ended."""
        request = self.under_way.pop(sequence.seq_id)
        if not self.under_way:
            self._activity.stop(now)
        return RequestRecord(
            reason=reason,
            submitted=request.submitted,
            begun=sequence.begun_at,
            first=request.first,
            last=None if request.first is None else request.last,
            ended=now,
            prompt=sequence.num_prompt_tokens,
            cached=sequence.num_cached or 0,
            generated=sequence.num_generated,
            forced=sequence.drafts.num_forced,
            max_tokens=sequence.params.max_tokens,
            preemptions=sequence.num_preemptions,
        )

    # -- stages ------------------------------------------------------------------------------

    def lost(self, now: float) -> None:
        """The steps under way are lost; until all stages are back, no time counts as active."""
        self._is_whole = False
        self._activity.stop(now)

    def resumed(self, now: float) -> None:
        """All stages are there, again or for the first time."""
        self._is_whole = True
        self._arrivals = Arrivals()
        self._results: deque[tuple[float, float, float]] = deque()  # made, sent and heard, of those since a launch
        self._launched_at = ALWAYS
        if self.under_way:
            self._activity.begin(now)

    # -- steps -------------------------------------------------------------------------------

    def returned(
        self, step: StepInFlight, result: StepResult, tokens: Iterable[int], heard: float, now: float
    ) -> StepRecord:
        """A step's result was heard at ``heard``. ``tokens``: the sequences of the tokens that it brought, which their
        readers get at ``now``; a request that ends with them is still under way."""
        rows, useful = self._rows(step.planned, result)
        trigger = self._trigger(step)
        visits = self._visits(trigger, result.figures, heard)
        gaps = [stage.add(visit, self._activity) for stage, visit in zip(self.stages, visits, strict=True)]
        self._activity.forget(min(stage.until for stage in self.stages))
        return StepRecord(
            number=step.planned.step,
            num_sequences=len(step.planned.slices),
            rows=rows,
            useful=useful,
            gained=self._gained(tokens, now),
            visits=visits,
            figures=result.figures,
            gaps=gaps,
            sent=self._results[-1][1],
            heard=heard,
            cut=self._cut,
        )

    def _rows(self, plan: StepPlan, result: StepResult) -> tuple[Rows, int]:
        """What a step's rows were, and how many of them are useful: those that a request still wanted and that had not
        been computed before; of drafts, the accepted ones."""
        sampled = {each.seq_id: len(each.tokens) for each in result.sampled}
        decode = draft = useful = 0
        for part in plan.slices:
            request, size = self.under_way.get(part.seq_id), len(part.token_ids)
            if (part.num_drafts or size == 1) and (request is None or part.start >= request.sequence.num_prompt_tokens):
                decode += size - part.num_drafts
                draft += part.num_drafts
            if request is not None:
                useful += _new_rows(part, sampled.get(part.seq_id, 0), request)
        return Rows(plan.num_tokens - decode - draft, decode, draft), useful

    def _gained(self, tokens: Iterable[int], now: float) -> list[Gained]:
        counts: dict[int, int] = {}
        for seq_id in tokens:
            counts[seq_id] = counts.get(seq_id, 0) + 1
        gained: list[Gained] = []
        for seq_id, count in counts.items():
            request = self.under_way[seq_id]
            seq, seconds, request.last = request.sequence, now - request.last, now
            if request.first is None:
                request.first = now
                gained.append(Gained(seq_id, count, seconds, seq.num_prompt_tokens, seq.num_cached or 0))
            else:
                gained.append(Gained(seq_id, count, seconds))
        return gained

    def _trigger(self, step: StepInFlight) -> tuple[float, float, float]:
        """When the result that made a step possible was made, sent and heard."""
        results, at = self._results, ALWAYS if step.launched_at is None else step.launched_at
        while results and results[0][2] <= self._launched_at:
            results.popleft()
        self._launched_at = at
        return results[0] if results and results[0][2] <= at else _NOT_WAITED_FOR

    def _visits(self, trigger: tuple[float, float, float], figures: Seq[StageFigures], heard: float) -> list[Visit]:
        """A step on each stage; notes when its result came."""
        first = figures[0]
        visits = [Visit(*trigger, first.started, first.ended)]
        if len(figures) == 1:
            self._results.append((first.ended, first.ended, first.ended))
            return visits
        sent = first.sent
        for each, received in zip(figures[1:], self._arrivals.of(figures, heard), strict=True):
            ahead = each.received - received
            visits.append(Visit(visits[-1].end, sent, received, each.started - ahead, each.ended - ahead))
            sent = each.sent - ahead
        self._results.append((visits[-1].end, sent, heard))
        return visits


def _new_rows(part: Slice, num_sampled: int, request: _UnderWay) -> int:
    if part.num_drafts and not num_sampled:  # void: what was wrong is behind its beginning
        return 0
    end, before = part.end, request.computed
    if part.num_drafts:
        end += num_sampled - part.num_logits
    if end <= before:
        return 0
    request.computed = end
    return end - max(part.start, before)
