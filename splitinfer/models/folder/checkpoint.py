"""Reads the contents of a model folder without reading a weight.

A safetensors file begins with eight bytes (the header's length, little-endian) and a JSON header that names every
tensor with its dtype, shape and place. That is enough to plan a cut, to compute what a stage needs, and to tell two
sets of weights apart.
"""

import contextlib
import hashlib
import json
import logging
import struct
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from splitinfer.common.fingerprint import FileFingerprint, Fingerprint
from splitinfer.common.model_config import positive, token_ids
from splitinfer.common.tensor_info import ITEM_BITS, TensorInfo
from splitinfer.core.sampling_defaults import Recommended, recommended
from splitinfer.errors import ModelError
from splitinfer.models.folder.weight_files import read_index, resolve, weight_files
from splitinfer.weights.manifest import Manifest, SmallFile, is_small_file
from splitinfer.weights.models import Hold, StoredModel
from splitinfer.weights.ranges import Span, merged
from splitinfer.weights.source import Place, Source

GENERATION_CONFIG = "generation_config.json"
GGUF = ".gguf"
_MAX_HEADER = 100 * 2**20  # the format's own bound
_NUM_SAMPLES = 32
_SAMPLE_BYTES = 4096

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model folder's configuration and tensors. Weight files may still be missing from ``folder``.

    ``copied``: tensors that were copied from another machine, and the files that hold them here. They are not read from
    ``folder`` (``splitinfer.weights``). ``origin``: the fingerprint of the files they were copied from; these files are
    not here. ``hold``: keeps the copies from being removed.
    """

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    revision: str | None = None
    copied: Mapping[str, Path] = field(default_factory=dict)
    origin: Fingerprint | None = None
    hold: Hold | None = field(default=None, compare=False, repr=False)

    def path_of(self, tensor: str) -> Path:
        """Return the file that holds a tensor, or would hold it."""
        return self.copied.get(tensor) or self.folder / self.tensors[tensor].file

    def paths_of(self, tensors: Iterable[str]) -> dict[Path, list[str]]:
        """Return the files that hold these tensors, sorted, each with the tensors to read from it."""
        found = defaultdict[Path, list[str]](list)
        for name in tensors:
            found[self.path_of(name)].append(name)
        return dict(sorted(found.items()))

    def missing(self, tensors: Iterable[str]) -> list[str]:
        """Return the names among ``tensors`` that no file on this machine holds, in the order of the files."""
        wanted = list(tensors)
        gone = {path for path in self.paths_of(wanted) if not path.exists()}
        infos = (self.tensors[name] for name in wanted if self.path_of(name) in gone)
        return [info.name for info in sorted(infos, key=lambda info: (info.file, info.begin))]

    @property
    def files(self) -> list[str]:
        """The weight files' names, sorted."""
        return sorted({t.file for t in self.tensors.values()})

    @property
    def vocab_size(self) -> int | None:
        """Rows of the embedding table; ``None`` if the configuration does not say."""
        return positive(self.config, "vocab_size")

    @property
    def context_length(self) -> int:
        """The context in tokens that the model was trained for; 2**20 if its configuration does not say."""
        keys = ("max_position_embeddings", "max_seq_len", "n_positions", "seq_length", "max_sequence_length")
        return positive(self.config, *keys) or 2**20

    def fingerprint(self) -> Fingerprint:
        """Return a fingerprint of these weights, cheap enough to compute at every start."""
        return self.origin or self.table_fingerprint()

    def table_fingerprint(self) -> Fingerprint:
        """Return the fingerprint computed from the files on this machine, even if the weights were copied."""
        prints = {name: self._file_print(name) for name in self.files}
        return Fingerprint(_digest(json.dumps(self.config, sort_keys=True)), prints, self.revision)

    def _file_print(self, name: str) -> FileFingerprint:
        own = sorted((t for t in self.tensors.values() if t.file == name), key=lambda t: t.begin)
        table = _digest(repr([(t.name, t.dtype, t.shape, t.begin, t.end) for t in own]))
        path = self.folder / name
        return FileFingerprint(max(t.end for t in own), table, _sample(path) if path.exists() else None)


def open_folder(folder: Path, revision: str | None = None, listed: Collection[str] | None = None) -> Checkpoint:
    """Return the checkpoint in a local model folder. ``listed``: the names of the files that belong there, if known.

    Raises:
        IncompleteModel: a file of weights is missing.
        ModelError: no such folder, no configuration, no weights, or a damaged file.
    """
    if not folder.is_dir() and listed is None:
        raise ModelError(f"there is no model folder {folder}")
    links = {path.name for path in folder.glob("*")}
    names = links if listed is None else listed
    if not any(name.endswith(".safetensors") for name in names) and any(name.endswith(GGUF) for name in names):
        raise in_gguf(folder)
    config, index = read_config(folder), read_index(folder)
    files = weight_files(names, index)
    if not files:
        raise ModelError(f"{folder} contains no weights (model*.safetensors)")
    here = {file for file in files if file in links and (folder / file).exists()}
    headers = {file: read_header(folder / file) if file in here else None for file in files}
    return Checkpoint(folder, config, resolve(headers, index, str(folder)), revision)


def in_gguf(what: Path | str) -> ModelError:
    """Return the error for a file, folder or hub id that holds a model in GGUF."""
    return ModelError(
        f"{what} has a model in GGUF, and MLX reads safetensors: give the same model by a name of mlx-community on the "
        "hub, or convert the original model: mlx_lm.convert --hf-path OWNER/MODEL --mlx-path FOLDER -q"
    )


def table_of(infos: Iterable[TensorInfo]) -> dict[str, TensorInfo]:
    """Return the tensors by name."""
    return {info.name: info for info in infos}


def read_config(folder: Path) -> dict[str, Any]:
    """Return the folder's config.json.

    Raises:
        ModelError: the file is missing, unreadable, or has no model_type.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{folder} contains no config.json, so it is not a model folder") from error
    except (ValueError, RecursionError, OSError) as error:
        raise ModelError(f"{path} cannot be read ({error})") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ModelError(f"{path} lacks the model's type (model_type)")
    return config


def read_header(path: Path) -> list[TensorInfo]:
    """Return the tensors of one safetensors file.

    Raises:
        ModelError: the file is cut short, damaged, or not in this format.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MAX_HEADER:
                raise ModelError(f"{path} is not a safetensors file (its header claims {length:,} bytes)")
            entries = json.loads(file.read(length))
        infos = parse_entries(entries, path.name)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise ModelError(f"{path} is damaged or not a safetensors file ({error})") from error
    wanted, there = 8 + length + max((i.end for i in infos), default=0), path.stat().st_size
    if there < wanted:
        raise ModelError(f"{path} is cut short: {there:,} of {wanted:,} bytes; delete it and download it again")
    return infos


def data_begin(path: Path) -> int:
    """Return the offset of the data part in a safetensors file that ``read_header`` has accepted."""
    with path.open("rb") as file:
        return 8 + int(struct.unpack("<Q", file.read(8))[0])


def parse_entries(entries: Mapping[str, Any], file: str) -> list[TensorInfo]:
    """Return the tensors in a header's JSON.

    Raises:
        ModelError: a tensor has a dtype that MLX does not load.
        ValueError, KeyError, TypeError, AttributeError: ``entries`` is not a valid header.
    """
    infos = []
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        if entry["dtype"] not in ITEM_BITS:
            raise ModelError(f"{file} holds {name} as {entry['dtype']}, which MLX does not load")
        info = TensorInfo(name, entry["dtype"], tuple(entry["shape"]), file, begin, end)
        if not info.fills_its_place:
            raise ValueError(f"{name} has the wrong size")
        infos.append(info)
    return infos


def _sample(path: Path) -> str:
    """Return a digest of a few kilobytes spread over the file, including its first and last."""
    size = path.stat().st_size
    step = max(1, (size - _SAMPLE_BYTES) // (_NUM_SAMPLES - 1))
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for offset in (*range(0, size - _SAMPLE_BYTES, step), max(0, size - _SAMPLE_BYTES)):
            file.seek(offset)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# -- copies from and for other machines ------------------------------------------------------------


def open_stored(stored: StoredModel, snapshot: Path | None = None) -> Checkpoint:
    """Return the checkpoint of a model in the store; some of its tensors may be missing. ``snapshot``: a folder with
    files of the same model, which are preferred to the copies.

    Raises:
        ModelError: it is being removed, its configuration is damaged or missing, or its tensors differ from its
            fingerprint.
    """
    hold = stored.hold()
    tensors, origin = table_of(stored.manifest.tensors), stored.manifest.fingerprint
    here = {**stored.tensors(), **_beside(snapshot, tensors)}
    config = read_config(stored.folder)
    checkpoint = Checkpoint(stored.folder, config, tensors, origin.revision, here, origin, hold)
    difference = origin.difference(checkpoint.table_fingerprint())
    if difference:
        remedy = f"remove it with: splitinfer models rm {stored.digest}"
        raise ModelError(f"{stored.folder} is damaged ({difference}); {remedy}")
    return checkpoint


def _beside(snapshot: Path | None, tensors: Mapping[str, TensorInfo]) -> dict[str, Path]:
    """Return the ``tensors`` that the snapshot's readable files hold, each with its file."""
    found = dict[str, Path]()
    paths = [] if snapshot is None else [snapshot / file for file in {info.file for info in tensors.values()}]
    for path in paths:
        with contextlib.suppress(ModelError):
            found |= {info.name: path for info in read_header(path) if info == tensors.get(info.name)}
    return found


def matches(told: Manifest, config: bytes, wanted: Fingerprint) -> str | None:
    """Return a phrase that says how a peer's model, with its config.json, differs from the ``wanted`` one, or None."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_bytes(config)
        described = Checkpoint(folder, read_config(folder), table_of(told.tensors), wanted.revision)
        difference = wanted.difference(described.table_fingerprint())
    return difference or (None if told.fingerprint.digest() == wanted.digest() else "it has another fingerprint")


def source_of(checkpoint: Checkpoint, model: str) -> Source:
    """Return the source from which other machines may copy a checkpoint: its tensors on this machine and its small
    files.

    Raises:
        ModelError: a file is gone or damaged.
    """
    small = tuple(
        SmallFile(path.name, path.stat().st_size)
        for path in sorted(checkpoint.folder.iterdir())
        if is_small_file(path.name) and path.is_file()
    )
    places, held = dict[str, Place](), dict[str, tuple[Span, ...]]()
    for name in checkpoint.files:
        path, spans = _held(checkpoint, name)
        if spans:
            places[name], held[name] = Place(path, data_begin(path), grows=path.parent != checkpoint.folder), spans
    made = Manifest(model, checkpoint.fingerprint(), small, tuple(checkpoint.tensors.values()), held)
    return Source(made, places | {file.name: Place(checkpoint.folder / file.name) for file in small})


def _held(checkpoint: Checkpoint, file: str) -> tuple[Path, tuple[Span, ...]]:
    """Return the local path of a weight file, and the byte ranges of its tensors that are there."""
    wanted = [info for info in checkpoint.tensors.values() if info.file == file]
    here = [info for info in wanted if info.name in checkpoint.copied] or wanted
    path = checkpoint.path_of(here[0].name)
    there = {info.name: (info.begin, info.end) for info in read_header(path)} if path.exists() else {}
    return path, merged(there[info.name] for info in here if there.get(info.name) == (info.begin, info.end))


# -- generation config -----------------------------------------------------------------------------


def read_recommended(folder: Path) -> Recommended:
    """Return the sampling values that the folder's generation config recommends. Without the file they are empty."""
    config, problem = _generation_config(folder)
    if problem is not None:
        log.warning("%s is ignored: %s", folder / GENERATION_CONFIG, problem)
    found = recommended(config)
    if found.problems:
        log.warning("ignored values in %s: %s", folder / GENERATION_CONFIG, "; ".join(found.problems))
    return found


def end_tokens(folder: Path, config: Mapping[str, Any]) -> int | list[int] | None:
    """Return the token ids that end an answer: from the generation config, else from the model's ``config``, as mlx-lm
    does, else from its language model's part, as transformers does."""
    given = token_ids(_generation_config(folder)[0], "eos_token_id")
    return token_ids(config, "eos_token_id") if given is None else given


def _generation_config(folder: Path) -> tuple[Mapping[str, Any], str | None]:
    """Return the fields of the folder's generation config, and a phrase for the file's fault, if it has one."""
    try:
        config = json.loads((folder / GENERATION_CONFIG).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, None
    except (ValueError, RecursionError, OSError) as error:
        return {}, f"it cannot be read ({error})"
    if not isinstance(config, dict):
        return {}, "it is not a JSON object"
    return config, None
