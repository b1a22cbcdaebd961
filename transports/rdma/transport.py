"""Connecting and listening: a tcp link first, then a group.

One port serves both kinds. A connector says in its OPEN what the link is to be, so a listener at rdma:// hands out
plain tcp links as they come, and upgrades the others. A child is started only for a peer that the control link has let
in and whose wish makes sense; how many there may be is bounded.
"""

from __future__ import annotations

import logging
import threading

from transports.address import calling_it, split_scheme
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
from transports.rdma.address import RING, Place, parse
from transports.rdma.handshake import (
    Wish,
    address_of,
    join_as_connector,
    join_as_listener,
    parse_opening,
    why_not_ring,
)
from transports.rdma.link import RdmaLink, control_options
from transports.rdma.probe import usable
from transports.tcp import TcpListener, TcpTransport
from transports.tcp_link import TcpLink

log = logging.getLogger("transports")

MAX_LINKS = 16  # of one listener, those among them that are being set up; each is a process
MAX_HANDSHAKES = 4


class _Room:
    """How many links of a listener need a process: bounded, and asked for before anything is done for a peer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: list[RdmaLink] = []
        self._num_handshakes = 0

    def check_opening(self, opening: bytes) -> None:
        """Raises FrameError for what an OPEN asks for in vain."""
        if opening:
            parse_opening(opening)
            with self._lock:
                if (reason := self._why_none()) is not None:
                    raise FrameError(reason)

    def take(self) -> str | None:
        """Room for one more handshake; or why there is none."""
        with self._lock:
            reason = self._why_none()
            self._num_handshakes += reason is None
            return reason

    def _why_none(self) -> str | None:
        self._links = [link for link in self._links if link.closed is None]
        if self._num_handshakes >= MAX_HANDSHAKES:
            return f"{self._num_handshakes} rdma links are being set up here already; try again in a moment"
        if self._num_handshakes + len(self._links) >= MAX_LINKS:
            return f"there are {MAX_LINKS} rdma links here already"
        return None

    def leave(self, link: RdmaLink | None) -> None:
        """A handshake is over, and this came of it."""
        with self._lock:
            self._num_handshakes -= 1
            if link is not None:
                self._links.append(link)


class RdmaListener(Listener):
    def __init__(self, below: TcpListener, place: Place, room: _Room, options: LinkOptions) -> None:
        _, rest = split_scheme(below.address)
        self.address = str(Place(rest, place.backend, place.device))
        self._below = below
        self._options = options
        self._arrivals: Arrivals[Link] = Arrivals(self.address)
        self._room = room
        self._thread = threading.Thread(target=self._accept_all, name=f"transports on {self.address}", daemon=True)
        self._thread.start()

    def accept(self, timeout: float | None = None) -> Link:
        return self._arrivals.take(timeout)

    def close(self) -> None:
        self._arrivals.close()
        self._below.close()  # ends the control links, and with them the others
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
            elif (reason := self._room.take()) is not None:
                control.abort(reason)  # several asked at once, and were told that there is room
            else:
                threading.Thread(
                    target=self._upgrade, args=(control,), name=f"transports joins {control.address}", daemon=True
                ).start()

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
            self._room.leave(link)
        if link is not None:
            self._offer(link)


class RdmaTransport:
    scheme = "rdma"
    query_names = ("backend", "device")  # of our addresses, for those that put names of their own behind them

    def __init__(self) -> None:
        self._tcp = TcpTransport()

    def listen(self, address: str, *, options: LinkOptions) -> Listener:
        """Any backend is taken that a connector asks for and that is usable here: the address's own is for
        `Listener.address`, by which others connect."""
        place, room = parse(address), _Room()
        with calling_it(address, place.control):
            below = self._tcp.listen(place.control, options=control_options(options), takes=room.check_opening)
        return RdmaListener(below, place, room, options)

    def connect(self, address: str, *, timeout: float, options: LinkOptions) -> Link:
        """`timeout` is for finding the listener; a group takes seconds more when the machines are busy, at most
        HANDSHAKE_SECONDS. Also raises TransportUnavailable."""
        place = parse(address)
        self._check_here(place, options)
        wish = Wish(place.backend, place.devices[1])
        try:
            with calling_it(address, place.control):
                control = self._tcp.connect(
                    place.control, timeout=timeout, options=control_options(options), opening=wish.opening
                )
        except LinkRefused:
            raise  # the keys do not fit, which has nothing to do with what carries the frames
        except LinkClosed as problem:
            raise TransportUnavailable(problem.reason) from problem
        joined = join_as_connector(control, place, options)
        return RdmaLink(address, control, joined, 0, options)

    def _check_here(self, place: Place, options: LinkOptions) -> None:
        reason = usable(place.backend, place.devices[0])
        if reason is None and place.backend == RING and options.security is not None:
            reason = why_not_ring(address_of(place))
        if reason is not None:
            raise TransportUnavailable(reason)
