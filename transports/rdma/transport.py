"""Connects and listens at rdma:// addresses: a tcp link first, then a group.

One port serves both kinds. A connector's OPEN says which kind of link it wants, so a listener at rdma:// returns plain
tcp links as they are and upgrades the others. A child is started only for a peer that the control link has admitted and
whose request is valid; the number of children is bounded.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable
from dataclasses import replace

from transports import threads
from transports.address import errors_naming, parse_host_port, split_scheme
from transports.arrivals import QueueListener
from transports.base import Link, LinkClosed, LinkOptions, LinkRefused, Listener, ListenerClosed, TransportUnavailable
from transports.hub import TcpLink
from transports.listener_hub import OpeningCheck
from transports.rdma.address import JACCL, RING, RdmaAddress, parse
from transports.rdma.channel import Job
from transports.rdma.handshake import HANDSHAKE_SECONDS, LinkRequest, address_of, join, parse_opening
from transports.rdma.link import RdmaLink, control_options
from transports.rdma.macos import why_not_together
from transports.rdma.probe import device_for, macos_version
from transports.tcp import TcpListener, TcpTransport

log = logging.getLogger("transports")

# Without a frame until a link's reader rests. Waking it takes a message on the control link: that is slow compared with
# JACCL, whose reader stays awake between the tokens even of a slow model; on ring it is as fast as the group itself.
REST_SECONDS = {JACCL: 0.25, RING: 0.0}
MAX_LINKS = 16  # of one listener, including those being set up; each has a process


class RdmaListener(QueueListener[Link]):
    """`listen`: makes the listener for control links, with a check of their OPEN."""

    def __init__(
        self, listen: Callable[[OpeningCheck], TcpListener], parsed: RdmaAddress, options: LinkOptions
    ) -> None:
        self._options = options
        self._room = threading.Semaphore(MAX_LINKS)
        self._below = listen(_check_opening)
        super().__init__(str(replace(parsed, rest=split_scheme(self._below.address)[1])))
        self._thread = threads.make(self._accept_all, f"transports on {self.address}")
        self._thread.start()

    def close(self) -> None:
        super().close()
        self._below.close()  # ends the control links, and with them the rdma links
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)

    def _accept_all(self) -> None:
        while True:
            try:
                control = self._below.accept()
            except ListenerClosed:
                return
            if control.opening:
                threads.make(self._upgrade, f"transports joins {control.address}", control).start()
            else:
                self._offer_or_abort(control)

    def _offer_or_abort(self, link: Link) -> None:
        if not self.offer(link):
            link.abort(f"{self.address} stopped listening")

    def _upgrade(self, control: TcpLink) -> None:
        if not self._room.acquire(blocking=False):
            control.close(f"there are {MAX_LINKS} rdma links here already")
            return
        try:
            link = self._join(control, parse_opening(control.opening))
        except TransportUnavailable as problem:
            self._room.release()
            control.close(problem.reason)
            log.info("%s: no rdma link with %s: %s", self.address, control.address, problem.reason)
        else:
            self._offer_or_abort(link)

    def _join(self, control: TcpLink, request: LinkRequest) -> RdmaLink:
        host = parse_host_port(control.address).host
        device = _device_for(request.backend, request.device, host, self._options)
        if device and (reason := why_not_together(macos_version(device), request.macos)) is not None:
            raise TransportUnavailable(reason)
        child = join(control, _job(1, request, device, host))
        address = control.address.replace("tcp://", "rdma://", 1)
        return RdmaLink(address, control, child, self._options, on_end=self._room.release)


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
        most HANDSHAKE_SECONDS. Also raises TransportUnavailable."""
        parsed = parse(address)
        host = address_of(parsed) if parsed.backend == RING else ""
        device = _device_for(parsed.backend, parsed.devices[0], host, options)
        nonce = int.from_bytes(os.urandom(8), "little")
        request = LinkRequest(parsed.backend, parsed.devices[1], nonce, macos_version(device) if device else "")
        try:
            with errors_naming(address, parsed.control):
                control = self._tcp.connect(
                    parsed.control, timeout=timeout, options=control_options(options), opening=request.opening
                )
        except LinkRefused:
            raise  # the keys do not match, which no other transport would change
        except LinkClosed as problem:
            raise TransportUnavailable(problem.reason) from problem
        child = join(control, _job(0, request, device, host))
        return RdmaLink(address, control, child, options)


def _check_opening(opening: bytes) -> None:
    """Raises FrameError for an OPEN whose request is invalid."""
    if opening:
        parse_opening(opening)


def _device_for(backend: str, wanted: str, host: str, options: LinkOptions) -> str:
    """This end's device; "" for ring. Raises TransportUnavailable if the backend cannot be used here."""
    device = device_for(backend, wanted)
    if backend == RING and options.security is not None and not host.startswith("127."):
        raise TransportUnavailable("ring does not encrypt, and this link has keys: use it within one machine only")
    return device


def _job(rank: int, request: LinkRequest, device: str, host: str) -> Job:
    seconds = math.ceil(HANDSHAKE_SECONDS) + 1
    return Job(rank, request.backend, request.nonce, seconds, REST_SECONDS[request.backend], device, host)
