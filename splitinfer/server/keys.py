"""API keys: who may use the server, for what, and how much.

A key is 32 random bytes behind a prefix; it is shown once, when it is made. The file holds its SHA-256 only: a random
key of this length cannot be guessed from it, so it needs no slow hash. What a client shows is looked up by its digest,
which it cannot steer, so the time of that tells nothing of the keys. A file is YAML, a list:

    - name: laptop
      sha256: 9f86d081884c7d65...     # of the whole key
      scopes: [use]                   # metrics: /metrics only; use: requests, too; admin: also the serving options
      requests_per_minute: 600        # left out: any number
      concurrent: 8                   # answers at a time; left out: any number
"""

import hashlib
import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

from splitinfer.errors import ConfigError

_PREFIX = "sk-splitinfer-"
SHORT = 16  # characters: a key that somebody chose, and another can find by trying
_DIGEST = re.compile(r"[0-9a-f]{64}")
# What PyYAML raises beside its own: for a date in month 13, `!!int ""`, `!!timestamp x`, `!!bool x`, a thousand `[`.
_UNREADABLE = (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError, yaml.YAMLError)
_NEEDED, _FURTHER = ("name", "sha256"), ("scopes", "requests_per_minute", "concurrent")


class Scope(StrEnum):
    """What a key is for."""

    USE = "use"  # requests, and what the server says of itself, figures included
    ADMIN = "admin"  # also to change serving options
    METRICS = "metrics"  # nothing but figures of all requests together, for Prometheus


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as the server knows it. ``requests_per_minute``, ``concurrent``: ``None`` is any number.

    Raises:
        ValueError: a value that cannot be, in one sentence.
    """

    name: str
    sha256: str
    scopes: frozenset[Scope] = frozenset({Scope.USE})
    requests_per_minute: float | None = None
    concurrent: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip() or len(self.name) > 60:
            raise ValueError(f"a key needs a name of at most 60 characters, not {self.name!r:.80}")
        if not isinstance(self.sha256, str) or not _DIGEST.fullmatch(self.sha256):
            raise ValueError(f"the sha256 of key {self.name!r} must be 64 hexadecimal digits in lower case")
        if not self.scopes:
            raise ValueError(f"key {self.name!r} has no scope; there are {', '.join(Scope)}")
        for field in ("requests_per_minute", "concurrent"):
            value = getattr(self, field)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (number and 0 < value < float("inf")):
                raise ValueError(f"{field} of key {self.name!r} must be a number over 0, not {value!r:.40}")
        if self.concurrent is not None and not isinstance(self.concurrent, int):
            raise ValueError(f"concurrent of key {self.name!r} must be a whole number, not {self.concurrent!r}")

    def may(self, scope: Scope) -> bool:
        """Whether the key is for this; an administrator may do all, and who may use may read figures."""
        return bool(self.scopes & {scope, Scope.ADMIN}) or (scope is Scope.METRICS and Scope.USE in self.scopes)


NOBODY = ApiKey("nobody", "0" * 64, frozenset(Scope))
"""Who asks where no key is needed. Nothing has this digest."""


def digest(secret: str) -> str:
    """What the file holds of a key."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def new_secret() -> str:
    """A new key."""
    return _PREFIX + secrets.token_urlsafe(32)


class ApiKeys:
    """The keys of a server, by digest.

    Raises:
        ConfigError: two keys have one name, or one digest.
    """

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._by_digest: dict[str, ApiKey] = {}
        self._set(keys)

    def _set(self, keys: Iterable[ApiKey]) -> None:
        by_digest: dict[str, ApiKey] = {}
        names: set[str] = set()
        for key in keys:
            if key.name in names or key.sha256 in by_digest:
                raise ConfigError(f"there are two API keys {key.name!r}, or one key under two names")
            names.add(key.name)
            by_digest[key.sha256] = key
        self._by_digest = by_digest

    def __len__(self) -> int:
        return len(self._by_digest)

    def __iter__(self) -> Iterator[ApiKey]:
        return iter(self._by_digest.values())

    def find(self, secret: str) -> ApiKey | None:
        """The key that a client has shown."""
        return self._by_digest.get(digest(secret))

    def holds(self, key: ApiKey) -> bool:
        """Whether a key is among them, as it was."""
        return self._by_digest.get(key.sha256) == key


def read_keys(path: Path, *, may_be_empty: bool = False) -> list[ApiKey]:
    """The keys in a file. ``may_be_empty``: also a list without any.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except _UNREADABLE as error:
        reason = str(error).replace("\n", " ")
        raise ConfigError(f"the API keys {path} cannot be read: {reason}") from error
    if not isinstance(found, list) or not (found or may_be_empty):
        raise ConfigError(f"{path} must hold a list of API keys")
    keys = []
    for number, entry in enumerate(found, 1):
        try:
            keys.append(_key_of(entry))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"key {number} of {path}: {error}") from error
    return keys


def _key_of(entry: Any) -> ApiKey:
    if not isinstance(entry, dict) or not {*_NEEDED} <= entry.keys() <= {*_NEEDED, *_FURTHER}:
        raise ValueError(f"it must have {' and '.join(_NEEDED)}, and may have {', '.join(_FURTHER)}")
    scopes = entry.get("scopes", [Scope.USE])
    if not isinstance(scopes, list) or not all(one in tuple(Scope) for one in scopes):
        raise ValueError(f"scopes must be a list of {', '.join(Scope)}, not {scopes!r:.60}")
    return ApiKey(**{**entry, "scopes": frozenset(map(Scope, scopes))})


def as_yaml(keys: Iterable[ApiKey]) -> str:
    """A file's text."""
    entries = [
        {
            "name": key.name,
            "sha256": key.sha256,
            "scopes": sorted(map(str, key.scopes)),
            **({} if key.requests_per_minute is None else {"requests_per_minute": key.requests_per_minute}),
            **({} if key.concurrent is None else {"concurrent": key.concurrent}),
        }
        for key in keys
    ]
    return yaml.safe_dump(entries, sort_keys=False)
