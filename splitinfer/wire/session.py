"""Which word may follow which on a link: a table, and a small machine that walks it.

Everything that affects the state is in ``_TABLE``; the machine does not know whether it is the end
that opened the link (its words go "down") or the one that answered ("up"). Both ends walk the same
table, so a word that is illegal to send is also illegal to receive.

    control link   NEW -Hello-> GREETED -Welcome-> FREE -Load-> LOADING -Progress*, Ready-> READY
                   READY -Connect-> JOINING -Connected-> READY        (every worker but the last)
                   READY -Compress-> READY                            (every worker but the last)
                   READY -ClockAsk-> TIMING -ClockTell-> READY        (some times, before the first step)
                   READY -Echo-> ECHOING -Echoed-> READY              (so are these)
                   READY -MeasureNext-> MEASURING -Measured-> READY
                   READY -Step, Result-> READY                        (first worker; last worker)
    data link      NEW -Hello-> GREETED -Welcome-> FREE -Step-> STREAM -Step-> STREAM ...
                   FREE -Echo-> FREE_ECHOING -Echoed-> FREE           (some times, before the first step)
    anywhere later -Refuse or Fault-> OVER

Whoever only looks at the links of a pipeline asks all that of a worker that has loaded nothing: from FREE back to FREE,
with Expect in place of Load.
"""

from enum import Enum

from splitinfer.errors import ProtocolError
from splitinfer.wire.codec import kind_of
from splitinfer.wire.messages import Message


class State(Enum):
    """Where a link is in its life."""

    NEW = "new"
    GREETED = "greeted"
    FREE = "free"
    LOADING = "loading"
    READY = "ready"
    JOINING = "joining"
    TIMING = "timing"
    ECHOING = "echoing"
    MEASURING = "measuring"
    FREE_JOINING = "joining, with nothing loaded"
    FREE_TIMING = "timing, with nothing loaded"
    FREE_ECHOING = "echoing, with nothing loaded"
    FREE_MEASURING = "measuring, with nothing loaded"
    STREAM = "stream"  # a data link that carries steps
    OVER = "over"


Move = tuple[State, str, str]  # state, direction, kind


def _aside(state: State, question: str, asked: State, answer: str) -> dict[Move, State]:
    """A question that leaves everything as it was."""
    return {
        (state, "down", question): asked,
        (asked, "up", answer): state,
        (asked, "up", "fault"): State.OVER,
    }


_TABLE: dict[Move, State] = {
    (State.NEW, "down", "hello"): State.GREETED,
    (State.GREETED, "up", "welcome"): State.FREE,
    (State.GREETED, "up", "refuse"): State.OVER,
    (State.FREE, "down", "load"): State.LOADING,
    (State.FREE, "down", "expect"): State.FREE,
    (State.FREE, "down", "step"): State.STREAM,
    (State.STREAM, "down", "step"): State.STREAM,
    (State.STREAM, "up", "fault"): State.OVER,
    (State.FREE, "up", "fault"): State.OVER,
    (State.LOADING, "up", "progress"): State.LOADING,
    (State.LOADING, "up", "ready"): State.READY,
    (State.LOADING, "up", "refuse"): State.OVER,
    (State.LOADING, "up", "fault"): State.OVER,
    (State.READY, "down", "compress"): State.READY,
    (State.READY, "down", "step"): State.READY,
    (State.READY, "up", "result"): State.READY,
    (State.READY, "up", "fault"): State.OVER,
    **_aside(State.READY, "connect", State.JOINING, "connected"),
    **_aside(State.READY, "clockask", State.TIMING, "clocktell"),
    **_aside(State.READY, "echo", State.ECHOING, "echoed"),
    **_aside(State.READY, "measurenext", State.MEASURING, "measured"),
    **_aside(State.FREE, "connect", State.FREE_JOINING, "connected"),
    **_aside(State.FREE, "clockask", State.FREE_TIMING, "clocktell"),
    **_aside(State.FREE, "echo", State.FREE_ECHOING, "echoed"),
    **_aside(State.FREE, "measurenext", State.FREE_MEASURING, "measured"),
}


class Session:
    """One end of a link. ``opened``: whether this end opened it."""

    def __init__(self, *, opened: bool) -> None:
        self._out, self._in = ("down", "up") if opened else ("up", "down")
        self.state = State.NEW

    def sending(self, message: Message) -> None:
        """Walk the table with a word of ours.

        Raises:
            ProtocolError: it may not be said now (an error of ours).
        """
        self._walk(self._out, kind_of(message))

    def received(self, message: Message) -> None:
        """Walk the table with a word of the peer's.

        Raises:
            ProtocolError: it may not be said now (an error of theirs).
        """
        self._walk(self._in, kind_of(message))

    def _walk(self, direction: str, kind: str) -> None:
        following = _TABLE.get((self.state, direction, kind))
        if following is None:
            who = "the peer sent" if direction == self._in else "about to send"
            raise ProtocolError(f"{who} a {kind} message, which cannot follow in state '{self.state.value}'")
        self.state = following
