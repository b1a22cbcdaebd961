"""Checkpoints made of what was copied from other machines, and checkpoints that others copy from."""

from collections.abc import Mapping
from pathlib import Path

from splitinfer.core.fingerprint import Fingerprint
from splitinfer.core.tensor_info import TensorInfo
from splitinfer.errors import ModelError
from splitinfer.models.checkpoint import Checkpoint, data_begin, read_config, read_header, table_of
from splitinfer.store.manifest import Manifest, SmallFile, manifest
from splitinfer.store.models import StoredModel
from splitinfer.store.names import is_small_file
from splitinfer.store.source import Place, Source


def open_stored(stored: StoredModel, snapshot: Path | None = None) -> Checkpoint:
    """The checkpoint of a model in the store, of which some tensors may be missing. ``snapshot``: a folder with files
    of the same model, for tensors that the store lacks.

    Raises:
        ModelError: it is being removed, its configuration is damaged or missing, or its tensors are others than its
            fingerprint says.
    """
    hold = stored.hold()
    tensors, origin = table_of(stored.manifest.tensors), stored.manifest.fingerprint
    here = {**_beside(snapshot, tensors), **stored.tensors()}
    config = read_config(stored.folder)
    checkpoint = Checkpoint(stored.folder, config, tensors, origin.revision, here, origin, hold)
    difference = origin.difference(checkpoint.table_fingerprint())
    if difference:
        remedy = f"remove it with: splitinfer models rm {stored.digest}"
        raise ModelError(f"{stored.folder} is damaged ({difference}); {remedy}")
    return checkpoint


def _beside(snapshot: Path | None, tensors: Mapping[str, TensorInfo]) -> dict[str, Path]:
    """The tensors in those files that the snapshot has."""
    if snapshot is None:
        return {}
    there = {file: snapshot / file for file in {info.file for info in tensors.values()} if (snapshot / file).exists()}
    return {name: there[info.file] for name, info in tensors.items() if info.file in there}


def matches(told: Manifest, config_folder: Path, wanted: Fingerprint) -> str | None:
    """How a model that a peer describes differs from the ``wanted`` one, as a phrase; ``None`` if it does not."""
    described = Checkpoint(config_folder, read_config(config_folder), table_of(told.tensors), wanted.revision)
    return wanted.difference(described.table_fingerprint()) or (
        None if told.fingerprint.digest() == wanted.digest() else "it has another fingerprint"
    )


def source_of(checkpoint: Checkpoint, model: str) -> Source:
    """What other machines may copy of a checkpoint: its tensors that are here, and its small files.

    Raises:
        ModelError: a file is gone or damaged.
    """
    fingerprint, places = checkpoint.fingerprint(), _places(checkpoint)
    small = [
        SmallFile(path.name, path.stat().st_size)
        for path in checkpoint.folder.iterdir()
        if is_small_file(path.name) and path.is_file()
    ]
    held = [*places, *(file.name for file in small)]
    made = manifest(model, fingerprint, small, checkpoint.tensors.values(), held)
    numbered = {made.number_of[name]: place for name, place in places.items()}
    return Source(made, numbered | {at: Place(checkpoint.folder / file.name) for at, file in enumerate(made.files)})


def _places(checkpoint: Checkpoint) -> dict[str, Place]:
    """Where the tensors that are here begin."""
    return {
        info.name: Place(path, begin + info.begin)
        for path in checkpoint.paths_of(checkpoint.tensors)
        if path.exists()
        for begin in [data_begin(path)]
        for info in read_header(path)
        if info.name in checkpoint.tensors and checkpoint.path_of(info.name) == path
    }
