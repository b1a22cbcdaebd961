"""Where this user's files are, one folder named ``splitinfer`` in each of the platform's places; and how a small file
is changed that others read: as a whole, and by one process at a time.

                                       variable            macOS                           elsewhere
    what is configured: keys           $XDG_CONFIG_HOME    ~/Library/Application Support   ~/.config
    what is kept: copied weights       $XDG_DATA_HOME      ~/Library/Application Support   ~/.local/share
    state: history, the last `up`, …    $XDG_STATE_HOME     ~/Library/Application Support   ~/.local/state
    what can be made again: KV, ...    $XDG_CACHE_HOME     ~/Library/Caches                ~/.cache

The variables and the places elsewhere are those of the XDG Base Directory Specification 0.8, and a variable that is set
counts on macOS, too. macOS empties Caches when its disk fills up (Apple, File System Programming Guide), and knows no
folder for state.
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
    """Return the folder of what is configured. As the others, it may not exist yet."""
    return _place("XDG_CONFIG_HOME", _SUPPORT, Path(".config"))


def data() -> Path:
    """Return the folder of what is kept."""
    return _place("XDG_DATA_HOME", _SUPPORT, Path(".local", "share"))


def state() -> Path:
    """Return the folder of state."""
    return _place("XDG_STATE_HOME", _SUPPORT, Path(".local", "state"))


def of_up() -> Path:
    """Return where `up` remembers things, on every machine: hosts and model of the last one from here (``last.json``),
    the layout that it made (``layout.yaml``), what a worker says that some `up` has started here
    (``worker-PORT.log``)."""
    return state() / "up"


def caches() -> Path:
    """Return the folder of what can be made again."""
    return _place("XDG_CACHE_HOME", _CACHES, Path(".cache"))


def of_this_host(what: str) -> Path:
    """Return the folder WHAT/HOST among the caches, where this user's processes leave word for each other. The host is
    in the name because home folders may be shared, and processes are not."""
    host = "".join(c if c.isalnum() or c in "-." else "_" for c in platform.node()) or "localhost"
    return caches() / what / host


def _place(variable: str, on_a_mac: Path, elsewhere: Path) -> Path:
    given = os.environ.get(variable)
    usual = on_a_mac if sys.platform == "darwin" else elsewhere
    return (Path(given) if given else Path.home() / usual) / "splitinfer"


def folder_named(given: Path | str, what: str) -> Path | None:
    """Return the folder that a person names; ``None`` for the word "none". ``what``: the option or setting, for
    messages.

    Raises:
        ConfigError: that can be no folder.
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


# -- how a small file is changed ---------------------------------------------------------------------------------------


def replace_file(path: Path, text: str | bytes) -> None:
    """Replace a file as a whole, readable by its owner only, when the text is on the disk: nobody reads half of it, and
    nothing is left over if that fails. The folder is made if it is not there. Raises OSError."""
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
    """Replace a file for a person, who is told of what goes wrong. Raises ConfigError: it cannot be written."""
    try:
        replace_file(path, text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def read(path: Path) -> str | None:
    """Return a file's text. Return None if there is none. Raises ConfigError: it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """No other process or thread that asks for this changes a file of the folder meanwhile. The folder is made if it is
    not there, and the lock ends with its process. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)
