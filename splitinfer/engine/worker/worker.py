"""A worker's loop, on the other machines: serves one coordinator after another.

One thread, the engine, owns MLX: it loads the stage and launches the steps. Links deliver into its inbox from their own
threads, so the next step arrives while this one is computed. When the device is done with a step, the thread that waits
for it sends the rows or the result (``engine.device.steps``). If the device computes at launch, the engine sends them.

    inbox -> Profile   -> time a few layers of the model, without its weights -> Profiled
          -> Spawn     -> start a process for a rank of a stage across two machines -> Spawned
          -> Meet      -> time sums with the other rank of such a stage -> Met
          -> Load      -> survey, fetch or copy, read the weights -> Ready
          -> Connect   -> open the data link to the next stage -> Connected (stage 1 gets steps on the control link)
                      to the first rank of two: before Load
          -> Probe     -> measure a link to the next stage -> Probed
          -> a probe's frame -> another frame (``engine.links.probe``)
          -> Shown     -> keep a picture until the next plan is launched
          -> Plan      -> wait for its Rows, unless it needs none
          -> Rows      -> launch, Plan to the next stage ... done -> Rows to it, or Result to the coordinator
                      to the first rank of two: -> pass both on at once to the other rank, which sends the output
          -> link gone -> forget the sequences, keep the weights, wait for the next coordinator

No message of a peer ends a worker: an error ends that coordinator's session, with one sentence on both sides. Only a
failed device ends it. If the device only lacked memory, the worker stays, and the coordinator sends it smaller steps.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np

from splitinfer.common.plain_text import plain
from splitinfer.core.plan import StepPlan
from splitinfer.engine.device.steps import StepFailed, StepsUnderWay
from splitinfer.engine.housekeeping import Housekeeping
from splitinfer.engine.links.connection import Connection, open_connection, outgoing, payload_of
from splitinfer.engine.links.probe import probe_next, reply_to
from splitinfer.engine.stage.launched import Launched
from splitinfer.engine.stage.loader import LoadedStage
from splitinfer.engine.stage.masking import RawMasks
from splitinfer.engine.threads import clears_streams
from splitinfer.engine.versions import machine_name
from splitinfer.engine.worker.handshake import REASON_LENGTH, Acceptor, AccessControl
from splitinfer.engine.worker.holder import Abandoned, StageHolder
from splitinfer.engine.worker.ranks import Sampled
from splitinfer.engine.worker.weights import Weights
from splitinfer.errors import DeviceFailed, PeerError, ProtocolError, SplitinferError
from splitinfer.keyring import Keyring
from splitinfer.kvstore.store import Disk
from splitinfer.models.border.hidden_states import ReceivedRows
from splitinfer.models.cut.pictures import Pixels, known
from splitinfer.pictures.families import family_from
from splitinfer.system import qos
from splitinfer.weights.models import ModelStore
from splitinfer.wire.messages import (
    MOST_NAME,
    Connect,
    Connected,
    Fault,
    Load,
    Meet,
    Message,
    Plan,
    Probe,
    Profile,
    Result,
    Rows,
    Shown,
    Spawn,
    Spawned,
)  # fmt: skip
from splitinfer.wire.steps import packed
from transports import Frame, KeyPair, LinkClosed, Listener, TransportError

log = logging.getLogger(__name__)

_STOP = "stop"
_MOST_WAITING = 256  # plans without rows; a coordinator has one in flight for each group, or for each stage and one
_COMES_WITHIN = 0.5  # seconds within which the engine handles an event, unless a step holds it

Event = tuple[Connection, Frame | LinkClosed, float]  # the last is the time of arrival, in seconds


class Worker:
    """Serves on ``listener`` until ``stop``.

    ``model`` overrides the coordinator's name for the model, for a folder that lies elsewhere on this machine.
    ``disk``: where KV is stored for coordinators that ask for it. ``store``: where weights that are copied from other
    machines are kept; ``None``: copy no weights. ``keys``: for encrypted links to the next stage.
    ``access``: which peers may connect to ``listener``. ``ended``: called by the engine's thread when it ends.
    ``start_rank``: starts the process of a rank of a stage across two machines, given its name; returns the process's
    address and a function that ends it.
    """

    def __init__(
        self,
        listener: Listener,
        *,
        name: str | None = None,
        model: str | None = None,
        disk: Disk | None = None,
        keys: Keyring | None = None,
        access: AccessControl | None = None,
        store: ModelStore | None = None,
        ended: Callable[[], None] = lambda: None,
        start_rank: Callable[[str], tuple[str, Callable[[], None]]] | None = None,
    ) -> None:
        self.name = name or machine_name()
        self._keys, self._access = keys, access or AccessControl(None)
        self._ended = ended
        self._holder = StageHolder(self.name, model, disk, self._access)
        # With a folder in ``model``, the worker uses that folder and copies no weights.
        self._weights = Weights(store, self._holder.running, self._own_key, copies=model is None)
        self._inbox: queue.SimpleQueue[Event | StepFailed | str] = queue.SimpleQueue()
        self._owner: Connection | None = None
        self._guests: dict[str, Connection] = {}  # by role: the previous stage, and the peer that measures a link
        self._downstream: Connection | None = None
        self._sampled = Sampled()
        self._start_rank = start_rank
        self._end_rank: Callable[[], None] = lambda: None  # the process that serves as a rank in this worker's place
        self._waiting: deque[StepPlan] = deque()  # plans whose rows have not arrived
        self._shown: list[Pixels] = []  # pictures of the next plan
        self._steps = StepsUnderWay[Launched](self._inbox.put)
        self._housekeeping = Housekeeping(self._inbox)
        self._acceptor = Acceptor(listener, self._deliver, self.name, self._access, self._weights.readers)
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()  # last, because a coordinator may have connected already

    def stop(self, timeout: float) -> bool:
        """Finish the steps in flight, close all links, and end. Return whether ``timeout`` seconds were enough."""
        self._inbox.put(_STOP)
        self._thread.join(timeout)
        self._acceptor.close()
        return not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self._thread.is_alive()

    # -- the loop ----------------------------------------------------------------------------

    @clears_streams()
    def _serve(self) -> None:
        qos.serve_requests()
        while self._guarded(self._next_event()):
            pass
        self._housekeeping.close()
        self._holder.close()
        self._steps.close()
        self._ended()

    def _guarded(self, event: Event | StepFailed | str | None) -> bool:
        """Handle an event and report its errors. Return whether the worker should go on."""
        try:
            if isinstance(event, StepFailed):
                event.raise_if_due()
            elif isinstance(event, tuple):
                self._on_item(*event)
            elif event is _STOP:
                self._steps.drain()
                self._end_session("the worker was stopped")
                return False
        except Abandoned:
            self._end_session("the coordinator is gone")
        except DeviceFailed as error:
            is_ending = not error.no_memory
            self._fail(str(error), no_memory=error.no_memory, is_ending=is_ending, lost_rank=error.lost_rank)
            return error.no_memory  # a process whose device failed cannot be trusted
        except (SplitinferError, TransportError) as error:
            self._fail(str(error))
        except Exception as error:
            log.exception("the stage failed")
            self._fail(f"{self.name} failed ({type(error).__name__}: {error})")
        return True

    def _deliver(self, connection: Connection, item: Frame | LinkClosed) -> None:
        channel = self._weights.channel
        if channel is not None and channel.takes(connection, item):
            return
        if isinstance(item, LinkClosed) and self._holder.is_rank:
            self._tell_later(connection, item)
        self._inbox.put((connection, item, time.monotonic()))

    def _next_event(self) -> Event | StepFailed | str | None:
        """Build graphs of likely steps until an event arrives, and return the event. Return None if none arrived before
        the machine may sleep again.

        The machine stays awake while a coordinator is connected. Open requests are not the criterion: if the machine
        sleeps between two requests, its coordinator loses it and cannot wake it. A coordinator that sleeps itself falls
        silent, and then the session ends."""
        try:
            self._housekeeping.watch_machine(is_needed=self._owner is not None)
            self._housekeeping.build_ahead(None if self._holder.stage is None else self._holder.stage.runner)
            release = None if self._owner is not None else self._housekeeping.until_release()
            return self._housekeeping.next_event(release)
        except Exception as error:  # noqa: BLE001 - ends the session, as an error in an event does
            return StepFailed(error, lambda: False)

    def _on_item(self, connection: Connection, item: Frame | LinkClosed, received: float) -> None:
        """Handle one frame, or a link's end."""
        if isinstance(item, LinkClosed):
            self._on_closed(connection, item)
            return
        if not self._is_in_session(connection):
            return
        if connection.role == "probe":
            connection.link.send(reply_to(item))
        else:
            self._on_message(connection, connection.receive(item), item, received)

    def _on_message(self, connection: Connection, message: Message, item: Frame, received: float) -> None:
        """Handle a message."""
        match message:
            case Shown():
                self._take_picture(message, item)
            case Plan():
                self._take_plan(message, item, received)
            case Rows():
                self._take_rows(message, item, received)
            case Profile():
                self._holder.profile(connection, message, item)
            case Load():
                self._sampled = Sampled()
                self._holder.load(connection, message, self._weights)
            case Meet():
                self._holder.meet(connection, message.half, self._weights)
            case Spawn():
                self._spawn(connection, message)
            case Connect():
                self._connect_next(connection, message)
            case Probe():
                connection.send(probe_next(message.following, self.name, connection.session_id, self._own_key))

    def _is_in_session(self, connection: Connection) -> bool:
        """Return whether a connection belongs to the session. A new coordinator's first frame begins a session. Frames
        of earlier sessions are late and ignored."""
        owner = self._acceptor.owner
        if owner is None or owner.session_id != connection.session_id or connection.link.closed is not None:
            return False
        if owner is not self._owner:
            self._end_session("another coordinator connected")
            self._owner = owner
            self._housekeeping.watch_machine(is_needed=True)  # loading takes minutes
            log.info("serving %s (%s)", owner.name, owner.link.address)
        if connection is not owner:
            self._guests[connection.role] = connection
        return True

    # -- the coordinator's commands ----------------------------------------------------------

    def _connect_next(self, connection: Connection, message: Connect) -> None:
        """Open the data link to the next stage."""
        session = connection.session_id
        following, note = open_connection(message.following, "upstream", self.name, session, self._own_key)
        if self._downstream is not None:
            self._downstream.link.close("another next stage was named")
        self._downstream = following
        following.link.deliver_to(lambda item: self._deliver(following, item))
        if self._holder.stage is not None:  # ranks are connected before they load
            self._holder.stage.runner.use_codec(message.codec)
        connection.send(Connected(note))

    def _spawn(self, connection: Connection, message: Spawn) -> None:
        """Unload the stage and start the process of a rank, which can be ended while it waits for the other one."""
        if self._start_rank is None:
            raise PeerError(f"{self.name} starts no processes for stages across two machines")
        self._holder.unload()
        self._end_rank()
        address, self._end_rank = self._start_rank(plain(message.name, MOST_NAME))
        connection.send(Spawned(int(address.rpartition(":")[2])))

    def _own_key(self) -> KeyPair:
        if self._keys is None:
            raise PeerError(f"{self.name} was started with --insecure, but another worker requires an encrypted link")
        return self._keys.own()

    # -- steps -------------------------------------------------------------------------------

    def _stage_for(self, frame: Frame) -> LoadedStage:
        """Return the stage for a step's frame. The first of two ranks sends the frame on to the other one, unchanged.
        Raises ProtocolError, PeerError."""
        stage = self._holder.stage
        if stage is None:
            raise ProtocolError("a step came before the stage was loaded")
        if stage.command.passes_on:
            if self._downstream is None:
                raise ProtocolError("a step came before the next stage was connected")
            try:
                self._downstream.link.send(frame)
            except TransportError as error:
                raise PeerError(f"{self.name} lost the other rank: {error}") from error
        return stage

    def _take_picture(self, message: Shown, frame: Frame) -> None:
        """Keep a picture until the next plan's sequences hold it."""
        self._stage_for(frame)
        try:
            (part,) = frame.parts
            rgb = np.frombuffer(bytes(part), np.uint8).reshape(*message.size, 3)
            self._shown.append(known(family_from(message.family).prepared(rgb)))
        except (ValueError, TypeError, ArithmeticError, KeyError) as error:
            raise ProtocolError(f"a picture came that cannot be read ({error})") from error

    def _take_plan(self, message: Plan, frame: Frame, received: float) -> None:
        """Check a plan, and launch it if it needs no rows."""
        stage = self._stage_for(frame)
        stage.runner.check(message.plan, stage.command.longest)
        if len(self._waiting) == _MOST_WAITING:
            raise ProtocolError(f"{_MOST_WAITING} plans wait for their rows already")
        if message.waits:
            self._waiting.append(message.plan)
        else:
            self._launch(stage, message.plan, None, {}, (), received)

    def _take_rows(self, rows: Rows, frame: Frame, received: float) -> None:
        """Launch the oldest waiting plan with its rows. Raises ProtocolError if the rows are for another step."""
        stage = self._stage_for(frame)
        if not self._waiting or self._waiting[0].step != rows.step:
            raise ProtocolError(f"the rows of step {rows.step} came, and no plan waits for them")
        self._launch(stage, self._waiting.popleft(), *payload_of(rows, frame), rows.figures, received)

    def _launch(
        self,
        stage: LoadedStage,
        plan: StepPlan,
        hidden: ReceivedRows | None,
        raw: RawMasks,
        figures: tuple[bytes, ...],
        received: float,
    ) -> None:
        """Launch a step on the device, and send its plan ahead to the next stage. Its rows follow when the device is
        done (``_send``). ``figures``: the figures of the earlier stages."""
        runner, command = stage.runner, stage.command
        following = None if command.is_last or command.passes_on else self._downstream
        if runner.needs_verdict(plan):
            self._steps.drain()
        sends_first = runner.device.computes_at_launch
        if following is not None and sends_first:
            self._send_next(following, Plan(plan))
        launched = runner.launch(plan, hidden, runner.read_masks(raw), self._steps.under_way())
        self._shown.clear()
        if following is not None and not sends_first:
            self._send_next(following, Plan(plan))
        self._weights.stepped_at = time.monotonic()
        assert self._owner is not None
        send = partial(self._send, stage, figures, raw, received, self._owner, self._downstream)
        self._steps.add(launched, runner.wait, send, is_done=runner.device.computes_at_launch)

    def _send_next(self, following: Connection, message: Message, *parts: memoryview) -> None:
        """Send a message to the next stage.

        Raises:
            PeerError: the link has ended.
        """
        try:
            following.send(message, *parts)
        except TransportError as error:
            raise PeerError(f"{self.name} lost the next stage: {error}") from error

    def _send(
        self,
        stage: LoadedStage,
        figures: tuple[bytes, ...],
        masks: RawMasks,
        received: float,
        owner: Connection,
        following: Connection | None,
        launched: Launched,
    ) -> None:
        """Send a step that is done: its hidden states to the next stage, or its result to the coordinator. Runs on the
        thread that waits for steps, if there is one.

        Args:
            figures: the step's figures on the earlier stages.
            masks: the masks that came with the step, for the last stage.
            received: when the step arrived, in seconds.
            owner, following: the links to the coordinator and to the next stage at the step's launch.
        """
        done = stage.runner.finish(launched)
        # The coordinator's step number: a count of the worker's own would outlive the coordinator's pipeline.
        owner.link.set_progress(done.plan.step + 1)
        if stage.command.half is not None and (digest := self._sampled.after(done)) is not None:
            owner.send(digest)
        if stage.command.passes_on:
            pass  # the other rank answers
        elif stage.command.is_last:
            here = packed(done.figures(received=received, sent=time.monotonic()))
            owner.send(Result(done.plan.step, done.sampled, (*figures, here)))
        elif following is None:
            raise ProtocolError("a step came before the next stage was connected")
        else:
            message, parts, _ = outgoing(done, masks, figures, received)
            self._send_next(following, message, *parts)
        stage.runner.store(launched)

    # -- endings -----------------------------------------------------------------------------

    def _tell_later(self, connection: Connection, ending: LinkClosed) -> None:
        """Tell the coordinator of a lost neighbour from another thread, after ``_COMES_WITHIN`` seconds. The engine
        cannot do so while it waits, maybe for ever, in a sum with a silent rank."""

        def tell() -> None:
            owner = self._owner
            if owner is not None and connection in (self._downstream, self._guests.get("upstream")):
                owner.link.close(self._lost(connection, ending))

        later = threading.Timer(_COMES_WITHIN, tell)
        later.daemon = True
        later.start()

    def _lost(self, connection: Connection, ending: LinkClosed) -> str:
        return plain(f"{self.name} lost {connection.name} ({connection.link.address}): {ending.reason}", REASON_LENGTH)

    def _on_closed(self, connection: Connection, ending: LinkClosed) -> None:
        if connection is self._owner:
            log.info("%s has left: %s", connection.name, ending.reason or "it closed the link")
            self._end_session("the coordinator is gone")
        elif connection.role != "probe" and self._owner and connection.session_id == self._owner.session_id:
            self._fail(self._lost(connection, ending))

    def _fail(self, reason: str, *, no_memory: bool = False, is_ending: bool = False, lost_rank: bool = False) -> None:
        """End the session, with one sentence on both sides."""
        reason = plain(reason, REASON_LENGTH)
        log.warning("session ended: %s", reason)
        owner = self._owner
        self._acceptor.release(owner)
        if owner is not None and owner.link.closed is None:
            try:
                owner.send(Fault(reason, no_memory, is_ending, lost_rank))
            except (TransportError, ProtocolError) as error:
                log.info("cannot send the reason to the coordinator: %s", error)
            owner.link.close(reason)
        self._end_session(reason)

    def _end_session(self, reason: str) -> None:
        """Close the session's links and forget its sequences, but keep the weights for the next one."""
        for connection in (*self._guests.values(), self._owner, self._downstream):
            if connection is not None:
                connection.link.close(reason)
        self._acceptor.release(self._owner)
        self._owner = self._downstream = None
        self._guests = {}
        self._end_rank()
        self._waiting.clear()
        self._shown.clear()
        self._steps.drop()
        if self._holder.stage is not None:
            self._holder.stage.rest()
