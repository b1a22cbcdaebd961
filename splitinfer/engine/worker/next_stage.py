"""A worker's way to the next stage: the link, the handshake, and what it says if there is none."""

from collections.abc import Callable

from splitinfer.engine.links.connection import Connection
from splitinfer.engine.links.keys import options_to
from splitinfer.engine.links.reachability import explain_here
from splitinfer.engine.links.setup import reach
from splitinfer.engine.versions import machine_name, own_versions
from splitinfer.errors import PeerError
from splitinfer.wire import codec
from splitinfer.wire.messages import Connect, Hello, Refuse, Welcome
from splitinfer.wire.session import Session
from transports import Frame, KeyPair, LinkTimeout, TransportUnavailable

CONNECT_TIMEOUT = 10.0  # seconds


def connect(message: Connect, name: str, session_id: str, own_key: Callable[[], KeyPair]) -> tuple[Connection, str]:
    """Open the data link that the coordinator names, and a note about it. ``name``: this worker's.

    Raises:
        PeerError: the next stage cannot be reached, or refuses.
    """
    session = Session(opened=True)
    hello = Hello("upstream", name, session_id, own_versions())
    session.sending(hello)
    options = options_to(message.key, own_key)
    try:
        link, note = reach(message.address, message.fallback, CONNECT_TIMEOUT, options)
    except TransportUnavailable as error:
        raise PeerError(f"{name} cannot reach {message.address}: {error.reason}") from error
    except LinkTimeout as error:
        why = error if error.unreachable is None else explain_here(error.unreachable, machine_name())
        raise PeerError(f"{name} cannot reach the next stage at {message.address}: {why}") from error
    try:
        link.send(Frame(codec.encode(hello)))
        reply = codec.decode(link.recv(timeout=CONNECT_TIMEOUT).header)
        session.received(reply)
        if isinstance(reply, Refuse):
            raise PeerError(f"{name} was refused by the next stage at {message.address}: {reply.reason}")
    except BaseException:
        link.abort()
        raise
    assert isinstance(reply, Welcome)
    return Connection(link, "downstream", reply.name, session_id, session), note
