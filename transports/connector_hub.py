"""The connecting side's hub: a DEALER and its one link. The socket, the thread and the link end together."""

from __future__ import annotations

import zmq

from transports.base import FLUSH_SECONDS, LinkOptions
from transports.hub import Hub
from transports.tcp_link import TcpLink


class ConnectorHub(Hub):
    """The hub of one connection."""

    def __init__(self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes], options: LinkOptions, peer: str) -> None:
        super().__init__(socket, monitor, options, f"to {peer}")
        self.link = TcpLink(self, peer, (), options)
        self._links.add(self.link)
        self._is_lost = False

    def _on_finished(self, link: TcpLink) -> None:
        self._is_stopping = True

    def _drop(self, link: TcpLink) -> None:
        self._linger = 0.0  # the thread closes the socket when it ends

    def _settle(self) -> None:
        self._thread.join(FLUSH_SECONDS)

    def _on_monitor(self, event: zmq.Event, descriptor: int) -> None:
        self._is_lost = self._is_lost or event == zmq.Event.DISCONNECTED

    def _on_message(self, message: list[zmq.Frame], now: float) -> None:
        self._take(self.link, message, now)

    def _on_dry(self) -> None:
        if self._is_lost:
            with self._lock:
                self._finish(self.link, f"connection to {self.link.address} lost")
