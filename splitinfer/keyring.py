"""This machine's key, and the keys of those it admits: two files in a folder of the user's.

    key     the key pair; made when it is first needed; readable by its owner alone
    peers   a line for each key that may come in: 64 hexadecimal digits, and a name for people

A worker looks at ``peers`` whenever somebody comes, so that ``splitinfer pair`` works while it runs.
"""

import json
import logging
import os
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from splitinfer.errors import ConfigError
from transports import KeyPair, check_key

log = logging.getLogger(__name__)

_MOST_NAME = 60  # characters
_MOST_TOLD = 20  # strangers' keys that are written to the log


def default_keys() -> Path:
    """The folder of the user's keys."""
    usual = Path("Library", "Application Support") if sys.platform == "darwin" else Path(".config")
    configs = os.environ.get("XDG_CONFIG_HOME")
    return (Path(configs) if configs else Path.home() / usual) / "splitinfer"


@dataclass(frozen=True, slots=True)
class Known:
    """A key that is admitted, and what its owner is called."""

    key: str
    name: str


class Keyring:
    """The files in ``folder``. May be asked from any thread.

    Raises (all methods):
        ConfigError: a file cannot be read or written, or holds something else.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or default_keys()
        self._lock = threading.Lock()
        self._told: set[str] = set()
        self._seen: tuple[float, int] | None = None  # the file's time and size when it was read
        self._known: dict[str, Known] = {}

    # -- the own key -----------------------------------------------------------------------------

    def own(self) -> KeyPair:
        """This machine's key pair."""
        path = self._folder / "key"
        try:
            if not path.exists():
                self._make(path)
            said = json.loads(path.read_text(encoding="utf-8"))
            return KeyPair(str(said["public"]), str(said["secret"]))
        except OSError as error:
            raise ConfigError(f"the key {path} cannot be read or made: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} holds no key ({error}); remove it, and another is made") from error

    def _make(self, path: Path) -> None:
        made = KeyPair.make()
        self._folder.mkdir(parents=True, exist_ok=True)
        # In one piece, and never readable by others; whoever came first has made it.
        with tempfile.NamedTemporaryFile("w", dir=self._folder, delete=False, encoding="utf-8") as file:
            json.dump({"public": made.public, "secret": made.secret}, file)
        try:
            os.link(file.name, path)
        except FileExistsError:
            pass
        finally:
            Path(file.name).unlink()

    # -- who is admitted -------------------------------------------------------------------------

    def known(self) -> tuple[Known, ...]:
        """Everybody who is admitted."""
        with self._lock:
            self._read()
            return tuple(self._known.values())

    def admits(self, key: str) -> bool:
        """Whether the owner of a key may come in; a file that cannot be read admits nobody."""
        with self._lock:
            try:
                self._read()
            except ConfigError as error:
                log.warning("nobody is admitted: %s", error)
                return False
            return key in self._known

    def tell_stranger(self, key: str) -> None:
        """Say once how a key would be admitted."""
        with self._lock:
            if key in self._told or len(self._told) >= _MOST_TOLD:
                return
            self._told.add(key)
        log.warning(
            "refused a peer whose key is not known here; if it is yours, admit it with: splitinfer pair %s", key
        )

    def admit(self, key: str, name: str) -> None:
        """Let the owner of a key in from now on."""
        _check(key)
        with self._lock:
            self._read()
            self._write({**self._known, key: Known(key, " ".join(name.split())[:_MOST_NAME])})

    def forget(self, key: str) -> bool:
        """Let the owner of a key in no more; whether it was known."""
        with self._lock:
            self._read()
            was_known = key in self._known
            self._write({one: known for one, known in self._known.items() if one != key})
            return was_known

    @property
    def _peers(self) -> Path:
        return self._folder / "peers"

    def _read(self) -> None:
        try:
            found = self._peers.stat()
            seen = (found.st_mtime, found.st_size)
            if seen == self._seen:
                return
            lines = self._peers.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            self._known, self._seen = {}, None
            return
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self._peers} cannot be read: {error}") from error
        known = {}
        for number, line in enumerate(lines, 1):
            key, _, name = line.strip().partition(" ")
            if key:
                try:
                    check_key(key)
                except ValueError as error:
                    raise ConfigError(f"line {number} of {self._peers}: {error}") from error
                known[key] = Known(key, name.strip())
        self._known, self._seen = known, seen

    def _write(self, known: dict[str, Known]) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._folder, delete=False, encoding="utf-8") as file:
                file.writelines(f"{one.key} {one.name}\n" for one in known.values())
            Path(file.name).replace(self._peers)
        except OSError as error:
            raise ConfigError(f"{self._peers} cannot be written: {error.strerror}") from error
        self._known, self._seen = known, None


def _check(key: str) -> None:
    try:
        check_key(key)
    except ValueError as error:
        raise ConfigError(str(error)) from error
