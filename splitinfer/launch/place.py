"""Where `up` remembers things: a folder of the user's, on every machine.

last.json           hosts and model of the last `up` from here
layout.yaml         the layout that it made
worker-PORT.json    a worker that some `up` has started here
worker-PORT.log     what it says
"""

from pathlib import Path

from splitinfer.errors import ConfigError
from splitinfer.places import replace_file, state


def state_folder() -> Path:
    """The folder, which may not exist yet."""
    return state() / "up"


def write(path: Path, text: str) -> None:
    """Replace a file as a whole. Raises ConfigError: it cannot be written."""
    try:
        replace_file(path, text)
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
