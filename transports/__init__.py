"""Links between processes: one contract (`base`), several carriers, chosen by the scheme of an address.

    listener = listen("tcp://0.0.0.0:5577")          link = connect("tcp://mini.local:5577", timeout=10)
    link = listener.accept()                         link.send(Frame(b"header", (array,)))

Stands alone: nothing here knows what the frames mean.
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
    LinkStats,
    LinkTimeout,
    Listener,
    ListenerClosed,
    Sink,
    Transport,
    TransportError,
)
from transports.inproc import InprocTransport
from transports.registry import connect, known, listen, register
from transports.tcp import TcpTransport

register(InprocTransport())
register(TcpTransport())

__all__ = [
    "AddressError",
    "AddressInUse",
    "Buffer",
    "Frame",
    "FrameError",
    "Link",
    "LinkClosed",
    "LinkOptions",
    "LinkStats",
    "LinkTimeout",
    "Listener",
    "ListenerClosed",
    "Sink",
    "Transport",
    "TransportError",
    "connect",
    "known",
    "listen",
    "register",
]
