"""The probe of a link: the exchanges of ``core.metrics.link_measurement``, timed by the asking end.

A request's header has four bytes, the number of bytes to send back; its part has the bytes to send there. A reply has
an empty header. ``plan`` and ``doctor`` open a separate link to a worker, in the role "probe", or have a worker open
one to another worker; ``bench`` measures between two processes of its own. A worker replies on the thread that computes
steps, so that the time to wake it counts, as it does for steps.
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

_PAUSE = 0.02  # seconds before each exchange, as between two steps: a sleeping processor wakes slowly
PATIENCE = 10.0  # seconds for one reply; a dead link ends sooner by itself
_WANTED = Struct("<I")  # the number of bytes to send back


class Carrier(Protocol):
    """Exchanges frames: a ``Link``, or for ``bench`` the layer below links."""

    def send(self, frame: Frame, /) -> None: ...

    def recv(self, timeout: float | None = None, /) -> Frame: ...


def probe_next(to: NextStage, name: str, session_id: str, own_key: Callable[[], KeyPair]) -> Probed:
    """Open a link to the next stage, measure it and close it again. ``name``: the name of the measuring worker.

    Raises:
        PeerError: the next stage cannot be reached, refuses, or replies wrongly.
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
    """Measure a link whose other end replies by ``reply_to``. Takes about 0.3 s, plus ``pause`` seconds before each of
    about thirty exchanges. Raises as ``ask``."""
    return probe(partial(ask, link, pause=pause))


def ask(link: Carrier, there: int, back: int, pause: float = 0.0) -> float:
    """Send ``there`` bytes and receive ``back`` bytes, after a pause; return the seconds that it took.

    Raises:
        ProtocolError: the reply has the wrong number of bytes.
        TransportError: the link has ended, or no reply arrives.
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
    """Return the reply to a probe's frame.

    Raises:
        ProtocolError: the frame is not a probe's, or asks for or carries more bytes than allowed.
    """
    if len(frame.header) != _WANTED.size or len(frame.parts) > 1:
        raise ProtocolError(f"a probe came with a header of {len(frame.header)} bytes and {len(frame.parts)} payloads")
    (wanted,) = _WANTED.unpack(frame.header)
    if max(wanted, _num_bytes(frame)) > MOST_BYTES:
        raise ProtocolError(f"a probe came with {_num_bytes(frame):,} bytes and asks for {wanted:,}")
    return Frame(b"", _payload(wanted))


@cache
def _noise() -> memoryview:
    """Return random bytes, which no lower layer can compress. All frames share them, so frames need no memory."""
    return memoryview(random.Random(0).randbytes(MOST_BYTES))


def _payload(num_bytes: int) -> tuple[memoryview, ...]:
    """Return the parts of a frame with ``num_bytes`` bytes. The bytes never change, so links may send them uncopied."""
    return (_noise()[:num_bytes],) if num_bytes else ()


def _num_bytes(frame: Frame) -> int:
    return sum(memoryview(part).nbytes for part in frame.parts)
