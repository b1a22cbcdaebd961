"""Links between processes: one contract (`base`), several transports, chosen by the scheme of an address.

    listener = listen("tcp://0.0.0.0:5577")          link = connect("tcp://mini.local:5577", timeout=10)
    link = listener.accept()                         link.send(Frame(b"header", (array,)))

The package stands alone: nothing in it knows what the frames mean.
"""

from transports.base import (
    AddressError,
    AddressInUse,
    Buffer,
    Frame,
    FrameError,
    Link,
    LinkClosed,
    LinkOptions,
    LinkRefused,
    LinkTimeout,
    Listener,
    ListenerClosed,
    Sink,
    Transport,
    TransportError,
    TransportUnavailable,
)
from transports.registry import connect, known, listen
from transports.security import KeyPair, Security, check_key
from transports.threads import at_thread_start
from transports.unreachable import Unreachable

__all__ = [
    "AddressError",
    "AddressInUse",
    "Buffer",
    "Frame",
    "FrameError",
    "KeyPair",
    "Link",
    "LinkClosed",
    "LinkOptions",
    "LinkRefused",
    "LinkTimeout",
    "Listener",
    "ListenerClosed",
    "Security",
    "Sink",
    "Transport",
    "TransportError",
    "TransportUnavailable",
    "Unreachable",
    "at_thread_start",
    "check_key",
    "connect",
    "known",
    "listen",
]
