"""Bytes to messages and back on one link, and which message may come when.

A link has four phases, and the role that its Hello names says what is allowed in each. Messages of the end that opened
the link go "down", those of the other end "up". Both ends use the same table, so a message that is illegal to send is
also illegal to receive.

    role         hello          load                      run                  end
    coordinator  the handshake  questions, then the load  steps and results    no message
    upstream     the handshake                            steps                no message
    reader       the handshake                            weights              no message
    probe        the handshake                                                 no message, but frames (``links.probe``)

Welcome ends the first phase, and Ready the second; Refuse or Fault ends the link. The table does not say whether a
reply was asked for: an end that does not wait for one ignores it.
"""

from enum import Enum

from splitinfer.errors import ProtocolError
from splitinfer.wire import codec
from splitinfer.wire import messages as m


class Phase(Enum):
    """The phases of a link."""

    HELLO = "hello"
    LOAD = "load"
    RUN = "run"
    END = "end"


Kinds = frozenset[type[m.Message]]

_ASKS: Kinds = frozenset({m.AskManifest, m.AskRanges})
_TELLS: Kinds = frozenset({m.TellManifest, m.TellRange, m.Unavailable})
_NOTHING: Kinds = frozenset()
_HANDSHAKE: tuple[Kinds, Kinds] = frozenset({m.Hello}), frozenset({m.Welcome, m.Refuse})

_ALLOWED: dict[tuple[str, Phase], tuple[Kinds, Kinds]] = {  # down, up
    ("coordinator", Phase.LOAD): (
        _TELLS | {m.Profile, m.Probe, m.Load, m.Gather, m.Spawn, m.Meet},
        _ASKS | {m.Progress, m.Profiled, m.Probed, m.Ready, m.Refuse, m.Fault, m.Gather, m.Spawned, m.Met},
    ),
    ("coordinator", Phase.RUN): (
        frozenset({m.Connect, m.Step, m.Rejected}),
        frozenset({m.Connected, m.Result, m.Fault, m.Digest}),
    ),
    ("upstream", Phase.RUN): (frozenset({m.Step}), frozenset({m.Fault})),
    ("reader", Phase.RUN): (_ASKS, _TELLS | {m.Fault}),
}
_AFTER_WELCOME = {"coordinator": Phase.LOAD, "upstream": Phase.RUN, "reader": Phase.RUN}


class Session:
    """One end of a link. ``opened``: whether this end opened it.

    Messages that leave the phase as it is, as steps and results do, may be sent on another thread than all others.
    """

    def __init__(self, *, opened: bool) -> None:
        self._opened, self._role = opened, ""
        self._enter(Phase.HELLO)

    def _enter(self, phase: Phase) -> None:
        nothing = _NOTHING, _NOTHING
        down, up = _HANDSHAKE if phase is Phase.HELLO else _ALLOWED.get((self._role, phase), nothing)
        self._sends, self._receives = (down, up) if self._opened else (up, down)
        self.phase = phase

    def encode(self, message: m.Message) -> bytes:
        """The header of a message that is about to be sent.

        Raises:
            ProtocolError: it is not allowed now (an error of this end).
        """
        self._take(message, self._sends, "about to send")
        return codec.encode(message)

    def decode(self, header: bytes | memoryview) -> m.Message:
        """The message of a header that was received.

        Raises:
            ProtocolError: it is no message, or not allowed now (an error of the peer).
        """
        message = codec.decode(header)
        self._take(message, self._receives, "the peer sent")
        return message

    def _take(self, message: m.Message, allowed: Kinds, who: str) -> None:
        if type(message) not in allowed:
            kind = codec.kind_of(message)
            raise ProtocolError(f"{who} a {kind} message, which has no place in the phase '{self.phase.value}'")
        match message:
            case m.Step() | m.Result() | m.Digest():
                return
            case m.Hello():
                self._role = message.role
            case m.Welcome():
                self._enter(_AFTER_WELCOME.get(self._role, Phase.END))
            case m.Ready():
                self._enter(Phase.RUN)
            case m.Refuse() | m.Fault():
                self._enter(Phase.END)
