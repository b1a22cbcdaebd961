"""What a model consists of, as one machine tells it another: small files, tensors, and which of them it has.

A manifest comes from a peer, so nothing in it is believed: names have an allowed form, sizes are those of dtype and
shape, numbers have bounds. That it describes the same model as a coordinator's is for the fingerprint to say
(``core.fingerprint``), which this machine computes from the manifest itself.

An *item* is a small file or a tensor; items have numbers, the small files first, then the tensors by file and place.
"""

import json
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from pydantic import TypeAdapter, ValidationError

from splitinfer.core.fingerprint import Fingerprint
from splitinfer.core.tensor_info import TensorInfo
from splitinfer.errors import ModelError
from splitinfer.store.names import CONFIGS, is_small_file, is_tensor, is_weight_file

MAX_BYTES = 64 * 2**20  # of a manifest as sent
_MAX_TEXT = 512 * 2**20  # of a manifest as text
_MAX_TENSORS, _MAX_FILES = 1_000_000, 200
_MAX_SMALL = 128 * 2**20  # bytes of one small file; a large tokenizer has 35 MB
_MAX_WEIGHTS = 2**46  # bytes of all tensors
_MAX_NAME = 4096
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class SmallFile:
    """A file beside the weights; ``nbytes``: its size."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Item:
    """A small file or a tensor, and its size. ``tensor``: ``None`` for a small file."""

    name: str
    nbytes: int
    tensor: TensorInfo | None = None


@dataclass(frozen=True)
class Manifest:
    """A model's parts. ``held``: the numbers of the items that the sender has.

    Raises:
        ModelError: a name or a size that no model of this project has.
    """

    model: str
    fingerprint: Fingerprint
    files: tuple[SmallFile, ...]
    tensors: tuple[TensorInfo, ...]
    held: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        mistake = _mistake(self)
        if mistake:
            raise ModelError(f"the list of what {self.model!r:.100} consists of cannot be used: {mistake}")

    @cached_property
    def items(self) -> tuple[Item, ...]:
        """All items, by their numbers."""
        small = (Item(file.name, file.nbytes) for file in self.files)
        return (*small, *(Item(info.name, info.nbytes, info) for info in self.tensors))

    @cached_property
    def number_of(self) -> dict[str, int]:
        """The numbers of the tensors, by name."""
        return {info.name: len(self.files) + at for at, info in enumerate(self.tensors)}

    def small(self, *, tokenizer: bool) -> list[int]:
        """The numbers of the small files that are needed: by a stage its configuration, by a coordinator all."""
        return [at for at, file in enumerate(self.files) if tokenizer or file.name in CONFIGS]


def manifest(
    model: str, fingerprint: Fingerprint, files: Iterable[SmallFile], tensors: Iterable[TensorInfo], held: Iterable[str]
) -> Manifest:
    """A manifest with its items in their order. ``held``: names of the files and tensors that are here."""
    small = tuple(sorted(files, key=lambda file: file.name))
    ordered = tuple(sorted(tensors, key=lambda info: (info.file, info.begin, info.name)))
    made, here = Manifest(model, fingerprint, small, ordered), set(held)
    numbers = frozenset(at for at, item in enumerate(made.items) if item.name in here)
    return Manifest(model, fingerprint, small, ordered, numbers)


def with_files(made: Manifest, files: Iterable[SmallFile]) -> Manifest:
    """The same model with these small files, too; of two with one name, these."""
    merged = {file.name: file for file in (*made.files, *files)}
    return manifest(made.model, made.fingerprint, merged.values(), made.tensors, ())


def pack(made: Manifest) -> bytes:
    """A manifest as bytes."""
    fields = {
        "format": _FORMAT,
        "model": made.model,
        "fingerprint": asdict(made.fingerprint),
        "files": [[file.name, file.nbytes] for file in made.files],
        "tensors": [[t.name, t.dtype, t.shape, t.file, t.begin, t.end] for t in made.tensors],
        "held": _ranges(made.held),
    }
    return zlib.compress(json.dumps(fields, separators=(",", ":")).encode(), 1)


def unpack(data: bytes | memoryview) -> Manifest:
    """The manifest in bytes that are not trusted.

    Raises:
        ModelError: they hold none, or one that cannot be used.
    """
    inflating = zlib.decompressobj()
    try:
        text = inflating.decompress(data, _MAX_TEXT)
        if not inflating.eof:
            raise ModelError(f"a list of a model's parts has over {_MAX_TEXT:,} bytes, or ends too early")
        fields = _DOCUMENT.validate_json(text, strict=True)
    except (zlib.error, ValidationError, RecursionError) as error:
        raise ModelError(f"a list of a model's parts cannot be read ({_first_line(error)})") from error
    if fields.format != _FORMAT:
        raise ModelError(f"a list of a model's parts has the format {fields.format}; this version reads {_FORMAT}")
    tensors = tuple(TensorInfo(*each) for each in fields.tensors)
    files = tuple(SmallFile(*each) for each in fields.files)
    return Manifest(fields.model, fields.fingerprint, files, tensors, _numbers(fields.held, len(files) + len(tensors)))


@dataclass(frozen=True)
class _Document:
    format: int
    model: str
    fingerprint: Fingerprint
    files: tuple[tuple[str, int], ...]
    tensors: tuple[tuple[str, str, tuple[int, ...], str, int, int], ...]
    held: tuple[tuple[int, int], ...]


_DOCUMENT: TypeAdapter[_Document] = TypeAdapter(_Document)


def _mistake(made: Manifest) -> str | None:
    """Why a manifest cannot be used, as a phrase; ``None`` if it can."""
    if not 0 < len(made.model) <= _MAX_NAME or not made.model.isprintable():
        return "the model's name cannot be printed"
    if len(made.tensors) > _MAX_TENSORS or len(made.files) > _MAX_FILES:
        return f"{len(made.tensors):,} tensors and {len(made.files):,} files"
    return _mistake_in_files(made.files) or _mistake_in_tensors(made.tensors)


def _mistake_in_files(files: tuple[SmallFile, ...]) -> str | None:
    for file in files:
        if not is_small_file(file.name):
            return f"the file name {file.name!r:.80} is not allowed"
        if not 0 <= file.nbytes <= _MAX_SMALL:
            return f"{file.name} has {file.nbytes:,} bytes"
    names = {file.name.casefold() for file in files}  # a Mac's file system does not tell upper from lower case
    return None if len(names) == len(files) else "two files have one name"


def _mistake_in_tensors(tensors: tuple[TensorInfo, ...]) -> str | None:
    for info in tensors:
        if not is_tensor(info.name):
            return f"the tensor name {info.name!r:.80} is not allowed"
        if not is_weight_file(info.file):
            return f"the file name {info.file!r:.80} is not allowed"
        if len(info.shape) > 16 or not info.fills_its_place:
            return f"{info.name:.80} has another size than its shape says"
    if len({info.name for info in tensors}) < len(tensors):
        return "two tensors have one name"
    if sum(info.nbytes for info in tensors) > _MAX_WEIGHTS:
        return "its tensors are larger than any disk"
    in_order = sorted(tensors, key=lambda info: (info.file, info.begin, info.name))
    return None if in_order == list(tensors) else "its tensors are not in the order of their files"


def _ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Numbers as half-open ranges.

    >>> _ranges([5, 1, 2, 3])
    [(1, 4), (5, 6)]
    """
    ranges: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number:
            ranges[-1] = (ranges[-1][0], number + 1)
        else:
            ranges.append((number, number + 1))
    return ranges


def _numbers(ranges: Iterable[tuple[int, int]], count: int) -> frozenset[int]:
    """The numbers in rising ranges below ``count``, so that their number is bounded.

    Raises:
        ModelError: ranges that are not so.
    """
    numbers: list[int] = []
    for begin, end in ranges:
        if not (numbers[-1] if numbers else -1) < begin < end <= count:
            raise ModelError("a list of a model's parts cannot be used: it has items that it does not name")
        numbers += range(begin, end)
    return frozenset(numbers)


def _first_line(error: Any) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
