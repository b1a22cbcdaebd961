"""Encodes frames as bytes, numbers them, and measures silence. No sockets, no threads, no clock.

A packet is a list of byte strings whose boundaries the transport keeps. The first is the *prelude*, followed by the
length of each payload part and by the header. The parts follow: if they are small, inside the first byte string;
otherwise each is a byte string of its own, unchanged.

    magic 'SPLI' | version u8 | kind u8 | inline u16 | seq u64 | progress u64
    | num_parts u16 | zero u16 | header_len u32 | crc u32 | length u64 ... | header ... [ | part ... ]

All little-endian, 36 bytes before the lengths; zero is 0, and inline is 1 if the parts are in the first byte string.
`crc` covers everything before the parts but itself. TCP, Ethernet and encryption check the bytes of the parts.

Kinds: OPEN (the first packet, from the connecting side) and its answer ACCEPT; DATA, a frame; BEAT, a heartbeat; BYE,
the end, whose header is the reason. BYE is answered by BYE, which proves that everything before it arrived. `seq`
numbers the DATA packets of one direction from 0. All other kinds repeat the number of the *next* DATA packet, so that a
heartbeat also detects lost frames at the end. Every packet carries the sender's progress.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from enum import IntEnum
from itertools import accumulate, pairwise
from typing import NamedTuple

from transports.base import Buffer, Frame, FrameError, LinkOptions

MAGIC = b"SPLI"
VERSION = 3

_PRELUDE = struct.Struct("<4sBBHQQHHII")
_CRC = struct.Struct("<I")
PRELUDE_BYTES = _PRELUDE.size
_BEFORE_CRC = PRELUDE_BYTES - _CRC.size
INLINE_BYTES = 1 << 16
"""Parts of fewer bytes in all are copied into the first byte string: a further one takes longer to pass to zmq."""
MAX_REASON_BYTES = 1024


class FrameKind(IntEnum):
    OPEN = 1
    ACCEPT = 2
    DATA = 3
    BEAT = 4
    BYE = 5


_KINDS = dict(enumerate(FrameKind, 1))


class Packet(NamedTuple):
    """A decoded packet; `parts` are views of the message that `decode` received."""

    kind: FrameKind
    seq: int
    progress: int
    header: bytes
    parts: tuple[memoryview, ...]


def as_bytes(buffer: Buffer) -> memoryview:
    """Return a flat view of format 'B' of any contiguous buffer, without a copy. Raises FrameError for anything
    else."""
    try:
        view = memoryview(buffer)
        if view.nbytes == 0:  # cast() refuses shapes with a zero in them
            return memoryview(b"")
        return view if view.format == "B" and view.ndim == 1 and view.c_contiguous else view.cast("B")
    except (TypeError, BufferError) as problem:
        raise FrameError(f"a part of type {type(buffer).__name__} is not a contiguous buffer: {problem}") from None


def flatten(frame: Frame, options: LinkOptions) -> Frame:
    """Return `frame` with flat byte parts, checked against the bounds. Raises FrameError."""
    parts = tuple(map(as_bytes, frame.parts))
    check_bounds(len(frame.header), [part.nbytes for part in parts], options)
    return Frame(bytes(frame.header), parts)


def reason_bytes(reason: str) -> bytes:
    """Return the header of a BYE."""
    return reason.encode("utf-8", "replace")[:MAX_REASON_BYTES]


def reason_of(header: bytes | memoryview) -> str:
    """Return the reason in the header of a BYE."""
    return bytes(header[:MAX_REASON_BYTES]).decode("utf-8", "replace")


def encode(
    kind: FrameKind,
    *,
    seq: int,
    progress: int = 0,
    header: bytes = b"",
    parts: Sequence[memoryview] = (),
) -> list[Buffer]:
    """Return the packet as byte strings. The parts must be flat (`as_bytes`)."""
    lengths = [part.nbytes for part in parts]
    inline = sum(lengths) < INLINE_BYTES
    fields = (MAGIC, VERSION, kind, inline, seq, progress, len(parts), 0, len(header))
    prelude = _PRELUDE.pack(*fields, 0)[:_BEFORE_CRC]
    checked = struct.pack(f"<{len(parts)}Q", *lengths) + header
    crc = _CRC.pack(zlib.crc32(checked, zlib.crc32(prelude)))
    return [b"".join((prelude, crc, checked, *parts))] if inline else [prelude + crc + checked, *parts]


def decode(message: Sequence[Buffer], options: LinkOptions) -> Packet:
    """Return the packet in `message`. Raises FrameError, and nothing else, for bytes that are not a packet."""
    if not message:
        raise FrameError("an empty message")
    first = as_bytes(message[0])
    # Magic and version are first in every version, so that versions can recognise each other.
    if first[: len(MAGIC)] != MAGIC:
        raise FrameError("the peer is not a splitinfer transport: the first bytes are wrong")
    if first.nbytes > len(MAGIC) and first[len(MAGIC)] != VERSION:
        raise FrameError(f"transport version {first[len(MAGIC)]} there, version {VERSION} here")
    if first.nbytes < PRELUDE_BYTES:
        raise FrameError(f"cut short after {first.nbytes} bytes")
    _, _, kind, inline, seq, progress, num_parts, zero, header_len, crc = _PRELUDE.unpack_from(first)
    header_at = PRELUDE_BYTES + 8 * num_parts
    parts_at = header_at + header_len
    if zlib.crc32(first[PRELUDE_BYTES:parts_at], zlib.crc32(first[:_BEFORE_CRC])) != crc or first.nbytes < parts_at:
        raise FrameError("the header's checksum does not match")
    if kind not in _KINDS or inline > 1 or zero:
        raise FrameError(f"kind {kind} with flags {inline:#x} and {zero:#x} is unknown here")
    lengths = struct.unpack_from(f"<{num_parts}Q", first, PRELUDE_BYTES)
    check_bounds(header_len, lengths, options)
    parts = tuple(map(as_bytes, message[1:]))
    came = [first.nbytes - parts_at, *(part.nbytes for part in parts)]
    if came != ([sum(lengths)] if inline else [0, *lengths]):
        raise FrameError(f"parts of {', '.join(map(str, lengths))} bytes were announced, {came} came")
    if inline:
        ends = accumulate(lengths, initial=parts_at)
        parts = tuple(first[start:end] for start, end in pairwise(ends))
    return Packet(_KINDS[kind], seq, progress, bytes(first[header_at:parts_at]), parts)


def check_bounds(header_bytes: int, part_bytes: Sequence[int], options: LinkOptions) -> None:
    """Check the sizes of a frame's header and parts. Raises FrameError."""
    if header_bytes > options.max_header_bytes:
        raise FrameError(f"a header of {header_bytes} bytes; at most {options.max_header_bytes} are allowed")
    if len(part_bytes) > options.max_parts:
        raise FrameError(f"{len(part_bytes)} parts; at most {options.max_parts} are allowed")
    for index, num_bytes in enumerate(part_bytes):
        if num_bytes > options.max_part_bytes:
            raise FrameError(f"part {index} has {num_bytes} bytes; at most {options.max_part_bytes} are allowed")


def check_order(packet: Packet, next_seq: int) -> None:
    """Check that a packet of an open link has the number of the next frame. Raises FrameError."""
    if packet.seq != next_seq:
        what = "missing" if packet.seq > next_seq else "repeated"
        raise FrameError(f"{packet.kind.name} is number {packet.seq}, not {next_seq}: frames are {what}")
    if packet.kind in (FrameKind.OPEN, FrameKind.ACCEPT):
        raise FrameError(f"{packet.kind.name} on an open link")


class Liveness:
    """How long a peer has been silent while this process was listening. Times are seconds on any monotonic clock.

    A process that was itself held up (a long GIL hold, a suspended laptop) learns nothing about its peer meanwhile.
    So silence is added up over checks, and one check adds at most the time of two heartbeats.
    """

    def __init__(self, options: LinkOptions, now: float) -> None:
        self._dead_after, self._silent_after = options.dead_after, options.silent_after
        self._longest_step = 2 * options.beat_every
        self._silence = 0.0
        self._checked_at = now
        self._received_at = now
        self.is_busy = False
        """Whether the peer's machine answered when its process was found silent for `dead_after`."""

    def received(self, now: float) -> None:
        """Record that something was received from the peer."""
        self._silence = 0.0
        self._checked_at = self._received_at = now
        self.is_busy = False

    def is_dead(self, now: float, machine_answers: Callable[[], bool | None] = lambda: False) -> bool:
        """Return whether the silence is too long. Call it after reading everything that has arrived.

        `machine_answers` is called after `dead_after` seconds: whether the peer's machine acknowledges packets; None:
        unknown. Unless it returns False, the limit is `silent_after`.
        """
        self._silence += min(now - self._checked_at, self._longest_step)
        self._checked_at = now
        if self._silence <= self._dead_after:
            return False
        answers = machine_answers()
        self.is_busy = bool(answers)
        return answers is False or self._silence > self._silent_after

    def silent_for(self, now: float) -> float:
        """Return the seconds since the last receipt, including time when this process was held up."""
        return now - self._received_at
