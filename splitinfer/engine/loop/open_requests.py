"""The requests of the loop, on the engine's thread.

    add     give a submitted request (``Shared.submit``) to the scheduler
    take    take the tokens of a step; a stop string may end a request
    tell    give the tokens to their readers
    end     by the last token, an abort, a timeout, lack of memory, or the end of the engine

A request that ends is counted before its reader is told, because the reader may ask for figures at once.
"""

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator

from splitinfer.common.plain_text import size
from splitinfer.core.kv.budget import NeverFits
from splitinfer.core.plan import SampledToken
from splitinfer.core.scheduler.in_flight import TokenEvent
from splitinfer.core.sequence import FinishReason, Sequence
from splitinfer.engine.figures.figures import Figures
from splitinfer.engine.loop.drafting import Drafting
from splitinfer.engine.loop.requests import Came, RequestState
from splitinfer.engine.loop.shared import Shared
from splitinfer.errors import QueueFull, SplitinferError

_OVERFLOWED = "the model's numbers overflowed (NaN); use dtype bfloat16 or float32"
_NOT_KEPT = "the answer did not keep the form that was asked for, so it was ended"


class OpenRequests:
    """The requests of the loop. ``drafting`` is told of each request that ends."""

    def __init__(self, shared: Shared, figures: Figures, drafting: Drafting | None) -> None:
        self._shared, self._figures, self._drafting = shared, figures, drafting
        self._states: dict[int, RequestState] = {}
        self._untold: deque[tuple[RequestState, Came]] = deque()

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[int]:
        return iter([*self._states])

    def add(self, state: RequestState, submitted: float) -> None:
        """Give a request to the scheduler. ``submitted``: the time of submission, in seconds on the monotonic clock."""
        try:
            self._shared.take_in(state)
        except QueueFull as error:  # preempted sequences have filled the queue since ``submit`` checked it
            state.end(FinishReason.ERROR, str(error))
        except NeverFits as error:  # another cut was loaded since
            state.end(FinishReason.ERROR, self._shared.never_fits(error))
        else:
            self._states[state.seq_id] = state
            self._figures.submitted(state.sequence, submitted, time.monotonic())

    def take(self, events: Iterable[TokenEvent], now: float) -> None:
        """Take the tokens of a step. ``tell`` gives them to their readers."""
        for event in events:
            state = self._states.get(event.seq_id)
            if state is None:
                continue  # a stop string ended the request at an earlier token of this step
            if (why := _broken(state.sequence, event.token)) is not None:
                self._end(event.seq_id, FinishReason.ERROR, why)
                continue
            came, reason = state.take(event.token, event.finish_reason)
            if reason is not None:
                self._remove(event.seq_id, reason)
            self._untold.append((state, came))

    def tell(self) -> None:
        """Give the tokens of ``take`` to their readers. A reader that wakes takes the interpreter's lock."""
        while self._untold:
            state, came = self._untold.popleft()
            state.tell(came)

    def abort(self, seq_id: int) -> None:
        """End a request early. Do nothing if it has ended."""
        if seq_id in self._states:
            self._end(seq_id, FinishReason.ABORT)

    def abort_all(self) -> None:
        """End every request early."""
        for seq_id in self:
            self.abort(seq_id)

    def expire(self) -> bool:
        """End the requests that have timed out. Return whether there were any."""
        seq_ids = self._shared.scheduler.expire(time.monotonic())
        for seq_id in seq_ids:
            self._end(seq_id, FinishReason.ABORT, "it timed out")
        return bool(seq_ids)

    def end_unable(self) -> None:
        """End the requests whose KV no longer fits because a stage's device ran out of memory."""
        for seq, error in self._shared.scheduler.unable():
            reason = (
                f"{error.num_tokens:,} tokens need {size(error.needed)} of KV on stage {self._shared.stage_of(error)}, "
                f"whose device ran out of memory and has {size(error.there)} for it; shorten the request, or give the "
                "stage fewer layers"
            )
            self._end(seq.seq_id, FinishReason.ERROR, reason)

    def end_all(self, reason: FinishReason, failure: SplitinferError) -> None:
        """End every request, including those that the loop has not seen, and refuse new ones. If ``reason`` is an
        error, each request gets the failure's sentence."""
        arriving = self._shared.fail(failure)
        self.tell()
        for state in (*self._states.values(), *arriving):
            state.end(reason, str(failure) if reason is FinishReason.ERROR else None)
        self._states.clear()
        self._shared.note_empty()

    def note_empty(self) -> None:
        """Set the draining event if no request is left."""
        if not self._states:
            self._shared.note_empty()

    def _end(self, seq_id: int, reason: FinishReason, error: str | None = None) -> None:
        """End a request without a token."""
        self._remove(seq_id, reason).end(reason, error)

    def _remove(self, seq_id: int, reason: FinishReason) -> RequestState:
        """End a request in the scheduler and count it. The caller tells its reader afterwards."""
        self.tell()
        self._shared.scheduler.finish(seq_id, reason)
        state = self._states.pop(seq_id)
        if self._drafting is not None:
            self._drafting.forget(seq_id)
        self._figures.ended(state.sequence, reason, time.monotonic())
        self.note_empty()
        return state


def _broken(seq: Sequence, token: SampledToken) -> str | None:
    """Return why an answer's token is not valid, or None if it is."""
    if seq.rules is not None:
        is_refused = seq.rules.refuses(seq.answer)
        if is_refused or seq.rules.failure is not None:
            return seq.rules.failure or _NOT_KEPT
    scored = [token, *seq.scores] if seq.num_generated == 1 else [token]
    return _OVERFLOWED if any(one.logprob is not None and math.isnan(one.logprob) for one in scored) else None
