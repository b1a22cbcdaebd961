"""Checkpoints made of what was copied from other machines, and checkpoints that others copy from."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from splitinfer.core.fingerprint import Fingerprint
from splitinfer.core.tensor_info import TensorInfo
from splitinfer.errors import ModelError
from splitinfer.models.checkpoint import Checkpoint, data_begin, read_config, read_header, table_of
from splitinfer.store.manifest import Manifest, SmallFile, is_small_file
from splitinfer.store.models import StoredModel
from splitinfer.store.ranges import Span, merged
from splitinfer.store.source import Place, Source


def open_stored(stored: StoredModel, snapshot: Path | None = None) -> Checkpoint:
    """The checkpoint of a model in the store, of which some tensors may be missing. ``snapshot``: a folder with files
    of the same model, which are read rather than the copies.

    Raises:
        ModelError: it is being removed, its configuration is damaged or missing, or its tensors are others than its
            fingerprint says.
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
    """The tensors in those files that the snapshot has and that can be read."""
    found = dict[str, Path]()
    paths = [] if snapshot is None else [snapshot / file for file in {info.file for info in tensors.values()}]
    for path in paths:
        with contextlib.suppress(ModelError):
            found |= {info.name: path for info in read_header(path) if info == tensors.get(info.name)}
    return found


def matches(told: Manifest, config: bytes, wanted: Fingerprint) -> str | None:
    """How a model that a peer describes differs from the ``wanted`` one, as a phrase; ``None`` if it does not.
    ``config``: its config.json."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_bytes(config)
        described = Checkpoint(folder, read_config(folder), table_of(told.tensors), wanted.revision)
        difference = wanted.difference(described.table_fingerprint())
    return difference or (None if told.fingerprint.digest() == wanted.digest() else "it has another fingerprint")


def source_of(checkpoint: Checkpoint, model: str) -> Source:
    """What other machines may copy of a checkpoint: its tensors that are here, and its small files.

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
    """Where a file of weights lies on this machine, and which bytes of its tensors are there."""
    wanted = [info for info in checkpoint.tensors.values() if info.file == file]
    here = [info for info in wanted if info.name in checkpoint.copied] or wanted
    path = checkpoint.path_of(here[0].name)
    there = {info.name: (info.begin, info.end) for info in read_header(path)} if path.exists() else {}
    return path, merged(there[info.name] for info in here if there.get(info.name) == (info.begin, info.end))
