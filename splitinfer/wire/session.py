"""The state machine of a link: which message may follow which.

All transitions are in ``_TABLE``. Messages of the end that opened the link go "down", those of the other end "up". Both
ends use the same table, so a message that is illegal to send is also illegal to receive.

    control link   NEW -Hello-> GREETED -Welcome-> FREE -Load-> LOADING -Progress*, Ready-> READY
                   FREE -Profile-> PROFILING -Progress*, Profiled-> FREE
                   READY -Connect-> JOINING -Connected-> READY        (every worker but the last)
                   READY -ClockAsk-> TIMING -ClockTell-> READY        (repeatedly, before the first step)
                   READY -Step, Result-> READY                        (first worker; last worker)
                   READY -Void-> READY                                (every worker but the last)
    data link      NEW -Hello-> GREETED -Welcome-> FREE -Step-> STREAM -Step-> STREAM ...
    weights        LOADING -AskManifest, AskRanges, and their answers-> LOADING   (the worker asks)
                   NEW -Hello-> GREETED -Welcome-> FREE -AskManifest-> READING -the same-> READING   (a reader asks)
    anywhere later -Refuse or Fault-> OVER

A coordinator that only looks at workers sends ClockAsk and Probe from FREE, and is FREE again after the reply.
"""

from enum import Enum

from splitinfer.errors import ProtocolError
from splitinfer.wire.codec import kind_of
from splitinfer.wire.messages import Message


class State(Enum):
    """The states of a link."""

    NEW = "new"
    GREETED = "greeted"
    FREE = "free"
    PROFILING = "profiling"
    LOADING = "loading"
    READY = "ready"
    JOINING = "joining"
    TIMING = "timing"
    FREE_TIMING = "timing, with nothing loaded"
    PROBING = "probing"
    STREAM = "stream"  # a data link that carries steps
    READING = "reading"  # a link on which weights are taken from a worker
    OVER = "over"


Move = tuple[State, str, str]  # state, direction, kind


def _exchange(state: State, request: str, waiting: State, reply: str) -> dict[Move, State]:
    """The transitions of a request whose reply leads back to the same state."""
    return {
        (state, "down", request): waiting,
        (waiting, "up", reply): state,
        (waiting, "up", "fault"): State.OVER,
    }


_TOLD = ("tellmanifest", "tellrange", "unavailable")


def _weights(state: State, asking: str, telling: str) -> dict[Move, State]:
    """The transitions of asks for weights and their answers, any number of which may be under way."""
    asks = {(state, asking, kind): state for kind in ("askmanifest", "askranges")}
    return {**asks, **{(state, telling, kind): state for kind in _TOLD}}


_TABLE: dict[Move, State] = {
    (State.NEW, "down", "hello"): State.GREETED,
    (State.GREETED, "up", "welcome"): State.FREE,
    (State.GREETED, "up", "refuse"): State.OVER,
    (State.FREE, "down", "load"): State.LOADING,
    (State.PROFILING, "up", "progress"): State.PROFILING,
    (State.PROFILING, "up", "refuse"): State.OVER,
    (State.FREE, "down", "step"): State.STREAM,
    (State.STREAM, "down", "step"): State.STREAM,
    (State.STREAM, "up", "fault"): State.OVER,
    (State.FREE, "up", "fault"): State.OVER,
    (State.LOADING, "up", "progress"): State.LOADING,
    (State.LOADING, "up", "ready"): State.READY,
    (State.LOADING, "up", "refuse"): State.OVER,
    (State.LOADING, "up", "fault"): State.OVER,
    (State.READY, "down", "step"): State.READY,
    (State.READY, "down", "void"): State.READY,
    (State.READY, "up", "result"): State.READY,
    (State.READY, "up", "fault"): State.OVER,
    (State.FREE, "down", "askmanifest"): State.READING,
    (State.READING, "up", "fault"): State.OVER,
    **_weights(State.READING, "down", "up"),
    **_weights(State.LOADING, "up", "down"),
    **_exchange(State.READY, "connect", State.JOINING, "connected"),
    **_exchange(State.READY, "clockask", State.TIMING, "clocktell"),
    **_exchange(State.FREE, "profile", State.PROFILING, "profiled"),
    **_exchange(State.FREE, "clockask", State.FREE_TIMING, "clocktell"),
    **_exchange(State.FREE, "probe", State.PROBING, "probed"),
}


class Session:
    """The state of one end of a link. ``opened``: whether this end opened it.

    Steps and results, which leave the state as it is, may be sent on another thread than everything else.
    """

    def __init__(self, *, opened: bool) -> None:
        self._out, self._in = ("down", "up") if opened else ("up", "down")
        self.state = State.NEW

    def sending(self, message: Message) -> None:
        """Make the transition of a message that is about to be sent.

        Raises:
            ProtocolError: it is not allowed now (an error of this end).
        """
        self._move(self._out, kind_of(message))

    def received(self, message: Message) -> None:
        """Make the transition of a message that was received.

        Raises:
            ProtocolError: it is not allowed now (an error of the peer).
        """
        self._move(self._in, kind_of(message))

    def _move(self, direction: str, kind: str) -> None:
        following = _TABLE.get((self.state, direction, kind))
        if following is None:
            prefix = "the peer sent" if direction == self._in else "about to send"
            raise ProtocolError(f"{prefix} a {kind} message, which cannot follow in state '{self.state.value}'")
        self.state = following
