"""Which tensors lie together in one file of the store, and that file's header.

    8 bytes   the header's length, little-endian
    header    JSON: the tensors, as in every safetensors file
    data      the tensors one behind the other, in the order of the header

(The format: huggingface/safetensors, README, "Format".) A part is a file of weights like any other, so what reads those
reads it. It is bounded, so that a copy for other layers, after another cut, begins with what earlier ones have
completed; and it is large, because MLX keeps a file open while it reads from it and a process may have 256 files open
on macOS (*assumed*: the default of launchd's limit maxfiles).
"""

import hashlib
import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from splitinfer.core.tensor_info import TensorInfo, header_entry
from splitinfer.store.manifest import Item, Manifest
from splitinfer.store.pieces import PIECE, Piece, num_pieces, pieces_of

PART = 2**31  # bytes; a larger tensor has a part of its own
_ALIGN = 8  # the data part begins at a multiple of so many bytes


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a piece goes: ``offset`` in the file, ``index`` among the part's pieces."""

    offset: int
    index: int


@dataclass(frozen=True, slots=True)
class Part:
    """A file of tensors: ``numbers`` are theirs in the manifest. ``name``: of the file, made from what is in it."""

    name: str
    numbers: tuple[int, ...]
    tensors: tuple[TensorInfo, ...]
    header: bytes

    @property
    def nbytes(self) -> int:
        """Size of the complete file."""
        return len(self.header) + sum(info.nbytes for info in self.tensors)

    @property
    def num_pieces(self) -> int:
        """The number of its pieces."""
        return sum(num_pieces(info.nbytes) for info in self.tensors)

    def pieces(self) -> list[tuple[Piece, Slot]]:
        """All pieces, and where they go."""
        placed: list[tuple[Piece, Slot]] = []
        begin = len(self.header)
        for number, info in zip(self.numbers, self.tensors, strict=True):
            placed += [
                (piece, Slot(begin + piece.begin, len(placed) + at))
                for at, piece in enumerate(pieces_of(number, Item(info.name, info.nbytes, info)))
            ]
            begin += info.nbytes
        return placed


def parts_of(manifest: Manifest, numbers: Iterable[int], most: int = PART) -> list[Part]:
    """The wanted tensors in parts of at most ``most`` bytes, in the order of their numbers."""
    parts: list[Part] = []
    bunch, held = list[int](), 0
    for number in sorted(numbers):
        nbytes = manifest.items[number].nbytes
        if bunch and held + nbytes > most:
            parts.append(_part(manifest, bunch))
            bunch, held = [], 0
        bunch.append(number)
        held += nbytes
    return [*parts, _part(manifest, bunch)] if bunch else parts


def header_of(tensors: Sequence[TensorInfo]) -> bytes:
    """The beginning of a safetensors file that holds these tensors one behind the other."""
    entries, begin = {}, 0
    for info in tensors:
        entries[info.name] = header_entry(info, begin)
        begin += info.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    return struct.pack("<Q", len(text)) + text


def _part(manifest: Manifest, numbers: Sequence[int]) -> Part:
    infos = tuple(info for number in numbers if (info := manifest.items[number].tensor) is not None)
    header = header_of(infos)
    name = hashlib.sha256(header + struct.pack("<Q", PIECE)).hexdigest()[:20]
    return Part(f"part-{name}.safetensors", tuple(numbers), infos, header)
