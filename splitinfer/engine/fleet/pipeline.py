"""The coordinator's view of all stages: opens them, launches steps through them, receives the results.

    stage 0 (here) --Step + hidden--> worker 1 --Step + hidden--> worker 2 --Result--> here

If the first stage is across two machines, the coordinator has no stage and sends each step to the first one. Of the two
ranks of a stage, the first passes on what it gets, and the second answers.

The loop launches the coordinator's own stage. If the device computes at launch, the loop also sends the hidden states;
otherwise the thread that waits for the device sends them, because launching the next step may hold the loop for most of
a step.

Opening again after a loss reuses what is left: weights stay loaded, here and on the remaining workers, but all KV that
is not on disk is forgotten. First, local workers that died or froze are started again. Ranks are started again after
any loss, because each may be waiting for the other in a sum.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

from splitinfer.core.absence import Rest
from splitinfer.core.codecs import NONE, packs
from splitinfer.core.kv.block_tree import DiskBlock
from splitinfer.core.kv.rewind import least_rewind
from splitinfer.core.layout import BY_UP, Layout, StageSpec
from splitinfer.core.plan import FiguresLater, StageFigures, StepResult
from splitinfer.core.scheduler.in_flight import StepInFlight
from splitinfer.engine.device.device import Device, open_device
from splitinfer.engine.device.steps import StepFailed, StepsUnderWay
from splitinfer.engine.fleet.fleet import (
    SILENCE,
    Fleet,
    LinkEvent,
    Notice,
    WorkerHandle,
    start_command,
)
from splitinfer.engine.fleet.local_workers import LocalWorker, started
from splitinfer.engine.fleet.ranks import halves_of
from splitinfer.engine.links.connection import outgoing
from splitinfer.engine.stage.disk import kept_here
from splitinfer.engine.stage.launched import Finished, Launched
from splitinfer.engine.stage.loader import LoadedStage, free_memory, load
from splitinfer.engine.stage.masking import RawMasks, read_masks
from splitinfer.engine.stage.runner import StageRunner
from splitinfer.engine.weights.answering import Running
from splitinfer.errors import PeerError, ProtocolError, WorkerLost, WorkerUnreachable
from splitinfer.keyring import Keyring
from splitinfer.kvstore.store import Disk
from splitinfer.models.cut.pictures import shown_by
from splitinfer.wire.messages import Digest, Half, Load, Message, Peer, Plan, Progress, Ready, Result, Shown
from splitinfer.wire.steps import read_figures
from transports import LinkClosed, TransportError


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """The pipeline to open. ``first``: the Load command of the first stage; other stages differ in layers and peers."""

    layout: Layout
    first: Load
    connect_timeout: float  # seconds to reach a worker
    keys: Keyring  # for encrypted links
    disk: Disk | None = None  # where this machine stores KV
    running: tuple[Running, ...] = ()  # the models that workers without weights may copy
    find: Callable[[StageSpec], str | None] = lambda _spec: None  # the address that a worker's key announces now
    by_key: frozenset[str] = frozenset()  # the stages whose addresses were found by their keys
    insecure_sums: bool = False  # whether the sums of two ranks may cross any network
    room: int | None = None  # the tokens of a sequence for which stages must have room; None: as ``first`` says
    drafts: bool = True  # whether the drafter on the last stage is loaded

    def load(self, stage: int, half: Half | None = None) -> Load:
        """Return the Load command of a stage, or of the rank of it that loads ``half``."""
        stages, first = self.layout.stages, self.first
        if not self.drafts:  # nor are blocks on disk read, which have the drafter's KV
            first = replace(first, drafter="", drafter_fingerprint=None, kv_root=b"")
        return replace(
            first,
            kv_tokens=first.kv_tokens if self.room is None else min(self.room, first.kv_tokens),
            stage=stage,
            bounds=(0, *(spec.end for spec in stages)),
            float32_head=self.layout.float32_head and stage == len(stages) - 1,
            peers=tuple(self._peers(stage)),
            reader_keys=tuple(peer.key for peer in self._peers(stage) if peer.key),
            half=half,
            experts_bytes=None if (given := stages[stage].experts_gb) is None else round(given * 1e9),
        )

    def _peers(self, stage: int) -> Iterator[Peer]:
        """Yield the workers of the other stages, on other machines."""
        for at, spec in enumerate(self.layout.stages):
            for one in spec.ranks if at != stage else ():
                if one.address is not None and not one.is_local:
                    yield Peer(one.name, one.address, one.key or "")


log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0  # for a worker to answer
_EXIT_SECONDS = 0.05  # the time that a process may outlive its connections
_NOTICE_SECONDS = 0.5  # a neighbour may report a loss this much earlier than the coordinator notices it


class LocalResult(NamedTuple):
    """The result of a step if this machine's stage is the only one. ``at``: when it was done, in seconds. ``group``:
    the fleet at its launch, which tells whether the result is from before the last loss."""

    result: StepResult
    at: float
    group: Fleet


StageEvent = LinkEvent | LocalResult | StepFailed
"""An event of a stage for the loop."""


class Pipeline:
    """All stages of one layout. Only the loop's thread uses it, except for ``close`` and for methods that only read.

    ``put`` receives the events: every message of a worker and every link's end once the pipeline is open, and the
    results and failures of steps here. ``notice`` receives a stage's name and its progress while it loads.
    """

    def __init__(self, config: PipelineConfig, put: Callable[[StageEvent], None], notice: Notice) -> None:
        self._config, self._put, self._notice = config, put, notice
        self._children: dict[str, LocalWorker] = {}
        self._fleet = self._new_fleet()
        self._local: LoadedStage | None = None
        self.steps = StepsUnderWay[Launched](put)  # on this machine's stage
        self._lost: WorkerHandle | None = None  # the worker lost last
        self._closing = threading.Lock()
        self._sending = threading.Lock()  # a link has one writer at a time
        self.is_open = False
        """Whether all stages were loaded and connected, and none is known to be lost."""
        self.ready: tuple[Ready, ...] = ()
        self.codecs: tuple[str, ...] = ()  # one for each link, once the pipeline was opened
        self._meanwhile: Callable[[], None] = lambda: None
        self._halves: dict[int, tuple[Half, ...]] = {}  # by stage across two machines: its ranks' halves
        self._digests: dict[tuple[int, int], int] = {}  # by stage and step: the digest of one rank's sampled tokens

    def _new_fleet(self) -> Fleet:
        return Fleet(self._config.keys.own, self._put, self._notice, self._config.running)

    # -- opening -----------------------------------------------------------------------------

    def open(
        self,
        connect_timeout: float | None = None,
        silence: float = SILENCE,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Load and connect all stages, without sequences. Call on the thread that will run the steps, because MLX's
        streams belong to a thread.

        Args:
            connect_timeout: seconds to reach a worker; ``None``: the config's.
            silence: seconds after which a loading worker that sends nothing counts as lost.
            meanwhile: called on this thread a few times a second while stages load.

        Raises:
            PeerError, ModelError: a stage cannot be reached or loaded. All links are closed again.
        """
        self.renew_links("the pipeline is reopening", settled=self.is_open)  # each attempt needs fresh ones
        fleet, self._meanwhile = self._fleet, meanwhile
        try:
            self._pair_ranks()
            self._reach_workers(fleet, connect_timeout or self._config.connect_timeout)
            fleet.connect_ranks()
            for each in fleet.workers:  # all of them load at the same time
                each.send(self._config.load(each.stage, self._half(each)))
            local = self._load_local()
            own = () if local is None else (local.begin_anew(),)
            self.ready = (*own, *fleet.await_ready(silence, meanwhile))
            self._tell_sums()
            self.codecs = tuple(map(_codec, self._config.layout.stages[1:], self.ready[1:]))
            if self.codecs and local is not None:
                local.runner.use_codec(self.codecs[0])
            fleet.connect_stages(self.codecs, silence)
            self.is_open = True
        except TransportError as error:
            fleet.close("the pipeline could not be opened")
            raise WorkerLost(str(error)) from error
        except BaseException:
            fleet.close("the pipeline could not be opened")
            raise
        fleet.start_delivery()

    def _tell_sums(self) -> None:
        for ready in self.ready:
            if ready.sum_seconds:
                told = f"each of its sums takes {1e3 * ready.sum_seconds:.3g} ms"
                self._notice(self.layout.stages[ready.stage].name, Progress("link", 0, 0, told))

    def renew_links(self, reason: str, *, settled: bool = False) -> None:
        """Close the links to the workers and begin a new fleet. Local workers that died or froze are started again, the
        others stay loaded. Steps in flight are forgotten, and their messages ignored. ``settled``: no step is in
        flight, so ranks may stay, too."""
        fleet, self._fleet = self._fleet, self._new_fleet()
        self.is_open = False
        self._digests.clear()
        self._kill_lost(fleet)
        # A rank's process on another machine ends with its link anyway.
        stages = self.layout.stages
        self._end_ranks(spec for spec in stages if not settled or not all(one.is_local for one in spec.ranks))
        self._start_locals()
        fleet.close(reason)
        self.steps.drop()

    def _kill_lost(self, fleet: Fleet) -> None:
        for handle in fleet.workers:
            worker = self._children.get(handle.spec.name)
            if worker is not None and self._is_lost(handle, worker):
                self._children.pop(handle.spec.name, None)
                worker.kill()

    def _end_ranks(self, specs: Iterable[StageSpec]) -> None:
        """End the processes of ranks: a process can join MLX's group only once in its life."""
        for spec in specs:
            for one in spec.ranks if spec.across else ():
                if (worker := self._children.pop(one.name, None)) is not None:
                    worker.kill()

    def _is_lost(self, handle: WorkerHandle, worker: LocalWorker) -> bool:
        """Return whether a local worker has died, is frozen or will end. A worker that only reported another one's loss
        is not lost."""
        if handle.hangs or handle.is_silent or handle.is_ending:
            return True
        return handle.link.closed is not None and worker.ends_within(_EXIT_SECONDS)

    def _reach_workers(self, fleet: Fleet, timeout: float) -> None:
        layout = self._config.layout
        for stage, spec in list(enumerate(layout.stages))[layout.has_own_stage :]:
            for number, one in enumerate(spec.ranks):
                rank = number if spec.across else None
                if one.is_local:
                    self._reach_local(fleet, stage, one, timeout, rank)
                elif spec.across:  # in a process of its own, which may end when the other rank is gone
                    fleet.connect(stage, one, fleet.spawn(stage, one, timeout), timeout, rank)
                else:
                    self._reach_remote(fleet, stage, spec, timeout)

    def _half(self, worker: WorkerHandle) -> Half | None:
        """Return the half of its stage that a rank loads, or None for a worker that is no rank."""
        if worker.rank is None:
            return None
        return self._halves[worker.stage][worker.rank]

    def _pair_ranks(self) -> None:
        """Choose how the ranks of each stage meet. Raises as ``halves_of``."""
        for stage, spec in enumerate(self.layout.stages):
            if spec.across:
                self._halves[stage] = halves_of(spec, insecure=self._config.insecure_sums)
                if not all(one.is_local for one in spec.ranks):
                    self._notice(spec.name, Progress("link", 0, 0, f"its sums go over {spec.sums}, not encrypted"))

    def _reach_remote(self, fleet: Fleet, stage: int, spec: StageSpec, timeout: float) -> None:
        """Connect to a worker. If it was found by its key and has moved, connect to its new address."""
        try:
            fleet.connect(stage, spec, str(spec.address), timeout)
        except WorkerUnreachable as error:
            address = self._config.find(spec)
            if address is None or address == spec.address:
                raise
            if spec.name not in self._config.by_key:
                raise WorkerUnreachable(
                    f"{error}. Its key is announced at {address} now: give that address, or the key alone"
                ) from error
            log.warning("worker %s is at %s now", spec.name, address)
            layout = self._config.layout.with_found({spec.name: (address, spec.key)})
            self._config = replace(self._config, layout=layout)
            fleet.connect(stage, layout.stages[stage], address, timeout)

    def _reach_local(self, fleet: Fleet, stage: int, spec: StageSpec, timeout: float, rank: int | None = None) -> None:
        try:
            worker = self._children.get(spec.name)
            if worker is None:
                raise WorkerUnreachable(f"the local worker {spec.name} was stopped while the pipeline was opening")
            fleet.connect(stage, spec, worker.address(), timeout, rank)
        except WorkerUnreachable:
            worker = self._children.pop(spec.name, None)  # the next attempt starts another
            if worker is not None:  # otherwise the pipeline was closed meanwhile, and the worker with it
                worker.kill()
            raise

    def _start_locals(self) -> None:
        """Start the local workers that do not run, all of them before waiting for the first."""
        for name in (spec.name for spec in self._config.layout.workers if spec.is_local):
            if name in self._children and not self._children[name].is_alive:
                self._children.pop(name).stop()
            if name not in self._children:
                self._children[name] = started(name, self._config.disk)

    def _load_local(self) -> LoadedStage | None:
        if self._local is None and self.layout.has_own_stage:
            name = self._config.layout.stages[0].name
            self._local = load(self._config.load(0), name, self._local_progress, self._config.disk)
        return self._local

    def _local_progress(self, progress: Progress) -> None:
        """Report progress, and raise a worker's refusal while this stage is still loading."""
        self._notice(self.layout.stages[0].name, progress)
        self._meanwhile()
        if not self._fleet.is_whole:
            self._fleet.await_ready()  # raises the error in that worker's last message

    def find(self, spec: StageSpec) -> str | None:
        """Return the address at which a worker of another machine admits this coordinator now, or None. Any thread may
        call it; it takes a few seconds at most."""
        fleet = self._new_fleet()
        for address in (spec.address, self._config.find(spec) if spec.name in self._config.by_key else None):
            with suppress(PeerError):
                if address is not None:
                    fleet.greet(spec, address, _LOOK_SECONDS)
                    return address
        return None

    @property
    def drafts(self) -> bool:
        """Whether the drafter on the last stage is loaded, if there is one."""
        return self._config.drafts

    def follow(self, by_key: frozenset[str]) -> None:
        """Find these stages' workers by their keys from now on, if they have moved."""
        self._config = replace(self._config, by_key=self._config.by_key | by_key)

    def use_layout(self, rest: Rest) -> None:
        """Use another layout of the same model from the next ``open`` on. Unload this machine's stage if it differs,
        and stop local workers that the layout does not have. No step may be in flight."""
        layout = rest.layout
        self._end_ranks(spec for spec in self.layout.stages if spec not in layout.stages)
        self._config = replace(self._config, layout=layout, room=rest.room, drafts=rest.drafts)
        if self._local is not None and not (layout.has_own_stage and self._local.serves(self._config.load(0))):
            self._local.close()
            self._local = None
            free_memory()
        names = {spec.name for spec in layout.workers if spec.is_local}
        for name in [name for name in self._children if name not in names]:
            self._children.pop(name).stop()

    # -- running -----------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:
        """Which stage holds which layers."""
        return self._config.layout

    @property
    def ranks(self) -> list[WorkerHandle]:
        """The ranks of all stages across two machines."""
        return [each for each in self._fleet.workers if each.rank is not None]

    @property
    def rewind(self) -> int | None:
        """The number of tokens by which every stage can rewind its caches; ``None``: any number."""
        return least_rewind(ready.rewind for ready in self.ready)

    @property
    def is_on_disk(self) -> bool:
        """Whether every stage writes KV to disk."""
        return all(ready.kept is not None for ready in self.ready)

    def kept(self) -> tuple[DiskBlock, ...]:
        """Return the blocks that were on every stage's disk when the pipeline was opened. A coordinator without a stage
        reads their tokens from the files of a rank on this machine."""
        disk = self._config.disk
        if disk is None or not self.is_on_disk:
            return ()
        everywhere = set.intersection(*(set(ready.kept or ()) for ready in self.ready))
        keys = [key for key in self.ready[0].kept or () if key in everywhere]
        if self._local is not None and self._local.disk is not None:
            return self._local.disk.kept(keys)
        here = [each for each in self._fleet.workers if each.stage == 0 and each.spec.is_local]
        return kept_here(disk, self._config.load(0, self._half(here[0])), keys) if here else ()

    @property
    def local(self) -> StageRunner | None:
        """The runner of the coordinator's own stage; ``None`` before ``open``, or if it has no stage."""
        return None if self._local is None else self._local.runner

    @property
    def device(self) -> Device:
        """The coordinator's device."""
        return open_device(0, self._config.load(0).bounds) if self.local is None else self.local.device

    def launch(self, step: StepInFlight, masks: Future[RawMasks] | None) -> None:
        """Launch a step on this machine's device, and send its plan ahead to the next stage. Its rows follow when the
        device is done (``_send``). ``masks``: the masks of its rows.

        Raises:
            WorkerLost, DeviceFailed, ProtocolError: the step cannot be launched, or its messages cannot be sent.
        """
        local, plan, here, group = self.local, step.plan, None, self._fleet
        if local is None:
            for one in shown_by(plan.new):
                self._send_next(group, Shown(one.rgb.shape[:2], one.family.as_json()), memoryview(one.rgb).cast("B"))
            self._send_next(group, Plan(plan, waits=masks is not None))
            step.is_sent = True
            if masks is not None:
                nothing = Finished(plan, partial(StageFigures, 0, 0.0, 0.0), None, None, ())
                message, parts, _ = outgoing(nothing, masks.result())  # the first stage's figures come with the result
                self._send_next(group, message, *parts)
            return
        if masks is not None and self.layout.num_stages == 1:
            raw, masks = masks, None
            here = cache(lambda: read_masks(raw.result(), self._config.first.vocab_size))
        if local.needs_verdict(plan):
            self.steps.drain()
        is_done = local.device.computes_at_launch
        if is_done and group.workers:
            self._send_next(group, Plan(plan))
        launched = local.launch(plan, None, here, self.steps.under_way())
        if not is_done and group.workers:
            self._send_next(group, Plan(plan))
        send = partial(self._send, local, group, step, masks)
        self.steps.add(launched, local.wait, send, is_done=is_done)

    def _send(
        self,
        local: StageRunner,
        group: Fleet,
        step: StepInFlight,
        masks: Future[RawMasks] | None,
        done: Launched,
    ) -> None:
        """Send the rows of a step that is done, and keep the first stage's figures in it, or give the loop its result
        if there is only one stage. Runs on the thread that waits for the device, if there is one. ``local``, ``group``:
        the runner and fleet at its launch."""
        finished, step.is_sent = local.finish(done), True
        if self.layout.num_stages == 1:
            result = StepResult(step.plan.step, finished.sampled, (finished.figures(),))
            self._put(LocalResult(result, time.monotonic(), group))
        else:
            message, parts, step.figures = outgoing(finished, {} if masks is None else masks.result())
            self._send_next(group, message, *parts)
        local.store(done)

    def _send_next(self, group: Fleet, message: Message, *parts: memoryview) -> None:
        """Send a message to the next stage.

        Raises:
            WorkerLost: the link fails.
        """
        handle = group.workers[0]
        try:
            with self._sending:
                handle.send(message, *parts)
        except LinkClosed:
            return  # the link's end is an event, and its reason may be the loss of another worker
        except TransportError as error:
            self._lost = handle
            raise handle.lost(str(error)) from error

    def receive(self, event: LinkEvent | LocalResult, oldest: StepInFlight | None) -> StepResult | None:
        """Read a stage's event. Return the result of the ``oldest`` step, or None for any other event.

        Raises:
            WorkerLost, ProtocolError: the pipeline cannot go on.
        """
        if isinstance(event, LocalResult):
            return event.result if event.group is self._fleet else None
        handle, item, _ = event
        if handle not in self._fleet.workers:
            return None  # late, from an earlier group
        try:
            message = handle.receive(item)
        except WorkerLost as loss:
            if handle.fault is not None and handle.fault.lost_rank:
                ranks = [one for one in self._fleet.workers if one.stage == handle.stage]
                self._lost = next(one for one in ranks if one is not handle)
                why = _reason(self._lost) if self._lost.link.closed else f"{handle.spec.name} lost it in a sum"
                raise self._lost.lost(why) from loss
            is_sure = isinstance(item, LinkClosed) or handle.is_ending
            self._lost = handle if is_sure else self._also_lost(handle)
            if self._lost is None or self._lost is handle:
                raise
            raise self._lost.lost(_reason(self._lost)) from loss
        if isinstance(message, Result):
            if handle is not self._fleet.workers[-1]:
                raise ProtocolError(f"worker {handle.spec.name} sent a result, but is not the last stage")
            stages = range(int(self.layout.has_own_stage), self.layout.num_stages)
            read = partial(read_figures, message.figures, stages)
            figures = FiguresLater(read if oldest is None else lambda: oldest.figures_of(read()))
            return StepResult(message.step, message.sampled, figures)
        if isinstance(message, Digest):
            self._compare(handle, message)
        return None

    def _compare(self, handle: WorkerHandle, said: Digest) -> None:
        """Compare the digests of both ranks' sampled tokens, once both have arrived.

        Raises:
            WorkerLost: the digests differ.
        """
        handle.busy = said.busy
        at = (handle.stage, said.step)
        other = self._digests.pop(at, None)
        if other is None:
            self._digests[at] = said.digest
        elif other != said.digest:
            self._lost = handle
            raise WorkerLost(f"the two ranks of stage {handle.stage_name} have sampled different tokens")

    def _also_lost(self, reporter: WorkerHandle) -> WorkerHandle | None:
        """Return another worker that is gone, which explains the reporter's fault. Return None if there is none."""
        give_up = time.monotonic() + _NOTICE_SECONDS
        others = [handle for handle in self._fleet.workers if handle is not reporter]
        while others:
            for handle in others:
                if handle.link.closed is not None or handle.is_silent:
                    return handle
            if time.monotonic() >= give_up:
                break
            time.sleep(0.01)
        return None

    def stuck_worker(self, seconds: float) -> WorkerLost:
        """Return the error for a step that is overdue. It names the first worker that has done fewer steps than the
        stage before it."""
        workers = self._fleet.workers
        done = [handle.link.peer_progress for handle in workers]
        slow = next((i for i in range(1, len(workers)) if done[i] < done[i - 1]), 0)
        handle = self._lost = workers[slow]
        handle.hangs = True
        return WorkerLost(f"worker {handle.spec.name} ({handle.address}) has made no progress for {seconds:.0f} s")

    @property
    def busy_name(self) -> str | None:
        """The name of a worker that is silent while its machine answers. Any thread may read it."""
        return next((handle.spec.name for handle in [*self._fleet.workers] if handle.link.is_busy), None)

    @property
    def lost_name(self) -> str | None:
        """The name of the stage whose worker was lost last."""
        return None if self._lost is None else self._lost.stage_name

    @property
    def lost_worker(self) -> str | None:
        """The name of the worker that was lost last, which may be one rank of a stage."""
        return None if self._lost is None else self._lost.spec.name

    @property
    def remedy(self) -> str:
        """How the worker that was lost last comes back, as part of a sentence."""
        if self._lost is None:
            return "it is still running; reconnecting"
        if self._lost.spec.is_local:
            return "restarting it"
        looks = "its key is looked for; if it has ended, " if self._lost.spec.name in self._config.by_key else ""
        if self.layout.name == BY_UP:
            return f"{looks}start it again with: splitinfer up --prepare"
        command = start_command(self._lost.address, has_key=self._lost.spec.key is not None)
        return f"{looks}start it there again with: {command}"

    # -- closing -----------------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """Close all links and end the local workers. Takes about 2 seconds at most."""
        with self._closing:  # a second caller waits, or the process could end before its children
            self.is_open = False
            self._kill_lost(self._fleet)
            self._fleet.close(reason)
            self.steps.close()
            for worker in list(self._children.values()):
                worker.stop()
            self._children.clear()
            if self._local is not None:
                self._local.close()
            self._local = None
            free_memory()


def _codec(spec: StageSpec, ready: Ready) -> str:
    """Return the codec of the link to a stage: the layout's, or none if the codec would not make rows smaller."""
    row = ready.hidden
    if spec.codec == NONE or row is None or packs(spec.codec, math.prod(row.shape), row.dtype):
        return spec.codec
    log.info("codec %s does not make hidden states of %s smaller; they are sent uncompressed", spec.codec, row.dtype)
    return NONE


def _reason(handle: WorkerHandle) -> str:
    """Return why a worker is considered gone."""
    return handle.link.closed.reason if handle.link.closed is not None else f"silent for {handle.link.silent_for:.1f} s"
