"""Encodes and decodes the messages of the group. No sockets, no MLX.

A frame is a packet of `transports.framing`: a list of byte strings, here called pieces. The group does not transmit
message sizes, so a header lists them:

    first message, FIRST_BYTES:    head | lengths of the pieces, u64 each | the pieces, as far as there is room
    then, CHUNK_BYTES each:        the rest of the pieces; the last one is as short as it can be

    head: magic 'SPRD' | version u8 | kind u8 | num_pieces u16 | nonce u64 | seq u64 | num_bytes u64 | crc u32

All little-endian. `crc` covers head and lengths. `seq` counts first messages. `num_bytes` is the sum of the lengths, so
both ends know how many chunks follow. Bytes after the pieces in a first message are padding.

Kinds: PACKET, which has pieces; REST, after which the reader sleeps until it is woken; LAST, a packet after which no
message follows.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from transports.base import Buffer, FrameError, LinkOptions
from transports.framing import PRELUDE_BYTES, as_bytes

MAGIC = b"SPRD"
VERSION = 1
FIRST_BYTES = 16 << 10  # the plan and the hidden state of a step of few tokens
CHUNK_BYTES = 2 << 20  # bounds a child's memory; large enough for the cost of a message not to matter

_HEAD = struct.Struct("<4sBBHQQQI")
_BEFORE_CRC = _HEAD.size - 4
_CRC = struct.Struct("<I")
_LENGTH_BYTES = 8
MAX_PIECES = (FIRST_BYTES - _HEAD.size) // _LENGTH_BYTES


class Kind(IntEnum):
    PACKET = 1
    REST = 2
    LAST = 3


@dataclass(frozen=True, slots=True)
class Head:
    """A first message's head. `start`: offset of the pieces in the message."""

    kind: Kind
    seq: int
    num_bytes: int
    lengths: tuple[int, ...]

    @property
    def start(self) -> int:
        return _HEAD.size + _LENGTH_BYTES * len(self.lengths)

    @property
    def num_inline(self) -> int:
        """Bytes of the pieces in the first message."""
        return min(self.num_bytes, FIRST_BYTES - self.start)

    @property
    def chunks(self) -> Iterator[int]:
        """The sizes of the messages that follow."""
        left = self.num_bytes - self.num_inline
        while left > 0:
            yield min(left, CHUNK_BYTES)
            left -= CHUNK_BYTES


def pack_head(kind: Kind, *, nonce: int, seq: int, lengths: Sequence[int] = ()) -> bytes:
    """Head and lengths. Raises FrameError when the lengths do not fit."""
    if len(lengths) > MAX_PIECES:
        raise FrameError(f"{len(lengths) - 1} parts; an rdma link takes at most {MAX_PIECES - 1}")
    before = _HEAD.pack(MAGIC, VERSION, kind, len(lengths), nonce, seq, sum(lengths), 0)[:_BEFORE_CRC]
    table = struct.pack(f"<{len(lengths)}Q", *lengths)
    return b"".join((before, _CRC.pack(zlib.crc32(table, zlib.crc32(before))), table))


def unpack_head(first: memoryview, *, nonce: int, seq: int) -> Head:
    """The head of a first message, whose number must be `seq`. Raises FrameError for anything else."""
    magic, version, kind, num_pieces, its_nonce, its_seq, num_bytes, crc = _HEAD.unpack_from(first)
    if magic != MAGIC:
        raise FrameError("a message does not begin as one: the two ends are out of step")
    if version != VERSION:
        raise FrameError(f"rdma framing version {version} there, version {VERSION} here")
    if num_pieces > MAX_PIECES:
        raise FrameError(f"{num_pieces} pieces; at most {MAX_PIECES} are possible")
    table = first[_HEAD.size : _HEAD.size + _LENGTH_BYTES * num_pieces]
    if zlib.crc32(table, zlib.crc32(first[:_BEFORE_CRC])) != crc:
        raise FrameError("the checksum of a message's head does not match")
    if its_nonce != nonce:
        raise FrameError("a message of another link")
    if its_seq != seq:
        raise FrameError(f"message {its_seq} came, not {seq}")
    lengths = struct.unpack(f"<{num_pieces}Q", table)
    if kind not in Kind._value2member_map_ or (kind == Kind.REST) != (num_pieces == 0) or sum(lengths) != num_bytes:
        raise FrameError(f"a message of kind {kind} with {num_pieces} pieces of {num_bytes} bytes means nothing here")
    return Head(Kind(kind), its_seq, num_bytes, lengths)


def check_lengths(lengths: Sequence[int], options: LinkOptions) -> None:
    """Check the pieces' lengths before memory is allocated for them. Raises FrameError."""
    if len(lengths) - 1 > options.max_parts:
        raise FrameError(f"{len(lengths) - 1} parts; at most {options.max_parts} are allowed")
    if lengths[0] > PRELUDE_BYTES + options.max_header_bytes:
        raise FrameError(f"a header of {lengths[0]} bytes; at most {options.max_header_bytes} are allowed")
    for index, length in enumerate(lengths[1:]):
        if length > options.max_part_bytes:
            raise FrameError(f"part {index} has {length} bytes; at most {options.max_part_bytes} are allowed")


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
    """A frame being received: a first message, then its chunks."""

    def __init__(self, head: Head, first: memoryview) -> None:
        self.kind = head.kind
        self._lengths = head.lengths
        self._num_bytes = head.num_bytes
        inline = first[head.start : head.start + head.num_inline]
        self._num_filled = head.num_inline
        # A frame of one message is copied once; memory for a longer one is allocated after its size was checked.
        self._data: bytes | bytearray = (
            bytes(inline) if head.num_inline == head.num_bytes else bytearray(head.num_bytes)
        )
        if isinstance(self._data, bytearray):
            self._data[: head.num_inline] = inline

    @property
    def is_whole(self) -> bool:
        return self._num_filled == self._num_bytes

    def add(self, chunk: memoryview) -> None:
        """The next chunk. Raises FrameError when it is too long."""
        end = self._num_filled + chunk.nbytes
        if end > self._num_bytes or not isinstance(self._data, bytearray):
            raise FrameError("more bytes than were announced")
        self._data[self._num_filled : end] = chunk
        self._num_filled = end

    @property
    def pieces(self) -> list[memoryview]:
        view, start, pieces = memoryview(self._data), 0, []
        for length in self._lengths:
            pieces.append(view[start : start + length])
            start += length
        return pieces
