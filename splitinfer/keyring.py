"""Keeps this machine's key pair and the keys that it admits in two files of a user's folder.

    key     the key pair; made on its first use; readable by its owner only
    peers   one line for each admitted key: 64 hexadecimal digits, and a name for people

A worker reads ``peers`` whenever a peer connects, so ``splitinfer pair`` takes effect while it runs.
"""

import contextlib
import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from splitinfer.errors import ConfigError
from splitinfer.places import configuration, locked, read, replace_file
from transports import KeyPair, check_key

log = logging.getLogger(__name__)

_MAX_NAME = 60  # characters
_MAX_LOGGED = 20  # unknown keys that are written to the log


def same_key() -> str:
    """Return the error and the cure for another machine with this one's key: a sentence without its subject."""
    return (
        f"has the same key as this machine, so the two cannot be told apart: {configuration() / 'key'} was copied from "
        "one to the other. Remove that file on one of them, which makes a new key, and pair the two again"
    )


@dataclass(frozen=True, slots=True)
class Known:
    """An admitted key, and its owner's name."""

    key: str
    name: str


class Keyring:
    """The files in ``folder``. All methods may be called from any thread.

    Raises (all methods):
        ConfigError: a file cannot be read or written, or holds something else.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or configuration()
        self._lock = threading.Lock()
        self._logged: set[str] = set()
        self._known: dict[str, Known] = {}

    # -- this machine's key ----------------------------------------------------------------------

    def own(self) -> KeyPair:
        """Return this machine's key pair. The first call makes it."""
        path = self._folder / "key"
        try:
            if not path.exists():
                self._make(path)
            fields = json.loads(path.read_text(encoding="utf-8"))
            return KeyPair(str(fields["public"]), str(fields["secret"]))
        except OSError as error:
            raise ConfigError(f"cannot read or make the key {path}: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} does not contain a key ({error}); remove it to have a new one made") from error

    def public(self) -> str | None:
        """Return this machine's public key, or None if it has no key yet."""
        return self.own().public if (self._folder / "key").exists() else None

    def _make(self, path: Path) -> None:
        with locked(self._folder):
            if not path.exists():  # the key of the first of several processes stays
                made = KeyPair.make()
                replace_file(path, json.dumps({"public": made.public, "secret": made.secret}))

    # -- admitted keys ---------------------------------------------------------------------------

    def known(self) -> tuple[Known, ...]:
        """Return the admitted keys."""
        with self._lock:
            self._read()
            return tuple(self._known.values())

    def admits(self, key: str) -> bool:
        """Return whether a key is admitted. If the file cannot be read, no key is."""
        with self._lock:
            try:
                self._read()
            except ConfigError as error:
                log.warning("no keys are admitted: %s", error)
                return False
            return key in self._known

    def log_unknown(self, key: str) -> None:
        """Log, once for each key, that its owner was refused, and the command that admits it."""
        with self._lock:
            if key in self._logged or len(self._logged) >= _MAX_LOGGED:
                return
            self._logged.add(key)
        log.warning("refused a peer with an unknown key; if it is yours, admit it with: splitinfer pair %s", key)

    def admit(self, key: str, name: str) -> None:
        """Admit a key from now on; ``name`` is its owner's, for people."""
        try:
            check_key(key)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        with self._changing():
            self._write({**self._known, key: Known(key, " ".join(name.split())[:_MAX_NAME])})

    def forget(self, key: str) -> bool:
        """Stop admitting a key. Return whether it was admitted before."""
        with self._changing():
            was_known = key in self._known
            self._write({one: known for one, known in self._known.items() if one != key})
            return was_known

    @property
    def _peers(self) -> Path:
        return self._folder / "peers"

    def _read(self) -> None:
        known = {}
        for number, line in enumerate((read(self._peers) or "").splitlines(), 1):
            key, _, name = line.strip().partition(" ")
            if key:
                try:
                    check_key(key)
                except ValueError as error:
                    raise ConfigError(f"line {number} of {self._peers}: {error}") from error
                known[key] = Known(key, name.strip())
        self._known = known

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Keep the file of admitted keys unchanged from its reading to its writing."""
        try:
            with self._lock, locked(self._folder):
                self._read()
                yield
        except OSError as error:
            raise ConfigError(f"{self._peers} cannot be written: {error.strerror}") from error

    def _write(self, known: dict[str, Known]) -> None:
        replace_file(self._peers, "".join(f"{one.key} {one.name}\n" for one in known.values()))
        self._known = known
