"""What a pipeline did: counters, a window's figures and requests' distributions, told by the loop as events.

    requests    submitted -> token, token ... -> ended
    steps       blocked | heard -> launched -> returned
    stages      opened | lost -> resumed | relaid

The loop tells what happened, in order, and counts nothing itself. Counting need not be done between a result and the
step that it allows, so it is put off until there is time or somebody asks. One thread at a time counts or reads.
"""

import threading
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from splitinfer.core.metrics.clocks import Clocks
from splitinfer.core.metrics.recent import RecentSteps
from splitinfer.core.metrics.requests import RequestFigures, RequestMeters
from splitinfer.core.plan import StepResult
from splitinfer.core.scheduler.in_flight import StepInFlight
from splitinfer.core.scheduler.room import UsualRequest
from splitinfer.core.sequence import FinishReason, Sequence
from splitinfer.engine.coordinator.metrics import PipelineMetrics
from splitinfer.engine.coordinator.totals import StageTotals, Totals
from splitinfer.engine.coordinator.trace import Trace

P = ParamSpec("P")
T = TypeVar("T")

_MOST = 256  # events that are counted later; a loop that is never idle counts them then


def _later(count: "Callable[Concatenate[Figures, P], None]") -> "Callable[Concatenate[Figures, P], None]":
    """Have a method count its event later, in order."""

    @wraps(count)
    def put(self: "Figures", /, *args: P.args, **named: P.kwargs) -> None:
        self.events.append(partial(count, self, *args, **named))
        if len(self.events) > _MOST:
            self.count()

    return put


class Figures:
    """Counts what the loop's thread tells; any thread may read.

    names: the stages'. now: seconds on the monotonic clock, as all times here. trace: where every step is drawn.
    ``events``: those told and not yet counted.
    """

    def __init__(self, names: Seq[str], now: float, trace: Trace | None = None) -> None:
        if trace is not None:
            trace.begin(list(names))
        self.events: deque[Callable[[], None]] = deque()
        self._counting = threading.Lock()
        self._requests = RequestMeters()
        self.totals = Totals([])
        self._window = PipelineMetrics(names, now, self._requests.under_way, trace)

    # -- requests ----------------------------------------------------------------------------

    @_later
    def submitted(self, sequence: Sequence, at: float, now: float) -> None:
        """A request was submitted at ``at``, and has reached the loop."""
        self.totals.is_active(True, now)
        self._requests.submitted(sequence, at)
        self._window.submitted(now)

    @_later
    def token(self, seq_id: int, now: float) -> None:
        """A token goes to its reader."""
        request = self._requests.under_way[seq_id]
        self.totals.generated_tokens += 1
        self._window.token(request, now)
        self._requests.token(request, now)

    @_later
    def ended(self, sequence: Sequence, reason: FinishReason, now: float) -> None:
        """A request has ended."""
        self.totals.ended(sequence, reason)
        self._requests.ended(sequence.seq_id, now)
        self.totals.is_active(bool(self._requests.under_way), now)
        self._window.ended(now)

    # -- steps -------------------------------------------------------------------------------

    @_later
    def blocked(self) -> None:
        """Nothing can be planned now."""
        self._window.blocked()

    @_later
    def heard(self, at: float) -> None:
        """An event reached the loop that may let it plan again."""
        self._window.heard(at)

    @_later
    def launched(self, step: StepInFlight) -> None:
        """The first stage begins a step."""
        self.totals.computed_tokens += step.planned.num_tokens
        self._window.launched(step)
        self._requests.planned(step.planned.num_tokens)

    @_later
    def returned(self, step: StepInFlight, result: StepResult, heard: float) -> None:
        """A step's result arrived at ``heard``; the readers have not got its tokens yet."""
        self._window.returned(step, result, heard)
        self.totals.step(result, heard)

    # -- stages ------------------------------------------------------------------------------

    @_later
    def opened(self, clocks: Clocks, now: float) -> None:
        """All stages are there for the first time."""
        self.totals.stages = [StageTotals() for _ in clocks.readings]
        self._window.opened(clocks, now)

    @_later
    def lost(self, now: float) -> None:
        """The stages are gone, and the steps under way with them."""
        self._window.lost(now)

    @_later
    def resumed(self, clocks: Clocks, now: float) -> None:
        """All stages are there again."""
        self._window.resumed(clocks, now)

    @_later
    def relaid(self, names: Seq[str], clocks: Clocks, now: float) -> None:
        """The stages are others, of these names; what was counted of the ones before is kept apart."""
        self.totals.stages = [StageTotals() for _ in names]
        self._window.relaid(names, now)
        self._window.resumed(clocks, now)

    # -- readings ----------------------------------------------------------------------------

    def count(self) -> None:
        """Count everything told so far."""
        self._after_counting(lambda: None)

    def _after_counting(self, read: Callable[[], T]) -> T:
        """Count everything told so far; the result of ``read``, during which nothing is counted."""
        with self._counting:
            while self.events:
                self.events.popleft()()
            return read()

    def as_dict(self, names: Seq[str], now: float, *, reset: bool = False) -> dict[str, Any]:
        """Counters and the window's figures as plain numbers, for ``LLM.stats``; ``reset`` begins another window."""

        def read() -> dict[str, Any]:
            stats = self.totals.as_dict(names, now)
            stats["window"] = self._window.snapshot(now, reset=reset)
            for stage, idle in zip(stats["stages"], self._window.idle_seconds(), strict=False):
                stage["idle_seconds"] = idle
            return stats

        return self._after_counting(read)

    @property
    def generated_tokens(self) -> int:
        """Tokens that readers got since the start."""
        return self._after_counting(lambda: self.totals.generated_tokens)

    @property
    def usual_request(self) -> UsualRequest:
        """The means of the requests that have ended."""
        return self._after_counting(lambda: self.totals.usual_request)

    def of_requests(self) -> RequestFigures:
        """Distributions of requests' times and sizes, since the start."""
        return self._after_counting(self._requests.read)

    def watch(self, recent: RecentSteps | None) -> None:
        """Put every step that is launched from now on into ``recent``; ``None`` ends that. From any thread."""
        self._window.watch(recent)
