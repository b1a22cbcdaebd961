"""Connects and listens at rdma:// addresses: a tcp link first, then a group.

One port serves both kinds. A connector's OPEN says which kind of link it wants, so a listener at rdma:// returns plain
tcp links as they are and upgrades the others. A child is started only for a peer that the control link has admitted and
whose request is valid; the number of children is bounded.
"""

from __future__ import annotations

import contextlib
import logging
import threading

from transports import threads
from transports.address import errors_naming, split_scheme
from transports.arrivals import Arrivals
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


class _LinkLimits:
    """Bounds how many links of a listener have a process; checked before anything is done for a peer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: list[RdmaLink] = []
        self._num_handshakes = 0

    def check_opening(self, opening: bytes) -> None:
        """Raises FrameError for an OPEN whose request is invalid or over the limits."""
        if opening:
            parse_opening(opening)
            with self._lock:
                if (reason := self._why_full()) is not None:
                    raise FrameError(reason)

    def begin(self) -> str | None:
        """Count one more handshake; or return why there may be none."""
        with self._lock:
            reason = self._why_full()
            self._num_handshakes += reason is None
            return reason

    def _why_full(self) -> str | None:
        self._links = [link for link in self._links if link.closed is None]
        if self._num_handshakes >= MAX_HANDSHAKES:
            return f"{self._num_handshakes} rdma links are being set up here already; try again in a moment"
        if self._num_handshakes + len(self._links) >= MAX_LINKS:
            return f"there are {MAX_LINKS} rdma links here already"
        return None

    def finish(self, link: RdmaLink | None) -> None:
        """A handshake is over; `link`: its result, None if it failed."""
        with self._lock:
            self._num_handshakes -= 1
            if link is not None:
                self._links.append(link)


class RdmaListener(Listener):
    def __init__(self, below: TcpListener, parsed: RdmaAddress, limits: _LinkLimits, options: LinkOptions) -> None:
        _, rest = split_scheme(below.address)
        self.address = str(RdmaAddress(rest, parsed.backend, parsed.device))
        self._below = below
        self._options = options
        self._arrivals: Arrivals[Link] = Arrivals(self.address)
        self._limits = limits
        self._thread = threads.make(self._accept_all, f"transports on {self.address}")
        self._thread.start()

    def accept(self, timeout: float | None = None) -> Link:
        return self._arrivals.take(timeout)

    def close(self) -> None:
        self._arrivals.close()
        self._below.close()  # ends the control links, and with them the rdma links
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)

    def _accept_all(self) -> None:
        while True:
            try:
                control = self._below.accept()
            except ListenerClosed:
                return
            if not control.opening:
                self._offer(control)
            elif (reason := self._limits.begin()) is not None:
                control.abort(reason)  # several passed `check_opening` at once
            else:
                threads.make(self._upgrade, f"transports joins {control.address}", control).start()

    def _offer(self, link: Link) -> None:
        if not self._arrivals.put(link):
            link.abort(f"{self.address} stopped listening")

    def _upgrade(self, control: TcpLink) -> None:
        link: RdmaLink | None = None
        try:
            joined = join_as_listener(control, parse_opening(control.opening), self._options)
            address = control.address.replace("tcp://", "rdma://", 1)
            link = RdmaLink(address, control, joined, 1, self._options)
        except TransportUnavailable as problem:
            log.info("%s: no rdma link with %s: %s", self.address, control.address, problem.reason)
        finally:
            self._limits.finish(link)
        if link is not None:
            self._offer(link)


class RdmaTransport:
    scheme = "rdma"
    query_names = ("backend", "device")  # names in the query of an address, for `emulated+rdma://`, which adds others

    def __init__(self) -> None:
        self._tcp = TcpTransport()

    def listen(self, address: str, *, options: LinkOptions) -> Listener:
        """A listener that accepts every backend that a connector asks for and this machine can use. The address's own
        backend is only for `Listener.address`, by which others connect."""
        parsed, limits = parse(address), _LinkLimits()
        with errors_naming(address, parsed.control):
            below = self._tcp.listen(
                parsed.control, options=control_options(options), check_opening=limits.check_opening
            )
        return RdmaListener(below, parsed, limits, options)

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
        joined = join_as_connector(control, parsed, options)
        return RdmaLink(address, control, joined, 0, options)

    def _check_here(self, parsed: RdmaAddress, options: LinkOptions) -> None:
        reason = usable(parsed.backend, parsed.devices[0])
        if reason is None and parsed.backend == RING and options.security is not None:
            reason = why_no_ring(address_of(parsed))
        if reason is not None:
            raise TransportUnavailable(reason)
