"""API keys: who may use the server, for what, and how much; and the file that holds them.

A key is 32 random bytes after a prefix, shown once. The file holds only its SHA-256, and nobody can guess the key from
that. The server looks up a client's key by its digest. The client cannot steer the digest, so the time of the lookup
reveals nothing about the keys.

    - name: laptop
      sha256: 9f86d081884c7d65...     # of the whole key
      scopes: [use]                   # metrics: /metrics only; use: requests, too; admin: also the serving options
      requests_per_minute: 600        # left out: any number
      concurrent: 8                   # answers at a time; left out: any number

A change replaces the whole file, and changes wait for each other. Whenever a client shows a key, the server compares
the file's identity, time and size with the last ones. So a removed key is refused at once, and so are its sessions. If
the file becomes unreadable, or other users may write it, only keys from the command line are admitted.
"""

import contextlib
import dataclasses
import hashlib
import logging
import math
import secrets
import stat
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import ConfigDict, Field, StrictFloat, StrictInt, StringConstraints, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from splitinfer.errors import ConfigError
from splitinfer.places import locked, replace_file
from splitinfer.server.problem import Problem

log = logging.getLogger(__name__)

_PREFIX = "sk-splitinfer-"
SHORT = 16  # characters; a shorter key can be found by trying
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
# PyYAML raises these, too: for a date in month 13, `!!int ""`, `!!timestamp x`, `!!bool x`, a thousand `[`.
_UNREADABLE = (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError, yaml.YAMLError)
_Version = tuple[int, int, int, int]


class Scope(StrEnum):
    USE = "use"  # requests, and the server's own state, figures included
    ADMIN = "admin"  # also to change serving options
    METRICS = "metrics"  # only the figures of all requests together, for Prometheus


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ApiKey:
    """A key as the server stores it. ``requests_per_minute``, ``concurrent``: ``None`` is any number.

    Raises:
        pydantic.ValidationError: a value is not valid.
    """

    name: Annotated[str, StringConstraints(strict=True, max_length=60, pattern=r"\S")]
    sha256: Annotated[str, StringConstraints(strict=True, pattern=r"^[0-9a-f]{64}$")]
    scopes: Annotated[frozenset[Scope], Field(min_length=1)] = frozenset({Scope.USE})
    requests_per_minute: Annotated[StrictInt | StrictFloat, Field(gt=0, lt=float("inf"))] | None = None
    concurrent: Annotated[StrictInt, Field(gt=0)] | None = None

    def may(self, scope: Scope) -> bool:
        return bool(self.scopes & {scope, Scope.ADMIN}) or (scope is Scope.METRICS and Scope.USE in self.scopes)


_KEYS = TypeAdapter(list[ApiKey])

NOBODY = ApiKey("nobody", "0" * 64, frozenset(Scope))
"""The caller if no key is needed. No secret has this digest."""


def digest(secret: str) -> str:
    """Return the digest of a key, as in the file."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def new_secret() -> str:
    return _PREFIX + secrets.token_urlsafe(32)


class ApiKeys:
    """The keys of a server, by digest: the keys in the file ``path``, which is read again when it changes, and the
    ``given`` keys.

    Raises:
        ConfigError: two keys share a name or a digest; or the file cannot be read, is not valid, or can be written by
            others than its owner.
    """

    def __init__(self, given: Iterable[ApiKey] = (), path: Path | None = None) -> None:
        self._given, self._path = tuple(given), path
        self._version = self._version_now()
        self._by_digest = self._read()

    def __len__(self) -> int:
        return len(self._by_digest)

    def __iter__(self) -> Iterator[ApiKey]:
        return iter(self._now().values())

    def find(self, secret: str) -> ApiKey | None:
        return self._now().get(digest(secret))

    def holds(self, key: ApiKey) -> bool:
        """Return whether a key is still admitted, unchanged."""
        return self._now().get(key.sha256) == key

    def _now(self) -> dict[str, ApiKey]:
        version = self._version_now()
        if version != self._version:
            self._version = version
            self._by_digest = _by_digest(self._given)  # even if reading fails, no earlier key is admitted
            try:
                self._by_digest = self._read()
            except (ConfigError, OSError) as error:
                log.warning("no key of the file is admitted: %s", error)
        return self._by_digest

    def _read(self) -> dict[str, ApiKey]:
        if self._path is None:
            return _by_digest(self._given)
        keys = read_keys(self._path)
        if self._path.stat().st_mode & _OTHERS_WRITE:
            raise ConfigError(f"other users can write {self._path}, and so add keys; run `chmod 600 {self._path}`")
        return _by_digest([*keys, *self._given])

    def _version_now(self) -> _Version | None:
        try:
            status = None if self._path is None else self._path.stat()
        except OSError:
            return None
        return None if status is None else (status.st_ino, status.st_mtime_ns, status.st_size, status.st_mode)


def _by_digest(keys: Sequence[ApiKey]) -> dict[str, ApiKey]:
    by_digest: dict[str, ApiKey] = {}
    for key in keys:
        if key.sha256 in by_digest or key.name in (other.name for other in by_digest.values()):
            raise ConfigError(f"there are two API keys {key.name!r}, or one key under two names")
        by_digest[key.sha256] = key
    return by_digest


# -- the file --------------------------------------------------------------------------------------


def read_keys(path: Path) -> list[ApiKey]:
    """Return the keys in a file.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    try:
        return _KEYS.validate_python(yaml.safe_load(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        number = next((f"key {part + 1} of " for part in error.errors()[0]["loc"] if isinstance(part, int)), "")
        raise ConfigError(f"{number}{path}: {_sentence(error)}") from error
    except _UNREADABLE as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error).replace("\n", " ")
        raise ConfigError(f"the API keys {path} cannot be read: {reason}") from error


def add_key(
    path: Path,
    name: str,
    scopes: Iterable[Scope] = (Scope.USE,),
    requests_per_minute: float | None = None,
    concurrent: int | None = None,
) -> str:
    """Make a key, write its digest to the file, and return the key, which is kept nowhere. Make the file if it does not
    exist.

    Raises:
        ConfigError: a key of this name exists, a value is not valid, or the file cannot be read or written.
    """
    secret = new_secret()
    try:
        made = ApiKey(  # by name, because an error names the field
            name=name,
            sha256=digest(secret),
            scopes=frozenset(scopes),
            requests_per_minute=requests_per_minute,
            concurrent=concurrent,
        )
    except ValidationError as error:
        raise ConfigError(f"key {name!r:.80}: {_sentence(error)}") from error
    with _changing(path) as held:
        if any(key.name == name for key in held):
            raise ConfigError(f"{path} has a key {name!r} already; remove it first, or choose another name")
        held.append(made)
    return secret


def remove_key(path: Path, name: str) -> None:
    """Remove a key from the file.

    Raises:
        ConfigError: no key has this name, or the file cannot be read or written.
    """
    missing = ConfigError(f"{path} has no key {name!r}; `splitinfer keys ls` lists them")
    if not path.exists():
        raise missing
    with _changing(path) as held:
        left = [key for key in held if key.name != name]
        if len(left) == len(held):
            raise missing
        held[:] = left


@contextlib.contextmanager
def _changing(path: Path) -> Iterator[list[ApiKey]]:
    """Yield the keys of the file, which no other process changes meanwhile, and write them back at the end."""
    try:
        with locked(path.parent):
            keys = read_keys(path) if path.exists() else []
            yield keys
            replace_file(path, yaml.safe_dump(_KEYS.dump_python(keys, mode="json", exclude_none=True), sort_keys=False))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error


def _sentence(error: ValidationError) -> str:
    """Return the first error, with the field's name."""
    first = error.errors()[0]
    field = next((f"{part}: " for part in first["loc"] if isinstance(part, str)), "")
    return f"{field}{first['msg'][:1].lower()}{first['msg'][1:]}"


# -- how much each key may ask ---------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class _Account:
    running: int = 0
    tokens: float = math.inf  # requests that may be made at once, before the key's own limit; all at first
    at: float = 0.0  # seconds, when ``tokens`` was right


class Rates:
    """The accounts of all keys. Call ``begin`` for each request, and ``end`` when it is over, however it ended."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}  # by the key's name

    def begin(self, key: ApiKey, now: float, num_answers: int = 1) -> None:
        """Count a request that begins. ``now``: seconds of any steady clock. ``num_answers``: the answers that it
        requests at once; each takes a place.

        Raises:
            Problem: 429, the key has too many answers under way or asks too often; 400, it may never have that many
                answers.
        """
        account = self._accounts.setdefault(key.name, _Account())
        if key.concurrent is not None:
            _check_places(key, account.running, num_answers, key.concurrent)
        self._take_token(account, key, now)
        account.running += num_answers

    def end(self, key: ApiKey, num_answers: int = 1) -> None:
        self._accounts[key.name].running -= num_answers

    def give_back(self, key: ApiKey) -> None:
        """Give back a request that began but is not carried out, so that it does not count."""
        self._accounts[key.name].tokens += 1.0

    def _take_token(self, account: _Account, key: ApiKey, now: float) -> None:
        if key.requests_per_minute is None:
            return
        each, most = 60.0 / key.requests_per_minute, max(1.0, key.requests_per_minute)
        held = min(most, account.tokens + (now - account.at) / each)
        account.tokens, account.at = held, now
        wait = (1.0 - held) * each
        if wait > 0:
            raise Problem(
                429,
                f"key {key.name!r} may make {key.requests_per_minute:g} a minute; the next one in {wait:.0f} s",
                code="rate_limit_exceeded",
                retry_after=wait,
            )
        account.tokens = held - 1.0


def _check_places(key: ApiKey, running: int, wanted: int, most: int) -> None:
    if wanted > most:
        raise Problem(400, f"{wanted} answers are asked for at once, and key {key.name!r} may have {most}")
    if running + wanted > most:
        raise Problem(
            429,
            f"key {key.name!r} has {running} answers under way, and may have {most}",
            code="concurrency_exceeded",
            retry_after=1.0,
        )
