"""A zmq socket and its monitor: sends and receives whole messages, and has the descriptors to poll.

The descriptor of a zmq socket is *edge-triggered*: any call on the socket may swallow the signal for a message that
has arrived. So a thread that has used it calls `has_input` before it sleeps. Nothing here locks; only one thread at a
time may use a zmq socket, which the hub ensures.

``zmq.utils.monitor`` parses events as well, but imports asyncio, which takes a twentieth of a second at every start.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import zmq

from transports.base import Buffer
from transports.tcp_link import Message

_EVENT = struct.Struct("=Hi")  # which event, and its value
_POLLIN = int(zmq.POLLIN)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_COPIED_BYTES = 1 << 16  # a part below this size is quicker to copy than to keep alive


def parse_event(message: Sequence[bytes]) -> tuple[zmq.Event, int]:
    """The event in a monitor's message, and its value: a descriptor, an error number or a code."""
    event, value = _EVENT.unpack(message[0])
    return zmq.Event(event), value


class ZmqSocket:
    """Sends and receives without blocking."""

    def __init__(self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._monitor = monitor
        self.descriptor = socket.FD
        self.monitor_descriptor = monitor.FD

    def has_input(self) -> bool:
        return bool(int(self._socket.get(zmq.EVENTS)) & _POLLIN)

    def send(self, route: tuple[bytes, ...], message: Message) -> bool:
        """Whether zmq took the message. Raises zmq.ZMQError with EHOSTUNREACH if the peer of `route` is gone."""
        try:
            # pyzmq keeps parts that are not copied alive until they are sent.
            for name in route:
                self._socket.send(name, _MORE)
            for part in message[:-1]:
                self._socket.send(part, _MORE, copy=_is_small(part))
            self._socket.send(message[-1], zmq.NOBLOCK, copy=_is_small(message[-1]))
        except zmq.Again:
            return False
        return True

    def receive(self) -> list[zmq.Frame]:
        """The next message; raises zmq.Again if there is none."""
        message = [self._socket.recv(zmq.NOBLOCK, copy=False)]
        while message[-1].more:
            message.append(self._socket.recv(zmq.NOBLOCK, copy=False))
        return message

    def events(self) -> Iterator[tuple[zmq.Event, int]]:
        """The monitor's events, each with a descriptor, until none is left."""
        while True:
            try:
                message = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield parse_event(message)

    def close(self, linger: float) -> None:
        """Close both; queued messages have `linger` seconds to be sent."""
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(int(linger * 1000))


def _is_small(part: Buffer) -> bool:
    return (part.nbytes if isinstance(part, memoryview) else len(part)) < _COPIED_BYTES  # type: ignore[arg-type]
