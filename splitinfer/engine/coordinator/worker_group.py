"""The workers of one session: connects to them, loads them, connects them to each other, measures their links.

A group is fail-stop: the first lost worker ends it, with one error that names the worker. A pipeline that continues
after that makes a new group; what the old one's links still deliver is ignored.
"""

import math
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from splitinfer.core.layout import StageSpec
from splitinfer.core.link_transport import OVER_TCP, LinkTransport
from splitinfer.core.metrics.clocks import ClockReading, best, exchange
from splitinfer.core.metrics.link_measurement import Exchange, LinkMeasurement
from splitinfer.engine.coordinator.worker_handle import Event, WorkerHandle
from splitinfer.engine.files.answering import Answers, Running, find_running
from splitinfer.engine.links import probe as link_probe
from splitinfer.engine.links.keys import options_to, upstream_key
from splitinfer.engine.links.reachability import explain_here
from splitinfer.engine.links.setup import Reached, reach
from splitinfer.engine.versions import machine_name, own_versions
from splitinfer.errors import PeerError, ProtocolError, Refused, WorkerLost, WorkerUnreachable
from splitinfer.grammar.masks import MaskSender
from splitinfer.wire import codec
from splitinfer.wire.messages import (
    ClockAsk,
    ClockTell,
    Compress,
    Connect,
    Connected,
    Echo,
    Echoed,
    Expect,
    Hello,
    Load,
    Measured,
    MeasureNext,
    Message,
    Progress,
    Ready,
    Welcome,
)
from transports import (
    AddressError,
    Frame,
    KeyPair,
    LinkClosed,
    LinkOptions,
    LinkRefused,
    LinkTimeout,
    TransportError,
    TransportUnavailable,
    Unreachable,
    address_for_others,
)

Notice = Callable[[int, Progress], None]  # stage number, its progress
Reply = TypeVar("Reply", bound=Message)

_CLOCK_SECONDS, _CLOCK_EXCHANGES = 0.003, 8  # to read one worker's clock; at least one exchange is made
_MEANWHILE = 0.25  # seconds between looks at something else while stages load
_REPLY_SECONDS = 60.0  # for an idle engine to reply to what takes less than a second; a dead link ends in three
SILENCE = 300.0  # seconds in which a worker that loads or measures may say nothing; each tensor that is read is told
_MAX_NOTE = 300  # characters of a worker's note for a person


def _nothing() -> None:
    pass


def _no_key() -> KeyPair:
    raise PeerError("this pipeline has no key of its own for encrypted links")


class WorkerGroup:
    """Links to the workers, in the order of the stages.

    ``put`` receives an ``Event`` for every frame and link's end once ``start_delivery`` was called. ``notice`` receives
    a stage's number and its progress. ``own``: returns this machine's key pair, where a worker has a key. ``running``:
    the models that workers may copy.
    """

    def __init__(
        self,
        put: Callable[[Event], None],
        notice: Notice,
        own: Callable[[], KeyPair] = _no_key,
        running: tuple[Running, ...] = (),
    ) -> None:
        self._put, self._notice, self._own = put, notice, own
        self._find = find_running(lambda: running)
        self._session_id = uuid.uuid4().hex
        self._opening: queue.SimpleQueue[Event] | None = queue.SimpleQueue()
        self._delivery_lock = threading.Lock()
        self.workers: list[WorkerHandle] = []
        self.masks = MaskSender()
        """The masks that the last stage has: none when a group begins."""

    def connect(self, stage: int, spec: StageSpec, address: str, timeout: float) -> None:
        """Connect to one worker and complete the handshake, within ``timeout`` seconds each.

        Raises:
            WorkerUnreachable: nothing listens there, or no answer came.
            Refused: the worker refused.
        """
        # To later stages go commands only; a stage's rdma device is for the stage before it, and has room for one link.
        transport = spec.link_transport if stage == 1 else OVER_TCP
        link, note = _connect(spec, transport, address, timeout, options_to(spec.key, self._own))
        self._note(stage, note)
        worker = WorkerHandle(stage, spec, address, link)
        try:
            worker.send(Hello("coordinator", machine_name(), self._session_id, own_versions()))
            answer = worker.receive(link.recv(timeout=timeout))
        except (TransportError, PeerError) as error:
            link.abort("the handshake failed")
            if isinstance(error, PeerError):
                raise
            raise WorkerUnreachable(f"worker {spec.name} ({address}) did not answer: {error}") from error
        assert isinstance(answer, Welcome)
        worker.welcome = answer
        link.deliver_to(lambda item: self._deliver(worker, item))
        self.workers.append(worker)

    def load(self, commands: Sequence[Load]) -> None:
        """Send every worker its Load; all load at the same time."""
        for worker, load in zip(self.workers, commands, strict=True):
            worker.send(load)

    def prepare_to_measure(self) -> list[ClockReading]:
        """Prepare workers for link measurements without loading, in place of ``load`` and ``await_ready``.

        Sends every worker the key of the stage before it; returns the workers' clocks.
        """
        for before, worker in zip((None, *self.workers), self.workers, strict=False):
            worker.send(Expect(upstream_key(before.spec if before else None, worker.spec, self._own)))
        return self.read_clocks()

    @property
    def is_whole(self) -> bool:
        """Whether no link has ended."""
        return all(worker.link.closed is None for worker in self.workers)

    def await_ready(self, silence: float = SILENCE, meanwhile: Callable[[], None] = _nothing) -> list[Ready]:
        """Wait until all have loaded; their progress goes to ``notice``. ``silence``: seconds after which one that has
        said nothing is lost. ``meanwhile``: called a few times a second.

        Raises:
            PeerError: a worker refused, failed, is gone, or hangs.
        """
        ready: dict[int, Ready] = {}
        while waiting := [worker for worker in self.workers if worker.stage not in ready]:
            worker, message = self.next_message(waiting, silence, meanwhile)
            if isinstance(message, Progress):
                self._notice(worker.stage, message)
            elif isinstance(message, Ready):
                ready[worker.stage] = message
        return [ready[worker.stage] for worker in self.workers]

    def connect_stages(self, silence: float = SILENCE) -> None:
        """Have every worker but the last open its data link to the next. ``silence`` as in ``await_ready``."""
        for worker, following in zip(self.workers, self.workers[1:], strict=False):
            address, fallback = following.spec.link_transport.addresses(following.address)
            fallback = address_for_others(fallback) if fallback else ""
            worker.send(Connect(address_for_others(address), following.spec.key or "", fallback))
        waiting = self.workers[:-1]
        while waiting:
            worker, message = self.next_message(waiting, silence)
            if isinstance(message, Connected):
                waiting.remove(worker)
                self._note(worker.stage + 1, message.note)

    def _note(self, stage: int, note: str) -> None:
        """Report a note about the link to a stage."""
        if note:
            self._notice(stage, Progress("link", 0, 0, note[:_MAX_NOTE]))

    def set_codecs(self, codecs: Sequence[str]) -> None:
        """Set the codec in which every worker but the last sends the hidden states of prompts."""
        for worker, codec_name in zip(self.workers, codecs, strict=False):
            worker.send(Compress(codec_name))

    def read_clocks(self) -> list[ClockReading]:
        """Read every worker's clock: a few milliseconds each, or one exchange where that takes longer."""
        return [self._read_clock(worker) for worker in self.workers]

    def _read_clock(self, worker: WorkerHandle) -> ClockReading:
        readings: list[ClockReading] = []
        give_up = time.monotonic() + _CLOCK_SECONDS
        while not readings or (len(readings) < _CLOCK_EXCHANGES and time.monotonic() < give_up):
            readings.append(self._exchange_clock(worker))
        return best(readings)

    def _exchange_clock(self, worker: WorkerHandle) -> ClockReading:
        asked = time.monotonic()
        worker.send(ClockAsk())
        reply, event = self._reply(ClockTell)
        if not math.isfinite(reply.received) or not math.isfinite(reply.told):
            raise ProtocolError(f"worker {worker.spec.name} sent an invalid time")
        return exchange(asked, reply.received, reply.told, event.at)

    def measure_links(self) -> list[LinkMeasurement]:
        """Measure the links between the stages, beginning with the one to the first worker; some 0.3 s each.

        Raises:
            PeerError, TransportError: a worker is gone.
        """
        return [*map(self.measure_link, self.workers[:1]), *map(self.measure_next, self.workers[:-1])]

    def measure_link(self, worker: WorkerHandle) -> LinkMeasurement:
        """Measure this machine's own link to a worker."""
        return link_probe.measure(lambda exchange: self._exchange_echo(worker, exchange))

    def _exchange_echo(self, worker: WorkerHandle, exchange: Exchange) -> float:
        asked = time.monotonic()
        worker.send(Echo(exchange.back), *link_probe.payload(exchange.there))
        _, event = self._reply(Echoed)
        assert isinstance(event.item, Frame)
        link_probe.check_reply(exchange, event.item)
        return event.at - asked

    def measure_next(self, worker: WorkerHandle) -> LinkMeasurement:
        """Measure a worker's link to the next worker."""
        worker.send(MeasureNext())
        return self._reply(Measured)[0].figures

    def _reply(self, kind: type[Reply]) -> tuple[Reply, Event]:
        """Wait for a reply of this kind. Raises, too, if another worker is lost meanwhile."""
        assert self._opening is not None
        while True:
            try:
                event = self._opening.get(timeout=_REPLY_SECONDS)
            except queue.Empty:
                raise WorkerLost(f"a worker has not answered for {_REPLY_SECONDS:.0f} s") from None
            message = event.worker.receive(event.item)
            if isinstance(message, kind):
                return message, event

    def start_delivery(self) -> None:
        """Deliver all events to ``put`` from now on, beginning with those that have arrived already."""
        with self._delivery_lock:
            while self._opening is not None and not self._opening.empty():
                self._put(self._opening.get())
            self._opening = None

    def close(self, reason: str) -> None:
        """Close all links, the last stage first, so that no worker takes its neighbour's end for a loss."""
        for worker in reversed(self.workers):
            worker.link.close(reason)

    def next_message(
        self, waiting: Iterable[WorkerHandle], silence: float = SILENCE, meanwhile: Callable[[], None] = _nothing
    ) -> tuple[WorkerHandle, Message]:
        """Wait for the next message of any worker. One of those ``waiting`` for is lost after ``silence`` seconds in
        which no message went either way. ``meanwhile``: called a few times a second.

        Raises:
            PeerError: a worker refused, failed, is gone, or hangs.
        """
        assert self._opening is not None
        while True:
            meanwhile()
            try:
                event = self._opening.get(timeout=_MEANWHILE)
                return event.worker, event.worker.receive(event.item)
            except queue.Empty:
                since = time.monotonic() - silence
                if (quiet := next((worker for worker in waiting if worker.spoken_at < since), None)) is not None:
                    raise quiet.hung(f"has said nothing for {silence:.0f} s, though it is connected") from None

    def _deliver(self, worker: WorkerHandle, item: Frame | LinkClosed) -> None:
        if isinstance(item, LinkClosed):
            worker.silence_at_end = worker.link.silent_for
            if worker.answers is not None:
                worker.answers.close()
        elif codec.asks_for_weights(item.header):
            worker.answers = worker.answers or Answers(worker, self._find)
            worker.answers.put(item)
            return
        else:
            worker.last_frame, worker.spoken_at = item, time.monotonic()
        event = Event(worker, item, time.monotonic())
        with self._delivery_lock:
            put = self._put if self._opening is None else self._opening.put
            put(event)


def _why_refused(spec: StageSpec, address: str, options: LinkOptions, error: LinkRefused) -> str:
    """What to do about an encrypted handshake that failed, as a sentence."""
    where = f"worker {spec.name} ({address})"
    if options.security is None:
        return (
            f"{where} requires an encrypted link: give the key that it printed when it started, in a layout as "
            f"`key:` of stage {spec.name}, with --workers as {spec.name}=ADDRESS#KEY"
        )
    return (
        f"{where} cannot be reached with encryption: {error}. Its `key:` here is {(options.security.peer or '')[:8]}…; "
        "if the worker printed another one, correct that. Otherwise admit this machine there: splitinfer pair "
        f"{options.security.own.public}. A worker with --insecure, or on its own machine only, has no key"
    )


def start_command(address: str) -> str:
    """The command to run on a worker's machine so that it listens at this address."""
    return f"splitinfer worker --host 0.0.0.0 --port {address.rpartition(':')[2]}"


def _why_unreachable(name: str, address: str, timeout: float, unreachable: Unreachable | None) -> str:
    """What to do about a worker that could not be connected to, as a sentence."""
    tried = f"(tried for {timeout:.0f} s)"
    start = f"start it there with: {start_command(address)}"
    if unreachable is None:
        return f"worker {name} is not at {address} {tried}; {start}"
    why = explain_here(unreachable)
    if unreachable.is_refused or unreachable.is_silent:
        return f"worker {name} is not at {address} {tried}: {why}; {start}"
    return f"worker {name} cannot be reached at {address} {tried}: {why}"


def _connect(spec: StageSpec, transport: LinkTransport, address: str, timeout: float, options: LinkOptions) -> Reached:
    try:
        return reach(*transport.addresses(address), timeout, options)
    except LinkRefused as error:
        raise Refused(_why_refused(spec, address, options, error)) from error
    except TransportUnavailable as error:
        raise WorkerUnreachable(f"worker {spec.name} ({address}) cannot be reached by rdma: {error.reason}") from error
    except (LinkTimeout, LinkClosed) as error:
        unreachable = error.unreachable if isinstance(error, LinkTimeout) else None
        raise WorkerUnreachable(_why_unreachable(spec.name, address, timeout, unreachable)) from error
    except AddressError as error:
        raise WorkerUnreachable(f"worker {spec.name}: {error}") from error
