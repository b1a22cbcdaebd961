"""The way to the next stage: the link, the handshake, and what is said if there is none."""

from collections.abc import Callable

from splitinfer.engine.links.connection import Connection
from splitinfer.engine.links.keys import options_to
from splitinfer.engine.links.reachability import explain_here
from splitinfer.engine.links.setup import reach
from splitinfer.engine.versions import machine_name, own_versions
from splitinfer.errors import PeerError
from splitinfer.wire.messages import Hello, NextStage, Refuse, Welcome
from splitinfer.wire.session import Session
from transports import Frame, KeyPair, LinkTimeout, TransportUnavailable

CONNECT_TIMEOUT = 10.0  # seconds


def connect(
    to: NextStage, role: str, name: str, session_id: str, own_key: Callable[[], KeyPair]
) -> tuple[Connection, str]:
    """Open a link to the next stage in ``role``, and a note about it. ``name``: of the worker that opens it.

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
