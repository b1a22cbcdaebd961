"""Cheap checks of a measurement's inputs, before anything is loaded: loading takes a minute."""

from pathlib import Path

from splitinfer.errors import ConfigError
from splitinfer.models.checkpoint import Checkpoint


def check_text(path: Path | None) -> None:
    """Refuse a text without words.

    Raises:
        ConfigError: the text is no file, cannot be read, or holds only white space.
    """
    if path is None:
        return
    try:
        if path.exists() and not path.is_file():  # a pipe or device may have no end, or be readable only once
            raise ConfigError(f"text {path} cannot be read: it is not a file")
        with path.open(encoding="utf-8", errors="replace") as file:
            has_words = any(line.strip() for line in file)
    except OSError as error:
        raise ConfigError(f"text {path} cannot be read: {error.strerror}") from error
    if not has_words:
        raise ConfigError(f"text {path} is empty; there must be something to read")


def check_context(checkpoint: Checkpoint, needed: int, options: str) -> None:
    """Refuse tasks that exceed the model's context. ``options``: those that make the tasks shorter.

    Raises:
        ConfigError: ``needed`` tokens do not fit.
    """
    if needed > checkpoint.context_length:
        raise ConfigError(
            f"the tasks need {needed:,} tokens, but the model's context is {checkpoint.context_length:,}; "
            f"give fewer with {options}"
        )
