"""The socket of a running pipeline: this user's other processes ask what it does, and have it load another cut.

    {"ask": "figures"}                                     what ``llm.rebalance.LiveFigures`` holds
    {"ask": "recut", "from": [...], "stages": [...]}       the stages that shall be in place of those, as a layout has
                                                           them; the answer says how long requests have waited

One line of JSON each way, over a socket that only this user can reach (``system.private_sockets``). An answer with
"error" has one sentence. Comparing takes seconds of a processor, so whoever asks does it, and no stream here waits for
that. One asks at a time, the next waits.
"""

import contextlib
import json
import logging
import socket
import threading
from collections.abc import Mapping
from typing import Any, Protocol

from splitinfer.config import Layout as FileLayout
from splitinfer.core.layout import Layout
from splitinfer.errors import PeerError, RequestError, SplitinferError
from splitinfer.llm.rebalance import LiveFigures
from splitinfer.placement.document import as_mapping
from splitinfer.system.private_sockets import PrivateListener

log = logging.getLogger(__name__)

_LONGEST = 4 * 2**20  # bytes of a line
_LEAVE = 0.5  # seconds to remove the socket
_PATIENCE = 10.0  # seconds for a question to arrive, and for an answer to be taken


class Cuttable(Protocol):
    """What answers are about: an ``LLM``."""

    layout: Layout
    """The cut in force."""

    def live_figures(self) -> LiveFigures:
        """What the machines do."""
        ...

    def recut(self, cut: Layout, /) -> float:
        """Load another cut; the seconds in which nothing was computed."""
        ...


class LiveSocket:
    """Answers for ``llm`` until it is closed. Where there can be no socket, the log says so, and nobody is answered."""

    def __init__(self, llm: Cuttable) -> None:
        self._llm = llm
        self._listener: PrivateListener | None = None
        try:
            self._listener = PrivateListener()
        except OSError as error:
            log.info("`splitinfer plan --live` cannot reach this process: %s", error)
            return
        self._thread = threading.Thread(target=self._run, args=(self._listener,), name="live socket", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer no more. Hardly waits for an answer under way."""
        if self._listener is not None:
            self._listener.wake()
            self._thread.join(_LEAVE)

    def _run(self, listener: PrivateListener) -> None:
        with contextlib.closing(listener):
            while (connection := listener.accept()) is not None:
                with connection:
                    self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_PATIENCE)
            send(connection, self._answer(receive(connection)))
        except (OSError, PeerError) as error:
            log.info("an answer to `splitinfer plan --live` was not taken: %s", error)

    def _answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return answer(self._llm, question)
        except SplitinferError as error:
            return {"error": str(error)}
        except Exception as error:
            log.exception("a question cannot be answered")
            return {"error": f"the pipeline cannot answer ({type(error).__name__}: {error})"}


def answer(llm: Cuttable, question: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a question.

    Raises:
        SplitinferError: it cannot be answered; the sentence says why.
    """
    match question:
        case {"ask": "figures"}:
            return llm.live_figures().as_dict()
        case {"ask": "recut", "from": list(before), "stages": list(stages)}:
            if before != stages_of(llm.layout):
                raise RequestError("the cut has changed meanwhile; ask again")
            paused = llm.recut(FileLayout.from_dict({"stages": stages}, llm.layout.name))
            log.info("%s is in force, asked for from outside; requests waited %.1f s", llm.layout.cut, paused)
            return {"paused": paused, "cut": llm.layout.cut}
    raise RequestError("this is no question that this version of splitinfer knows; both sides need the same version")


def stages_of(layout: Layout) -> list[dict[str, Any]]:
    """The stages of a layout, as its file has them."""
    found: list[dict[str, Any]] = as_mapping(layout)["stages"]
    return found


# -- lines ---------------------------------------------------------------------------------------


def send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    """Send a message.

    Raises:
        OSError: it cannot be sent.
    """
    connection.sendall(json.dumps(message).encode() + b"\n")


def receive(connection: socket.socket) -> dict[str, Any]:
    """The other side's message.

    Raises:
        OSError: the other side sends nothing.
        PeerError: the answer is not valid.
    """
    with connection.makefile("rb") as file:
        line = file.readline(_LONGEST + 1)
    if len(line) > _LONGEST:
        raise PeerError(f"the message has more than {_LONGEST:,} bytes")
    if not line.endswith(b"\n"):
        raise PeerError("the pipeline ended before it had answered" if not line else "the message has no end")
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PeerError(f"the message is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise PeerError("the message is no question and no answer")
    return found


def ask(connection: socket.socket, question: Mapping[str, Any]) -> dict[str, Any]:
    """Ask a pipeline, and wait for its answer, however long that takes: loading may take minutes.

    Raises:
        PeerError: it is gone, or it cannot answer; the sentence says why.
    """
    try:
        send(connection, question)
        connection.settimeout(None)
        found = receive(connection)
    except OSError as error:
        raise PeerError(f"the pipeline cannot be asked: {error}") from error
    if "error" in found:
        raise PeerError(str(found["error"]))
    return found
