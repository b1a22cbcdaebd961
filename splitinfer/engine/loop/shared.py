"""The state that the threads of an engine share.

The engine's thread creates and owns everything else. Other threads have no reference to the loop: they put a call into
the inbox, and the engine's thread makes it between two steps. Two more objects are shared and guard themselves: the
pipeline, because the thread that waits for the device may send its steps, and the figures, which any thread may read.

    any thread           submit, begin_draining; inbox.put(call); reads the attributes
    the engine's thread  take_in, note_empty, fail; writes in_force, drafter, lost_stage, absent, is_changing, failure
    the closing thread   writes is_closing

One lock ensures that a refused request never reaches the loop, and that a loop that ends also ends the requests that
it has not seen.
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from splitinfer.common.plain_text import size
from splitinfer.core.kv.budget import NeverFits
from splitinfer.core.layout import Layout
from splitinfer.core.scheduler.scheduler import Scheduler
from splitinfer.engine.drafts.drafters import Drafter
from splitinfer.engine.fleet.pipeline import StageEvent
from splitinfer.engine.loop.requests import RequestState
from splitinfer.errors import Draining, RequestError, SplitinferError


class InForce(NamedTuple):
    """The scheduler and the cut that it plans for, as one value, so that other threads read both at once."""

    scheduler: Scheduler
    layout: Layout


class Shared:
    """The shared state of an engine. Any thread may use it, unless a method says otherwise.

    inbox: the stages' events, and calls from any thread, which get the loop.
    in_force: the scheduler and its cut; ``None`` before the stages are loaded.
    drafter: other threads read only its name; the rest belongs to the loop.
    absent: what is said while workers are away and the others go on without them; ``None``: none is left out.
    lost_stage: the stage that requests wait for, or waited for until the timeout.
    is_changing: whether another cut is being loaded.
    failure: why the engine accepts no more requests.
    """

    def __init__(self, inbox: "queue.SimpleQueue[StageEvent | Callable[[Any], object]]") -> None:
        self.inbox = inbox
        self.in_force: InForce | None = None
        self.drafter: Drafter | None = None
        self.lost_stage: str | None = None
        self.absent: str | None = None
        self.is_changing = self.is_closing = False
        self.failure: SplitinferError | None = None
        self._lock = threading.Lock()
        self._arriving: dict[int, RequestState] = {}  # submitted, but not yet given to the scheduler
        self._drained: threading.Event | None = None  # set once no request is left; None unless draining

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler in force, once the stages are loaded."""
        assert self.in_force is not None
        return self.in_force.scheduler

    def submit(self, state: RequestState) -> None:
        """Check that a request has room, and give it to the loop.

        Raises:
            QueueFull: too many requests wait already.
            RequestError: its KV can never fit.
            SplitinferError: the engine has failed, was closed, or is draining.
        """
        submitted = time.monotonic()
        with self._lock:
            if self.failure is not None:
                raise self.failure
            if self._drained is not None:
                raise Draining("the coordinator is shutting down and takes no new requests")
            scheduler = self.scheduler
            try:
                scheduler.config.check_room(state.sequence, len(scheduler.waiting) + len(self._arriving))
            except NeverFits as error:
                raise RequestError(self.never_fits(error)) from error
            self._arriving[state.seq_id] = state
            self.inbox.put(lambda loop: loop.requests.add(state, submitted))

    def take_in(self, state: RequestState) -> None:
        """Give a request to the scheduler, on the engine's thread. Raises QueueFull, NeverFits."""
        with self._lock:  # so that ``submit`` does not count the request twice
            self._arriving.pop(state.seq_id, None)
            self.scheduler.add(state.sequence)

    def stage_of(self, error: NeverFits) -> str:
        """Return the name of the stage that lacks the room."""
        assert self.in_force is not None
        return self.in_force.layout.stages[error.stage].name

    def never_fits(self, error: NeverFits) -> str:
        """Return the sentence for a request that can never fit the cut in force."""
        return (
            f"a prompt and answer of {error.num_tokens:,} tokens can never fit: they need {size(error.needed)} of KV "
            f"on stage {self.stage_of(error)}, which has {size(error.there)} for it; shorten them, or give it fewer "
            "layers"
        )

    def begin_draining(self) -> threading.Event:
        """Refuse new requests. Return an event that is set when no request is left or the engine has failed."""
        with self._lock:
            drained = self._drained = self._drained or threading.Event()
            if self.failure is not None:
                drained.set()
            return drained

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused."""
        return self._drained is not None

    def note_empty(self) -> None:
        """Set the draining event if no request is arriving. The loop, on its thread, calls this without requests."""
        if self._drained is not None and not self._arriving:
            self._drained.set()

    def fail(self, failure: SplitinferError) -> list[RequestState]:
        """Refuse requests with ``failure``, on the engine's thread, and return the ones that the loop has not seen."""
        with self._lock:
            self.failure = failure
            arriving = [*self._arriving.values()]
            self._arriving.clear()
            return arriving
