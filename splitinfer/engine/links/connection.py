"""Links between stages: opens them, runs their handshake, and turns a finished step into a message and back. A link
uses the transport of the layout, or tcp if that transport is unavailable and a fallback is allowed."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from splitinfer.core.layout import StageSpec
from splitinfer.core.plan import StageFigures
from splitinfer.engine.links.reachability import explain_here
from splitinfer.engine.stage.launched import Finished
from splitinfer.engine.stage.masking import RawMasks
from splitinfer.engine.versions import machine_name, own_versions
from splitinfer.errors import PeerError, ProtocolError
from splitinfer.models.border.hidden_states import ReceivedRows, to_parts
from splitinfer.system.gpu_roads import Road
from splitinfer.wire.headers import Session
from splitinfer.wire.messages import Hello, Message, NextStage, Refuse, Rows, Welcome
from splitinfer.wire.steps import packed
from transports import Frame, KeyPair, Link, LinkOptions, LinkTimeout, Security, TransportUnavailable, connect


def upstream_key(before: StageSpec | None, stage: StageSpec, own: Callable[[], KeyPair]) -> str:
    """Return the key with which the worker ``before`` connects to ``stage``. Return an empty text if that link is not
    encrypted, or if the coordinator is the previous stage."""
    if before is None or before.address is None or stage.key is None:
        return ""
    return before.key or own().public


def options_to(key: str | None, own: Callable[[], KeyPair]) -> LinkOptions:
    """Return the options of a link to the owner of ``key``. Without a key, the link is not encrypted."""
    return LinkOptions(security=Security(own(), key)) if key else LinkOptions()


@dataclass(slots=True)
class Connection:
    """An accepted link, the peer's role, and the protocol's state on it."""

    link: Link
    role: str
    name: str
    session_id: str
    session: Session

    def send(self, message: Message, *parts: memoryview) -> None:
        """Send one message. Raises LinkClosed, ProtocolError."""
        self.link.send(Frame(self.session.encode(message), parts))

    def receive(self, frame: Frame) -> Message:
        """Read one message. Raises ProtocolError."""
        return self.session.decode(frame.header)


log = logging.getLogger(__name__)

_RDMA = "rdma://"


class Reached(NamedTuple):
    """A link. ``note``: why it does not use the preferred transport; empty if it does."""

    link: Link
    note: str = ""


def reach(address: str, fallback: str, timeout: float, options: LinkOptions) -> Reached:
    """Connect to ``address``, or to ``fallback`` (unless empty) if the transport of ``address`` is unavailable.

    Raises:
        TransportError: as ``transports.connect``; TransportUnavailable only without a fallback.
    """
    if address.startswith(_RDMA) and not Road.RDMA.is_open:
        tcp = fallback or f"tcp://{address.removeprefix(_RDMA).partition('?')[0]}"
        return Reached(connect(tcp, timeout=timeout, options=options), f"tcp in place of rdma: {Road.RDMA} is 0")
    try:
        return Reached(connect(address, timeout=timeout, options=options))
    except TransportUnavailable as error:
        if not fallback:
            raise
        note = f"tcp in place of {address.partition('://')[0]}: {error.reason}"
    log.info("%s: %s", fallback, note)
    return Reached(connect(fallback, timeout=timeout, options=options), note)


CONNECT_TIMEOUT = 10.0  # seconds


def open_connection(
    to: NextStage, role: str, name: str, session_id: str, own_key: Callable[[], KeyPair]
) -> tuple[Connection, str]:
    """Open a link to the next stage in ``role``; return it and the note of ``Reached``. ``name``: the opening worker's.

    Raises:
        PeerError: the next stage cannot be reached, or refuses.
    """
    session = Session(opened=True)
    options = options_to(to.key, own_key)
    try:
        link, note = reach(to.address, to.fallback, CONNECT_TIMEOUT, options)
    except TransportUnavailable as error:
        raise PeerError(f"{name} cannot reach {to.address}: {error.reason}") from error
    except LinkTimeout as error:
        why = error if error.unreachable is None else explain_here(error.unreachable, machine_name())
        raise PeerError(f"{name} cannot reach the next stage at {to.address}: {why}") from error
    try:
        link.send(Frame(session.encode(Hello(role, name, session_id, own_versions()))))
        reply = session.decode(link.recv(timeout=CONNECT_TIMEOUT).header)
        if isinstance(reply, Refuse):
            raise PeerError(f"{name} was refused by the next stage at {to.address}: {reply.reason}")
    except BaseException:
        link.abort()
        raise
    assert isinstance(reply, Welcome)
    return Connection(link, "downstream", reply.name, session_id, session), note


def outgoing(
    done: Finished, masks: RawMasks, before: tuple[bytes, ...] | None = None, received: float = 0.0
) -> tuple[Rows, tuple[memoryview, ...], StageFigures]:
    """Return the message for a finished step's rows, its payload, and the step's figures here. ``masks``: for the last
    stage. ``before``: the figures of earlier stages, to be sent together with this stage's; ``None`` on the first
    stage, which keeps its own. ``received``: when the step's frame arrived, in seconds."""
    sent, now = to_parts(done.hidden, done.packed), time.monotonic()
    num_bytes = sum([part.nbytes for part in sent.parts])
    here = done.figures(received=received, bytes_sent=num_bytes, sent=now, unfit=sent.num_unfit)
    figures = () if before is None else (*before, packed(here))
    rows = Rows(done.plan.step, sent.spec, figures, sent.packing, tuple(masks))
    return rows, (*sent.parts, memoryview(b"".join(masks.values()))) if masks else sent.parts, here


def payload_of(rows: Rows, frame: Frame) -> tuple[ReceivedRows | None, RawMasks]:
    """Return the hidden states and masks that arrived with a step.

    Raises:
        ProtocolError: the payload does not match the message.
    """
    parts = tuple(memoryview(part) for part in frame.parts)
    masks, parts = (parts[-1:], parts[:-1]) if rows.masked else ((), parts)
    if (rows.tensor is not None) != bool(parts) or len(masks) != bool(rows.masked):
        raise ProtocolError(f"step {rows.step} came with {len(frame.parts)} payloads")
    if rows.tensor is not None and len(rows.tensor.shape) != 2:
        raise ProtocolError(f"step {rows.step} came with hidden states of shape {rows.tensor.shape}")
    hidden = None if rows.tensor is None else ReceivedRows(rows.tensor, rows.packing, parts)
    return hidden, _cut(masks[0].cast("B"), rows.masked) if masks else {}


def _cut(masks: memoryview, rows: Sequence[tuple[int, int]]) -> RawMasks:
    """Split the bytes of all masks, and return the mask of each row."""
    size, rest = divmod(masks.nbytes, len(rows))
    if rest:
        raise ProtocolError(f"{masks.nbytes:,} bytes came as {len(rows)} masks of one size")
    return {place: masks[at * size : (at + 1) * size] for at, place in enumerate(rows)}
