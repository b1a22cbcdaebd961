"""How a command runs: its log, its signals, its exit code, and one sentence for whatever went wrong."""

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

import typer

from splitinfer.errors import SplitinferError


def set_up(verbose: bool, *, info: bool = False) -> None:
    """Log, and take signals. ``info``: the log is what the command shows."""
    level = logging.DEBUG if verbose else logging.INFO if info else logging.WARNING
    logging.basicConfig(
        level=level, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", handlers=[_Lines(among_answers=not info)]
    )
    for noisy in ("httpx", "httpcore", "huggingface_hub", "filelock", "urllib3", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    # SIGTERM takes the way of Ctrl-C, so that everything is closed on both; `open_llm` lets answers end first.
    signal.signal(signal.SIGTERM, _terminated)


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


def _terminated(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(143)


def finish(run: Callable[[], int], verbose: bool) -> NoReturn:
    """Run a command to its exit code, with one sentence for whatever went wrong."""
    try:
        code = run()
    except KeyboardInterrupt:
        code = 130
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 1
    except BrokenPipeError:  # whoever read standard output has seen enough
        code = 0
    except SplitinferError as error:
        code = _say(error, verbose)
    _exit(code)


def _say(error: Exception, verbose: bool) -> int:
    if verbose:
        logging.getLogger(__name__).error("here is where it happened", exc_info=error)
    typer.echo(f"splitinfer: {error}", err=True)
    return 1


def _exit(code: int) -> NoReturn:
    """End now. Threads that are inside a long computation cannot be waited for, and hold nothing to save."""
    from splitinfer.engine.coordinator.local_workers import end_early

    end_early()
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
