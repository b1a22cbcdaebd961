"""The workers of one session: connects to them, loads them, connects them to each other, measures their links.

A fleet is fail-stop: the first lost worker ends it, with one error that names the worker. A pipeline that continues
after that makes a new fleet, and messages on the old one's links are ignored.
"""

import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, pairwise
from typing import NamedTuple, TypeVar

from splitinfer.common.endpoint import is_loopback
from splitinfer.core.codecs import NONE
from splitinfer.core.layout import StageSpec
from splitinfer.core.link_transport import OVER_TCP, LinkTransport
from splitinfer.engine.fleet.ranks import as_one
from splitinfer.engine.links.connection import Reached, options_to, reach, upstream_key
from splitinfer.engine.links.probe import probe_next
from splitinfer.engine.links.reachability import explain_here
from splitinfer.engine.versions import machine_name, own_versions
from splitinfer.engine.weights.answering import Running, WeightAnswers, find_running
from splitinfer.errors import PeerError, ProtocolError, Refused, WorkerLost, WorkerUnreachable
from splitinfer.keyring import Keyring
from splitinfer.wire import headers
from splitinfer.wire.headers import Phase, Session
from splitinfer.wire.messages import (
    Connect,
    Connected,
    Fault,
    Gather,
    Half,
    Hello,
    Meet,
    Message,
    Met,
    NextStage,
    Probe,
    Probed,
    Progress,
    Ready,
    Refuse,
    Spawn,
    Spawned,
    Welcome,
)
from transports import (
    AddressError,
    Frame,
    KeyPair,
    Link,
    LinkClosed,
    LinkOptions,
    LinkRefused,
    LinkTimeout,
    TransportError,
    TransportUnavailable,
    Unreachable,
)

# MLX waits for a peer without limit and holds the interpreter's lock, so an alarm ends the process.
_HINT = "; a rank that cannot reach the other one for their sums ends after 20 s: is a firewall between the two?"
_SILENCE = LinkOptions().silent_after - 1.0  # seconds until a process counts as frozen; its link may notice a bit later


@dataclass(slots=True, eq=False)
class WorkerHandle:
    """One worker, as the coordinator knows it. ``rank``: 0 or 1 in a stage across two machines, otherwise ``None``."""

    stage: int
    spec: StageSpec
    address: str
    link: Link
    session: Session = field(default_factory=lambda: Session(opened=True))
    welcome: Welcome | None = None  # its versions, device and free memory
    answers: WeightAnswers | None = None  # answers its requests for weights
    spoken_at: float = float("-inf")  # the time of the last message in either direction, in seconds, monotonic clock
    hangs: bool = False  # its heartbeats arrive, but its engine makes no progress
    silence_at_end: float | None = None  # the seconds since its last frame or heartbeat, when its link ended
    last_frame: Frame | None = None  # the last frame received from it
    rank: int | None = None
    ready: Ready | None = None  # its message when it had loaded
    busy: float = 0.0  # the seconds that it has computed since then, if it is a rank

    @property
    def stage_name(self) -> str:
        """The name of its stage, which is the worker's own name unless it is a rank."""
        return self.spec.name if self.rank is None else self.spec.name.rpartition("/")[0]

    @property
    def place(self) -> NextStage:
        """The address at which the previous stage connects to it."""
        address, fallback = self.spec.link_transport.addresses(self.address)
        return NextStage(address, self.spec.key or "", fallback)

    @property
    def is_silent(self) -> bool:
        """Whether its process seems frozen: nothing arrives from it, not even the end of its link."""
        silence = self.link.silent_for if self.silence_at_end is None else self.silence_at_end
        return silence >= _SILENCE

    @property
    def fault(self) -> Fault | None:
        """Its last message if that is a Fault, otherwise None."""
        try:
            message = None if self.last_frame is None else headers.decode(self.last_frame.header)
        except ProtocolError:
            return None
        return message if isinstance(message, Fault) else None

    @property
    def is_ending(self) -> bool:
        """Whether the worker has said that its process ends."""
        return self.fault is not None and self.fault.is_ending

    def lost(self, reason: str) -> WorkerLost:
        """Return the error for the loss of this worker, with the worker's own reason if it gave one."""
        if self.fault is not None:
            return self._faulty(self.fault)
        hint = "" if self.rank is None or self.ready is not None else _HINT
        why = reason or f"it closed the link{hint}"
        return WorkerLost(f"worker {self.spec.name} ({self.address}) is gone: {why}")

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


class LinkEvent(NamedTuple):
    """A worker's frame, or the end of its link, and when it arrived, in seconds on the monotonic clock."""

    worker: WorkerHandle
    item: Frame | LinkClosed
    at: float


Notice = Callable[[str, Progress], None]  # the name of a stage or machine, its progress
Reply = TypeVar("Reply", bound=Message)

_MEANWHILE = 0.25  # seconds between calls of ``meanwhile`` while stages load
_REPLY_SECONDS = 60.0  # for an idle engine to reply to a request that takes less than 1 s; a dead link ends in 3 s
SILENCE = 300.0  # seconds that a worker may send nothing while it loads or measures; it reports each tensor it reads
_MAX_NOTE = 300  # characters of a worker's note that a person sees


class Fleet:
    """The links to the workers, in the order of the stages and of the ranks within a stage.

    ``own_key``: returns this machine's key pair; called if a worker has a key. ``put`` receives a ``LinkEvent`` for
    every frame and every link's end after ``start_delivery``. ``notice`` receives a stage's name and its progress.
    ``running``: the models that workers may copy.
    """

    def __init__(
        self,
        own_key: Callable[[], KeyPair],
        put: Callable[[LinkEvent], None] = lambda _event: None,
        notice: Notice = lambda _name, _progress: None,
        running: tuple[Running, ...] = (),
    ) -> None:
        self._own_key, self._put, self._notice = own_key, put, notice
        self._find = find_running(lambda: running)
        self._session_id = uuid.uuid4().hex
        self._opening: queue.SimpleQueue[LinkEvent] | None = queue.SimpleQueue()
        self._delivery_lock = threading.Lock()
        self.workers: list[WorkerHandle] = []
        self._keepers: list[WorkerHandle] = []  # the workers that have started the process of a rank
        self._gathered: dict[WorkerHandle, bytes] = {}

    def connect(self, stage: int, spec: StageSpec, address: str, timeout: float, rank: int | None = None) -> None:
        """Connect to one worker and complete the handshake, within ``timeout`` seconds each. ``rank``: as in the
        handle.

        Raises:
            WorkerUnreachable: nothing listens there, or no answer arrived.
            Refused: the worker refused.
        """
        before = upstream_key(self.workers[-1].spec if self.workers else None, spec, self._own_key)
        # Later stages get only commands from here: their rdma device has room for one link, the previous stage's.
        transport = spec.link_transport if stage == 1 and not self.workers else OVER_TCP
        worker = self._greet(stage, spec, address, timeout, transport, before)
        worker.rank = rank
        worker.link.deliver_to(partial(self._deliver, worker))
        self.workers.append(worker)

    def spawn(self, stage: int, spec: StageSpec, timeout: float) -> str:
        """Have the worker at a rank's address start a process, which ends with this fleet, and return its address.

        Raises:
            PeerError: as ``connect``, or that worker starts no processes.
        """
        keeper = self._greet(stage, spec, str(spec.address), timeout, OVER_TCP)
        self._keepers.append(keeper)
        keeper.link.deliver_to(partial(self._deliver, keeper))
        keeper.send(Spawn(spec.name))
        (reply,) = self._from_each([keeper], Spawned, _REPLY_SECONDS)
        return f"{str(spec.address).rpartition(':')[0]}:{reply.port}"

    def greet(self, spec: StageSpec, address: str, timeout: float) -> None:
        """Complete the handshake with a worker, and leave it. Raises PeerError: as ``connect``."""
        self._greet(0, spec, address, timeout, OVER_TCP).link.close("it was only looked for")

    def _greet(
        self, stage: int, spec: StageSpec, address: str, timeout: float, transport: LinkTransport, before: str = ""
    ) -> WorkerHandle:
        """Connect to a worker, and return it after the handshake. ``before``: the key of the previous stage."""
        (link, note), spec = self._connect(spec, transport, address, timeout)
        self._note(spec, note)
        worker = WorkerHandle(stage, spec, address, link)
        try:
            worker.send(Hello("coordinator", machine_name(), self._session_id, own_versions(), before))
            answer = worker.receive(link.recv(timeout=timeout))
        except (TransportError, PeerError) as error:
            link.abort("the handshake failed")
            if isinstance(error, PeerError):
                raise
            raise WorkerUnreachable(f"worker {spec.name} ({address}) did not answer: {error}") from error
        assert isinstance(answer, Welcome)
        worker.welcome = answer
        return worker

    def _connect(
        self, spec: StageSpec, transport: LinkTransport, address: str, timeout: float
    ) -> tuple[Reached, StageSpec]:
        """Return a link, and the stage with its worker's key: the given key, otherwise the known key that the worker
        accepts."""
        try:
            return _reach(spec, transport, address, timeout, options_to(spec.key, self._own_key)), spec
        except Refused:
            for known in Keyring().known() if spec.key is None else ():
                found = replace(spec, key=known.key)
                with suppress(Refused):
                    return _reach(found, transport, address, timeout, options_to(known.key, self._own_key)), found
            raise

    @property
    def is_whole(self) -> bool:
        """Whether no link has ended."""
        return all(worker.link.closed is None for worker in self.workers)

    def await_ready(self, silence: float = SILENCE, meanwhile: Callable[[], None] = lambda: None) -> list[Ready]:
        """Wait until all workers have loaded, and return each stage's Ready. Their progress goes to ``notice``.
        ``silence``: seconds after which a silent worker is lost. ``meanwhile``: called a few times a second.

        Raises:
            PeerError: a worker refused, failed, is gone, or hangs.
        """
        said = self._from_each(self.workers, Ready, silence, meanwhile)
        for worker, ready in zip(self.workers, said, strict=True):
            worker.ready = ready
        return [as_one(list(ranks)) for _, ranks in groupby(said, lambda ready: ready.stage)]

    def _from_each(
        self,
        workers: Sequence[WorkerHandle],
        kind: type[Reply],
        silence: float,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> list[Reply]:
        """Wait until each of ``workers`` has sent a message of this kind, and return these. Raises as
        ``next_message``."""
        found = dict[WorkerHandle, Reply]()
        while waiting := [worker for worker in workers if worker not in found]:
            worker, message = self.next_message(waiting, silence, meanwhile)
            if isinstance(message, Progress):
                self._notice(worker.spec.name, message)
            elif isinstance(message, Gather):
                self._gather(worker, message)
            elif isinstance(message, kind):
                found[worker] = message
        return [found[worker] for worker in workers]

    def _gather(self, worker: WorkerHandle, told: Gather) -> None:
        """Keep a rank's data. Once both ranks of a stage have sent theirs, send both parts to each."""
        self._gathered[worker] = told.data
        ranks = [one for one in self.workers if one.stage == worker.stage]
        if all(one in self._gathered for one in ranks):
            both = Gather(b"".join(self._gathered.pop(one) for one in ranks))
            for one in ranks:
                one.send(both)

    def connect_ranks(self) -> None:
        """Have the first rank of each stage open its link to the second. It tells both when a cable is pulled, also
        while they load and one may wait for the other in a sum."""
        both = [(one, other) for one, other in pairwise(self.workers) if one.stage == other.stage]
        self._connect_each([(*pair, NONE) for pair in both], _REPLY_SECONDS)

    def connect_stages(self, codecs: Sequence[str], silence: float = SILENCE) -> None:
        """Have the last worker of every stage except the last open its data link to the next stage. ``codecs``: the
        codecs of these links and of the one to stage 1. ``silence``: as in ``await_ready``."""
        both = [(one, other) for one, other in pairwise(self.workers) if one.stage != other.stage]
        self._connect_each([(*pair, codecs[pair[1].stage - 1]) for pair in both], silence)

    def _connect_each(self, wanted: Sequence[tuple[WorkerHandle, WorkerHandle, str]], silence: float) -> None:
        for worker, following, packing in wanted:
            worker.send(Connect(following.place, packing))
        replies = self._from_each([worker for worker, _, _ in wanted], Connected, silence)
        for (_, following, _), reply in zip(wanted, replies, strict=True):
            self._note(following.spec, reply.note)

    def _note(self, spec: StageSpec, note: str) -> None:
        """Report a note about the link to a stage."""
        if note:
            self._notice(spec.name, Progress("link", 0, 0, note[:_MAX_NOTE]))

    def probe(self, worker: WorkerHandle) -> Probed:
        """Measure a separate link from this machine to a worker, by the transport of the worker's stage. Takes about a
        second.

        Raises:
            PeerError, TransportError: the worker is gone.
        """
        return probe_next(worker.place, machine_name(), self._session_id, self._own_key)

    def probe_between(self, worker: WorkerHandle, following: WorkerHandle) -> Probed:
        """Have a worker measure a link to the one that was connected right after it. Otherwise as ``probe``."""
        worker.send(Probe(following.place))
        (found,) = self._from_each([worker], Probed, _REPLY_SECONDS)
        return replace(found, note=found.note[:_MAX_NOTE])

    def time_sums(self, halves: Sequence[Half]) -> Met:
        """Have the workers, two ranks, meet and time sums. Return the message of the slower one.

        Raises:
            PeerError, TransportError: the ranks cannot meet, or one is gone.
        """
        for worker, half in zip(self.workers, halves, strict=True):
            worker.send(Meet(half))
        return max(self._from_each(self.workers, Met, _REPLY_SECONDS), key=lambda met: met.sums[0][1])

    def start_delivery(self) -> None:
        """Deliver all events to ``put`` from now on, first the events that have already arrived."""
        with self._delivery_lock:
            while self._opening is not None and not self._opening.empty():
                self._put(self._opening.get())
            self._opening = None

    def close(self, reason: str) -> None:
        """Close all links, the last stage first, so that no worker takes its neighbour's end for a loss."""
        for worker in (*reversed(self.workers), *self._keepers):
            worker.link.close(reason)

    def next_message(
        self, waiting: Iterable[WorkerHandle], silence: float = SILENCE, meanwhile: Callable[[], None] = lambda: None
    ) -> tuple[WorkerHandle, Message]:
        """Wait for the next message of any worker, and return both. A worker in ``waiting`` is lost after ``silence``
        seconds without a message in either direction. ``meanwhile``: called a few times a second.

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
                    quiet.hangs, who = True, f"worker {quiet.spec.name} ({quiet.address})"
                    raise WorkerLost(f"{who} is connected, and has said nothing for {silence:.0f} s") from None

    def _deliver(self, worker: WorkerHandle, item: Frame | LinkClosed) -> None:
        if isinstance(item, LinkClosed):
            worker.silence_at_end = worker.link.silent_for
            if worker.answers is not None:
                worker.answers.close()
        elif worker.session.phase is Phase.LOAD and headers.asks_for_weights(item.header):
            worker.answers = worker.answers or WeightAnswers(worker, self._find)
            worker.answers.put(item)
            return
        else:
            worker.last_frame, worker.spoken_at = item, time.monotonic()
        event = LinkEvent(worker, item, time.monotonic())
        with self._delivery_lock:
            put = self._put if self._opening is None else self._opening.put
            put(event)


def _why_refused(spec: StageSpec, address: str, options: LinkOptions, error: LinkRefused) -> str:
    """Return a sentence that says what to do after an encrypted handshake has failed."""
    where = f"worker {spec.name} ({address})"
    if options.security is None:
        place = f"as `key:` of stage {spec.name}, with --workers as {spec.name}=ADDRESS#KEY"
        if spec.name.endswith(("/0", "/1")):
            place = f"under `across:` of stage {spec.name[:-2]} as ADDRESS#KEY"
        return f"{where} requires an encrypted link: give the key that it printed when it started, in a layout {place}"
    return (
        f"{where} cannot be reached with encryption: {error}. Its key here is {(options.security.peer or '')[:8]}…; "
        "if the worker printed another one, correct that. Otherwise admit this machine there: splitinfer pair "
        f"{options.security.own.public}. A worker with --insecure, or on its own machine only, has no key"
    )


def start_command(address: str, *, has_key: bool) -> str:
    """Return the command that starts a worker that listens at this address and is open to no more machines than before.
    ``has_key``: its links are encrypted."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    is_here = is_loopback(host.strip("[]"))
    insecure = "" if has_key or is_here else " --insecure"
    return f"splitinfer worker --host {host.strip('[]') if is_here else '0.0.0.0'} --port {port}{insecure}"


def _why_unreachable(name: str, address: str, timeout: float, unreachable: Unreachable | None, *, has_key: bool) -> str:
    """Return a sentence that says what to do about a worker that cannot be reached."""
    tried = f"(tried for {timeout:.0f} s)"
    start = f"start it there with: {start_command(address, has_key=has_key)}"
    if unreachable is None:
        return f"worker {name} is not at {address} {tried}; {start}"
    why = explain_here(unreachable)
    if unreachable.is_refused or unreachable.is_silent:
        return f"worker {name} is not at {address} {tried}: {why}; {start}"
    return f"worker {name} cannot be reached at {address} {tried}: {why}"


def _reach(spec: StageSpec, transport: LinkTransport, address: str, timeout: float, options: LinkOptions) -> Reached:
    try:
        return reach(*transport.addresses(address), timeout, options)
    except LinkRefused as error:
        raise Refused(_why_refused(spec, address, options, error)) from error
    except TransportUnavailable as error:
        raise WorkerUnreachable(f"worker {spec.name} ({address}) cannot be reached by rdma: {error.reason}") from error
    except (LinkTimeout, LinkClosed) as error:
        unreachable = error.unreachable if isinstance(error, LinkTimeout) else None
        raise WorkerUnreachable(
            _why_unreachable(spec.name, address, timeout, unreachable, has_key=options.security is not None)
        ) from error
    except AddressError as error:
        raise WorkerUnreachable(f"worker {spec.name}: {error}") from error
