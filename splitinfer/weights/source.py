"""Reads ranges of a model's files for another machine, and notices when a file changes meanwhile.

A file is identified by its inode, size and modification time when its manifest was made, because the fingerprint
belongs to that content. A file that was replaced or written to is not read any more. A copy in the store may grow
meanwhile: its recorded ranges are never written again.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from splitinfer.errors import ModelError
from splitinfer.weights.manifest import Manifest
from splitinfer.weights.ranges import Span, is_in


@dataclass(frozen=True, slots=True)
class Place:
    """Where the bytes of a file are: in ``path``, from offset ``begin``. ``grows``: it is a copy in the store."""

    path: Path
    begin: int = 0
    grows: bool = False


_State = tuple[int, int, int]  # inode, size, nanoseconds of the last change


class Source:
    """Reads a model's files, in one thread, until ``close``. ``places``: the files that are here, complete or in part.

    Raises:
        ModelError: a file is gone or has changed.
    """

    def __init__(self, manifest: Manifest, places: Mapping[str, Place]) -> None:
        self.manifest = manifest
        self._places = places
        self._small = {file.name: file.nbytes for file in manifest.files}
        self._states = {place.path: _look(place) for place in places.values()}
        self._files: dict[Path, int] = {}

    def read(self, file: str, begin: int, end: int) -> bytes:
        """Return the bytes of a small file, or of the data part of a file of weights.

        Raises:
            ModelError: the file is gone or has changed since the manifest was made, or these bytes are not here.
        """
        place = self._places.get(file)
        held = ((0, self._small[file]),) if file in self._small else self.manifest.held.get(file, tuple[Span, ...]())
        if place is None or not is_in((begin, end), held):
            raise ModelError(f"this machine does not have bytes {begin:,} to {end:,} of {file:.100}")
        opened = self._open(place)
        try:
            data = os.pread(opened, end - begin, place.begin + begin)
        except OSError as error:
            raise ModelError(f"{place.path} cannot be read: {error.strerror or error}") from error
        if len(data) != end - begin or _state(os.fstat(opened), place) != self._states[place.path]:
            raise _changed(place.path)
        return data

    def _open(self, place: Place) -> int:
        path = place.path
        if path not in self._files:
            try:
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
            if _state(os.fstat(file), place) != self._states[path]:
                os.close(file)
                raise _changed(path)
            self._files[path] = file
        return self._files[path]

    def close(self) -> None:
        """Close the files."""
        while self._files:
            os.close(self._files.popitem()[1])


def _changed(path: Path) -> ModelError:
    return ModelError(f"{path.name} has changed while it was copied; start again")


def _look(place: Place) -> _State:
    try:
        return _state(place.path.stat(), place)
    except OSError as error:
        raise ModelError(f"{place.path} cannot be read: {error.strerror or error}") from error


def _state(status: os.stat_result, place: Place) -> _State:
    return status.st_ino, status.st_size, 0 if place.grows else status.st_mtime_ns
