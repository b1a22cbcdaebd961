"""The coordinator's view of all stages: open them, send a step through them, hear what came of it.

Opening: start the local workers, say hello to all, order all to load (the coordinator loads its own
layers at the same time), wait until all are ready, join each worker to the next, choose how hidden states cross the
links, read their clocks. Then a step goes

    stage 0 (here) --Step + hidden--> worker 1 --Step + hidden--> worker 2 --Result--> here

Opening it again after a loss is the same thing with what is still there: the own layers stay loaded, so
do those of the workers that live. Local workers that died are started anew, and so are those that froze:
a process of ours that stands still is killed, not asked. That comes first, because a new process takes
longer than all the rest.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from splitinfer.core.fingerprint import Fingerprint
from splitinfer.core.kv.block_tree import DiskBlock, Key
from splitinfer.core.kv.rewind import least_rewind
from splitinfer.core.layout import Layout, StageSpec
from splitinfer.core.metrics.clocks import Clocks
from splitinfer.core.plan import StepPlan, StepResult
from splitinfer.core.wire_codec import AUTO
from splitinfer.engine.coordinator.local_workers import LocalWorker, take
from splitinfer.engine.coordinator.worker_group import Event, Notice, WorkerGroup, WorkerHandle, start_command
from splitinfer.engine.cpu_affinity import yield_own_processor
from splitinfer.engine.links.codecs import codecs_of
from splitinfer.engine.stage.loader import LoadedStage, load
from splitinfer.engine.stage.runner import Finished, Launched
from splitinfer.engine.worker.access import Keys, upstream_key
from splitinfer.engine.worker.worker import send_step
from splitinfer.errors import ProtocolError, WorkerLost, WorkerUnreachable
from splitinfer.kvstore.store import Disk
from splitinfer.wire.messages import Load, Progress, Ready, Result
from transports import LinkClosed, TransportError

_DYING = 0.05  # seconds a process may outlive its connections
_GOSSIP = 0.1  # seconds by which a neighbour may tell of a loss before it is seen here


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """What to open: the layout, and what every stage has to be told."""

    layout: Layout
    model: str
    fingerprint: Fingerprint
    vocab_size: int
    kv_tokens: int
    connect_timeout: float  # seconds to reach a worker
    disk: Disk | None = None  # where this machine keeps KV
    kv_root: Key = b""  # what the keys of KV on disk begin with
    keys: Keys | None = None  # for encrypted links


class Pipeline:
    """All stages. ``put`` gets an ``Event`` for everything a worker says once the pipeline is open."""

    def __init__(self, order: PipelineConfig, put: Callable[[Event], None], notice: Notice) -> None:
        self._order, self._put, self._notice = order, put, notice
        self._locals: dict[str, LocalWorker] = {}
        self._worker_group = self._new_crew()
        self._own: LoadedStage | None = None
        self._lost: WorkerHandle | None = None  # what the last loss was about
        self._stuck: WorkerHandle | None = None  # beats, but its engine stands still
        self._closing = threading.Lock()
        self.ready: tuple[Ready, ...] = ()
        self.codecs: tuple[str, ...] | None = None  # of each link; None: not yet chosen
        self.clocks = Clocks(())

    def _new_crew(self) -> WorkerGroup:
        keys = self._order.keys
        return WorkerGroup(self._put, self._notice) if keys is None else WorkerGroup(self._put, self._notice, keys.own)

    # -- opening -----------------------------------------------------------------------------

    def open(self, connect_timeout: float | None = None) -> None:
        """Bring all stages up, all sequences forgotten. On the thread that will run the steps, because
        MLX's work stays on it. ``connect_timeout``: seconds to reach a worker, if not the order's.

        Raises:
            PeerError, ModelError: with one sentence; the links are closed again.
        """
        self.regroup("the pipeline is being opened again")
        worker_group = self._worker_group
        try:
            self._reach_workers(worker_group, connect_timeout or self._order.connect_timeout)
            worker_group.load([self._load_order(handle.stage) for handle in worker_group.workers])
            own = self._load_own()
            self.ready = (own.offer(), *worker_group.await_ready())
            worker_group.connect_stages()
            self._compress(own, worker_group)
            self.clocks = Clocks(worker_group.read_clocks())
        except TransportError as error:
            worker_group.close("the pipeline could not be opened")
            raise WorkerLost(str(error)) from error
        except BaseException:
            worker_group.close("the pipeline could not be opened")
            raise
        worker_group.start_delivery()

    def _compress(self, own: LoadedStage, worker_group: WorkerGroup) -> None:
        """Tell all stages how hidden states cross the links."""
        if self.codecs is None:
            wanted = [spec.codec for spec in self._order.layout.stages[1:]]
            rows = [ready.hidden for ready in self.ready[1:]]
            self.codecs = codecs_of(wanted, rows, lambda: [link.down for link in worker_group.measure_links()])
            for stage, codec in enumerate(self.codecs, 1):
                if wanted[stage - 1] == AUTO:
                    self._notice(stage, Progress("link", 0, 0, f"codec auto: {codec}"))
        if self.codecs:
            own.runner.use_codec(self.codecs[0])
            worker_group.set_codecs(self.codecs[1:])

    def regroup(self, reason: str) -> None:
        """Part with the workers as they are: a new process for each local one that is none any more or
        stands still, a goodbye to the others, which stay loaded."""
        worker_group, self._worker_group = self._worker_group, self._new_crew()
        self._kill_lost(worker_group)
        self._stuck = None
        self._start_locals()
        worker_group.close(reason)

    def _kill_lost(self, worker_group: WorkerGroup) -> None:
        for handle in worker_group.workers:
            worker = self._locals.get(handle.spec.name)
            if worker is not None and self._is_lost(handle, worker):
                self._locals.pop(handle.spec.name, None)
                worker.kill()

    def _is_lost(self, handle: WorkerHandle, worker: LocalWorker) -> bool:
        """Whether a local worker is past being asked. One that only told of another's loss is not."""
        if handle is self._stuck or handle.is_silent:
            return True
        return handle.link.closed is not None and worker.ends_within(_DYING)

    def _reach_workers(self, worker_group: WorkerGroup, timeout: float) -> None:
        for stage, spec in list(enumerate(self._order.layout.stages))[1:]:
            if spec.is_local:
                self._reach_local(worker_group, stage, spec, timeout)
            else:
                worker_group.connect(stage, spec, str(spec.address), timeout)

    def _reach_local(self, worker_group: WorkerGroup, stage: int, spec: StageSpec, timeout: float) -> None:
        try:
            worker = self._locals.get(spec.name)
            if worker is None:
                raise WorkerUnreachable(f"the local worker {spec.name} was stopped while the pipeline was being opened")
            worker_group.connect(stage, spec, worker.address(), timeout)
        except WorkerUnreachable:
            worker = self._locals.pop(spec.name, None)  # it is ours to end; the next attempt starts another
            if worker is not None:  # else the pipeline was closed meanwhile, and the worker with it
                worker.kill()
            raise

    def _start_locals(self) -> None:
        """Start those that do not run; all begin before the first is waited for."""
        for name in (spec.name for spec in self._order.layout.stages[1:] if spec.is_local):
            if name in self._locals and not self._locals[name].is_alive:
                self._locals.pop(name).stop()
            if name not in self._locals:
                self._locals[name] = take(name, self._order.disk)

    def _load_own(self) -> LoadedStage:
        if self._own is None:
            name = self._order.layout.stages[0].name
            self._own = load(self._load_order(0), name, self._own_progress, self._order.disk)
        return self._own

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
            kv_root=order.kv_root,
            kv_format=order.layout.kv_format,
            upstream_key=self._upstream_key(stage),
        )

    def _upstream_key(self, stage: int) -> str:
        stages, keys = self._order.layout.stages, self._order.keys
        return "" if keys is None or stage == 0 else upstream_key(stages[stage - 1], stages[stage], keys.own)

    def _own_progress(self, progress: Progress) -> None:
        """Report, and notice a worker's refusal while this stage is still loading."""
        self._notice(0, progress)
        if not self._worker_group.is_whole:
            self._worker_group.await_ready()  # raises when it comes to that worker's last word

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

    @property
    def is_on_disk(self) -> bool:
        """Whether every stage writes KV to disk."""
        return all(ready.kept is not None for ready in self.ready)

    def kept(self) -> tuple[DiskBlock, ...]:
        """What is on every stage's disk since the pipeline was opened."""
        if self._own is None or not self.is_on_disk:
            return ()
        everywhere = set.intersection(*(set(ready.kept or ()) for ready in self.ready))
        return self._own.kept(key for key in self.ready[0].kept or () if key in everywhere)

    def launch(self, plan: StepPlan) -> Launched:
        """Begin a step on the coordinator's own layers."""
        assert self._own is not None
        return self._own.runner.launch(plan, None)

    def finish(self, launched: Launched) -> Finished:
        """Wait for the own layers."""
        assert self._own is not None
        return self._own.runner.finish(launched)

    def send(self, done: Finished) -> StepResult | None:
        """Send a step on; with one stage alone, its result.

        Raises:
            WorkerLost: the step cannot be sent.
        """
        if self.num_stages == 1:
            return StepResult(done.plan.step, done.sampled, (done.figures,))
        handle = self._worker_group.workers[0]
        try:
            send_step(handle.link, handle.session, (), done)
        except LinkClosed:
            return None  # why it ended is the next thing to be heard of it, and may be another's fault
        except TransportError as error:
            self._lost = handle
            raise handle.lost(str(error)) from error
        for each in self._worker_group.workers:
            each.link.beat(done.plan.step + 1)
        yield_own_processor()
        return None

    def receive(self, event: Event) -> StepResult | None:
        """What a worker said: a result, or nothing of interest.

        Raises:
            WorkerLost, ProtocolError: the pipeline cannot go on.
        """
        handle, item, _ = event
        if handle not in self._worker_group.workers:
            return None  # the last words of an earlier crew
        try:
            message = handle.receive(item)
        except WorkerLost as loss:
            self._lost = handle if isinstance(item, LinkClosed) else self._missed_by(handle)
            if self._lost is None or self._lost is handle:
                raise
            raise self._lost.lost(_reason(self._lost)) from loss
        if isinstance(message, Result):
            if handle is not self._worker_group.workers[-1]:
                raise ProtocolError(f"worker {handle.spec.name} sent a result, but is not the last stage")
            return message.result
        return None

    def _missed_by(self, messenger: WorkerHandle) -> WorkerHandle | None:
        """Another worker that is gone, where the messenger's last words tell only what followed from it."""
        give_up = time.monotonic() + _GOSSIP
        others = [handle for handle in self._worker_group.workers if handle is not messenger]
        while others:
            for handle in others:
                if handle.link.closed is not None or handle.is_silent:
                    return handle
            if time.monotonic() >= give_up:
                break
            time.sleep(0.01)
        return None

    def stuck_worker(self, seconds: float) -> WorkerLost:
        """The error for a step that does not come back, naming the first worker that has done fewer than
        the stage before it."""
        workers = self._worker_group.workers
        done = [handle.link.peer_progress for handle in workers]
        late = next((i for i in range(1, len(workers)) if done[i] < done[i - 1]), 0)
        handle = self._lost = self._stuck = workers[late]
        return WorkerLost(f"worker {handle.spec.name} ({handle.address}) has made no progress for {seconds:.0f} s")

    @property
    def remedy(self) -> str:
        """What brings the worker back that was lost last."""
        if self._lost is None:
            return "it lives, and is being asked again"
        if self._lost.spec.is_local:
            return "it is being started again"
        return f"start it there again with: {start_command(self._lost.address)}"

    # -- closing -----------------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """Say goodbye to all and end the local workers. At most about 2 seconds."""
        with self._closing:  # who comes second waits, or the process could end before its children
            self._kill_lost(self._worker_group)
            self._worker_group.close(reason)
            for worker in list(self._locals.values()):
                worker.stop()
            self._locals.clear()
            if self._own is not None:
                self._own.close()
            self._own = None


def _reason(handle: WorkerHandle) -> str:
    """Why a worker counts as gone."""
    return handle.link.closed.reason if handle.link.closed is not None else f"silent for {handle.link.silent_for:.1f} s"
