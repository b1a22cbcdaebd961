"""Runs a command: sets up its log, and turns its result or error into an exit code and one sentence."""

import logging
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import typer

from splitinfer.common.plain_text import wrapped
from splitinfer.errors import SplitinferError
from splitinfer.shutdown import shutdown

log = logging.getLogger(__name__)


def set_up(verbose: bool, *, info: bool = False) -> None:
    """Log to standard error. ``info``: the log is the command's output, so it has more."""
    level = logging.DEBUG if verbose else logging.INFO if info else logging.WARNING
    logging.basicConfig(
        level=level, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", handlers=[_Lines(among_answers=not info)],
        force=True,
    )  # fmt: skip
    for noisy in ("httpx", "httpcore", "huggingface_hub", "filelock", "urllib3", "asyncio", "uvicorn"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


class _Lines(logging.Handler):
    """Writes to the present ``sys.stderr``, which a live display replaces.

    ``among_answers``: standard output is an answer; on a terminal, a line of the log begins below it.
    """

    def __init__(self, *, among_answers: bool) -> None:
        super().__init__()
        self._before = "\n" if among_answers and sys.stdout.isatty() and sys.stderr.isatty() else ""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(f"{self._before}{_fitted(self.format(record))}\n")
            sys.stderr.flush()
        except (OSError, ValueError):  # standard error is closed
            self.handleError(record)


def finished(command: Callable[..., int | None]) -> Callable[..., int]:
    """Return the command with a log (``set_up``) and an exit code, 0 where it returns none; an error becomes one
    sentence."""

    def run(**given: Any) -> int:
        set_up(given.get("verbose", False))
        try:
            return command(**given) or 0
        except KeyboardInterrupt:  # asyncio's own handler has SIGINT for the moment in which a prompt ends
            return 130
        except BrokenPipeError:  # the reader of standard output has closed it
            return 0
        except SplitinferError as error:
            if not shutdown.has_begun:
                log.debug("traceback of the error", exc_info=error)
                say(f"splitinfer: {error}")
        except Exception:
            if not shutdown.has_begun:  # else it was closed under the command, on purpose
                raise
        return 1

    return run


def say(text: str) -> None:
    """Print a text to standard error, wrapped between words if that is a terminal."""
    sys.stderr.write(f"{_fitted(text)}\n")


def tell(text: str) -> None:
    """Print a text to standard output, wrapped between words if that is a terminal."""
    typer.echo(_fitted(text, sys.stdout))


def show_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows to standard output: side by side where the terminal has room for them, else below each other."""
    from splitinfer.chat.formatting import columns

    typer.echo(columns(headings, rows, shutil.get_terminal_size().columns if sys.stdout.isatty() else None))


def _fitted(text: str, stream: TextIO | None = None) -> str:
    return wrapped(text, shutil.get_terminal_size().columns) if (stream or sys.stderr).isatty() else text
