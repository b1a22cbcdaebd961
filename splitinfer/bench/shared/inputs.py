"""Cheap checks of a measurement's inputs, before anything is loaded: loading takes a minute."""

import os
from pathlib import Path

from splitinfer.errors import ConfigError
from splitinfer.models.checkpoint import Checkpoint


def check_text(path: Path | None) -> None:
    """Refuse a text without words.

    Raises:
        ConfigError: the text is not a file, cannot be read, or holds only white space.
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


def check_plot(path: Path | None = None) -> None:
    """Refuse a plot that cannot be written, before anything is measured.

    Raises:
        ConfigError: ``path`` cannot be written, or matplotlib is not installed, or does not know its format.
    """
    if path is not None:
        check_file("plot", path)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from None
    if path is not None:
        _check_format(path)


def _check_format(path: Path) -> None:
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise ConfigError(f"{path} names no format of a plot; there are {', '.join(sorted(formats))}")


def check_file(what: str, path: Path) -> None:
    """Refuse a file that cannot be written, before anything is measured.

    Raises:
        ConfigError: with the reason.
    """
    if path.is_dir():
        raise ConfigError(f"the {what} cannot be written to {path}: it is a folder")
    if not path.parent.is_dir():
        raise ConfigError(f"the {what} cannot be written to {path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"the {what} cannot be written to {path}: permission denied")
