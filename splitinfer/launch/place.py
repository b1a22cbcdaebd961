"""Where `up` remembers things: a folder of the user's, on every machine.

    last.json           hosts and model of the last `up` from here
    layout.yaml         the layout that it made
    worker-PORT.json    a worker that some `up` has started here
    worker-PORT.log     what it says
    lock                held while one is started or stopped

On Linux it is a folder for state, which the XDG Base Directory Specification 0.8 has for logs and history; macOS knows
no such kind, and Application Support is where keys are, too.
"""

import contextlib
import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from splitinfer.errors import ConfigError


def state_folder() -> Path:
    """The folder, which may not exist yet."""
    usual = Path("Library", "Application Support") if sys.platform == "darwin" else Path(".local", "state")
    states = os.environ.get("XDG_STATE_HOME")
    return (Path(states) if states else Path.home() / usual) / "splitinfer" / "up"


def made(folder: Path) -> Path:
    """The folder, made for this user alone. Raises ConfigError: it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror}") from error
    return folder


def write(path: Path, text: str) -> None:
    """Replace a file as a whole. Raises ConfigError: it cannot be written."""
    made(path.parent)
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            file.write(text)
        Path(file.name).replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def read(path: Path) -> str | None:
    """A file's text; ``None`` if there is none. Raises ConfigError: it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """No other process of this user starts or stops a worker here meanwhile."""
    with (made(folder) / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
