"""A link to a worker that is asked for weights: opened in the role "reader", which allows nothing else."""

import uuid
from collections.abc import Sequence
from typing import Self

from splitinfer.engine.links.reachability import explain_here
from splitinfer.engine.versions import machine_name, own_versions
from splitinfer.errors import PeerError, ProtocolError, Refused, WorkerUnreachable
from splitinfer.wire.messages import Fault, Hello, Message, Refuse, Welcome
from splitinfer.wire.session import Session
from transports import Frame, Link, LinkOptions, LinkRefused, LinkTimeout, TransportError, connect

_REPLY_SECONDS = 60.0  # for a range to be read from a disk that is busy; a dead link ends in three


class Reader:
    """The link, as a ``Channel``.

    Raises:
        WorkerUnreachable: nothing answers at ``address``.
        Refused: the worker does not admit this machine, or is busy.
    """

    def __init__(self, address: str, options: LinkOptions, timeout: float, name: str = "") -> None:
        self.peer = f"worker {name} ({address})" if name else f"the worker at {address}"
        self._session = Session(opened=True)
        self._link = self._connect(address, options, timeout)
        try:
            self.send(Hello("reader", machine_name(), uuid.uuid4().hex, own_versions()))
            answer, _ = self.receive()
        except BaseException:
            self._link.abort("the handshake failed")
            raise
        if not isinstance(answer, Welcome):
            raise ProtocolError(f"{self.peer} answered with something else than a welcome")

    def _connect(self, address: str, options: LinkOptions, timeout: float) -> Link:
        try:
            return connect(address, timeout=timeout, options=options)
        except LinkRefused as error:
            remedy = (
                ""
                if options.security is None
                else f"; admit this machine there: splitinfer pair {options.security.own.public}"
            )
            raise Refused(f"{self.peer} cannot be asked for weights: {error}{remedy}") from error
        except LinkTimeout as error:
            why = error if error.unreachable is None else explain_here(error.unreachable)
            raise WorkerUnreachable(f"{self.peer} cannot be asked for weights: {why}") from error
        except TransportError as error:
            raise WorkerUnreachable(f"{self.peer} cannot be asked for weights: {error}") from error

    def send(self, message: Message) -> None:
        """As ``Channel.send``."""
        try:
            self._link.send(Frame(self._session.encode(message)))
        except TransportError as error:
            raise self._gone(error) from error

    def receive(self) -> tuple[Message, Sequence[memoryview]]:
        """As ``Channel.receive``."""
        try:
            frame = self._link.recv(timeout=_REPLY_SECONDS)
        except TransportError as error:
            raise self._gone(error) from error
        message = self._session.decode(frame.header)
        if isinstance(message, Refuse | Fault):
            raise Refused(f"{self.peer} refused: {message.reason}")
        return message, [memoryview(part) for part in frame.parts]

    def _gone(self, error: TransportError) -> PeerError:
        return PeerError(
            f"{self.peer} is gone: {error}; what was copied until then stays, and the next try goes on from it"
        )

    def close(self) -> None:
        """End the link."""
        self._link.close("nothing more is wanted")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
