"""How a command runs: its log, its exit code, and one sentence for whatever went wrong."""

import logging
import os
import sys
from collections.abc import Callable
from typing import NoReturn

import typer

from splitinfer.errors import SplitinferError
from splitinfer.shutdown import shutdown


def set_up(verbose: bool, *, info: bool = False) -> None:
    """Log to standard error. ``info``: the log is what the command shows."""
    level = logging.DEBUG if verbose else logging.INFO if info else logging.WARNING
    logging.basicConfig(
        level=level, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", handlers=[_Lines(among_answers=not info)]
    )
    for noisy in ("httpx", "httpcore", "huggingface_hub", "filelock", "urllib3", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


class _Lines(logging.Handler):
    """The log on standard error: whatever that is at the moment, because a live display takes its place.

    ``among_answers``: standard output is an answer; on a terminal, a line of the log begins below its last words.
    """

    def __init__(self, *, among_answers: bool) -> None:
        super().__init__()
        self._before = "\n" if among_answers and sys.stdout.isatty() and sys.stderr.isatty() else ""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(f"{self._before}{self.format(record)}\n")
            sys.stderr.flush()
        except (OSError, ValueError):  # nobody reads it any more
            self.handleError(record)


def finish(run: Callable[[], int], verbose: bool) -> NoReturn:
    """Run a command to its exit code, with one sentence for whatever went wrong."""
    try:
        code = run()
    except KeyboardInterrupt:  # asyncio's own handler has SIGINT for the moment in which a prompt ends
        code = 130
    except BrokenPipeError:  # whoever read standard output has seen enough
        code = 0
    except SplitinferError as error:
        code = 1 if shutdown.has_begun else _say(error, verbose)
    except Exception:
        if not shutdown.has_begun:  # else it was closed under the command, on purpose
            raise
        code = 1
    shutdown.exit(code)


def _say(error: Exception, verbose: bool) -> int:
    if verbose:
        logging.getLogger(__name__).error("here is where it happened", exc_info=error)
    typer.echo(f"splitinfer: {error}", err=True)
    return 1
