"""The coordinator's view of all stages: open them, send a step through them, hear what came of it.

Opening: start the local workers, say hello to all, order all to load (the coordinator loads its own
layers at the same time), wait until all are ready, join each worker to the next. Then a step goes

    stage 0 (here) --Step + hidden--> worker 1 --Step + hidden--> worker 2 --Result--> here

Everything a worker says arrives in ``inbox`` from the links' threads, as ``(worker, Frame or LinkClosed)``.
A pipeline is fail-stop: the first stage that is lost ends it, with one error that names the stage.
"""

import queue
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from splitinfer.core.identity import Fingerprint
from splitinfer.core.kv import least_rewind
from splitinfer.core.layout import Layout, StageSpec
from splitinfer.core.plan import StepPlan, StepResult
from splitinfer.engine.local import LocalWorker
from splitinfer.engine.stage_loader import LoadedStage, load
from splitinfer.engine.stage_runner import Launched
from splitinfer.engine.versions import machine_name, own_versions
from splitinfer.engine.worker import send_step
from splitinfer.errors import PeerError, ProtocolError, Refused, WorkerLost, WorkerUnreachable
from splitinfer.wire import codec
from splitinfer.wire.messages import (
    Connect,
    Connected,
    Fault,
    Hello,
    Load,
    Message,
    Progress,
    Ready,
    Refuse,
    Result,
    Welcome,
)  # fmt: skip
from splitinfer.wire.session import Session
from transports import AddressError, Frame, Link, LinkClosed, LinkTimeout, TransportError, connect

Notice = Callable[[int, Progress], None]  # stage number, how far it is


@dataclass(slots=True)
class Peer:
    """One worker as the coordinator knows it."""

    stage: int
    spec: StageSpec
    address: str
    link: Link
    session: Session = field(default_factory=lambda: Session(opened=True))

    def say(self, message: Message) -> None:
        """Send one message. Raises LinkClosed, ProtocolError."""
        self.session.sending(message)
        self.link.send(Frame(codec.encode(message)))

    def hear(self, item: Frame | LinkClosed) -> Message:
        """Read one message.

        Raises:
            WorkerLost: the link ended, or the worker said it cannot go on.
            Refused: the worker said no.
            ProtocolError: it said something that may not follow.
        """
        if isinstance(item, LinkClosed):
            raise WorkerLost(f"worker {self.spec.name} ({self.address}) is gone: {item.reason or 'it closed the link'}")
        message = codec.decode(item.header)
        self.session.received(message)
        if isinstance(message, Refuse):
            raise Refused(f"worker {self.spec.name} ({self.address}) refused: {message.reason}")
        if isinstance(message, Fault):
            raise WorkerLost(f"worker {self.spec.name} ({self.address}) cannot go on: {message.reason}")
        return message


Event = tuple[Peer, Frame | LinkClosed]


@dataclass(frozen=True, slots=True)
class PipelineOrder:
    """What to open: the layout, and what every stage has to be told."""

    layout: Layout
    model: str
    fingerprint: Fingerprint
    vocab_size: int
    kv_tokens: int
    connect_timeout: float  # seconds to reach a worker


class Pipeline:
    """All stages. ``put`` gets an ``Event`` for everything a worker says once the pipeline is open."""

    def __init__(self, order: PipelineOrder, put: Callable[[Event], None], notice: Notice) -> None:
        self._order, self._put, self._notice = order, put, notice
        self._session_id = uuid.uuid4().hex
        self._opening: queue.SimpleQueue[Event] | None = queue.SimpleQueue()
        self._handing_over = threading.Lock()
        self._locals: list[LocalWorker] = []
        self._peers: list[Peer] = []
        self._own: LoadedStage | None = None
        self.ready: tuple[Ready, ...] = ()

    # -- opening -----------------------------------------------------------------------------

    def open(self) -> None:
        """Bring all stages up. On the thread that will run the steps, because MLX's work stays on it.

        Raises:
            PeerError, ModelError: with one sentence; what was opened is closed again.
        """
        try:
            self._reach_workers()
            for peer in self._peers:
                peer.say(self._load_order(peer.stage))
            self._own = load(self._load_order(0), self._order.layout.stages[0].name, self._own_progress)
            self.ready = (self._own.ready, *self._await_ready())
            self._join_workers()
        except TransportError as error:
            self.close("the pipeline could not be opened")
            raise WorkerLost(str(error)) from error
        except BaseException:
            self.close("the pipeline could not be opened")
            raise
        self._hand_over()

    def _reach_workers(self) -> None:
        workers = list(enumerate(self._order.layout.stages))[1:]
        self._locals = [LocalWorker(spec.name) for _, spec in workers if spec.is_local]
        local_addresses = {worker.name: worker.address() for worker in self._locals}
        for stage, spec in workers:
            address = local_addresses[spec.name] if spec.is_local else str(spec.address)
            self._peers.append(self._greet(stage, spec, address))

    def _greet(self, stage: int, spec: StageSpec, address: str) -> Peer:
        link = self._connect(spec, address)
        peer = Peer(stage, spec, address, link)
        try:
            peer.say(Hello("coordinator", machine_name(), self._session_id, own_versions()))
            answer = peer.hear(link.recv(timeout=self._order.connect_timeout))
        except (TransportError, PeerError) as error:
            link.abort("the greeting failed")
            if isinstance(error, PeerError):
                raise
            raise WorkerUnreachable(f"worker {spec.name} ({address}) did not answer: {error}") from error
        assert isinstance(answer, Welcome)
        link.deliver_to(lambda item: self._deliver(peer, item))
        return peer

    def _connect(self, spec: StageSpec, address: str) -> Link:
        try:
            return connect(address, timeout=self._order.connect_timeout)
        except (LinkTimeout, LinkClosed) as error:
            raise WorkerUnreachable(
                f"worker {spec.name} is not at {address} (tried for {self._order.connect_timeout:.0f} s); "
                f"start it there with: splitinfer worker --host 0.0.0.0 --port {address.rpartition(':')[2]}"
            ) from error
        except AddressError as error:
            raise WorkerUnreachable(f"worker {spec.name}: {error}") from error

    def _load_order(self, stage: int) -> Load:
        stages, order = self._order.layout.stages, self._order
        return Load(
            model=order.model,
            dtype=order.layout.dtype,
            stage=stage,
            bounds=(0, *(spec.end for spec in stages)),
            fingerprint=order.fingerprint,
            vocab_size=order.vocab_size,
            kv_tokens=order.kv_tokens,
        )

    def _own_progress(self, progress: Progress) -> None:
        """Report, and notice a worker's refusal while this stage is still loading."""
        self._notice(0, progress)
        if any(peer.link.closed is not None for peer in self._peers):
            self._await_ready()  # raises when it comes to that worker's last word

    def _deliver(self, peer: Peer, item: Frame | LinkClosed) -> None:
        with self._handing_over:
            put = self._put if self._opening is None else self._opening.put
            put((peer, item))

    def _await_ready(self) -> list[Ready]:
        ready: dict[int, Ready] = {}
        while len(ready) < len(self._peers):
            peer, message = self._next_message()
            if isinstance(message, Progress):
                self._notice(peer.stage, message)
            elif isinstance(message, Ready):
                ready[peer.stage] = message
        return [ready[peer.stage] for peer in self._peers]

    def _next_message(self) -> tuple[Peer, Message]:
        assert self._opening is not None
        peer, item = self._opening.get()
        return peer, peer.hear(item)

    def _join_workers(self) -> None:
        """Every worker but the last opens its data link to the next."""
        for peer, following in zip(self._peers, self._peers[1:], strict=False):
            peer.say(Connect(following.address))
        waiting = {peer.stage for peer in self._peers[:-1]}
        while waiting:
            peer, message = self._next_message()
            if isinstance(message, Connected):
                waiting.discard(peer.stage)

    def _hand_over(self) -> None:
        """From now on everything goes to the engine; what came in between goes first."""
        with self._handing_over:
            while self._opening is not None and not self._opening.empty():
                self._put(self._opening.get())
            self._opening = None

    # -- running -----------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """Who holds what."""
        return self._order.layout

    @property
    def num_stages(self) -> int:
        """Stages, the coordinator's own among them."""
        return self._order.layout.num_stages

    @property
    def rewind(self) -> int | None:
        """How many tokens every stage's caches can go back."""
        return least_rewind(ready.rewind for ready in self.ready)

    def launch(self, plan: StepPlan) -> Launched:
        """Begin a step on the coordinator's own layers."""
        assert self._own is not None
        return self._own.runner.launch(plan, None)

    def pass_on(self, launched: Launched) -> StepResult | None:
        """Wait for the own layers and send the step on; with one stage alone, its result.

        Raises:
            WorkerLost: the link to the next stage is gone.
        """
        assert self._own is not None
        done = self._own.runner.finish(launched)
        if not self._peers:
            return StepResult(done.plan.step, done.sampled, (done.figures,))
        peer = self._peers[0]
        try:
            send_step(peer.link, peer.session, done.plan, (), done)
        except TransportError as error:
            raise WorkerLost(f"worker {peer.spec.name} ({peer.address}) is gone: {error}") from error
        for each in self._peers:
            each.link.beat(done.plan.step + 1)
        return None

    def hear(self, event: Event) -> StepResult | None:
        """What a worker said: a result, or nothing of interest.

        Raises:
            WorkerLost, ProtocolError: the pipeline cannot go on.
        """
        peer, item = event
        message = peer.hear(item)
        if isinstance(message, Result):
            if peer is not self._peers[-1]:
                raise ProtocolError(f"worker {peer.spec.name} sent a result, but is not the last stage")
            return message.result
        return None

    # -- closing -----------------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """Say goodbye to all, the last stage first, and end the local workers. At most about 2 seconds."""
        for peer in reversed(self._peers):
            peer.link.close(reason)
        for worker in self._locals:
            worker.stop()
        self._peers, self._locals, self._own = [], [], None

    def addresses(self) -> Sequence[str]:
        """Where the workers are, in order."""
        return [peer.address for peer in self._peers]
