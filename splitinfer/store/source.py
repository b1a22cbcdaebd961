"""Reads pieces of a model's files for another machine, and notices when a file changes meanwhile.

A file is known by its inode, size and time of modification from when the manifest was made, which the fingerprint was
computed for. One that was replaced by another of the same name, or written to, is not read from again.
"""

import hashlib
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from splitinfer.errors import ModelError
from splitinfer.store.manifest import Manifest
from splitinfer.store.pieces import Piece, pieces_of


@dataclass(frozen=True, slots=True)
class Place:
    """Where an item's bytes begin."""

    path: Path
    begin: int = 0


_State = tuple[int, int, int]  # inode, size, nanoseconds of the last change


class Source:
    """A model's files, open for reading until ``close``. ``places``: of the items that are here, by number.

    Raises:
        ModelError: a file is gone, or has changed.
    """

    def __init__(self, manifest: Manifest, places: Mapping[int, Place]) -> None:
        self.manifest = manifest
        self._places = places
        self._states = {path: _look(path) for path in {place.path for place in places.values()}}
        self._files: dict[Path, int] = {}
        self._lock = threading.Lock()

    def read(self, piece: Piece) -> bytes:
        """A piece's bytes.

        Raises:
            ModelError: the file is gone, or has changed since the manifest was made, or this item is not here.
        """
        place = self._places.get(piece.item)
        if place is None:
            raise ModelError(f"{self.manifest.items[piece.item].name} is not on this machine")
        file = self._open(place.path)
        try:
            data = os.pread(file, piece.nbytes, place.begin + piece.begin)
        except OSError as error:
            raise ModelError(f"{place.path} cannot be read: {error.strerror or error}") from error
        if len(data) != piece.nbytes or _state(os.fstat(file)) != self._states[place.path]:
            raise _changed(place.path)
        return data

    def digest(self, number: int) -> bytes:
        """The digest of a whole item, SHA-256.

        Raises:
            ModelError: as ``read``.
        """
        digest = hashlib.sha256()
        for piece in pieces_of(number, self.manifest.items[number]):
            digest.update(self.read(piece))
        return digest.digest()

    def _open(self, path: Path) -> int:
        with self._lock:
            if path not in self._files:
                try:
                    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
                if _state(os.fstat(file)) != self._states[path]:
                    os.close(file)
                    raise _changed(path)
                self._files[path] = file
            return self._files[path]

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            while self._files:
                os.close(self._files.popitem()[1])


def _changed(path: Path) -> ModelError:
    return ModelError(f"{path.name} has changed while it was copied; start again")


def _look(path: Path) -> _State:
    try:
        return _state(path.stat())
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error


def _state(status: os.stat_result) -> _State:
    return status.st_ino, status.st_size, status.st_mtime_ns
