"""One worker as the coordinator knows it: its link, what it says, and the error for its loss."""

import time
from dataclasses import dataclass, field
from typing import NamedTuple

from splitinfer.core.layout import StageSpec
from splitinfer.engine.files.answering import Answers
from splitinfer.errors import ProtocolError, Refused, WorkerLost
from splitinfer.wire import codec
from splitinfer.wire.messages import (
    Fault,
    Message,
    Ready,
    Refuse,
    Welcome,
)
from splitinfer.wire.session import Session
from transports import (
    Frame,
    Link,
    LinkClosed,
)

_SILENCE = 2.0  # seconds until a process counts as frozen; it sends heartbeats five times a second, even when busy


@dataclass(slots=True, eq=False)
class WorkerHandle:
    """One worker as the coordinator knows it. ``rank``: in a stage across two machines; ``None`` in others."""

    stage: int
    spec: StageSpec
    address: str
    link: Link
    session: Session = field(default_factory=lambda: Session(opened=True))
    welcome: Welcome | None = None  # its versions, device and free memory
    answers: Answers | None = None  # to its asks for weights
    spoken_at: float = float("-inf")  # when a message went either way, in seconds on the monotonic clock
    hangs: bool = False  # its heartbeats go on, and its engine does not
    silence_at_end: float | None = None  # seconds since anything was received from it when its link ended
    last_frame: Frame | None = None  # received from it
    rank: int | None = None
    ready: Ready | None = None  # what it said when it had loaded
    busy: float = 0.0  # seconds that it has computed since, if it is a rank

    @property
    def stage_name(self) -> str:
        """The name of its stage, which is its own but for a rank."""
        return self.spec.name if self.rank is None else self.spec.name.rpartition("/")[0]

    @property
    def is_silent(self) -> bool:
        """Whether the process at the other end seems frozen: nothing is received from it, not even a goodbye."""
        silence = self.link.silent_for if self.silence_at_end is None else self.silence_at_end
        return silence >= _SILENCE

    @property
    def fault(self) -> Fault | None:
        """Its last message, if that says why it cannot go on."""
        try:
            message = None if self.last_frame is None else codec.decode(self.last_frame.header)
        except ProtocolError:
            return None
        return message if isinstance(message, Fault) else None

    @property
    def is_ending(self) -> bool:
        """Whether its process ends, as it says itself."""
        return self.fault is not None and self.fault.is_ending

    def lost(self, reason: str) -> WorkerLost:
        """The error for the loss of this worker, with the reason that it gave itself, if it did."""
        if self.fault is not None:
            return self._faulty(self.fault)
        return WorkerLost(f"worker {self.spec.name} ({self.address}) is gone: {reason or 'it closed the link'}")

    def _faulty(self, fault: Fault) -> WorkerLost:
        no_memory_on = self.stage if fault.no_memory else None
        return WorkerLost(f"worker {self.spec.name} ({self.address}) cannot go on: {fault.reason}", no_memory_on)

    def send(self, message: Message, *parts: memoryview) -> None:
        """Send one message. Raises LinkClosed, ProtocolError."""
        self.spoken_at = time.monotonic()
        self.link.send(Frame(self.session.encode(message), parts))

    def receive(self, item: Frame | LinkClosed) -> Message:
        """Read one message.

        Raises:
            WorkerLost: the link ended, or the worker sent a Fault.
            Refused: the worker sent a Refuse.
            ProtocolError: the message is not allowed in this state.
        """
        if isinstance(item, LinkClosed):
            raise self.lost(item.reason)
        message = self.session.decode(item.header)
        if isinstance(message, Refuse):
            raise Refused(f"worker {self.spec.name} ({self.address}) refused: {message.reason}")
        if isinstance(message, Fault):
            raise self._faulty(message)
        return message


class Event(NamedTuple):
    """A worker's frame, or the end of its link, and when it arrived, in seconds on the monotonic clock."""

    worker: WorkerHandle
    item: Frame | LinkClosed
    at: float
