"""Runs the server: uvicorn's event loop in a thread of the coordinator's process (`connections` says why uvicorn).
Checks a certificate before the model loads, which takes minutes."""

import asyncio
import errno
import logging
import math
import socket
import ssl
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from splitinfer.errors import ConfigError
from splitinfer.server.api_routes import api_routes
from splitinfer.server.connections import Connections, Limits
from splitinfer.server.dials import dial_routes, plan_routes
from splitinfer.server.guard import MAX_HEAD_BYTES, Guard, where
from splitinfer.server.meters.routes import meter_routes
from splitinfer.server.own_routes import own_routes
from splitinfer.server.page.routes import page_routes
from splitinfer.server.problem import Problem
from splitinfer.server.service import Service
from splitinfer.server.several import Several

# -- whether a certificate can be used -------------------------------------------------------------


def check_tls(certificate: Path, key: Path) -> None:
    """Check that a server can use a certificate and its key, and that clients can trust it now.

    Raises:
        ConfigError: a file is not there or is something else, the key has a password or belongs to another certificate,
            or the certificate has expired, or is not valid yet.
    """
    for what, path in (("certificate", certificate), ("key", key)):
        text = _read(what, path)
        if "-----BEGIN" not in text:
            raise ConfigError(f"the {what} {path} is not in PEM; it would begin with -----BEGIN")
        if what == "key" and "ENCRYPTED" in text:  # OpenSSL would ask on the terminal, where nobody may answer
            raise ConfigError(f"the key {path} has a password; `openssl pkey -in {path.name} -out FILE` takes it off")
    _check_chain(certificate, key)
    _check_time(certificate)


def _read(what: str, path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise ConfigError(f"the {what} {path} cannot be read: {error.strerror or error}") from error


def _check_chain(certificate: Path, key: Path) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"the key {key} does not belong to the certificate {certificate}") from error
        reason = (error.reason or f"{error}").replace("_", " ").lower()
        raise ConfigError(f"the certificate {certificate} and the key {key} cannot be used: {reason}") from error


def _check_time(certificate: Path) -> None:
    known = ssl._ssl._test_decode_cert(str(certificate))  # type: ignore[attr-defined]  # Python reads none elsewhere
    if ssl.cert_time_to_seconds(known["notAfter"]) < time.time():
        raise ConfigError(f"the certificate {certificate} has expired")
    if ssl.cert_time_to_seconds(known["notBefore"]) > time.time():
        raise ConfigError(f"the certificate {certificate} is not valid yet")


# -- all routes ------------------------------------------------------------------------------------


def router_of(service: Service) -> Router:
    """Return all routes of one model."""
    own = [*own_routes(service), *dial_routes(service), *plan_routes(service), *meter_routes(service)]
    routes = [*own, *api_routes(service), *page_routes(service)]
    return Router(routes, default=_not_found, redirect_slashes=False)


def make_app(service: Service, several: Several | None = None) -> Guard:
    """Return the application. ``several``: the models that requests choose from; ``service`` then belongs to none."""
    return Guard(
        router_of(service) if several is None else several,
        service.gate,
        service.sessions,
        failure=lambda: service.llm.health().failure if several is None else None,
        ended=service.meters.responded,
    )


async def _not_found(scope: Scope, _receive: Receive, _send: Send) -> None:
    raise Problem(404, f"there is no {scope['method']:.20} {scope['path']:.80} here")


# -- the server ------------------------------------------------------------------------------------


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
    """A running server. ``service``, ``several``: as in ``make_app``.

    Raises:
        ConfigError: it cannot listen there.
    """

    def __init__(self, service: Service, listen: Listen, several: Several | None = None) -> None:
        self.service = several or service
        self._app, self._connections = make_app(service, several), Connections(listen.limits)
        self._socket = _bound(listen.host, listen.port)
        self.port: int = self._socket.getsockname()[1]
        """The port, also where a free one was taken."""
        config = uvicorn.Config(
            self._carry_out,
            http="h11",
            interface="asgi3",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=logging.CRITICAL,  # it warns of each invalid request, and anybody can send thousands
            access_log=False,
            server_header=False,
            date_header=False,
            h11_max_incomplete_event_size=2 * MAX_HEAD_BYTES,  # the guard refuses heads over one of them, in JSON
            timeout_keep_alive=math.ceil(listen.limits.idle),
            timeout_graceful_shutdown=_CLOSE_SECONDS,
            callback_notify=self._look,
            timeout_notify=0,  # the shortest interval: once a second
            ssl_certfile=listen.certificate,
            ssl_keyfile=listen.key,
        )
        config.load()
        self._server, self._has_loop = uvicorn.Server(config), threading.Event()
        self._connections.open = self._server.server_state.connections
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)
        self._thread.start()
        self._has_loop.wait()

    @property
    def num_connections(self) -> int:
        return len(self._connections.open)

    def begin_draining(self) -> None:
        """Accept no new request from now on; running answers continue. Any thread may call this."""
        self.service.is_draining = True

    @property
    def is_idle(self) -> bool:
        """Whether no answer is being made or sent, refusals included."""
        return not self.service.num_running and not self._server.server_state.tasks

    def close(self) -> None:
        """Refuse new connections, end the open ones, and stop, within about two seconds."""
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
        if isinstance(self.service, Several):
            self.service.turn()

    async def _carry_out(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Carry out a request. uvicorn ends the connection where an answer was not whole."""
        scope["state"]["turned_away"] = self._connections.turned_away()
        try:
            await self._app(scope, receive, send)
        except Exception as error:  # noqa: BLE001 - uvicorn would log its text, which could quote a prompt
            log.error("a request failed: %s\n%s", type(error).__name__, where(error))


def _note(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an error that nothing handles; any client can cause one by sending something else than HTTP, and asyncio
    reports thousands a second while the process has no files left for connections."""
    if log.isEnabledFor(logging.DEBUG):
        error = context.get("exception")
        log.debug("%s: %s\n%s", context.get("message"), type(error).__name__, where(error))


def check_port(host: str, port: int) -> None:
    """Raise ConfigError: the server cannot listen there now."""
    _bound(host, port).close()


def _bound(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        bound = socket.create_server((host, port), family=family)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while")[0]
        cure = "; choose another port" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(f"the server cannot listen on {host}:{port}: {reason}{cure}") from error
    # Connections inherit it. asyncio sets it only for sockets that name their protocol, and this one does not. An
    # answer is two writes, and the second would wait for the client's delayed ACK.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return bound
