"""The file format of a block.

    magic, with the format's version    8 bytes
    the header's length                 4 bytes, little-endian
    header                              msgpack: the block's fields, and the dtype and shape of every array
    the arrays' bytes, one after another, row-major
    CRC-32 of all bytes before          4 bytes, little-endian

A block's key is a hash of its tokens and its parent's key, so a header proves by itself that it belongs to its key. The
checksum detects damage, not malice: a program that can write to the folder can also write a valid checksum.
"""

import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import msgpack
from pydantic import TypeAdapter, ValidationError

from splitinfer.core.kv.block_tree import DiskBlock, Key, chained
from splitinfer.core.plan import StoredPart, TensorSpec

MAGIC = b"sikv\x00\x00\x00\x01"
_LENGTH = struct.Struct("<I")
_MAX_HEADER = 2**22
_MAX_AXES, _MAX_LENGTH = 8, 2**40
_ITEM_BYTES = {
    "bool_": 1, "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "float16": 2, "bfloat16": 2,
    "uint32": 4, "int32": 4, "float32": 4, "uint64": 8, "int64": 8, "float64": 8, "complex64": 8,
}  # fmt: skip


class Damaged(Exception):
    """A file is not a valid block, or no longer one. The text gives the reason in a few words."""


@dataclass(frozen=True, slots=True)
class Record:
    """A block's header: ``tokens`` from position ``start`` on, after the block of key ``parent``."""

    parent: Key
    tokens: tuple[int, ...]
    start: int
    parts: tuple[StoredPart, ...]

    @property
    def key(self) -> Key:
        """The block's key."""
        return chained(self.parent, self.tokens)

    @property
    def kept(self) -> DiskBlock:
        """The block in the form that the coordinator's prefix cache takes."""
        return DiskBlock(self.parent, self.tokens)

    @property
    def end(self) -> int:
        """One past the last position."""
        return self.start + len(self.tokens)


_RECORD: TypeAdapter[Record] = TypeAdapter(Record)
Buffer = bytes | bytearray | memoryview


def pack(record: Record, buffers: Iterable[Buffer]) -> Iterable[Buffer]:
    """Yield the pieces of a file, in order. ``buffers``: the arrays of all parts, in order."""
    header = bytes(msgpack.packb(_RECORD.dump_python(record)))
    begin = MAGIC + _LENGTH.pack(len(header)) + header
    checksum = zlib.crc32(begin)
    yield begin
    for buffer in buffers:
        checksum = zlib.crc32(buffer, checksum)
        yield buffer
    yield _LENGTH.pack(checksum)


def unpack(data: Buffer, key: Key) -> tuple[Record, list[memoryview]]:
    """Read a file's header and the arrays of all parts, in order, without copying.

    Raises:
        Damaged: the data is not the whole, unchanged block of that key.
    """
    view = memoryview(data)
    record = read_header(view, key)
    at = len(MAGIC) + _LENGTH.size + _LENGTH.unpack_from(view, len(MAGIC))[0]
    buffers: list[memoryview] = []
    for spec in (spec for part in record.parts for spec in part.arrays):
        size = _bytes_of(spec)
        buffers.append(view[at : at + size])
        at += size
    if len(view) != at + _LENGTH.size:
        raise Damaged(f"it has {len(view):,} bytes and should have {at + _LENGTH.size:,}")
    if zlib.crc32(view[:at]) != _LENGTH.unpack_from(view, at)[0]:
        raise Damaged("its checksum is wrong")
    return record, buffers


def header_bytes(begin: Buffer) -> int:
    """Return the offset of the header's end in the file, from the file's first 12 bytes.

    Raises:
        Damaged: the file is not a block of this format.
    """
    if len(begin) < len(MAGIC) + _LENGTH.size or bytes(begin[: len(MAGIC)]) != MAGIC:
        raise Damaged("it is not a block of this format")
    (length,) = _LENGTH.unpack_from(begin, len(MAGIC))
    if length > _MAX_HEADER:
        raise Damaged("its header is too long")
    return len(MAGIC) + _LENGTH.size + int(length)


def read_header(begin: Buffer, key: Key) -> Record:
    """Read the header of a file. ``begin`` must reach at least to the header's end.

    Raises:
        Damaged: the bytes are not a header, or they belong to another block.
    """
    end = header_bytes(begin)
    try:
        fields: Any = msgpack.unpackb(bytes(begin[len(MAGIC) + _LENGTH.size : end]), use_list=False)
        record = _RECORD.validate_python(fields, extra="forbid")
    except (ValueError, TypeError, RecursionError, ValidationError, msgpack.UnpackException) as error:
        raise Damaged(f"its header cannot be read ({type(error).__name__})") from error
    if record.key != key or record.start < 0 or not record.tokens:
        raise Damaged("it contains a different block than its name says")
    return record


def _bytes_of(spec: TensorSpec) -> int:
    item = _ITEM_BYTES.get(spec.dtype)
    if item is None or len(spec.shape) > _MAX_AXES or not all(0 <= n <= _MAX_LENGTH for n in spec.shape):
        raise Damaged(f"it holds an impossible array: {spec.dtype[:20]!r}, {len(spec.shape)} axes")
    return item * prod(spec.shape)
