"""What the threads of an engine share, all of it in this one place.

The engine's thread makes and owns everything else. No other thread has a reference to the loop; it puts a call into the
inbox, and the engine's thread carries it out between two steps. Two more things are shared, and guard themselves: the
pipeline, whose steps may be sent by the thread that waits for the device, and the figures, which anybody may read.

    any thread           submit, begin_draining; inbox.put(call); reads of what is below
    the engine's thread  take_in, note_empty, fail; writes in_force, drafter, lost_stage, is_changing, failure
    who closes           writes is_closing

One lock makes certain that a refused request never reaches the loop, and that a loop that ends ends those that it has
not seen.
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
    """The scheduler, and the cut that it plans for. Both at once: other threads read them."""

    scheduler: Scheduler
    layout: Layout


class Shared:
    """What an engine's threads share. Without another note any thread may use it.

    inbox: calls from any thread, which get the loop, and what stages bring.
    in_force: what requests are scheduled by; ``None`` before the stages are loaded.
    drafter: for its name; all else of it is the loop's.
    lost_stage: the stage that requests wait for, or waited for until they gave up.
    is_changing: whether another cut is being loaded.
    failure: why no request can be taken any more.
    """

    def __init__(self, inbox: "queue.SimpleQueue[StageEvent | Callable[[Any], object]]") -> None:
        self.inbox = inbox
        self.in_force: InForce | None = None
        self.drafter: Drafter | None = None
        self.lost_stage: str | None = None
        self.is_changing = self.is_closing = False
        self.failure: SplitinferError | None = None
        self._lock = threading.Lock()
        self._arriving: dict[int, RequestState] = {}  # submitted, and not yet taken in
        self._drained: threading.Event | None = None  # set once no request is left, when that is wanted

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler in force, once the stages are loaded."""
        assert self.in_force is not None
        return self.in_force.scheduler

    def submit(self, state: RequestState) -> None:
        """Check a request, and hand it to the loop.

        Raises:
            QueueFull: too many wait already.
            RequestError: its KV can never fit.
            SplitinferError: the engine has failed, was closed, or is being drained.
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
        """Give a request to the scheduler. Raises QueueFull, NeverFits. On the engine's thread."""
        with self._lock:  # meanwhile it would count twice
            self._arriving.pop(state.seq_id, None)
            self.scheduler.add(state.sequence)

    def stage_of(self, error: NeverFits) -> str:
        """Return the name of the stage on which something does not fit."""
        assert self.in_force is not None
        return self.in_force.layout.stages[error.stage].name

    def never_fits(self, error: NeverFits) -> str:
        """Return why a request can never be carried out with the cut in force."""
        return (
            f"a prompt and answer of {error.num_tokens:,} tokens can never fit: they need {size(error.needed)} of KV "
            f"on stage {self.stage_of(error)}, which has {size(error.there)} for it; shorten them, or give it fewer "
            "layers"
        )

    def begin_draining(self) -> threading.Event:
        """Take no new request; the event is set when none is left (``note_empty``), or the engine has failed."""
        with self._lock:
            drained = self._drained = self._drained or threading.Event()
            if self.failure is not None:
                drained.set()
            return drained

    @property
    def is_draining(self) -> bool:
        """Whether no new request is taken any more."""
        return self._drained is not None

    def note_empty(self) -> None:
        """The loop has no request: who drains is told, if none is arriving. On the engine's thread."""
        if self._drained is not None and not self._arriving:
            self._drained.set()

    def fail(self, failure: SplitinferError) -> list[RequestState]:
        """Take no request any more, for this reason; those that the loop has not seen. On the engine's thread."""
        with self._lock:
            self.failure = failure
            arriving = [*self._arriving.values()]
            self._arriving.clear()
            return arriving
