"""Connects and listens at rdma:// addresses: a tcp link first, then a group.

One port serves both kinds. A connector's OPEN says which kind of link it wants, so a listener at rdma:// returns plain
tcp links as they are and upgrades the others. A child is started only for a peer that the control link has admitted and
whose request is valid; the number of children is bounded.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import replace

from transports import threads
from transports.address import errors_naming, split_scheme
from transports.arrivals import QueueListener
from transports.base import (
    FrameError,
    Link,
    LinkClosed,
    LinkOptions,
    LinkRefused,
    Listener,
    ListenerClosed,
    TransportUnavailable,
)
from transports.listener_hub import OpeningCheck
from transports.rdma.address import RING, RdmaAddress, parse
from transports.rdma.handshake import (
    LinkRequest,
    RenewalFailed,
    address_of,
    join_as_connector,
    join_as_listener,
    parse_opening,
    why_no_ring,
)
from transports.rdma.link import RdmaLink, control_options
from transports.rdma.probe import usable
from transports.tcp import TcpListener, TcpTransport
from transports.tcp_link import TcpLink

log = logging.getLogger("transports")

MAX_LINKS = 16  # of one listener, including those being set up; each has a process
MAX_HANDSHAKES = 4


class RdmaListener(QueueListener[Link]):
    """`listen`: makes the listener for control links, with a check of their OPEN."""

    def __init__(
        self, listen: Callable[[OpeningCheck], TcpListener], parsed: RdmaAddress, options: LinkOptions
    ) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._links: list[RdmaLink] = []
        self._num_handshakes = 0
        self._below = listen(self._check_opening)
        super().__init__(str(replace(parsed, rest=split_scheme(self._below.address)[1])))
        self._thread = threads.make(self._accept_all, f"transports on {self.address}")
        self._thread.start()

    def close(self) -> None:
        super().close()
        self._below.close()  # ends the control links, and with them the rdma links
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)

    def _check_opening(self, opening: bytes) -> None:
        """Raises FrameError for an OPEN whose request is invalid or over the limits."""
        if opening:
            parse_opening(opening)
            with self._lock:
                self._check_room()

    def _check_room(self) -> None:
        self._links = [link for link in self._links if link.closed is None]
        if self._num_handshakes >= MAX_HANDSHAKES:
            raise FrameError(f"{self._num_handshakes} rdma links are being set up here already; try again in a moment")
        if self._num_handshakes + len(self._links) >= MAX_LINKS:
            raise FrameError(f"there are {MAX_LINKS} rdma links here already")

    def _accept_all(self) -> None:
        while True:
            try:
                control = self._below.accept()
            except ListenerClosed:
                return
            if not control.opening:
                self._offer_or_abort(control)
                continue
            try:
                with self._lock:
                    self._check_room()
                    self._num_handshakes += 1
            except FrameError as problem:
                control.abort(str(problem))  # several passed `_check_opening` at once
            else:
                threads.make(self._upgrade, f"transports joins {control.address}", control).start()

    def _offer_or_abort(self, link: Link) -> None:
        if not self.offer(link):
            link.abort(f"{self.address} stopped listening")

    def _upgrade(self, control: TcpLink) -> None:
        link: RdmaLink | None = None
        try:
            group = join_as_listener(control, parse_opening(control.opening), self._options)
            address = control.address.replace("tcp://", "rdma://", 1)
            link = RdmaLink(address, control, group, 1, self._options)
        except TransportUnavailable as problem:
            log.info("%s: no rdma link with %s: %s", self.address, control.address, problem.reason)
        finally:
            with self._lock:
                self._num_handshakes -= 1
                self._links += [link] if link is not None else []
        if link is not None:
            self._offer_or_abort(link)


class RdmaTransport:
    scheme = "rdma"
    query_names = ("backend", "device")  # names in the query of an address, for `emulated+rdma://`, which adds others

    def __init__(self) -> None:
        self._tcp = TcpTransport()

    def listen(self, address: str, *, options: LinkOptions) -> Listener:
        """A listener that accepts every backend that a connector asks for and this machine can use. The address's own
        backend is only for `Listener.address`, by which others connect."""
        parsed = parse(address)

        def listen(check_opening: OpeningCheck) -> TcpListener:
            return self._tcp.listen(parsed.control, options=control_options(options), check_opening=check_opening)

        with errors_naming(address, parsed.control):
            return RdmaListener(listen, parsed, options)

    def connect(self, address: str, *, timeout: float, options: LinkOptions) -> Link:
        """`timeout` is for reaching the listener; joining a group takes further seconds when the machines are busy, at
        most HANDSHAKE_SECONDS. Also raises TransportUnavailable. A group that an earlier link left is used again, and
        if it turns out to be of no use, another one is made."""
        parsed = parse(address)
        self._check_here(parsed, options)
        with contextlib.suppress(RenewalFailed):
            return self._connect(address, parsed, timeout, options)
        return self._connect(address, parsed, timeout, options)

    def _connect(self, address: str, parsed: RdmaAddress, timeout: float, options: LinkOptions) -> Link:
        request = LinkRequest(parsed.backend, parsed.devices[1])
        try:
            with errors_naming(address, parsed.control):
                control = self._tcp.connect(
                    parsed.control, timeout=timeout, options=control_options(options), opening=request.opening
                )
        except LinkRefused:
            raise  # the keys do not match, which no other transport would change
        except LinkClosed as problem:
            raise TransportUnavailable(problem.reason) from problem
        return RdmaLink(address, control, join_as_connector(control, parsed, options), 0, options)

    def _check_here(self, parsed: RdmaAddress, options: LinkOptions) -> None:
        reason = usable(parsed.backend, parsed.devices[0])
        if reason is None and parsed.backend == RING and options.security is not None:
            reason = why_no_ring(address_of(parsed))
        if reason is not None:
            raise TransportUnavailable(reason)
