"""Reads a lock file: which source archives an environment is made of."""

import tomllib
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


class LockError(Exception):
    """A lock that no formula can be made of; its text is one sentence."""


@dataclass(frozen=True, slots=True)
class Archive:
    """A source archive. sha256: its digest, 64 hexadecimal digits."""

    name: str
    version: str
    url: str
    sha256: str


def read_lock(text: str, without: frozenset[str] = frozenset()) -> list[Archive]:
    """The archives of a lock of one platform (PEP 751), by name; packages in ``without`` are left out.

    Raises:
        LockError: it is no such lock, or a package has no source archive or no digest.
    """
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise LockError(f"the lock is no TOML: {error}") from error
    if found.get("lock-version") != "1.0":
        raise LockError(f"a lock of version 1.0 (PEP 751) is needed, not {found.get('lock-version')}")
    packages = [each for each in found.get("packages", []) if each["name"] not in without]
    archives = sorted((_archive(each) for each in packages), key=lambda archive: archive.name)
    twice = {a.name for a, b in pairwise(archives) if a.name == b.name}
    if twice:
        raise LockError(f"the lock has several versions of {', '.join(sorted(twice))}: make it for one platform")
    return archives


def _archive(package: dict[str, Any]) -> Archive:
    name = package["name"]
    try:
        source = package["sdist"]
        return Archive(name, package["version"], source["url"], source["hashes"]["sha256"])
    except KeyError as error:
        raise LockError(
            f"{name} has no {error.args[0]} in the lock: Homebrew cannot build it, so it must be a formula of its own"
        ) from error
