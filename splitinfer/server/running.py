"""Runs the server: uvicorn's event loop in a thread of the coordinator's process."""

import asyncio
import math
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import uvicorn

from splitinfer.errors import ConfigError
from splitinfer.server.app import make_app
from splitinfer.server.connection import Doors
from splitinfer.server.listening import Listening
from splitinfer.server.patience import Limits
from splitinfer.server.service import Service

_MAX_HEADER_BYTES = 64 << 10
_BACKLOG = 2048


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
        self._socket = _bound(listen)
        self._doors = Doors(listen.limits)
        config = uvicorn.Config(
            make_app(service),
            http=self._doors.protocol(),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
            timeout_keep_alive=math.ceil(listen.limits.idle),
            ssl_certfile=listen.certificate,
            ssl_keyfile=listen.key,
        )
        try:
            config.load()
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            self._socket.close()
            raise ConfigError(f"the certificate or its key cannot be used: {error}") from error
        self._server, self._has_loop = _InThread(config, listen.limits.head), threading.Event()
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)
        self._thread.start()
        self._has_loop.wait()

    @property
    def port(self) -> int:
        """The port, also where a free one was taken."""
        return int(self._socket.getsockname()[1])

    @property
    def num_connections(self) -> int:
        """Connections that are open."""
        return self._doors.num_open

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

    def close(self, timeout: float = 5.0) -> None:
        """Take no new connection, end those that are open, and stop."""
        self.begin_draining()  # ends the streams of figures, which have no end of their own
        self._server.should_exit = True
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._server.ends.set)
        self._thread.join(timeout / 2)
        self._server.force_exit = True
        self._thread.join(timeout / 2)
        self._socket.close()

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            self._loop = runner.get_loop()
            self._has_loop.set()
            runner.run(self._server.serve([self._socket]))


async def _thread_seconds() -> float:
    return time.thread_time()


class _InThread(uvicorn.Server):
    """Signals belong to the process's main thread, and are handled there. Nothing is done while nothing happens:
    uvicorn's own loop looks ten times a second whether it should end. ``handshake``: seconds for TLS's; uvicorn gives
    none, so that asyncio would wait for a minute."""

    def __init__(self, config: uvicorn.Config, handshake: float) -> None:
        super().__init__(config)
        self.ends, self._handshake = asyncio.Event(), handshake

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on sockets that are bound already."""
        config, loop = self.config, asyncio.get_running_loop()
        make: Callable[..., asyncio.Protocol] = config.http_protocol_class
        protocol = partial(make, config=config, server_state=self.server_state, app_state=self.lifespan.state)
        self.servers = [
            await loop.create_server(
                protocol,
                sock=each,
                ssl=config.ssl,
                backlog=config.backlog,
                ssl_handshake_timeout=None if config.ssl is None else self._handshake,
            )
            for each in sockets or ()
        ]
        self.started = True

    def install_signal_handlers(self) -> None:
        pass

    async def main_loop(self) -> None:
        """Wait until it shall end."""
        await self.on_tick(0)  # sets the headers that all answers have
        await self.ends.wait()


def _bound(listen: Listen) -> socket.socket:
    try:
        family = socket.getaddrinfo(listen.host, listen.port, type=socket.SOCK_STREAM)[0][0]
        made = socket.create_server((listen.host, listen.port), family=family, backlog=_BACKLOG)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"the server cannot listen on {listen.host}:{listen.port}: {reason}") from error
    # Connections inherit it. asyncio sets it only for sockets that name their protocol, which this one does not; and an
    # answer is two writes, of which the second would wait for the client's delayed ACK.
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Listening(made, listen.limits.most_sockets)
