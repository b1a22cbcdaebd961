"""A link after its handshake, with what is known of the peer, and the messages on it."""

from dataclasses import dataclass

from splitinfer.wire.messages import Message
from splitinfer.wire.session import Session
from transports import Frame, Link


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
