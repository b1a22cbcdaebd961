"""The models in this machine's store, each in a folder that is named by the digest of its fingerprint.

    models/ 3f21.../ .manifest                     what the whole model consists of
                     config.json, ...              small files
                     part-x.safetensors            complete tensors
                     part-x.safetensors.checks     the checksums of their pieces
                     .part-y.safetensors.partial   being copied, or interrupted

Two sets of weights never share a folder, however alike their tables are: the digest has samples of the weights, or the
revision at the hub (``core.fingerprint``).
"""

import contextlib
import json
import os
import re
import shutil
import stat
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from splitinfer.core.tensor_info import TensorInfo
from splitinfer.errors import ModelError
from splitinfer.store.holding import Hold, alone, make_lock, unused
from splitinfer.store.manifest import MAX_BYTES, Manifest, pack, unpack, with_files
from splitinfer.store.part import PARTIAL, is_busy, write_whole
from splitinfer.store.parts import Part
from splitinfer.store.paths import no_room

_MANIFEST = ".manifest"
_FOLDER = re.compile(r"[0-9a-f]{32}")
_PART = re.compile(r"part-[0-9a-f]{20}\.safetensors")
_MAX_HEADER = 100 * 2**20


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model's folder in the store, and what the model consists of."""

    folder: Path
    manifest: Manifest

    @property
    def digest(self) -> str:
        """The digest of its fingerprint."""
        return self.folder.name

    def tensors(self) -> dict[str, Path]:
        """The complete tensors that are here, and the files that hold them. Others are as if they were not here."""
        wanted = {info.name: info for info in self.manifest.tensors}
        found: dict[str, Path] = {}
        for path in sorted(self.folder.glob("part-*.safetensors")):
            if _PART.fullmatch(path.name) and _is_file(path):
                found |= dict.fromkeys(_tensors_in(path, wanted), path)
        return found

    def files(self) -> list[str]:
        """The small files that are here."""
        sizes = {file.name: file.nbytes for file in self.manifest.files}
        return [name for name, nbytes in sizes.items() if _size(self.folder / name) == nbytes]

    def has_files(self, numbers: list[int]) -> bool:
        """Whether these small files are here."""
        here = set(self.files())
        return all(self.manifest.files[number].name in here for number in numbers)

    def begun(self, parts: Iterable[Part]) -> int:
        """Bytes of these parts that an earlier copy has written."""
        return sum(min(_size(self.folder / f".{part.name}{PARTIAL}") or 0, part.nbytes) for part in parts)

    def hold(self) -> Hold:
        """Keep other processes from removing it. Raises ModelError."""
        return Hold(self.folder)

    @property
    def nbytes(self) -> int:
        """Bytes on the disk, unfinished parts included."""
        return sum(_size(path) or 0 for path in _paths(self.folder))


class ModelStore:
    """The store at ``path``, which may hold ``cap`` bytes (``None``: as many as its disk leaves)."""

    def __init__(self, path: Path, cap: int | None = None) -> None:
        self.path, self.cap = path, cap

    def models(self) -> list[StoredModel]:
        """All models, by name. Folders that hold something else are left alone."""
        with contextlib.suppress(OSError):
            names = [entry.name for entry in os.scandir(self.path) if entry.is_dir(follow_symlinks=False)]
            found = (self.find(name) for name in names)
            return sorted((one for one in found if one is not None), key=lambda one: (one.manifest.model, one.digest))
        return []

    def find(self, digest: str) -> StoredModel | None:
        """The model with this fingerprint, if any of it is here."""
        folder = self.path / digest
        if not _FOLDER.fullmatch(digest) or folder.is_symlink():
            return None
        try:
            if (_size(folder / _MANIFEST) or 0) > MAX_BYTES:
                return None
            manifest = unpack((folder / _MANIFEST).read_bytes())
        except (OSError, ModelError):
            return None
        return StoredModel(folder, manifest) if manifest.fingerprint.digest() == digest else None

    def named(self, name: str) -> list[StoredModel]:
        """The models with this name, or with a fingerprint that begins so (eight digits or more)."""
        return [
            one
            for one in self.models()
            if one.manifest.model == name or (len(name) >= 8 and one.digest.startswith(name))
        ]

    def begin(self, manifest: Manifest) -> StoredModel:
        """The model's folder, which is made if there is none.

        Raises:
            ModelError: it cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ModelError(f"the folder {self.path} cannot be made: {error.strerror or error}") from error
        with alone(self.path):
            return self._begin(manifest)

    def _begin(self, manifest: Manifest) -> StoredModel:
        there = self.find(manifest.fingerprint.digest())
        if there is not None:
            manifest = with_files(manifest, there.manifest.files)
            if manifest.files == there.manifest.files:
                make_lock(there.folder)
                return there
        folder = self.path / manifest.fingerprint.digest()
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ModelError(f"the folder {folder} cannot be made: {error.strerror or error}") from error
        if folder.is_symlink():
            raise ModelError(f"{folder} is a link, which is not followed; remove it")
        make_lock(folder)
        write_whole(folder, _MANIFEST, pack(manifest))
        return StoredModel(folder, manifest)

    def check_room(self, wanted: int) -> None:
        """Check that ``wanted`` more bytes fit.

        Raises:
            ModelError: they do not; the message has the numbers.
        """
        here = next(path for path in (self.path, *self.path.parents) if path.exists())
        why = no_room(wanted, self.nbytes, shutil.disk_usage(here).free, self.cap)
        if why is not None:
            raise ModelError(f"there is no room in {self.path}: {why}; `splitinfer models rm` makes room")

    @property
    def nbytes(self) -> int:
        """Bytes of all models."""
        return sum(one.nbytes for one in self.models())

    def remove(self, model: StoredModel) -> int:
        """Remove a model; return the bytes freed.

        Raises:
            ModelError: it is in use, or cannot be removed.
        """
        with alone(self.path), unused(model.folder) as is_unused:
            if any(is_busy(path) for path in model.folder.glob(f".*{PARTIAL}")):
                raise ModelError(f"{model.manifest.model} is being copied just now; end that first")
            if not is_unused:
                raise ModelError(f"{model.manifest.model} is in use by a splitinfer of this machine; end that first")
            return self._remove(model)

    def _remove(self, model: StoredModel) -> int:
        freed = model.nbytes
        try:
            (model.folder / _MANIFEST).unlink(missing_ok=True)  # first, so that half a model is none
            shutil.rmtree(model.folder)
        except OSError as error:
            raise ModelError(f"{model.folder} cannot be removed: {error.strerror or error}") from error
        return freed


def _tensors_in(path: Path, wanted: Mapping[str, TensorInfo]) -> Iterator[str]:
    """The tensors of a part, as far as they are the model's; none if it is cut short or damaged."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            entries = json.loads(file.read(length)) if length <= _MAX_HEADER else {}
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        if path.stat().st_size != 8 + length + end:
            return
        for name, entry in entries.items():
            info = wanted.get(name)
            if info is not None and (info.dtype, list(info.shape)) == (entry["dtype"], entry["shape"]):
                yield name
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError):
        return


def _paths(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return [Path(entry.path) for entry in os.scandir(folder)]
    return []


def _is_file(path: Path) -> bool:
    return _size(path) is not None


def _size(path: Path) -> int | None:
    """The size of a regular file; ``None`` for all else."""
    with contextlib.suppress(OSError):
        status = path.lstat()
        return status.st_size if stat.S_ISREG(status.st_mode) else None
    return None
