"""The contract of a link, on every transport.

A *link* is one edge of the pipeline: ordered, full-duplex, between exactly two processes. It transmits `Frame`s: a
short header and a few payload parts. Every scheme keeps this contract (`tests/transports/contract.py` is the same in
code):

* **Ordered, whole, at most once.** Frames arrive complete, in the order they were sent, or not at all.
* **Fail-stop.** A lost connection, a gap in the numbering, a damaged or over-sized frame, or silence ends the link with
  one `LinkClosed(reason)` for every waiter. A link never reconnects: only the caller knows what to send again.
* **Bounded.** Sizes, counts and silence have limits, all of them in `LinkOptions`.
* **Alive is more than connected.** Each side's heartbeats carry a progress number that the engine sets, so a peer whose
  network thread runs while its engine is stuck can be told from a healthy one.

The life of a link: `connect` opens it to an address that another process listens on, where `Listener.accept` returns
its other end; frames go both ways; `close` (flush, send the reason), `abort` (drop everything) or a failure ends it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    # An object with the buffer protocol; the name is in the standard library only from Python 3.12 on.
    from typing_extensions import Buffer as Buffer

    from transports.security import Security
    from transports.unreachable import Unreachable
else:
    Buffer = object

MIB = 1 << 20
FLUSH_SECONDS = 1.0  # the most time that `Link.close` takes


class TransportError(Exception):
    """The base class of every error that this package raises on purpose."""


class LinkClosed(TransportError):
    """The link is over; `reason` is one sentence for people."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class LinkRefused(LinkClosed):
    """The handshake failed: one end is encrypted and the other is not, or a key is not the expected one."""


class TransportUnavailable(LinkClosed):
    """Both ends are reachable, but one of them cannot use the transport; `reason` says which end, and why."""


class LinkTimeout(TransportError):
    """Nothing happened in the time allowed; the call may be repeated. ``unreachable``: why there is no link, or None
    if the reason is unknown."""

    def __init__(self, text: str, unreachable: Unreachable | None = None) -> None:
        super().__init__(text)
        self.unreachable = unreachable


class ListenerClosed(TransportError):
    """The listener was closed before or during `accept`."""


class FrameError(TransportError):
    """A frame over a bound, or bytes that are not a valid frame."""


class AddressError(TransportError):
    """An address that cannot be parsed or resolved, or that this machine cannot listen on."""


class AddressInUse(TransportError):
    """Another listener already has this address."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One message. The parts of a received frame are memoryviews of format 'B', not copied from the network buffer."""

    header: bytes
    parts: tuple[Buffer, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the header and all parts."""
        return len(self.header) + sum([memoryview(part).nbytes for part in self.parts])


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """Every bound of a link. Both ends should be given the same."""

    max_header_bytes: int = 8 * MIB
    max_part_bytes: int = 256 * MIB
    max_parts: int = 16
    max_waiting_bytes: int = 1024 * MIB  # received and not yet read; more ends the link, as its reader fell behind
    beat_every: float = 0.2  # seconds between heartbeats
    # Seconds of silence after which the link is closed: if the peer's machine acknowledges nothing either, and if the
    # machine acknowledges, or that is not known: then the process may only be busy.
    dead_after: float = 3.0
    silent_after: float = 15.0
    security: Security | None = None  # None: not encrypted, and any peer may connect


DEFAULT_OPTIONS = LinkOptions()


Sink = Callable[[Frame | LinkClosed], None]


class Link(ABC):
    """One ordered, full-duplex, point-to-point edge.

    One thread reads (`recv`, or the sink) and one thread writes (`send`); they may be the same or different, and other
    methods may be called from any thread. A link holds a connection until `close` or `abort`, so use one of them, or
    `with`. Leaving the `with` block by an exception aborts, otherwise it closes.
    """

    address: str
    """The peer's address, for messages to people."""

    peer_key: str | None = None
    """The peer's public key, proven by the handshake; None if the link is not encrypted."""

    @abstractmethod
    def send(self, frame: Frame) -> None:
        """Queue `frame` and return at once. The buffers must never change afterwards: they may be sent without a copy.

        When the transport's queue is full it waits up to `silent_after` seconds, then ends the link. Raises LinkClosed
        when the link is over, FrameError when the frame is over a bound (nothing was sent, the link stays up).
        """

    @abstractmethod
    def recv(self, timeout: float | None = None) -> Frame:
        """Return the next frame, waiting at most `timeout` seconds (None: for ever). Raises LinkTimeout, LinkClosed.

        Frames that arrived before the end are returned first; after them every call raises LinkClosed.
        """

    @abstractmethod
    def deliver_to(self, sink: Sink) -> None:
        """Pass every frame, and finally exactly one LinkClosed, to `sink`, one call at a time. This replaces `recv`.

        The calls come from the transport's own thread (inproc: from the sender's), beginning with frames already
        queued. The sink must be quick and must not raise: heartbeats wait while it runs. It may use this link. If the
        link is over already, the calls are made before this method returns.
        """

    @abstractmethod
    def set_progress(self, progress: int) -> None:
        """Send `progress` (0 <= progress < 2**64) in heartbeats from now on. Raises ValueError out of range."""

    @property
    @abstractmethod
    def peer_progress(self) -> int:
        """The last progress received from the peer; 0 before the first."""

    @property
    @abstractmethod
    def silent_for(self) -> float:
        """Seconds since anything was received from the peer."""

    @property
    def is_busy(self) -> bool:
        """Whether the peer has been silent for `dead_after`, and its machine is known to acknowledge packets."""
        return False

    @abstractmethod
    def close(self, reason: str = "") -> None:
        """Flush, send the peer `reason`, end the link; takes at most FLUSH_SECONDS. A second call does nothing.

        The peer gets LinkClosed(reason) after all earlier frames. At this end, frames that have arrived stay readable.
        """

    @abstractmethod
    def abort(self, reason: str = "") -> None:
        """Drop everything at once, sent or received; a waiting `recv` raises LinkClosed. From any thread."""

    @property
    @abstractmethod
    def closed(self) -> LinkClosed | None:
        """How the link ended; None while it is open. (Frames that came earlier may still wait to be read.)"""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            self.abort(f"{type(error).__name__}: {error}")


class Listener(ABC):
    """Accepts links at an address. It owns the links it returned: closing it aborts them."""

    address: str
    """The address to connect to, with the real port (port 0 asks for a free one)."""

    @abstractmethod
    def accept(self, timeout: float | None = None) -> Link:
        """Return the next peer's link, waiting at most `timeout` seconds (None: for ever).

        Raises LinkTimeout, ListenerClosed.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop listening and abort this listener's links; to end a link politely, close it before."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Transport(Protocol):
    """One scheme. `connect` and `listen` of `transports.registry` find it by the address and document the errors."""

    def connect(self, address: str, *, timeout: float, options: LinkOptions) -> Link: ...

    def listen(self, address: str, *, options: LinkOptions) -> Listener: ...
