"""The file of API keys, as it is changed and as a running server follows it.

A change replaces the file as a whole, readable by its owner only, so a reader never finds half of it. A server looks at
the file's identity, time and size whenever a key is shown, so a key that is removed is refused at once, and so are the
sessions that it bought. A file that cannot be read any more, or that other users may write, who could add keys of
their own, admits nobody but those given on the command line.
"""

import logging
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from splitinfer.errors import ConfigError
from splitinfer.server.keys import ApiKey, ApiKeys, Scope, as_yaml, digest, new_secret, read_keys

log = logging.getLogger(__name__)

_Version = tuple[int, int, int, int]
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def add_key(
    path: Path,
    name: str,
    scopes: Iterable[Scope] = (Scope.USE,),
    requests_per_minute: float | None = None,
    concurrent: int | None = None,
) -> str:
    """Make a key and write its digest to the file, which is made if it is not there; the key, which is kept nowhere.

    Raises:
        ConfigError: there is a key of this name, a value cannot be, or the file cannot be read or written.
    """
    secret = new_secret()
    try:
        made = ApiKey(name, digest(secret), frozenset(scopes), requests_per_minute, concurrent)
    except ValueError as error:
        raise ConfigError(f"{error}") from error
    held = _held(path)
    if any(key.name == name for key in held):
        raise ConfigError(f"{path} has a key {name!r} already; remove it first, or choose another name")
    _replace(path, [*held, made])
    return secret


def remove_key(path: Path, name: str) -> None:
    """Remove a key from the file.

    Raises:
        ConfigError: there is none of this name, or the file cannot be read or written.
    """
    held = _held(path)
    left = [key for key in held if key.name != name]
    if len(left) == len(held):
        raise ConfigError(f"{path} has no key {name!r}; `splitinfer keys ls` lists them")
    _replace(path, left)


def _held(path: Path) -> list[ApiKey]:
    return read_keys(path, may_be_empty=True) if path.exists() else []


def _replace(path: Path, keys: Sequence[ApiKey]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # mode 0600 from the first byte; the last step is atomic
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            file.write(as_yaml(keys))
            file.flush()
            os.fsync(file.fileno())
        Path(file.name).replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error


def _admitted(path: Path) -> list[ApiKey]:
    """The keys of a file that only its owner can write.

    Raises:
        ConfigError: others can, or it cannot be read, or holds something else.
    """
    keys = read_keys(path, may_be_empty=True)
    if path.stat().st_mode & _OTHERS_WRITE:
        raise ConfigError(f"other users can write {path}, and so add keys; `chmod 600 {path}` makes it its owner's")
    return keys


class FollowedKeys(ApiKeys):
    """The keys of a file as it is now, and ``further`` ones.

    Raises:
        ConfigError: the file cannot be read, or holds something else, or others than its owner can write it.
    """

    def __init__(self, path: Path, further: Iterable[ApiKey] = ()) -> None:
        self._path, self._further = path, tuple(further)
        self._version = self._version_now()
        super().__init__([*_admitted(path), *self._further])

    def find(self, secret: str) -> ApiKey | None:
        """The key that a client has shown."""
        self._follow()
        return super().find(secret)

    def holds(self, key: ApiKey) -> bool:
        """Whether a key is admitted still, as it was."""
        self._follow()
        return super().holds(key)

    def __iter__(self) -> Iterator[ApiKey]:
        self._follow()
        return super().__iter__()

    def _follow(self) -> None:
        version = self._version_now()
        if version == self._version:
            return
        self._version = version
        self._set(self._further)  # whatever comes of reading it, no key that was in it before is admitted
        try:
            self._set([*_admitted(self._path), *self._further])
        except (ConfigError, OSError) as error:
            log.warning("no key of the file is admitted: %s", error)

    def _version_now(self) -> _Version | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size, status.st_mode
