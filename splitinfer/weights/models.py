"""The models in this machine's store, each in a folder named after the digest of its fingerprint.

    models/ 3f21.../ .manifest                   all files and tensors of the model
                     config.json, ...            small files
                     weights/                    the files of weights, complete or in part (``copied_file``)
            .lock                                locked while a model is begun or removed
            .3f21....used                        shared lock of the processes that copy or have opened this model;
                                                 exclusive while it is removed
            .3f21....copied                      locked by the process that copies it

Two sets of weights never share a folder: the digest has samples of the weights, or the revision at the hub
(``common.fingerprint``). The store is not a folder of caches, which macOS may empty: a copy may have taken hours. Lock
files stay when a model is removed, so that all processes lock the same file.
"""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from splitinfer.common.plain_text import size as in_words
from splitinfer.common.tensor_info import TensorInfo
from splitinfer.errors import ModelError
from splitinfer.places import data
from splitinfer.weights.copied_file import CopiedFile, copied, said, write_whole
from splitinfer.weights.manifest import MAX_BYTES, Manifest, pack, unpack, with_files
from splitinfer.weights.ranges import Span, is_in, missing, size

_MANIFEST, _WEIGHTS, _LOCK = ".manifest", "weights", ".lock"
_FOLDER = re.compile(r"[0-9a-f]{32}")


class Hold:
    """A lock, for example on a model in use. It lasts until ``close`` or until this object is garbage."""

    def __init__(self, file: int) -> None:
        self._file = file

    def close(self) -> None:
        """Release the lock."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model's folder in the store, with its manifest."""

    folder: Path
    manifest: Manifest

    @property
    def digest(self) -> str:
        """The digest of the model's fingerprint."""
        return self.folder.name

    def path_of(self, file: str) -> Path:
        """Return the path of the copy of a file of weights."""
        return self.folder / _WEIGHTS / file

    def copied(self) -> dict[str, tuple[Span, ...]]:
        """Return the spans that are here of each file of weights."""
        return {file: copied(self.path_of(file), infos) for file, infos in self.manifest.by_file.items()}

    def tensors(self) -> dict[str, Path]:
        """Return the tensors that are here, and the files that hold them."""
        here = self.copied()
        return {
            info.name: self.path_of(info.file)
            for info in self.manifest.tensors
            if is_in((info.begin, info.end), here[info.file]) and self.path_of(info.file).exists()
        }

    def files(self) -> list[str]:
        """Return the small files that are here."""
        return [file.name for file in self.manifest.files if _size(self.folder / file.name) == file.nbytes]

    def lacking(self, wanted: Iterable[TensorInfo]) -> int:
        """Return the number of bytes of these tensors that are missing here."""
        here, spans = self.copied(), dict[str, list[Span]]()
        for info in wanted:
            spans.setdefault(info.file, []).append((info.begin, info.end))
        return sum(size(missing(of_file, here[file])) for file, of_file in spans.items())

    def open(self, file: str) -> CopiedFile:
        """Open the copy of a file of weights to continue it. Raises ModelError."""
        with said(self.folder):
            (self.folder / _WEIGHTS).mkdir(mode=0o700, exist_ok=True)
        if (self.folder / _WEIGHTS).is_symlink():
            raise _is_link(self.folder / _WEIGHTS)
        return CopiedFile(self.path_of(file), self.manifest.by_file[file])

    def hold(self) -> Hold:
        """Keep other processes from removing the model.

        Raises:
            ModelError: it is being removed.
        """
        try:
            hold = _lock(self._locked_by("used"), fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._removed() from None
        if not (self.folder / _MANIFEST).exists():
            raise self._removed()
        return hold

    @contextlib.contextmanager
    def copying(self, waits: Callable[[], None]) -> Iterator[None]:
        """Hold the lock for copying this model. ``waits`` is called, and must sleep, while another process copies it.

        Raises:
            ModelError: it is being removed.
        """
        with self.hold(), contextlib.ExitStack() as stack:
            while True:
                with contextlib.suppress(BlockingIOError):
                    stack.enter_context(_lock(self._locked_by("copied"), fcntl.LOCK_EX | fcntl.LOCK_NB))
                    break
                waits()
            yield

    def remove(self) -> int:
        """Remove the model and return the number of bytes freed.

        Raises:
            ModelError: it is in use or cannot be removed.
        """
        try:
            unused = _lock(self._locked_by("used"), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ModelError(
                f"{self.manifest.model} is in use by a splitinfer process of this machine, or being copied; "
                "end that first"
            ) from None
        with unused, _lock(self.folder.with_name(_LOCK), fcntl.LOCK_EX):
            freed = self.nbytes
            try:
                (self.folder / _MANIFEST).unlink(missing_ok=True)  # first, so that half a model does not count as one
                shutil.rmtree(self.folder)
            except OSError as error:
                raise ModelError(f"{self.folder} cannot be removed: {error.strerror or error}") from error
            return freed

    @property
    def nbytes(self) -> int:
        """The bytes that are here."""
        small = sum(_size(path) or 0 for path in _paths(self.folder))
        return small + sum(map(size, self.copied().values()))

    def _locked_by(self, what: str) -> Path:
        return self.folder.with_name(f".{self.digest}.{what}")

    def _removed(self) -> ModelError:
        return ModelError(f"{self.folder} is being removed by another process; try again")


class ModelStore:
    """The store at ``path``, which may hold ``cap`` bytes (None: as many as the disk allows)."""

    def __init__(self, path: Path, cap: int | None = None) -> None:
        self.path, self.cap = path, cap

    def models(self) -> list[StoredModel]:
        """Return all models, sorted by name. Skip folders that hold something else."""
        found = (self.find(path.name) for path in _paths(self.path))
        return sorted((one for one in found if one is not None), key=lambda one: (one.manifest.model, one.digest))

    def find(self, digest: str) -> StoredModel | None:
        """Return the model with this fingerprint, if any of it is here."""
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
        """Return the models with this name, or whose fingerprint begins with it (eight digits or more)."""
        return [
            one
            for one in self.models()
            if one.manifest.model == name or (len(name) >= 8 and one.digest.startswith(name))
        ]

    def begin(self, manifest: Manifest) -> StoredModel:
        """Return the model's folder, and make it if it does not exist.

        Raises:
            ModelError: the folder cannot be made.
        """
        folder = self.path / manifest.fingerprint.digest()
        with said(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        with _lock(self.path / _LOCK, fcntl.LOCK_EX), said(folder):
            there = self.find(folder.name)
            merged = with_files(manifest, () if there is None else there.manifest.files)
            if there is not None and there.manifest.files == merged.files:
                return there
            folder.mkdir(mode=0o700, exist_ok=True)
            if folder.is_symlink():
                raise _is_link(folder)
            stored = StoredModel(folder, Manifest(merged.model, merged.fingerprint, merged.files, merged.tensors))
            write_whole(folder, _MANIFEST, pack(stored.manifest))
            stored.hold().close()  # makes the lock's file now, so that readers need not
            return stored

    def check_room(self, wanted: int) -> None:
        """Check that ``wanted`` more bytes fit.

        Raises:
            ModelError: they do not fit; the message has the numbers.
        """
        here = next(path for path in (self.path, *self.path.parents) if path.exists())
        why = no_room(wanted, self.nbytes, shutil.disk_usage(here).free, self.cap)
        if why is not None:
            raise ModelError(f"there is no room in {self.path}: {why}; `splitinfer models rm` makes room")

    @property
    def nbytes(self) -> int:
        """The bytes of all models."""
        return sum(one.nbytes for one in self.models())


def _lock(path: Path, how: int) -> Hold:
    """Lock the file at ``path``. A store that cannot be written needs no lock, because nobody can remove anything.

    Raises:
        BlockingIOError: another process has the lock, and ``how`` does not wait.
        ModelError: the file cannot be made.
    """
    with said(path.parent):
        try:
            file = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EROFS):
                return Hold(-1)
            raise
    try:
        fcntl.flock(file, how)
    except BaseException:
        os.close(file)
        raise
    return Hold(file)


def _is_link(path: Path) -> ModelError:
    return ModelError(f"{path} is a symbolic link, which splitinfer does not follow here; remove it")


def _paths(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return [Path(entry.path) for entry in os.scandir(folder)]
    return []


def _size(path: Path) -> int | None:
    """Return the size of a regular file, or None for anything else."""
    with contextlib.suppress(OSError):
        status = path.lstat()
        return status.st_size if stat.S_ISREG(status.st_mode) else None
    return None


# -- the folder, and the room in it ------------------------------------------------------------------------------------

RESERVE = 5 * 10**9  # bytes of the disk that stay free: macOS itself needs some for swap files


def default_folder() -> Path:
    """Return the folder for weights among the user's data."""
    return data() / "models"


def no_room(wanted: int, stored: int, free: int, cap: int | None, reserve: int = RESERVE) -> str | None:
    """Return why ``wanted`` more bytes cannot be stored, as a phrase. Return None if they can.

    ``stored``: bytes in the store. ``free``: bytes on its disk. ``cap``: the most bytes of the store; None: any number.

    >>> no_room(3 * 10**9, 0, 7 * 10**9, None)
    '3 GB must be copied, but 5 GB of the 7 GB free on the disk are reserved'
    >>> no_room(3 * 10**9, 9 * 10**9, 10**12, 10**10)
    '3 GB must be copied, but with the 9 GB already there the store would exceed 10 GB'
    """
    if cap is not None and stored + wanted > cap:
        there = f"with the {in_words(stored)} already there the store would exceed {in_words(cap)}"
        return f"{in_words(wanted)} must be copied, but {there}"
    if wanted > free - reserve:
        there = f"{in_words(reserve)} of the {in_words(free)} free on the disk are reserved"
        return f"{in_words(wanted)} must be copied, but {there}"
    return None
