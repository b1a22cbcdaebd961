"""The loop on the other machines: serves one coordinator after another.

One thread, the engine, owns MLX: it loads the stage and launches the steps. Links deliver into its inbox from their own
threads, so the next step is received while this one is computed. A step is sent on when the device is done with it, by
the thread that waits for that (``engine.device.steps``), because launching the next one may hold the engine for most of
a step; so neither the device nor the link waits for the other. Where the device computes at launch, the engine sends.

    inbox -> Profile   -> time a few layers of the model, without its weights -> Profiled
          -> Load      -> survey, fetch or copy, read the weights -> Ready
          -> Connect   -> open the data link to the next stage -> Connected
          -> ClockAsk  -> ClockTell
          -> Echo, MeasureNext -> Echoed, Measured: the links' latency and bandwidth
          -> Void      -> forget slices that wait to be computed
          -> Step      -> launch ... done -> Step to the next stage, or Result to the coordinator
          -> link gone -> forget the sequences, keep the weights, wait for the next coordinator

Nothing that a peer sends ends a worker: an error ends that coordinator's session, with one sentence on both sides. The
weights stay in memory, so a coordinator that connects again finds them loaded. Only a device that fails ends it, unless
that was for lack of memory: then it keeps its weights, and the coordinator asks less of it.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import mlx.core as mx

from splitinfer.core.layout import DTYPES
from splitinfer.core.metrics.link_measurement import LinkMeasurement
from splitinfer.core.plan import StepResult
from splitinfer.engine.cpu_affinity import yield_own_processor
from splitinfer.engine.device.steps import StepFailed, StepsUnderWay
from splitinfer.engine.files.answering import Running
from splitinfer.engine.links.connection import Connection
from splitinfer.engine.links.keys import Keys, options_to
from splitinfer.engine.links.probe import NextStage, reply_to
from splitinfer.engine.links.reachability import explain_here
from splitinfer.engine.links.sending import Outgoing, send_step
from splitinfer.engine.links.setup import reach
from splitinfer.engine.mailbox import Mailbox
from splitinfer.engine.profiling.measure import answer
from splitinfer.engine.rehearsal import of_worker
from splitinfer.engine.stage.checks import check_step
from splitinfer.engine.stage.launched import Launched
from splitinfer.engine.stage.loader import LoadedStage, load
from splitinfer.engine.threads import clears_streams
from splitinfer.engine.versions import machine_name, own_versions
from splitinfer.engine.worker.access import AccessControl
from splitinfer.engine.worker.handshake import Acceptor, one_line
from splitinfer.engine.worker.weights import Weights
from splitinfer.errors import CannotFit, DeviceFailed, PeerError, ProtocolError, SplitinferError
from splitinfer.kvstore.store import Disk
from splitinfer.models.hidden_states import ReceivedRows
from splitinfer.models.memory import HeldReport
from splitinfer.store.models import ModelStore
from splitinfer.system import qos
from splitinfer.system.keep_awake import KeepAwake
from splitinfer.wire import codec
from splitinfer.wire.messages import (
    AskManifest,
    ClockAsk,
    ClockTell,
    Compress,
    Connect,
    Connected,
    Echo,
    Echoed,
    Expect,
    Fault,
    Hello,
    Load,
    Measured,
    MeasureNext,
    Message,
    Profile,
    Progress,
    Refuse,
    Result,
    Step,
    Void,
    Welcome,
)  # fmt: skip
from splitinfer.wire.session import Session
from transports import Frame, KeyPair, LinkClosed, LinkTimeout, Listener, TransportError, TransportUnavailable

log = logging.getLogger(__name__)

CONNECT_TIMEOUT = 10.0  # seconds to reach the next stage
_STOP = "stop"
_MAX_PATH = 4096  # characters of a model's name

Event = tuple[Connection, Frame | LinkClosed, float]  # and when it arrived, in seconds


@dataclass(slots=True)
class _StepInFlight:
    """A step under way on the device, the stage, its message, when that was received, in seconds, and whose it is."""

    stage: LoadedStage
    launched: Launched
    step: Step
    received: float
    owner: Connection
    downstream: NextStage | None


class _Abandoned(Exception):
    """The coordinator went away while the stage was being loaded."""


class Worker:
    """Serves on ``listener`` until ``stop``.

    ``model`` overrides the coordinator's name for the model, for a folder that lies elsewhere on this machine.
    ``disk``: where KV is stored for coordinators that ask for it. ``store``: where weights are kept that are copied
    from other machines; ``None``: none are. ``keys``: for encrypted links to the next stage.
    ``access``: which peers may connect to ``listener``. ``ended``: called by the engine's thread when it ends.
    """

    def __init__(
        self,
        listener: Listener,
        *,
        name: str | None = None,
        model: str | None = None,
        disk: Disk | None = None,
        keys: Keys | None = None,
        access: AccessControl | None = None,
        store: ModelStore | None = None,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name or machine_name()
        self._keys, self._access = keys, access or AccessControl(None)
        self._model, self._disk, self._ended = model, disk, ended
        # Who names a folder of this machine wants that one.
        self._weights = Weights(store, self._running, self._own_key, copies=model is None)
        self._inbox: Mailbox[Event | StepFailed | str] = Mailbox()
        self._void: deque[tuple[Connection, Frame]] = deque()  # messages that overtake the steps in the inbox
        self._expecting = False  # the last event was a step, so another may follow soon
        self._owner: Connection | None = None
        self._upstream: Connection | None = None
        self._downstream: NextStage | None = None
        self._stage: LoadedStage | None = None
        self._steps = StepsUnderWay(_wait_for, self._send, self._inbox.put)
        self._num_steps = 0
        self._awake, self._held = KeepAwake(f"splitinfer worker {self.name} serves a coordinator"), HeldReport()
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()
        self._acceptor = Acceptor(listener, self._deliver, self.name, self._access, self._weights.readers)

    def stop(self, timeout: float) -> bool:
        """Finish the step under way, close all links, end. Whether that was done within ``timeout`` seconds."""
        self._inbox.put(_STOP)
        self._thread.join(timeout)
        self._acceptor.close()
        return not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self._thread.is_alive()

    # -- the loop ----------------------------------------------------------------------------

    @clears_streams
    def _serve(self) -> None:
        qos.serve_requests()
        while self._take(self._next_event()):
            pass
        self._awake.close()
        if self._stage is not None:
            self._stage.close()
        self._steps.close()
        self._ended()

    def _take(self, event: Event | StepFailed | str | None) -> bool:
        """Act on an event, and see to what goes wrong; whether to go on."""
        self._expecting = False
        try:
            if isinstance(event, StepFailed):
                self._raise(event)
            elif isinstance(event, tuple):
                self._handle(*event)
            elif event is _STOP:
                self._steps.drain()
                self._end_session("the worker was stopped")
                return False
        except _Abandoned:
            self._end_session("the coordinator is gone")
        except DeviceFailed as error:
            self._fail(str(error), no_memory=error.no_memory, is_ending=not error.no_memory)
            return error.no_memory  # a process whose device failed cannot be trusted
        except (SplitinferError, TransportError) as error:
            self._fail(str(error))
        except Exception as error:
            log.exception("the stage failed")
            self._fail(f"{self.name} failed ({type(error).__name__}: {error})")
        return True

    def _raise(self, why: StepFailed) -> None:
        if not why.is_late():
            raise why.error

    def _running(self) -> Running | None:
        """The model whose layers are held. From any thread."""
        stage = self._stage
        return None if stage is None else (stage.checkpoint, stage.command.model)

    def _deliver(self, connection: Connection, item: Frame | LinkClosed) -> None:
        if self._weights.takes(connection, item):
            return
        if isinstance(item, Frame) and codec.is_void(item.header):
            self._void.append((connection, item))
        self._inbox.put((connection, item, time.monotonic()))

    def _next_event(self) -> Event | StepFailed | str | None:
        """Wait for the next event, and build graphs of steps that are likely to come until it does; ``None`` if none
        came until device or machine had to be looked after."""
        try:
            self._watch_machine()
            while self._stage is not None and self._inbox.is_empty and self._stage.runner.prepare_next():
                pass
            with suppress(queue.Empty):
                return self._inbox.get(self._until_next_look(), expecting=self._expecting)
            if self._stage is not None:
                self._stage.runner.tick(time.monotonic())
        except Exception as error:  # noqa: BLE001 - ends the session, like what is raised for an event
            return StepFailed(error, lambda: False)
        return None

    def _until_next_look(self) -> float | None:
        """Seconds until the device's next tick, or until the machine may sleep."""
        now = time.monotonic()
        tick = None if self._stage is None else self._stage.runner.until_tick(now)
        release = None if self._owner is not None else self._awake.until_update(now)
        return min((due for due in (tick, release) if due is not None), default=None)

    def _watch_machine(self) -> None:
        """Keep the machine awake while a coordinator is connected, and let its other processes know what this one
        holds.

        Whether requests are open is not enough: a machine that sleeps between two of them is lost to its coordinator,
        which cannot wake it. A coordinator that sleeps itself falls silent, and then the session ends."""
        now = time.monotonic()
        self._awake.update(self._owner is not None, now)
        self._held.update(now)

    def _handle(self, connection: Connection, item: Frame | LinkClosed, received: float) -> None:
        """Act on one frame, or on a link's end."""
        if isinstance(item, LinkClosed):
            self._on_closed(connection, item)
            return
        if not self._is_in_session(connection):
            return
        message = connection.receive(item)
        if connection.role == "upstream" and not isinstance(message, Step | Echo):
            kind = codec.kind_of(message)
            raise ProtocolError(
                f"the previous stage sends only hidden states, but {connection.name} sent a {kind} message"
            )
        match message:
            case Step():
                self._launch(message, item, received)
                self._expecting = True
            case Void():
                self._take_void()
            case Profile():
                self._profile(connection, message, item)
            case Load():
                self._load(connection, message)
            case Connect():
                self._connect_next(connection, message)
            case Compress():
                self._loaded().runner.use_codec(message.codec)
            case _:
                self._reply(connection, message, item, received)

    def _reply(self, connection: Connection, message: Message, frame: Frame, received: float) -> None:
        """Reply to a message that leaves the stage as it is."""
        match message:
            case ClockAsk():
                connection.send(ClockTell(received, time.monotonic()))
            case Echo():
                connection.send(Echoed(), *reply_to(message, frame))
            case MeasureNext():
                connection.send(Measured(self._measure_next()))
            case Expect():
                self._access.expect(message.upstream_key)
            case AskManifest():
                raise ProtocolError("weights are asked for on a link of its own, in the role 'reader'")

    def _is_in_session(self, connection: Connection) -> bool:
        """Whether a connection belongs to the session; a new coordinator's begins one. Frames of earlier ones are late,
        and ignored."""
        if connection.link.closed is not None:
            return False
        if connection.role == "coordinator" and connection is not self._owner:
            self._end_session("another coordinator connected")
            self._owner = connection
            self._watch_machine()  # loading takes minutes
            log.info("serving %s (%s)", connection.name, connection.link.address)
        if connection.role == "upstream":
            if self._owner is None or self._owner.session_id != connection.session_id:
                return False
            self._upstream = connection
        return True

    def _measure_next(self) -> LinkMeasurement:
        if self._downstream is None:
            raise ProtocolError("the link to the next stage does not exist yet, so it cannot be measured")
        try:
            return self._downstream.measure()
        except (PeerError, TransportError) as error:
            raise PeerError(f"{self.name} could not measure the link to the next stage: {error}") from error

    # -- the coordinator's commands ----------------------------------------------------------

    def _load(self, connection: Connection, command: Load) -> None:
        if self._model is not None:
            command = replace(command, model=self._model)
        _check_load(command)
        try:
            if self._stage is None or not self._stage.serves(command):
                self._unload()
                self._stage = self._load_anew(connection, command)
            self._access.expect(command.upstream_key, command.reader_keys)
            ready = self._stage.offer()
        except SplitinferError as error:
            _refuse(connection, error)
            return
        self._inbox.rehearse = None if self._stage.runner.device.computes_at_launch else self._rehearse
        log.info("holding layers %d to %d of %s", command.start, command.end - 1, command.model)
        connection.send(ready)

    def _profile(self, connection: Connection, command: Profile, frame: Frame) -> None:
        """Measure this machine. A loaded stage stays, unless its memory is needed for that."""
        parts, report = [memoryview(part) for part in frame.parts], _reporter(connection)
        try:
            try:
                profiled = answer(command, parts, self.name, report)
            except CannotFit:
                if self._stage is None:
                    raise
                self._unload()
                profiled = answer(command, parts, self.name, report)
        except ProtocolError:
            raise
        except SplitinferError as error:
            _refuse(connection, error)
            return
        connection.send(profiled)

    def _load_anew(self, connection: Connection, command: Load) -> LoadedStage:
        with self._weights.supply(connection) as supply:
            try:
                return load(command, self.name, _reporter(connection), self._disk, supply)
            except LinkClosed:
                raise _Abandoned from None

    def _unload(self) -> None:
        """Free the stage's memory."""
        if self._stage is not None:
            self._stage.close()
        self._stage = None
        mx.clear_cache()

    def _connect_next(self, connection: Connection, message: Connect) -> None:
        """Open the data link to the next stage."""
        session = Session(opened=True)
        hello = Hello("upstream", self.name, connection.session_id, own_versions())
        session.sending(hello)
        if message.key and self._keys is None:
            raise PeerError(f"{self.name} was started with --insecure, but the next stage requires an encrypted link")
        options = options_to(message.key, self._own_key)
        try:
            link, note = reach(message.address, message.fallback, CONNECT_TIMEOUT, options)
        except TransportUnavailable as error:
            raise PeerError(f"{self.name} cannot reach {message.address}: {error.reason}") from error
        except LinkTimeout as error:
            why = error if error.unreachable is None else explain_here(error.unreachable, machine_name())
            raise PeerError(f"{self.name} cannot reach the next stage at {message.address}: {why}") from error
        try:
            link.send(Frame(codec.encode(hello)))
            reply = codec.decode(link.recv(timeout=CONNECT_TIMEOUT).header)
            session.received(reply)
            if isinstance(reply, Refuse):
                raise PeerError(f"{self.name} was refused by the next stage at {message.address}: {reply.reason}")
        except BaseException:
            link.abort()
            raise
        assert isinstance(reply, Welcome)
        if self._downstream is not None:
            self._downstream.link.close("another next stage was named")
        next_stage = Connection(link, "downstream", reply.name, connection.session_id, session)
        self._downstream = NextStage(next_stage, lambda item: self._deliver(next_stage, item))
        connection.send(Connected(note))

    def _own_key(self) -> KeyPair:
        if self._keys is None:
            raise PeerError(f"{self.name} was started with --insecure, and has no key for encrypted links")
        return self._keys.own()

    # -- steps -------------------------------------------------------------------------------

    def _launch(self, step: Step, frame: Frame, received: float) -> None:
        """Hand a step to the device. It is sent on when the device is done with it."""
        stage = self._loaded()
        self._take_void()
        check_step(step, frame, stage.command.longest)
        if stage.runner.needs_verdict(step.plan):
            self._steps.drain()
        parts = tuple(memoryview(part) for part in frame.parts)
        hidden = None if step.tensor is None else ReceivedRows(step.tensor, step.packing, parts)
        launched = stage.runner.launch(step.plan, hidden, stage.runner.read_masks(step.masks))
        self._weights.stepped()
        assert self._owner is not None
        in_flight = _StepInFlight(stage, launched, step, received, self._owner, self._downstream)
        self._steps.add(in_flight, is_done=stage.runner.device.computes_at_launch)

    def _rehearse(self) -> None:
        """Do what the next step brings, beforehand; not where that would delay a step's way to the next stage."""
        if self._steps.is_empty:
            of_worker()

    def _take_void(self) -> None:
        """Learn which slices are void, also of steps that are in front of that message in the inbox."""
        while self._void:
            connection, frame = self._void.popleft()
            if connection is self._owner and isinstance(message := codec.decode(frame.header), Void):
                self._loaded().runner.drop_void(message.slices)

    def _loaded(self) -> LoadedStage:
        if self._stage is None:
            raise ProtocolError("a step came before the stage was loaded")
        return self._stage

    def _send(self, under_way: _StepInFlight) -> None:
        """Send a step that is done: its hidden states to the next stage, or its result to the coordinator. Runs on the
        thread that waits for steps, if there is one."""
        stage, step, owner, following = under_way.stage, under_way.step, under_way.owner, under_way.downstream
        done = stage.runner.finish(under_way.launched)
        self._num_steps += 1
        owner.link.beat(self._num_steps)
        if stage.command.is_last:
            own = replace(done.figures, received=under_way.received, sent=time.monotonic())
            owner.send(Result(StepResult(done.plan.step, done.sampled, (*step.figures, own))))
        elif following is None:
            raise ProtocolError("a step came before the next stage was connected")
        else:
            out = Outgoing.of(done, under_way.received)
            try:
                send_step(following.link, following.session, out, (*step.figures, out.figures), step.masks)
            except TransportError as error:
                raise PeerError(f"{self.name} lost the next stage: {error}") from error
        yield_own_processor()
        stage.runner.store(under_way.launched)

    # -- endings -----------------------------------------------------------------------------

    def _on_closed(self, connection: Connection, ending: LinkClosed) -> None:
        if connection is self._owner:
            log.info("%s is gone: %s", connection.name, ending.reason or "it closed the link")
            self._end_session("the coordinator is gone")
        elif self._owner is not None and connection.session_id == self._owner.session_id:
            self._fail(f"{self.name} lost {connection.name} ({connection.link.address}): {ending.reason}")

    def _fail(self, reason: str, *, no_memory: bool = False, is_ending: bool = False) -> None:
        """End the session, with one sentence on both sides."""
        reason = one_line(reason)
        log.warning("session ended: %s", reason)
        owner = self._owner
        if owner is not None and owner.link.closed is None:
            try:
                owner.send(Fault(reason, no_memory, is_ending))
            except (TransportError, ProtocolError) as error:
                log.info("cannot send the reason to the coordinator: %s", error)
            owner.link.close(reason)
        self._end_session(reason)

    def _end_session(self, reason: str) -> None:
        """Forget the session; keep the weights for the next one."""
        for connection in (self._upstream, self._owner):
            if connection is not None:
                connection.link.close(reason)
        if self._downstream is not None:
            self._downstream.link.close(reason)
        self._owner = self._upstream = self._downstream = None
        self._steps.drop()
        self._access.expect("")
        if self._stage is not None:
            self._stage.rest()


def _reporter(connection: Connection) -> Callable[[Progress], None]:
    """Sends progress to a coordinator, and raises if it has gone away."""

    def report(progress: Progress) -> None:
        if connection.link.closed is not None:
            raise _Abandoned
        connection.send(progress)

    return report


def _refuse(connection: Connection, error: SplitinferError) -> None:
    log.warning("refused %s: %s", connection.name, error)
    connection.send(Refuse(str(error)))
    connection.link.close(str(error))


def _wait_for(under_way: _StepInFlight) -> None:
    under_way.stage.runner.wait(under_way.launched)


def _check_load(command: Load) -> None:
    """Raise ProtocolError for values that no coordinator of this project sends."""
    if command.dtype not in DTYPES:
        raise ProtocolError(
            f"a load message has the unknown dtype {command.dtype!r:.40}; known are {', '.join(DTYPES)}"
        )
    if command.vocab_size < 1 or command.kv_tokens < 1 or len(command.model) > _MAX_PATH:
        raise ProtocolError(
            f"a load message has a vocabulary of {command.vocab_size}, {command.kv_tokens} tokens of KV "
            f"and a model's name of {len(command.model)} characters"
        )
