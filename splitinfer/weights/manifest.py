"""Describes a model to another machine: its small files, its tensors, and the bytes of them that the sender holds.

A manifest comes from a peer, so nothing in it is trusted: names must have an allowed form, sizes must match dtype and
shape, numbers have bounds. The fingerprint (``common.fingerprint``), which this machine computes from the manifest
itself, proves that it describes the coordinator's model.

Only files with these names are sent and taken: other files of a model's folder, above all programs, stay there.
"""

import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from pydantic import TypeAdapter, ValidationError

from splitinfer.common.fingerprint import Fingerprint
from splitinfer.common.tensor_info import TensorInfo
from splitinfer.errors import ModelError
from splitinfer.weights.ranges import Span, merged

CONFIGS = ("config.json", "generation_config.json", "hf_quant_config.json", "engram_token_map.json")
"""The small files that a stage needs, if the model has them."""
MAX_BYTES = 64 * 2**20  # of a compressed manifest
_MAX_TEXT = 512 * 2**20  # of a manifest as text
_MAX_TENSORS, _MAX_FILES = 1_000_000, 200
_MAX_SMALL = 128 * 2**20  # bytes of one small file; a large tokenizer has 35 MB
_MAX_WEIGHTS = 2**46  # bytes of all tensors
_MAX_NAME = 4096
_FORMAT = 2

_NAME = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]{0,126}"
)  # no separator, no leading dot, no character that is special to a shell
_SMALL = re.compile(
    r"(config|generation_config|hf_quant_config|tokenizer[\w.-]*|special_tokens_map|added_tokens|vocab|chat_template|engram_token_map)\.json"
    r"|(vocab|merges)\.txt|[\w.-]+\.(jinja|tiktoken)|[\w.-]*(tokenizer|spiece|sentencepiece)[\w.-]*\.model"
)
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?")  # devices, to some file systems


def is_small_file(name: str) -> bool:
    """Return whether a file of this name may be copied beside the weights: configuration, tokenizer, chat template.

    >>> [is_small_file(name) for name in ("config.json", "../config.json", "a/config.json", "model.py", "keys.json")]
    [True, False, False, False, False]
    """
    return _is_plain(name) and _SMALL.fullmatch(name) is not None


def is_weight_file(name: str) -> bool:
    """Return whether this may be the name of a file of weights."""
    return _is_plain(name) and name.endswith(".safetensors")


def is_tensor(name: str) -> bool:
    """Return whether this may be a tensor's name."""
    return 0 < len(name) <= 512 and name.isprintable() and name != "__metadata__"


def _is_plain(name: str) -> bool:
    return _NAME.fullmatch(name) is not None and ".." not in name and not _RESERVED.fullmatch(name.lower())


@dataclass(frozen=True, slots=True)
class SmallFile:
    """A file beside the weights; ``nbytes``: its size."""

    name: str
    nbytes: int


@dataclass(frozen=True)
class Manifest:
    """A model, as its sender describes it.

    Args:
        files: the small files; the sender has all of them.
        held: the bytes of the weights that the sender has, by file, as merged spans of the data part (after the header
            of a safetensors file).

    Raises:
        ModelError: a name or a size is not allowed.
    """

    model: str
    fingerprint: Fingerprint
    files: tuple[SmallFile, ...]
    tensors: tuple[TensorInfo, ...]
    held: Mapping[str, tuple[Span, ...]] = field(default_factory=dict)
    format: int = _FORMAT

    def __post_init__(self) -> None:
        mistake = _mistake(self)
        if mistake:
            raise ModelError(f"the list of files and tensors of {self.model!r:.100} cannot be used: {mistake}")

    @cached_property
    def by_name(self) -> dict[str, TensorInfo]:
        """The tensors by name."""
        return {info.name: info for info in self.tensors}

    @cached_property
    def by_file(self) -> dict[str, list[TensorInfo]]:
        """The tensors of each file of weights, in the order of their bytes."""
        found: dict[str, list[TensorInfo]] = {}
        for info in sorted(self.tensors, key=lambda info: (info.file, info.begin, info.name)):
            found.setdefault(info.file, []).append(info)
        return found

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The bytes that can be asked for, by file: of a small file, or of the data part of a file of weights."""
        weights = {file: max(info.end for info in infos) for file, infos in self.by_file.items()}
        return weights | {file.name: file.nbytes for file in self.files}

    def small(self, *, tokenizer: bool) -> list[str]:
        """Return the small files to copy: the configuration only, or with ``tokenizer`` all of them."""
        return [file.name for file in self.files if tokenizer or file.name in CONFIGS]


def with_files(made: Manifest, files: Iterable[SmallFile]) -> Manifest:
    """Return the same model with these small files added. They replace files of the same name."""
    both = {file.name: file for file in (*made.files, *files)}
    return replace(made, files=tuple(sorted(both.values(), key=lambda file: file.name)))


def pack(made: Manifest) -> bytes:
    """Return a manifest as bytes."""
    return zlib.compress(_ADAPTER.dump_json(made), 1)


def unpack(data: bytes | memoryview) -> Manifest:
    """Return the manifest in bytes that are not trusted.

    Raises:
        ModelError: they are not a manifest, or not one that can be used.
    """
    inflating = zlib.decompressobj()
    try:
        text = inflating.decompress(data, _MAX_TEXT)
        if not inflating.eof:
            raise ModelError(f"a model's list of files and tensors has over {_MAX_TEXT:,} bytes, or ends too early")
        return _ADAPTER.validate_json(text, strict=True)
    except (zlib.error, ValidationError, RecursionError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise ModelError(f"a model's list of files and tensors cannot be read ({first})") from error


_ADAPTER: TypeAdapter[Manifest] = TypeAdapter(Manifest)


def _mistake(made: Manifest) -> str | None:
    """Return why a manifest cannot be used, as a phrase. Return None if it can."""
    if made.format != _FORMAT:
        return f"it has the format {made.format}; this version reads {_FORMAT}"
    if not 0 < len(made.model) <= _MAX_NAME or not made.model.isprintable():
        return "the model's name cannot be printed"
    if len(made.tensors) > _MAX_TENSORS or len(made.files) > _MAX_FILES:
        return f"it has {len(made.tensors):,} tensors and {len(made.files):,} files"
    return _mistake_in_files(made.files) or _mistake_in_tensors(made.tensors) or _mistake_in_held(made)


def _mistake_in_files(files: tuple[SmallFile, ...]) -> str | None:
    for file in files:
        if not is_small_file(file.name):
            return f"the file name {file.name!r:.80} is not allowed"
        if not 0 <= file.nbytes <= _MAX_SMALL:
            return f"{file.name} has {file.nbytes:,} bytes"
    return None if _are_distinct(file.name for file in files) else "two files have one name"


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
    if not _are_distinct({info.file for info in tensors}):
        return "two files have one name"
    if max(sum(info.nbytes for info in tensors), max((info.end for info in tensors), default=0)) > _MAX_WEIGHTS:
        return "its tensors are larger than any disk"
    return None


def _mistake_in_held(made: Manifest) -> str | None:
    for file, spans in made.held.items():
        if file not in made.by_file:
            return f"it holds {file!r:.80}, and none of its tensors is in that file"
        if spans != merged(spans) or (spans and not 0 <= spans[0][0] < spans[-1][1] <= made.sizes[file]):
            return f"it holds ranges of {file:.80} that are not in it"
    return None


def _are_distinct(names: Iterable[str]) -> bool:
    """Return whether the names differ, also for a Mac's file system, which does not tell upper from lower case."""
    folded = [name.casefold() for name in names]
    return len(set(folded)) == len(folded)
