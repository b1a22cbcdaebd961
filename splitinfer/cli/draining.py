"""Opens a model for the command line, and closes it when a signal arrives.

SIGTERM drains a coordinator: the running answer may end, no request is admitted, then everything is closed and every
worker is sent a goodbye. A second SIGTERM, or Ctrl-C, does not wait. While the stages load, there is nothing to wait
for.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from splitinfer.console import load_llm
from splitinfer.llm import LLM, Settings
from splitinfer.shutdown import Closing, Shutdown

DRAIN_SECONDS = 5.0
"""Seconds that an answer may still take after SIGTERM. The end of a paragraph fits in, and with the two seconds of
closing it stays below the ten after which container runtimes send SIGKILL."""

_LEAVE = 0.5  # seconds to print the end of a drained answer; a reader that waits for input does not set ``left``
_CLOSE_SECONDS = 4.0  # twice what closing takes at most


@contextmanager
def open_llm(layout: str, model: str | None, settings: Settings, shutdown: Shutdown) -> Iterator[LLM]:
    """An LLM whose loading is shown on standard error, and which ``shutdown`` drains and closes."""
    llm, left = load_llm(layout, model, settings), threading.Event()
    with shutdown.closed_by(_closing(llm, left)), llm:
        try:
            yield llm
        finally:
            left.set()


def _closing(llm: LLM, left: threading.Event) -> Closing:
    """How a signal closes an LLM. ``left``: set once the answers have been read and printed."""

    def drain() -> None:
        llm._engine.drain(DRAIN_SECONDS)
        left.wait(_LEAVE)
        llm.close()

    return Closing(llm.close, _CLOSE_SECONDS, drain, DRAIN_SECONDS + _CLOSE_SECONDS)
