"""Opens a model for the command line, and closes it when a signal arrives.

SIGTERM drains a coordinator: the running answer may end, no request is admitted, then everything is closed and every
worker is sent a goodbye. A second SIGTERM, or Ctrl-C, does not wait. While the stages load, there is nothing to wait
for.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from splitinfer.console import load_llm, say
from splitinfer.llm import LLM, Settings
from splitinfer.llm.automatic import Chosen
from splitinfer.shutdown import Closing, Shutdown

DRAIN_SECONDS = 5.0
"""Seconds that an answer may still take after SIGTERM. The end of a paragraph fits in, and with the seconds of sending
and closing it stays below the ten after which container runtimes send SIGKILL."""

_NO_TURNS = (
    "This model has no chat template: it was trained to continue texts, not to chat. The messages of a chat are joined "
    "by blank lines, and the model goes on from there. To have a text continued, use /v1/completions of a server, or: "
    "splitinfer coord --raw --prompt TEXT"
)
_LEAVE = 0.5  # seconds to print the end of a drained answer; a reader that waits for input does not set ``left``
_SEND = 2.0  # seconds to send the ends of all answers: a thousand of them take one
_CLOSE_SECONDS = 4.0  # twice what closing takes at most, where no KV is to be saved
_SAVE_SECONDS = 20.0  # for that, at most; on a machine that is not busy it takes a moment


class Draining(Protocol):
    """What takes requests from elsewhere, and is drained with the LLM (``server.running.Server``)."""

    def begin_draining(self) -> None:
        """Take no new request from now on."""
        ...

    @property
    def is_idle(self) -> bool:
        """Whether no answer is being sent."""
        ...


@contextmanager
def open_llm(
    layout: str | Chosen,
    model: str | None,
    settings: Settings,
    shutdown: Shutdown,
    servers: Sequence[Draining] = (),
    drain_seconds: float = DRAIN_SECONDS,
    *,
    chats: bool = True,
) -> Iterator[LLM]:
    """An LLM whose loading is shown on standard error, and which ``shutdown`` drains and closes.

    servers: those that are open then; the caller may add to them. ``drain_seconds``: that running answers may take.
    ``chats``: whether it is for chats; then it is said once if the model was not trained to have any.
    """
    llm, left = load_llm(layout, model, settings), threading.Event()
    closing_llm = _closing(
        llm, left, servers, drain_seconds, _CLOSE_SECONDS + (_SAVE_SECONDS if settings.disk else 0.0)
    )
    with shutdown.closed_by(closing_llm), llm:
        if chats and llm.has_tokenizer and not llm.tokenizer.writes_turns:
            say(_NO_TURNS)
        try:
            yield llm
        finally:
            left.set()


def _closing(
    llm: LLM, left: threading.Event, servers: Sequence[Draining], seconds: float, close_seconds: float
) -> Closing:
    """How a signal closes an LLM. ``left``: set once the answers have been read and printed. ``seconds``,
    ``close_seconds``: the most that draining and closing take."""

    def drain() -> None:
        for server in servers:
            server.begin_draining()
        llm.drain(seconds)
        if servers:
            _until(lambda: all(server.is_idle for server in servers), _SEND)
        else:
            left.wait(_LEAVE)
        llm.close()

    return Closing(llm.close, close_seconds, drain, seconds + _SEND + close_seconds)


def _until(is_so: Callable[[], bool], seconds: float) -> None:
    give_up = time.monotonic() + seconds
    while not is_so() and time.monotonic() < give_up:
        time.sleep(0.01)
