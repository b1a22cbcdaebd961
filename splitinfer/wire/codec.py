"""Messages to frame headers and back: msgpack for the bytes, pydantic to validate what a peer sent.

A header is one msgpack map with the message's fields and its ``kind``. It is not trusted: unknown kinds, missing or
extra fields, wrong types and impossible plans all raise ProtocolError.

Of pydantic only the compiled validators are used: they read the step of one token in 6 µs. Checks in Python took as
long for that step, twice as long for eight blocks of drafts, and are more code to get wrong.
"""

from typing import Any, get_args

import msgpack
from pydantic import TypeAdapter, ValidationError

from splitinfer.errors import ProtocolError
from splitinfer.wire.messages import Message

_ADAPTERS: dict[str, TypeAdapter[Any]] = {cls.__name__.lower(): TypeAdapter(cls) for cls in get_args(Message)}
_READ = {kind: adapter.validator.validate_python for kind, adapter in _ADAPTERS.items()}
_WRITE = {kind: adapter.serializer.to_python for kind, adapter in _ADAPTERS.items()}


def kind_of(message: Message) -> str:
    """The name that selects a message's decoder: its class, in lower case."""
    return type(message).__name__.lower()


def encode(message: Message) -> bytes:
    """Encode a message as a frame header."""
    kind = kind_of(message)
    fields = _WRITE[kind](message, exclude_defaults=True)  # most fields of a decode are empty
    return bytes(msgpack.packb({"kind": kind, **fields}))


def _beginning(kind: str) -> bytes:
    """What a header of this kind has behind the number of its fields."""
    return bytes(msgpack.packb({"kind": kind})[1:])


_REJECTED = _beginning("rejected")
_ASKS = tuple(map(_beginning, ("askmanifest", "askranges")))
_LONGEST = 1 + max(map(len, (_REJECTED, *_ASKS)))


def is_rejected(header: bytes | memoryview) -> bool:
    """Whether a header is that of a Rejected message, as far as can be told without decoding it."""
    return bytes(header[1:_LONGEST]).startswith(_REJECTED)


def asks_for_weights(header: bytes | memoryview) -> bool:
    """Whether a header is that of AskManifest or AskRanges, as far as can be told without decoding it."""
    return bytes(header[1:_LONGEST]).startswith(_ASKS)


def decode(header: bytes | memoryview) -> Message:
    """Decode a frame header.

    Raises:
        ProtocolError: the bytes are no message of this protocol.
    """
    try:
        fields = msgpack.unpackb(header, strict_map_key=True, use_list=False)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        why = str(error) or type(error).__name__
        raise ProtocolError(f"the peer sent a header that cannot be read ({why})") from error
    kind = fields.pop("kind", None) if isinstance(fields, dict) else None
    if not isinstance(kind, str) or kind not in _READ:
        raise ProtocolError(f"the peer sent a message of unknown kind {kind!r:.40}")
    try:
        message: Message = _READ[kind](fields, extra="forbid")
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ProtocolError(
            f"the peer sent a {kind} message with a wrong {where or 'content'} ({first['msg']})"
        ) from error
    return message
