"""Encodes and decodes the messages of the group. No sockets, no MLX.

**One size.** All messages of a link have MESSAGE_BYTES. A group does not transmit sizes, so a receiver must know them
beforehand; and consecutive messages of different sizes were reported to hang JACCL or to bring wrong data (mlx#3149).
A message:

    head: magic 'SPRD' | version u8 | kind u8 | flags u8 | num_next u8 | nonce u64 | seq u64 | num_used u32 | crc u32
    content, `num_used` bytes, then padding, which is whatever lay there before

All little-endian. `seq` counts the messages of a link, so a lost or repeated one is noticed at the next. With the flag
CHECKED `crc` covers head and content, else the head alone. `num_next`: how many messages follow at once, so that the
reader's child may wait for them before it tells its engine of any; they are called a run.

Kinds: DATA, a part of a frame; REST, after which the reader sleeps until it is woken; LAST, a whole frame or nothing,
after which no message follows.

**Frames.** A frame is a packet of `transports.framing`: a list of byte strings, here called pieces. The contents of as
many messages as it takes are one stream: `num_pieces u32 | crc u32 | the pieces' lengths, u64 each | the pieces`, where
`crc` covers the number and the lengths. The table is in the first message, and a frame begins a new message.

**Why 64 KiB.** It holds the step of a generated token: the hidden states of 4 sequences of width 8192 in bfloat16. A
larger one makes each such step wait for its padding, a smaller one makes prompts pay for each message. The figures are
in `scripts/README.md`. It is a power of two times 4 KiB and at most 512 KiB, so that JACCL sends it in one frame.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from transports.base import Buffer, FrameError
from transports.framing import as_bytes

MAGIC = b"SPRD"
VERSION = 2
CHECKED = 1  # flag: crc covers the content
MESSAGE_BYTES = 64 << 10
MAX_RUN = 16  # messages; a frame begins with a run of one, so that sending begins early, and each is twice as long

_HEAD = struct.Struct("<4sBBBBQQII")
HEAD_BYTES = _HEAD.size
ROOM_BYTES = MESSAGE_BYTES - HEAD_BYTES  # for content
_BEFORE_CRC = HEAD_BYTES - 4
_CRC = struct.Struct("<I")
_TABLE = struct.Struct("<II")
_LENGTH_BYTES = 8
MAX_PIECES = (ROOM_BYTES - _TABLE.size) // _LENGTH_BYTES


class Kind(IntEnum):
    DATA = 1
    REST = 2
    LAST = 3


@dataclass(frozen=True, slots=True)
class Head:
    """What a message's head says; its content is the `num_used` bytes after HEAD_BYTES."""

    kind: Kind
    num_used: int
    num_next: int = 0


def num_messages(num_bytes: int) -> int:
    """How many messages a content of `num_bytes` takes."""
    return -(-num_bytes // ROOM_BYTES)


def seal(message: memoryview, head: Head, *, nonce: int, seq: int, checked: bool = True) -> None:
    """Write the head of `message`, whose content is there already."""
    flags = CHECKED if checked else 0
    _HEAD.pack_into(message, 0, MAGIC, VERSION, head.kind, flags, head.num_next, nonce, seq, head.num_used, 0)
    _CRC.pack_into(message, _BEFORE_CRC, _crc(message, head.num_used, flags))


def unseal(message: memoryview, *, nonce: int, seq: int) -> Head:
    """The head of a message, whose number must be `seq`. Raises FrameError for anything else."""
    magic, version, kind, flags, num_next, its_nonce, its_seq, num_used, crc = _HEAD.unpack_from(message)
    if magic != MAGIC:
        raise FrameError("a message does not begin as one: the two ends are out of step")
    if version != VERSION:
        raise FrameError(f"rdma framing version {version} there, version {VERSION} here")
    if num_used > ROOM_BYTES or _crc(message, num_used, flags) != crc:
        raise FrameError("the checksum of a message does not match")
    if its_nonce != nonce:
        raise FrameError("a message of another link")
    if its_seq != seq:
        what = "missing" if its_seq > seq else "repeated"
        raise FrameError(f"message {its_seq} came, not {seq}: messages are {what}")
    is_sound = kind in Kind._value2member_map_ and not flags & ~CHECKED and num_next < MAX_RUN
    if not is_sound or (num_used == 0 and (kind == Kind.DATA or num_next > 0)):
        raise FrameError(f"a message of kind {kind} with {num_used} bytes, {num_next} to come, means nothing here")
    return Head(Kind(kind), num_used, num_next)


def _crc(message: memoryview, num_used: int, flags: int) -> int:
    crc = zlib.crc32(message[:_BEFORE_CRC])
    return zlib.crc32(message[HEAD_BYTES : HEAD_BYTES + num_used], crc) if flags & CHECKED else crc


def pack_table(lengths: Sequence[int]) -> bytes:
    """What precedes the pieces. Raises FrameError when it does not fit into one message."""
    if len(lengths) > MAX_PIECES:
        raise FrameError(f"{len(lengths) - 1} parts; an rdma link takes at most {MAX_PIECES - 1}")
    table = struct.pack(f"<{len(lengths)}Q", *lengths)
    return _TABLE.pack(len(lengths), _table_crc(table)) + table


def unpack_table(content: memoryview) -> tuple[int, ...]:
    """The pieces' lengths, from the first content of a frame. Raises FrameError."""
    if content.nbytes < _TABLE.size:
        raise FrameError(f"a frame begins with {content.nbytes} bytes")
    num_pieces, crc = _TABLE.unpack_from(content)
    table = content[_TABLE.size : table_bytes(num_pieces)]
    if not 0 < num_pieces <= MAX_PIECES or table.nbytes != _LENGTH_BYTES * num_pieces or _table_crc(table) != crc:
        raise FrameError("the lengths at the beginning of a frame are damaged")
    return struct.unpack(f"<{num_pieces}Q", table)


def table_bytes(num_pieces: int) -> int:
    return _TABLE.size + _LENGTH_BYTES * num_pieces


def _table_crc(table: bytes | memoryview) -> int:
    return zlib.crc32(table, len(table))


class Stream:
    """Reads several byte strings as one."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._views = [as_bytes(buffer) for buffer in reversed(buffers)]

    def fill(self, room: memoryview) -> int:
        """Copy as many of the next bytes into `room` as fit; returns how many."""
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

    def __init__(self, lengths: Sequence[int], content: memoryview) -> None:
        """`content`: the first message's, which began with the table. Raises FrameError when it is too long."""
        self._lengths = lengths
        self._data = bytearray(sum(lengths))
        self._num_filled = 0
        self.add(content[table_bytes(len(lengths)) :])

    @property
    def is_whole(self) -> bool:
        return self._num_filled == len(self._data)

    def add(self, content: memoryview) -> None:
        """The next message's. Raises FrameError when it is too long."""
        end = self._num_filled + content.nbytes
        if end > len(self._data):
            raise FrameError("more bytes than were announced")
        self._data[self._num_filled : end] = content
        self._num_filled = end

    @property
    def pieces(self) -> list[memoryview]:
        view, start, pieces = memoryview(self._data), 0, []
        for length in self._lengths:
            pieces.append(view[start : start + length])
            start += length
        return pieces
