"""Cheap looks at what a measurement was given, before anything is loaded: loading takes a minute."""

from pathlib import Path

from splitinfer.errors import ConfigError
from splitinfer.models.checkpoint import Checkpoint


def check_text(path: Path | None) -> None:
    """Refuse a text that has nothing in it.

    Raises:
        ConfigError: it is no file, cannot be read, or holds only white space.
    """
    if path is None:
        return
    try:
        if path.exists() and not path.is_file():  # it may have no end, or be there only once
            raise ConfigError(f"text {path} cannot be read: it is not a file")
        with path.open(encoding="utf-8", errors="replace") as file:
            has_words = any(line.strip() for line in file)
    except OSError as error:
        raise ConfigError(f"text {path} cannot be read: {error.strerror}") from error
    if not has_words:
        raise ConfigError(f"text {path} is empty; there must be something to read")


def check_context(checkpoint: Checkpoint, needed: int, options: str) -> None:
    """Refuse tasks of more tokens than the model was made for. ``options``: what makes them shorter.

    Raises:
        ConfigError: they are.
    """
    if needed > checkpoint.context_length:
        raise ConfigError(
            f"the tasks need {needed:,} tokens, but the model's context is {checkpoint.context_length:,}; "
            f"give fewer with {options}"
        )
