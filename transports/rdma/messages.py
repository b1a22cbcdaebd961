"""Encodes and decodes the messages of the group. No sockets, no MLX.

**One size.** All messages of a link have MESSAGE_BYTES: a group does not transmit sizes. A message:

    head: magic 'SPRD' | rests u16 | num_next u16 | nonce u64 | seq u64 | num_used u32 | crc u32
    content, `num_used` bytes, then padding: old bytes of the buffer

All little-endian. `crc` covers head and content, always; `seq` counts the messages of a link, so a lost or repeated one
is noticed at the next. `num_next` is the number of messages of the same chunk that follow, so that the reader's child
reports only whole chunks to its engine. If `rests` is 1, the reader sleeps after the message until it is woken.

**Frames.** A frame's header and parts are its pieces. The contents of its messages together are one stream:
`kind u32 | num_pieces u32 | the pieces' lengths, u64 each | the pieces`. The first message holds this table, and a
frame begins a new message. Two kinds of `transports.framing` are used: DATA, and BYE, whose only piece is the reason.
At most CHUNK_MESSAGES go from an engine to its child, or back, at a time: a chunk.

**Why 64 KiB.** It holds the step of a generated token: 4 sequences of width 8192 in bfloat16. A larger one makes each
such step wait for its padding, a smaller one makes prompts pay for each message; and JACCL sends it in one frame.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from transports.base import Buffer, FrameError
from transports.framing import FrameKind, as_bytes

MAGIC = b"SPRD"
VERSION = 3  # the two ends compare it before they join
MESSAGE_BYTES = 64 << 10
CHUNK_MESSAGES = 8
MAX_STEP_BYTES = 64 << 10  # of the handshake on the control link

_HEAD = struct.Struct("<4sHHQQII")
HEAD_BYTES = _HEAD.size
ROOM_BYTES = MESSAGE_BYTES - HEAD_BYTES  # for content
_BEFORE_CRC = HEAD_BYTES - 4
_CRC = struct.Struct("<I")
_TABLE = struct.Struct("<II")
_LENGTH_BYTES = 8
MAX_PIECES = (ROOM_BYTES - _TABLE.size) // _LENGTH_BYTES


@dataclass(frozen=True, slots=True)
class Head:
    """What a message's head says; its content is the `num_used` bytes after HEAD_BYTES."""

    num_used: int
    num_next: int = 0
    rests: bool = False


def num_messages(num_bytes: int) -> int:
    """Return the number of messages that `num_bytes` of content take."""
    return -(-num_bytes // ROOM_BYTES)


def seal(message: memoryview, head: Head, *, nonce: int, seq: int) -> None:
    """Write the head of `message`, whose content is there already."""
    _HEAD.pack_into(message, 0, MAGIC, head.rests, head.num_next, nonce, seq, head.num_used, 0)
    _CRC.pack_into(message, _BEFORE_CRC, _crc(message, head.num_used))


def unseal(message: memoryview, *, nonce: int, seq: int) -> Head:
    """Return the head of a message, whose number must be `seq`. Raises FrameError for anything else."""
    magic, rests, num_next, its_nonce, its_seq, num_used, crc = _HEAD.unpack_from(message)
    if magic != MAGIC:
        raise FrameError("a message does not begin as one: the two ends are out of step")
    if num_used > ROOM_BYTES or _crc(message, num_used) != crc:
        raise FrameError("the checksum of a message does not match")
    if its_nonce != nonce:
        raise FrameError("a message of another link")
    if its_seq != seq:
        what = "missing" if its_seq > seq else "repeated"
        raise FrameError(f"message {its_seq} came, not {seq}: messages are {what}")
    if num_next >= CHUNK_MESSAGES or (num_used == 0 and (num_next > 0 or not rests)):
        raise FrameError(f"a message with {num_used} bytes, {num_next} to come, is not valid here")
    return Head(num_used, num_next, rests=bool(rests))


def _crc(message: memoryview, num_used: int) -> int:
    return zlib.crc32(message[HEAD_BYTES : HEAD_BYTES + num_used], zlib.crc32(message[:_BEFORE_CRC]))


def pack_table(kind: FrameKind, lengths: Sequence[int]) -> bytes:
    """Return the table that precedes the pieces. Raises FrameError if it does not fit into one message."""
    if len(lengths) > MAX_PIECES:
        raise FrameError(f"{len(lengths) - 1} parts; an rdma link takes at most {MAX_PIECES - 1}")
    return _TABLE.pack(kind, len(lengths)) + struct.pack(f"<{len(lengths)}Q", *lengths)


def unpack_table(content: memoryview) -> tuple[FrameKind, tuple[int, ...]]:
    """Return the kind and the pieces' lengths, from the first content of a frame. Raises FrameError."""
    kind, num_pieces = _TABLE.unpack_from(content) if content.nbytes >= _TABLE.size else (0, 0)
    if kind not in (FrameKind.DATA, FrameKind.BYE) or num_pieces == 0 or content.nbytes < table_bytes(num_pieces):
        raise FrameError(f"a frame of kind {kind} and {num_pieces} pieces begins with {content.nbytes} bytes")
    return FrameKind(kind), struct.unpack_from(f"<{num_pieces}Q", content, _TABLE.size)


def table_bytes(num_pieces: int) -> int:
    return _TABLE.size + _LENGTH_BYTES * num_pieces


class Stream:
    """Reads several byte strings as one."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._views = [as_bytes(buffer) for buffer in reversed(buffers)]

    def fill(self, room: memoryview) -> int:
        """Copy as many of the next bytes into `room` as fit. Return their number."""
        at = 0
        while self._views and at < room.nbytes:
            view = self._views.pop()
            num_bytes = min(view.nbytes, room.nbytes - at)
            room[at : at + num_bytes] = view[:num_bytes]
            at += num_bytes
            if num_bytes < view.nbytes:
                self._views.append(view[num_bytes:])
        return at


class Assembly:
    """A frame being received: the contents of its messages, one after the other."""

    def __init__(self, kind: FrameKind, lengths: Sequence[int], content: memoryview) -> None:
        """Take the first `content`, which begins with the table. Raises FrameError if it is too long."""
        self.kind = kind
        self._lengths = lengths
        self._data = bytearray(sum(lengths))
        self._num_filled = 0
        self.add(content[table_bytes(len(lengths)) :])

    @property
    def is_whole(self) -> bool:
        return self._num_filled == len(self._data)

    def add(self, content: memoryview) -> None:
        """Add the next content. Raises FrameError if it is too long."""
        end = self._num_filled + content.nbytes
        if end > len(self._data):
            raise FrameError("more bytes than were announced")
        self._data[self._num_filled : end] = content
        self._num_filled = end

    @property
    def pieces(self) -> list[memoryview]:
        view, ends = memoryview(self._data), accumulate(self._lengths, initial=0)
        return [view[start:end] for start, end in pairwise(ends)]
