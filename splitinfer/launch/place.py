"""Where `up` remembers things: a folder of the user's, on every machine.

last.json           hosts and model of the last `up` from here
layout.yaml         the layout that it made
worker-PORT.json    a worker that some `up` has started here
worker-PORT.log     what it says
lock                held while one is started or stopped
"""

import contextlib
import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path

from splitinfer.errors import ConfigError
from splitinfer.places import state


def state_folder() -> Path:
    """The folder, which may not exist yet."""
    return state() / "up"


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
def locked() -> Iterator[None]:
    """No other process of this user starts or stops a worker here meanwhile."""
    with (made(state_folder()) / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
