"""Names the folders of this user's files, one called ``splitinfer`` in each of the platform's places, and replaces
small shared files: as a whole, and by one process at a time.

                                       variable            macOS                           elsewhere
    configuration: keys                $XDG_CONFIG_HOME    ~/Library/Application Support   ~/.config
    data: copied weights               $XDG_DATA_HOME      ~/Library/Application Support   ~/.local/share
    state: history, the last `up`, ... $XDG_STATE_HOME     ~/Library/Application Support   ~/.local/state
    files that can be made again: KV   $XDG_CACHE_HOME     ~/Library/Caches                ~/.cache

The variables and the last column follow the XDG Base Directory Specification 0.8; a variable that is set counts on
macOS, too. macOS empties Caches when its disk fills up (Apple, File System Programming Guide), and has no folder for
state.
"""

import contextlib
import fcntl
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from splitinfer.errors import ConfigError

_SUPPORT, _CACHES = Path("Library", "Application Support"), Path("Library", "Caches")


def configuration() -> Path:
    """Return the folder for configuration. Like the others, it may not exist yet."""
    return _place("XDG_CONFIG_HOME", _SUPPORT, Path(".config"))


def data() -> Path:
    """Return the folder for data that stays."""
    return _place("XDG_DATA_HOME", _SUPPORT, Path(".local", "share"))


def state() -> Path:
    """Return the folder for state."""
    return _place("XDG_STATE_HOME", _SUPPORT, Path(".local", "state"))


def of_up() -> Path:
    """Return the folder of `up` on every machine. It has the hosts and the model of the last `up` from here
    (``last.json``), its layout (``layout.yaml``), and the logs of workers that any `up` has started here
    (``worker-PORT.log``)."""
    return state() / "up"


def caches() -> Path:
    """Return the folder for files that can be made again if they are deleted."""
    return _place("XDG_CACHE_HOME", _CACHES, Path(".cache"))


def of_this_host(what: str) -> Path:
    """Return the folder WHAT/HOST among the caches, for files that this user's processes share. The host is in the name
    because machines may share a home folder, but not processes."""
    host = "".join(c if c.isalnum() or c in "-." else "_" for c in platform.node()) or "localhost"
    return caches() / what / host


def _place(variable: str, on_a_mac: Path, elsewhere: Path) -> Path:
    given = os.environ.get(variable)
    usual = on_a_mac if sys.platform == "darwin" else elsewhere
    return (Path(given) if given else Path.home() / usual) / "splitinfer"


def folder_named(given: Path | str, what: str) -> Path | None:
    """Return the folder that a person names, or None for the word "none". ``what``: the option or setting, for
    messages.

    Raises:
        ConfigError: the name cannot be a folder.
    """
    if str(given) == "none":
        return None
    try:
        path = Path(given).expanduser().absolute()
    except RuntimeError as error:
        raise ConfigError(f"{what}: there is no home folder for {given}") from error
    if not str(given) or "\0" in str(given) or (path.exists() and not path.is_dir()):
        raise ConfigError(f"{what}: {str(given)!r} is not a folder; name one, or 'none'")
    return path


# -- changing a small file ---------------------------------------------------------------------------------------------


def replace_file(path: Path, text: str | bytes) -> None:
    """Replace a file as a whole once the text is on the disk: nobody reads half of it, and a failure leaves nothing
    over. Only its owner can read it. The folder is made if necessary. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(text if isinstance(text, bytes) else text.encode())
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def write(path: Path, text: str | bytes) -> None:
    """Replace a file at a person's request. Raises ConfigError, with a sentence, if it cannot be written."""
    try:
        replace_file(path, text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def read(path: Path) -> str | None:
    """Return a file's text, or None if it does not exist. Raises ConfigError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder during the ``with`` block, so that processes and threads change its files one at a
    time. The folder is made if necessary, and the lock ends with its process. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)
