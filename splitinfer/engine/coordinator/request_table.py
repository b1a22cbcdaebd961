"""The requests of an engine, from the call that submits one to its end.

Requests are submitted from any thread and carried out by the engine's. Between the two they are *arriving*: refused
requests must not reach the loop, and a loop that ends must end those that it has not seen. One lock makes both certain.
"""

import threading
from collections.abc import Callable, Iterator

from splitinfer.core.sequence import FinishReason
from splitinfer.engine.coordinator.requests import RequestState
from splitinfer.errors import PeerError, SplitinferError


class RequestTable:
    """``arrive``, ``begin_draining`` and ``failure`` may be used from any thread, the rest on the engine's."""

    def __init__(self) -> None:
        self._states: dict[int, RequestState] = {}
        self._arriving: dict[int, RequestState] = {}  # submitted, and not yet taken by the loop
        self._lock = threading.Lock()
        self._drained: threading.Event | None = None  # set once no request is left, when that is wanted
        self.failure: SplitinferError | None = None
        """Why no request can be taken any more."""

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._states))

    def __getitem__(self, seq_id: int) -> RequestState:
        return self._states[seq_id]

    def get(self, seq_id: int) -> RequestState | None:
        """The request, unless it has ended."""
        return self._states.get(seq_id)

    def arrive(self, state: RequestState, check: Callable[[int], None], hand_over: Callable[[], None]) -> None:
        """Take a request in and call ``hand_over``. ``check`` gets the number of those arriving, and may refuse.

        Raises:
            SplitinferError: the engine has failed, was closed, or is being drained; or what ``check`` raises.
        """
        with self._lock:
            if self.failure is not None:
                raise self.failure
            if self._drained is not None:
                raise PeerError("the coordinator is shutting down and takes no new requests")
            check(len(self._arriving))
            self._arriving[state.seq_id] = state
            hand_over()

    def add(self, state: RequestState) -> None:
        """The loop carries a request out from now on."""
        self._states[state.seq_id] = state

    def arrived(self, state: RequestState) -> None:
        """The loop has taken a request, or refused it."""
        with self._lock:
            self._arriving.pop(state.seq_id, None)

    def remove(self, seq_id: int) -> RequestState:
        """Forget a request that has ended."""
        return self._states.pop(seq_id)

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

    def check_drained(self) -> None:
        """Tell whoever drains if no request is left."""
        if self._drained is not None and not self._states and not self._arriving:
            self._drained.set()

    def end_all(self, reason: FinishReason) -> None:
        """End every request, those that are arriving too, with the failure's sentence if the reason is an error."""
        with self._lock:
            error = str(self.failure) if reason is FinishReason.ERROR else None
            for state in (*self._states.values(), *self._arriving.values()):
                state.end(reason, error)
            self._states.clear()
            self._arriving.clear()
            self.check_drained()
