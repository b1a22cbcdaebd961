"""The one probe of a link: the exchanges of ``core.metrics.link_measurement``, timed by who asks.

A frame there has four bytes in its header, how many bytes are to come back, and as many bytes in its part as are to go
there; the frame back has an empty header. ``plan`` and ``doctor`` open a link to a worker for this alone, in the role
"probe", or have a worker open one to another; ``bench`` does it between two processes of its own. A worker answers on
the thread that computes steps: these pay for waking it, too.
"""

import random
import time
from collections.abc import Callable
from functools import cache, partial
from struct import Struct
from typing import Protocol

from splitinfer.core.metrics.link_measurement import MOST_BYTES, LinkMeasurement, probe
from splitinfer.engine.links.connection import open_connection
from splitinfer.errors import PeerError, ProtocolError
from splitinfer.wire.messages import NextStage, Probed
from transports import Frame, KeyPair, TransportError

_PAUSE = 0.02  # seconds before each exchange, as between two steps: a processor that has slept wakes slowly
PATIENCE = 10.0  # seconds for one reply; a dead link ends sooner, and by itself
_WANTED = Struct("<I")  # bytes that are to come back


class Carrier(Protocol):
    """What frames can be exchanged on, as on a ``Link``: one, or, for ``bench``, what lies below links."""

    def send(self, frame: Frame, /) -> None: ...

    def recv(self, timeout: float | None = None, /) -> Frame: ...


def probe_next(to: NextStage, name: str, session_id: str, own_key: Callable[[], KeyPair]) -> Probed:
    """Open a link to the next stage, measure it and close it again. ``name``: of the worker that does so.

    Raises:
        PeerError: the next stage cannot be reached, refuses, or does not answer as it should.
    """
    connection, note = open_connection(to, "probe", name, session_id, own_key)
    with connection.link as link:
        try:
            return Probed(measure(link, _PAUSE), note)
        except (TransportError, ProtocolError) as error:
            raise PeerError(
                f"{name} could not measure the link to {connection.name}: {str(error) or 'it closed the link'}"
            ) from error


def measure(link: Carrier, pause: float = 0.0) -> LinkMeasurement:
    """Measure a link at whose other end every frame gets its ``reply_to``; some 0.3 s, and a ``pause`` (seconds) before
    each of some thirty exchanges. Raises as ``ask``."""
    return probe(partial(ask, link, pause=pause))


def ask(link: Carrier, there: int, back: int, pause: float = 0.0) -> float:
    """Make one exchange of so many bytes there and back, after a pause; its seconds.

    Raises:
        ProtocolError: the reply has another number of bytes than was asked for.
        TransportError: the link is over, or nobody answers.
    """
    time.sleep(pause)
    asked = time.perf_counter()
    link.send(Frame(_WANTED.pack(back), _payload(there)))
    reply = link.recv(PATIENCE)
    seconds = time.perf_counter() - asked
    if _num_bytes(reply) != back:
        raise ProtocolError(f"{back:,} bytes were to come back, and {_num_bytes(reply):,} came")
    return seconds


def reply_to(frame: Frame) -> Frame:
    """Return the frame back.

    Raises:
        ProtocolError: the frame there is not a probe's, or asks for or carries more bytes than is allowed.
    """
    if len(frame.header) != _WANTED.size or len(frame.parts) > 1:
        raise ProtocolError(f"a probe came with a header of {len(frame.header)} bytes and {len(frame.parts)} payloads")
    (wanted,) = _WANTED.unpack(frame.header)
    if max(wanted, _num_bytes(frame)) > MOST_BYTES:
        raise ProtocolError(f"a probe came with {_num_bytes(frame):,} bytes and asks for {wanted:,}")
    return Frame(b"", _payload(wanted))


@cache
def _noise() -> memoryview:
    """Return random bytes, which no layer below can compress. All frames have these, so they take no memory of their
    own."""
    return memoryview(random.Random(0).randbytes(MOST_BYTES))


def _payload(num_bytes: int) -> tuple[memoryview, ...]:
    """Return the parts of a frame with ``num_bytes`` bytes. These never change, so they may be sent without a copy."""
    return (_noise()[:num_bytes],) if num_bytes else ()


def _num_bytes(frame: Frame) -> int:
    return sum(memoryview(part).nbytes for part in frame.parts)
