"""Turns messages into frame headers and back, and checks which message may come when on a link.

A header is one msgpack map with the message's fields and its ``kind``, or for Rows and Result a list (``steps``). It is
not trusted: unknown kinds, missing or extra fields, wrong types and impossible plans all raise ProtocolError.

A link has four phases, and the role in its Hello decides which messages are allowed in each. Messages of the end that
opened the link go "down", messages of the other end "up".

    role         hello          load                      run                  end
    coordinator  the handshake  questions, then the load  steps and results    no message
    upstream     the handshake                            steps                no message
    reader       the handshake                            weights              no message
    probe        the handshake                                                 no message, but frames (``links.probe``)

Welcome ends the first phase, and Ready the second; Refuse or Fault ends the link. The table does not say whether a
reply was asked for: an end that does not wait for one ignores it.
"""

from enum import Enum
from typing import Any, get_args

import msgpack
from pydantic import TypeAdapter, ValidationError

from splitinfer.errors import ProtocolError
from splitinfer.wire import messages as m
from splitinfer.wire.steps import READ_ERRORS, fields_of, message_of

_ADAPTERS: dict[str, TypeAdapter[Any]] = {
    cls.__name__.lower(): TypeAdapter(cls) for cls in get_args(m.Message) if cls not in (m.Rows, m.Result)
}
_READ = {kind: adapter.validator.validate_python for kind, adapter in _ADAPTERS.items()}
_WRITE = {kind: adapter.serializer.to_python for kind, adapter in _ADAPTERS.items()}


def encode(message: m.Message) -> bytes:
    """Encode a message as a frame header."""
    if isinstance(message, m.Rows | m.Result):
        return bytes(msgpack.packb(fields_of(message)))
    kind = type(message).__name__.lower()
    fields = _WRITE[kind](message, exclude_defaults=True)  # most fields of a decode are empty
    return bytes(msgpack.packb({"kind": kind, **fields}))


def decode(header: bytes | memoryview) -> m.Message:
    """Decode a frame header.

    Raises:
        ProtocolError: the bytes are not a message of this protocol.
    """
    try:
        fields = msgpack.unpackb(header, strict_map_key=True, use_list=False)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        why = str(error) or type(error).__name__
        raise ProtocolError(f"the peer sent a header that cannot be read ({why})") from error
    if isinstance(fields, tuple):
        try:
            return message_of(fields)
        except READ_ERRORS as error:
            raise ProtocolError(f"the peer sent a message that cannot be read, {fields[:1]!r:.40} ({error})") from error
    kind = fields.pop("kind", None) if isinstance(fields, dict) else None
    if not isinstance(kind, str) or kind not in _READ:
        raise ProtocolError(f"the peer sent a message of unknown kind {kind!r:.40}")
    try:
        message: m.Message = _READ[kind](fields, extra="forbid")
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ProtocolError(
            f"the peer sent a {kind} message with a wrong {where or 'content'} ({first['msg']})"
        ) from error
    return message


def asks_for_weights(header: bytes | memoryview) -> bool:
    """Return whether a header belongs to AskManifest or AskRanges."""
    try:
        return type(decode(header)) in _ASKS
    except ProtocolError:
        return False


class Phase(Enum):
    """The phases of a link."""

    HELLO = "hello"
    LOAD = "load"
    RUN = "run"
    END = "end"


MessageKinds = frozenset[type[m.Message]]

_ASKS: MessageKinds = frozenset({m.AskManifest, m.AskRanges})
_TELLS: MessageKinds = frozenset({m.TellManifest, m.TellRange, m.Unavailable})
_NOTHING: tuple[MessageKinds, MessageKinds] = frozenset(), frozenset()
_HANDSHAKE: tuple[MessageKinds, MessageKinds] = frozenset({m.Hello}), frozenset({m.Welcome, m.Refuse})

_ALLOWED: dict[tuple[str, Phase], tuple[MessageKinds, MessageKinds]] = {  # down, up
    ("coordinator", Phase.LOAD): (
        _TELLS | {m.Profile, m.Probe, m.Load, m.Gather, m.Spawn, m.Meet, m.Connect},
        _ASKS | {m.Progress, m.Profiled, m.Probed, m.Ready, m.Refuse, m.Fault, m.Gather, m.Spawned, m.Met, m.Connected},
    ),
    ("coordinator", Phase.RUN): (
        frozenset({m.Connect, m.Shown, m.Plan, m.Rows}),
        frozenset({m.Connected, m.Result, m.Fault, m.Digest}),
    ),
    ("upstream", Phase.RUN): (frozenset({m.Shown, m.Plan, m.Rows}), frozenset({m.Fault})),
    ("reader", Phase.RUN): (_ASKS, _TELLS | {m.Fault}),
}
_TURNS = (m.Hello, m.Welcome, m.Ready, m.Refuse, m.Fault)  # all others keep the phase
_AFTER_WELCOME = {"coordinator": Phase.LOAD, "upstream": Phase.RUN, "reader": Phase.RUN}


class Session:
    """One end of a link. ``opened``: whether this end opened it.

    Messages that do not change the phase, such as steps and results, may be sent on a thread of their own.
    """

    def __init__(self, *, opened: bool) -> None:
        self._opened, self._role = opened, ""
        self._enter(Phase.HELLO)

    def _enter(self, phase: Phase) -> None:
        down, up = _HANDSHAKE if phase is Phase.HELLO else _ALLOWED.get((self._role, phase), _NOTHING)
        self._sends, self._receives = (down, up) if self._opened else (up, down)
        self.phase = phase

    def encode(self, message: m.Message) -> bytes:
        """Return the header of a message to send.

        Raises:
            ProtocolError: the message is not allowed now (an error of this end).
        """
        if type(message) not in self._sends:
            raise self._misplaced("about to send", message)
        if isinstance(message, _TURNS):
            self._follow(message)
        return encode(message)

    def decode(self, header: bytes | memoryview) -> m.Message:
        """Return the message of a header that was received.

        Raises:
            ProtocolError: it is not a message, or not allowed now (an error of the peer).
        """
        message = decode(header)
        if type(message) not in self._receives:
            raise self._misplaced("the peer sent", message)
        if isinstance(message, _TURNS):
            self._follow(message)
        return message

    def _misplaced(self, who: str, message: m.Message) -> ProtocolError:
        kind = type(message).__name__.lower()
        return ProtocolError(f"{who} a {kind} message that is not allowed in the phase '{self.phase.value}'")

    def _follow(self, message: m.Message) -> None:
        match message:
            case m.Hello():
                self._role = message.role
            case m.Welcome():
                self._enter(_AFTER_WELCOME.get(self._role, Phase.END))
            case m.Ready():
                self._enter(Phase.RUN)
            case _:
                self._enter(Phase.END)
