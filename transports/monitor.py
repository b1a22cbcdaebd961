"""Parses the events that a ZeroMQ socket's monitor reports.

``zmq.utils.monitor`` does the same, but imports asyncio, which takes a twentieth of a second at every start.
"""

import struct
from collections.abc import Sequence

import zmq

_EVENT = struct.Struct("=Hi")  # which event, and its value; a second part names the endpoint


def parse_event(message: Sequence[bytes]) -> tuple[zmq.Event, int]:
    """The event in a monitor's message, and its value: a descriptor, an error number or a code, depending on the event.

    Raises:
        ValueError: not a message of a monitor.
    """
    if len(message) != 2 or len(message[0]) != _EVENT.size:
        raise ValueError(f"not an event of a ZeroMQ monitor: {message!r:.80}")
    event, value = _EVENT.unpack(message[0])
    return zmq.Event(event), value
