"""The requests of an engine, from the call that submits one to its end.

    submit      checked in the caller's thread, then *arriving*: the loop has not seen it yet
    add         the scheduler has it
    take        a step brought tokens: each goes to its reader, and a stop string may end the request
    end         by its last token, aborted, timed out, without memory, or with the engine

One lock makes certain that a refused request never reaches the loop, and that a loop that ends ends those that it has
not seen. However a request ends, it is counted before its reader is told: who has an answer may ask for figures at
once.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from splitinfer.core.kv.budget import NeverFits
from splitinfer.core.layout import Layout
from splitinfer.core.scheduler.results import TokenEvent
from splitinfer.core.scheduler.scheduler import Scheduler
from splitinfer.core.sequence import FinishReason
from splitinfer.engine.coordinator.figures import Figures
from splitinfer.engine.coordinator.requests import Came, RequestState
from splitinfer.errors import Draining, QueueFull, RequestError, SplitinferError
from splitinfer.models.memory import size

_NOT_KEPT = "the answer did not keep the form that was asked for, so it was ended"


class InForce(NamedTuple):
    """The scheduler, and the cut that it plans for. Both at once: other threads read them."""

    scheduler: Scheduler
    layout: Layout


class OpenRequests:
    """``submit``, ``begin_draining`` and ``failure`` may be used from any thread, the rest on the engine's.

    forget: told of each request that ends, by its id; for drafts.
    """

    def __init__(self, figures: Figures, forget: Callable[[int], None]) -> None:
        self._figures, self._forget = figures, forget
        self._states: dict[int, RequestState] = {}
        self._arriving: dict[int, RequestState] = {}  # submitted, and not yet taken by the loop
        self._untold: deque[tuple[RequestState, Came]] = deque()
        self._aborted: set[int] = set()  # of which the loop has not heard yet
        self._lock = threading.Lock()
        self._drained: threading.Event | None = None  # set once no request is left, when that is wanted
        self.in_force: InForce | None = None
        """What requests are scheduled by; ``None`` before the stages are loaded."""
        self.failure: SplitinferError | None = None
        """Why no request can be taken any more."""

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._states))

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._states

    @property
    def now_in_force(self) -> InForce:
        """What requests are scheduled by, once the stages are loaded."""
        assert self.in_force is not None
        return self.in_force

    # -- from any thread ---------------------------------------------------------------------

    def submit(self, state: RequestState, hand_over: Callable[[], None]) -> None:
        """Take a request in and call ``hand_over``, by which the loop gets it (``add``).

        Raises:
            QueueFull: too many wait already.
            RequestError: its KV can never fit.
            SplitinferError: the engine has failed, was closed, or is being drained.
        """
        with self._lock:
            if self.failure is not None:
                raise self.failure
            if self._drained is not None:
                raise Draining("the coordinator is shutting down and takes no new requests")
            scheduler, layout = self.now_in_force
            try:
                scheduler.config.check_room(state.sequence, len(scheduler.waiting) + len(self._arriving))
            except NeverFits as error:
                raise RequestError(_never_fits(error, layout)) from error
            self._arriving[state.seq_id] = state
            hand_over()

    def abort_soon(self, seq_id: int) -> None:
        """Note that a request is to be aborted, so that ``end_unwanted`` finds it; ``abort`` does it."""
        self._aborted.add(seq_id)

    def begin_draining(self) -> threading.Event:
        """Take no new request; the event is set when none is left (``check_drained``), or the engine has failed."""
        with self._lock:
            drained = self._drained = self._drained or threading.Event()
            if self.failure is not None:
                drained.set()
            return drained

    @property
    def is_draining(self) -> bool:
        """Whether no new request is taken any more."""
        return self._drained is not None

    # -- on the engine's thread --------------------------------------------------------------

    def add(self, state: RequestState, submitted: float) -> None:
        """Have the scheduler carry a request out. ``submitted``: when that was, in seconds on the monotonic clock."""
        scheduler, layout = self.now_in_force
        try:
            with self._lock:  # meanwhile it would count twice
                self._arriving.pop(state.seq_id, None)
                scheduler.add(state.sequence)
        except QueueFull as error:  # sequences that gave up their KV have filled the queue since it was let in
            state.end(FinishReason.ERROR, str(error))
            return
        except NeverFits as error:  # another cut was loaded since
            state.end(FinishReason.ERROR, _never_fits(error, layout))
            return
        self._states[state.seq_id] = state
        self._figures.submitted(state.sequence, submitted, time.monotonic())

    def take(self, events: Sequence[TokenEvent], now: float) -> None:
        """Take the tokens of a step; ``tell`` gives them to their readers."""
        for event in events:
            state = self._states.get(event.seq_id)
            if state is None:
                continue  # a stop string ended it with an earlier token of this step
            rules = state.sequence.rules
            if rules is not None and rules.refuses(state.sequence.answer):
                self._remove(event.seq_id, FinishReason.ERROR).end(FinishReason.ERROR, _NOT_KEPT)
                continue
            came, reason = state.take(event.token, event.finish_reason)
            if reason is not None:
                self._remove(event.seq_id, reason)
            self._untold.append((state, came))
            if reason is None and rules is not None and rules.failure is not None:
                self._remove(event.seq_id, FinishReason.ERROR).end(FinishReason.ERROR, rules.failure)

    def tell(self) -> None:
        """Give the tokens that were taken to their readers. A reader that wakes takes the interpreter's lock."""
        while self._untold:
            state, came = self._untold.popleft()
            state.tell(came)

    def abort(self, seq_id: int) -> None:
        """End a request where it is; nothing happens if it has ended."""
        self._aborted.discard(seq_id)
        if seq_id in self._states:
            self._remove(seq_id, FinishReason.ABORT).end(FinishReason.ABORT)

    def abort_all(self) -> None:
        """End every request where it is."""
        for seq_id in self:
            self.abort(seq_id)

    def expire(self) -> bool:
        """End the requests whose time is over; whether there were any."""
        seq_ids = self.now_in_force.scheduler.expire(time.monotonic())
        for seq_id in seq_ids:
            self._remove(seq_id, FinishReason.ABORT).end(FinishReason.ABORT, "it timed out")
        return bool(seq_ids)

    def end_unable(self) -> None:
        """End the requests whose KV does not fit any more, since a stage's device had no memory left."""
        scheduler, layout = self.now_in_force
        for seq, error in scheduler.unable():
            name = layout.stages[error.stage].name
            reason = (
                f"{error.num_tokens:,} tokens need {size(error.needed)} of KV on stage {name}, whose device ran out of "
                f"memory and has {size(error.there)} for it; shorten the request, or give the stage fewer layers"
            )
            self._remove(seq.seq_id, FinishReason.ERROR).end(FinishReason.ERROR, reason)

    def end_unwanted(self) -> None:
        """End the requests that were aborted, and those whose time is over. One that is still arriving is aborted when
        it has arrived."""
        for seq_id in list(self._aborted):
            self.abort(seq_id)
        self.expire()

    def end_all(self, reason: FinishReason) -> None:
        """End every request, those that are arriving too, with the failure's sentence if the reason is an error."""
        with self._lock:
            error = str(self.failure) if reason is FinishReason.ERROR else None
            self.tell()
            for state in (*self._states.values(), *self._arriving.values()):
                state.end(reason, error)
            self._states.clear()
            self._arriving.clear()
            self.check_drained()

    def check_drained(self) -> None:
        """Tell whoever drains if no request is left."""
        if self._drained is not None and not self._states and not self._arriving:
            self._drained.set()

    def _remove(self, seq_id: int, reason: FinishReason) -> RequestState:
        """End a request in the scheduler, and count it. Its reader is told afterwards."""
        self.tell()
        self.now_in_force.scheduler.finish(seq_id, reason)
        state = self._states.pop(seq_id)
        self._forget(seq_id)
        self._figures.ended(state.sequence, reason, time.monotonic())
        self.check_drained()
        return state


def _never_fits(error: NeverFits, layout: Layout) -> str:
    """Why a request can never be carried out with this cut."""
    name = layout.stages[error.stage].name
    return (
        f"a prompt and answer of {error.num_tokens:,} tokens can never fit: they need {size(error.needed)} "
        f"of KV on stage {name}, which has {size(error.there)} for it; shorten them, or give it fewer layers"
    )
