"""Runs the server: uvicorn's event loop in a thread of the coordinator's process. `connections` says why uvicorn."""

import asyncio
import logging
import math
import socket
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import Receive, Scope, Send

from splitinfer.errors import ConfigError
from splitinfer.server.app import make_app
from splitinfer.server.connections import Connections, Limits, Listening
from splitinfer.server.guard import MAX_HEAD_BYTES
from splitinfer.server.service import Service

log = logging.getLogger(__name__)

_CLOSE_SECONDS = 2  # for answers that are being sent when it closes


@dataclass(frozen=True, slots=True)
class Listen:
    """Where to listen. ``certificate`` and ``key``: files for TLS. ``limits``: of connections."""

    host: str = "127.0.0.1"
    port: int = 8080
    certificate: Path | None = None
    key: Path | None = None
    limits: Limits = field(default_factory=Limits)


class Server:
    """A running server.

    Raises:
        ConfigError: it cannot listen there.
    """

    def __init__(self, service: Service, listen: Listen) -> None:
        self.service = service
        self._app, self._connections = make_app(service), Connections(listen.limits)
        self._socket = _bound(listen)
        self.port: int = self._socket.getsockname()[1]
        """The port, also where a free one was taken."""
        config = uvicorn.Config(
            self._carry_out,
            http="h11",
            interface="asgi3",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=logging.CRITICAL,  # it warns of what is no request, which anybody can send by thousands
            access_log=False,
            server_header=False,
            date_header=False,
            h11_max_incomplete_event_size=2 * MAX_HEAD_BYTES,  # what is over one of them the guard refuses, in JSON
            timeout_keep_alive=math.ceil(listen.limits.idle),
            timeout_graceful_shutdown=_CLOSE_SECONDS,
            callback_notify=self._look,
            timeout_notify=0,  # as often as it can: once a second
            ssl_certfile=listen.certificate,
            ssl_keyfile=listen.key,
        )
        try:
            config.load()
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            self._socket.close()
            raise ConfigError(f"the certificate or its key cannot be used: {error}") from error
        self._server, self._has_loop = uvicorn.Server(config), threading.Event()
        self._connections.open = self._server.server_state.connections
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)
        self._thread.start()
        self._has_loop.wait()

    @property
    def num_connections(self) -> int:
        """Connections that are open."""
        return len(self._connections.open)

    def begin_draining(self) -> None:
        """Take no new request from now on; answers under way go on. From any thread."""
        self.service.is_draining = True

    @property
    def is_idle(self) -> bool:
        """Whether no answer is being made or sent, refusals included."""
        return not self.service.num_running and not self._server.server_state.tasks

    def loop_seconds(self) -> float:
        """Processor seconds that the event loop's thread has taken so far; for measurements. Not on that thread."""
        return asyncio.run_coroutine_threadsafe(_thread_seconds(), self._loop).result()

    def close(self) -> None:
        """Take no new connection, end those that are open, and stop; in about two seconds at most."""
        self.begin_draining()  # ends the streams of figures, which have no end of their own
        self._server.should_exit = True
        self._thread.join(2 * _CLOSE_SECONDS)
        self._socket.close()

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            self._loop = runner.get_loop()
            self._loop.set_exception_handler(_note)
            self._has_loop.set()
            runner.run(self._serve())

    async def _serve(self) -> None:
        await self._server.serve([self._socket])
        for connection in tuple(self._connections.open):
            connection.transport.abort()

    async def _look(self) -> None:
        self._connections.look(self._loop.time())

    async def _carry_out(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Carry out a request. uvicorn ends the connection where an answer was not whole."""
        scope["state"]["turned_away"] = self._connections.turned_away()
        try:
            await self._app(scope, receive, send)
        except Exception as error:  # noqa: BLE001 - uvicorn would log its text, which could quote a prompt
            log.error("a request failed: %s\n%s", type(error).__name__, _where(error))


async def _thread_seconds() -> float:
    return time.thread_time()


def _note(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what nobody handles, which anybody can cause by what is no HTTP."""
    error = context.get("exception")
    log.debug("%s: %s\n%s", context.get("message"), type(error).__name__, _where(error))


def _where(error: BaseException | None) -> str:
    """Where it was raised: its text could quote a prompt."""
    return "" if error is None else "".join(traceback.format_tb(error.__traceback__))


def _bound(listen: Listen) -> Listening:
    try:
        family = socket.getaddrinfo(listen.host, listen.port, type=socket.SOCK_STREAM)[0][0]
        made = socket.create_server((listen.host, listen.port), family=family)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"the server cannot listen on {listen.host}:{listen.port}: {reason}") from error
    return Listening(made, listen.limits.most)
