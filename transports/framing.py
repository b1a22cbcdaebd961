"""Encodes frames as bytes, numbers them, and measures silence. No sockets, no threads, no clock.

A packet is a list of byte strings whose boundaries the transport keeps. The first is the *prelude* followed by the
header, the others are the payload parts, unchanged:

    magic 'SPLI' | version u8 | kind u8 | flags u16 | seq u64 | progress u64
    | num_parts u16 | zero u16 | header_len u32 | parts_crc u32 | crc u32 | header ...

All little-endian, 40 bytes; flags and zero are 0. `crc` covers the prelude before it and the header. `parts_crc` covers
the length of every part, so no byte can move between parts unnoticed. TCP, Ethernet and encryption check the bytes.

Kinds: OPEN (the first packet, from the connecting side) and its answer ACCEPT; DATA, a frame; BEAT, a heartbeat; BYE,
the end, whose header is the reason. BYE is answered by BYE, which proves that everything before it arrived. `seq`
numbers the DATA packets of one direction from 0. All other kinds repeat the number of the *next* DATA packet, so that a
heartbeat also detects lost frames at the end. Every packet carries the sender's progress.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from transports.base import Buffer, Frame, FrameError, LinkOptions

MAGIC = b"SPLI"
VERSION = 2

_PRELUDE = struct.Struct("<4sBBHQQHHIII")
_CRC = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")
PRELUDE_BYTES = _PRELUDE.size
_BEFORE_CRC = PRELUDE_BYTES - _CRC.size
MAX_REASON_BYTES = 1024


class FrameKind(IntEnum):
    OPEN = 1
    ACCEPT = 2
    DATA = 3
    BEAT = 4
    BYE = 5


@dataclass(frozen=True, slots=True)
class Packet:
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
    parts = tuple(as_bytes(part) for part in frame.parts)
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
    """Return the packet as byte strings. The parts are passed on unchanged, so they must be flat (`as_bytes`)."""
    fields = (MAGIC, VERSION, kind, 0, seq, progress, len(parts), 0, len(header), _parts_crc(parts))
    prelude = _PRELUDE.pack(*fields, 0)[:_BEFORE_CRC]
    crc = zlib.crc32(header, zlib.crc32(prelude))
    return [b"".join((prelude, _CRC.pack(crc), header)), *parts]


def decode(message: Sequence[Buffer], options: LinkOptions) -> Packet:
    """Return the packet in `message`. Raises FrameError, and nothing else, for bytes that are not a packet."""
    if not message:
        raise FrameError("an empty message")
    first = as_bytes(message[0])
    # Magic and version are first in every version, so that versions can recognise each other.
    if bytes(first[: len(MAGIC)]) != MAGIC:
        raise FrameError("the peer is not a splitinfer transport: the first bytes are wrong")
    if first.nbytes > len(MAGIC) and first[len(MAGIC)] != VERSION:
        raise FrameError(f"transport version {first[len(MAGIC)]} there, version {VERSION} here")
    if first.nbytes < PRELUDE_BYTES:
        raise FrameError(f"cut short after {first.nbytes} bytes")
    _, _, kind, flags, seq, progress, num_parts, zero, header_len, parts_crc, crc = _PRELUDE.unpack_from(first)
    if zlib.crc32(first[PRELUDE_BYTES:], zlib.crc32(first[:_BEFORE_CRC])) != crc:
        raise FrameError("the header's checksum does not match")
    if kind not in FrameKind._value2member_map_ or flags or zero:
        raise FrameError(f"kind {kind} with flags {flags:#x} is unknown here")
    if header_len != first.nbytes - PRELUDE_BYTES or num_parts != len(message) - 1:
        raise FrameError(
            f"{num_parts} parts and {header_len} header bytes were announced, "
            f"{len(message) - 1} and {first.nbytes - PRELUDE_BYTES} came"
        )
    parts = tuple(as_bytes(part) for part in message[1:])
    check_bounds(header_len, [part.nbytes for part in parts], options)
    if _parts_crc(parts) != parts_crc:
        raise FrameError("the checksum of the parts' lengths does not match")
    return Packet(FrameKind(kind), seq, progress, bytes(first[PRELUDE_BYTES:]), parts)


def check_bounds(header_bytes: int, part_bytes: Sequence[int], options: LinkOptions) -> None:
    """Check the sizes of a frame's header and parts. Raises FrameError."""
    if header_bytes > options.max_header_bytes:
        raise FrameError(f"a header of {header_bytes} bytes; at most {options.max_header_bytes} are allowed")
    if len(part_bytes) > options.max_parts:
        raise FrameError(f"{len(part_bytes)} parts; at most {options.max_parts} are allowed")
    for index, num_bytes in enumerate(part_bytes):
        if num_bytes > options.max_part_bytes:
            raise FrameError(f"part {index} has {num_bytes} bytes; at most {options.max_part_bytes} are allowed")


def _parts_crc(parts: Sequence[memoryview]) -> int:
    return zlib.crc32(b"".join(_LENGTH.pack(part.nbytes) for part in parts))


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
