"""Carries out a ``Load`` command, in the same way on the coordinator and on a worker.

    open -> compare fingerprints -> survey -> check memory, and claim it -> fetch files -> read weights

The needed and the free memory are reported before anything is read.
"""

import gc
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import mlx.core as mx

from splitinfer.core.kv.format import format_of
from splitinfer.core.kv.rewind import NEVER, WITHIN_DRAFTS
from splitinfer.core.plan import TensorSpec
from splitinfer.engine.device.device import Device, default_device, open_device
from splitinfer.engine.stage import outcomes
from splitinfer.engine.stage.disk import StageDisk
from splitinfer.engine.stage.outcomes import TrialOutcome
from splitinfer.engine.stage.runner import StageRunner
from splitinfer.engine.versions import device_name
from splitinfer.errors import ModelError, ProtocolError
from splitinfer.kvstore.store import CLOSE_SECONDS, Disk
from splitinfer.models.border.tensors import name_of
from splitinfer.models.caches.attention import STEP_ROWS, backend, score_bytes
from splitinfer.models.cut.cut import StageModel
from splitinfer.models.drafters.mtp import MTP
from splitinfer.models.folder.checkpoint import Checkpoint
from splitinfer.models.folder.hub import fetch, open_model
from splitinfer.models.library import mlx_vlm
from splitinfer.models.load.expert_store import least_bytes
from splitinfer.models.load.halves import Pair
from splitinfer.models.load.loader import Survey, load_stage, resolve_dtype, survey
from splitinfer.models.load.trained import read_of
from splitinfer.models.memory import (
    HeldReport,
    Need,
    announce_idle,
    announce_loaded,
    counted_bytes,
    experts_room,
    limit_to,
    reserve,
    resource_limit,
    set_limits,
    withdraw,
)
from splitinfer.models.rows.kv_trial import sample_blocks
from splitinfer.system.free_memory import release_freed
from splitinfer.wire.messages import Half, Load, Progress, Ready

log = logging.getLogger(__name__)

_ROW = 4096  # numbers in a timed sum: about as many as a token's hidden states have
_MAX_ERROR = 0.7  # relative error by quantized KV; a larger one is not rounding

OnLoading = Callable[[Progress], None]
Join = Callable[[Half], Pair]
"""Meets the other rank of a stage across two machines."""


class WeightSource:
    """Finds a model, and brings the tensors that a stage reads to this machine: from its files, or from the hub."""

    def open(self, command: Load) -> Checkpoint:
        """Return the model that a command names; its weights may still be missing. Raises ModelError, PeerError."""
        return open_model(command.model)

    def fetch(self, command: Load, checkpoint: Checkpoint, tensors: Collection[str], report: OnLoading) -> Checkpoint:
        """Bring the tensors to this machine, and return the checkpoint with them. Raises ModelError, PeerError."""
        missing = checkpoint.missing(tensors)
        if missing and checkpoint.origin is not None:
            layers = "" if command.is_of_drafter else f" --layers {command.start}-{command.end - 1}"
            remedy = f"splitinfer models pull {command.model} --from ADDRESS{layers}"
            raise ModelError(f"this machine lacks tensors of {command.model}; copy these, too: {remedy}")
        fetch(command.model, checkpoint, missing, lambda *at: report(Progress("download", *at)))
        return checkpoint


def free_memory() -> None:
    """Give the system back the memory that MLX and the C library keep for arrays and objects to come."""
    mx.clear_cache()
    release_freed()


def _alone(_half: Half) -> Pair:
    raise ProtocolError("a stage across two machines is loaded by workers alone")


@dataclass(frozen=True, slots=True)
class LoadedStage:
    """A stage in memory, the command that loaded it, and its model. ``claim``: the key under which its memory is
    announced. ``ready``: the Ready message, without the values that change while the stage is loaded. ``disk``: its KV
    on disk, if it stores any. ``arrays_per_block``: the arrays of a stored block. ``need``: the bytes that it takes."""

    command: Load
    claim: object
    checkpoint: Checkpoint
    runner: StageRunner
    ready: Ready
    disk: StageDisk | None
    arrays_per_block: int
    need: Need
    group: Pair | None = None

    def begin_anew(self) -> Ready:
        """Forget all sequences, and return the Ready message with the current free memory and stored blocks."""
        self.runner.reset()
        sum_seconds = 0.0
        if self.group is not None:
            self.group.check()
            sum_seconds = self.group.seconds(_ROW)
        kept = None if self.disk is None else self.disk.offer()
        free = announce_loaded(self.need, self.command.kv_tokens, self.claim)
        limit_to(free)
        stored = counted_bytes(self.need.kv_stored, self.arrays_per_block, free, resource_limit())
        return replace(self.ready, free_bytes=free, kv_bytes_stored=stored, kept=kept, sum_seconds=sum_seconds)

    def rest(self) -> None:
        """Forget all sequences and announce the stage as idle, until ``begin_anew``."""
        self.runner.reset()
        announce_idle(self.claim)

    def close(self) -> None:
        """Finish writing KV to disk within ``CLOSE_SECONDS``, and withdraw the claim on memory, because the process
        ends or another stage takes this one's place."""
        if self.disk is not None:
            self.disk.close(CLOSE_SECONDS)
        self.runner.close()
        withdraw(self.claim)

    def serves(self, command: Load) -> bool:
        """Return whether this stage can serve ``command`` without reloading. The command may differ in keys and peers,
        and in numbers of tokens that have room."""
        own = self.command
        same = replace(
            own,
            kv_tokens=command.kv_tokens,
            max_tokens=command.max_tokens,
            peers=command.peers,
            reader_keys=command.reader_keys,
        )
        return command.kv_tokens <= own.kv_tokens and command.longest <= own.longest and same == command


def load(
    command: Load,
    name: str,
    report: OnLoading,
    disk: Disk | None = None,
    source: WeightSource | None = None,
    join: Join = _alone,
) -> LoadedStage:
    """Load a stage. ``name``: the stage's name, for messages. ``disk``: where to store KV, if the command asks for
    that. ``source``: where weights come from; ``None``: this machine and the hub. ``join``: meets the other rank.

    Raises:
        ModelError: the model is not available, has other weights, cannot be cut there, or does not fit.
        PeerError: a machine that weights are copied from is gone, or sent something else.
        ConfigError: the emulated accelerator does not fit the layout.
    """
    free_memory()
    _check_classes(command, name)
    device = open_device(command.stage, command.bounds, 1 + (command.half is not None))
    source = source or WeightSource()
    checkpoint = source.open(command)
    difference = command.fingerprint.difference(checkpoint.fingerprint())
    if difference:
        raise ModelError(f"{name} has other weights for {command.model} than the coordinator: {difference}")
    dtype = resolve_dtype(command.dtype)
    kv_format = format_of(command.kv_format)
    drafter = _open_drafter(command, checkpoint, source, report)
    group, cut = None if command.half is None else join(command.half), (command.start, command.end)
    drafter_dtype = resolve_dtype(command.drafter_dtype or command.dtype)
    found = survey(
        checkpoint, *cut, dtype, kv_format, drafter=drafter, drafter_dtype=drafter_dtype, sees=command.sees, group=group
    )
    if command.float32_head:
        found = found.with_float32_head()
    scores = score_bytes(found.attention, backend(), STEP_ROWS, command.kv_tokens)
    found = _with_experts(command, replace(found, need=replace(found.need, scores=scores)))
    what = f"stage {name} (layers {command.start} to {command.end - 1})"
    claim = object()  # not the name, which stages of several models in one process may share
    free = reserve(found.need, command.kv_tokens, what, claim)
    try:
        said = [found.on_disk, found.need.warning(command.kv_tokens, free)]
        report(Progress("survey", 0, found.need.weights, "; ".join(filter(None, said))))
        own, checkpoint = drafter is checkpoint, source.fetch(command, checkpoint, found.tensors, report)
        set_limits(found.need, command.kv_tokens)
        drafter, disk = checkpoint if own else drafter, disk if command.kv_root else None
        return _read(command, claim, checkpoint, drafter, found, dtype, device, report, disk, group)
    except BaseException:
        withdraw(claim)
        raise


def _with_experts(command: Load, found: Survey) -> Survey:
    """Return the survey with the memory for experts that the command gives, or that is free beside the KV.

    Raises:
        ModelError: the command gives too little.
    """
    if command.experts_bytes is not None:
        return found.with_experts(command.experts_bytes)
    room = experts_room(found.need, command.kv_tokens, found.all_experts)
    return found.with_experts(room) if room >= least_bytes(found.experts) else found


def _check_classes(command: Load, name: str) -> None:
    """Raise ModelError if the model needs mlx-vlm and this machine does not have the coordinator's version of it."""
    if not command.mlx_vlm or (here := mlx_vlm.version()) == command.mlx_vlm:
        return
    lacks = f"has mlx-vlm {here}" if here else "lacks mlx-vlm"
    raise ModelError(
        f"{name} {lacks}, and {command.model} needs version {command.mlx_vlm} of it on every machine: "
        f"pip install 'mlx-vlm=={command.mlx_vlm}'"
    )


def _open_drafter(command: Load, checkpoint: Checkpoint, source: WeightSource, report: OnLoading) -> Checkpoint | None:
    """Return the checkpoint, maybe the model's own, of the drafter whose heads or taps the stage has, or None.

    Raises:
        ModelError: the drafter is not available, or differs from the coordinator's.
        PeerError: a machine that it is copied from is gone, or sent something else.
    """
    if command.drafter == MTP:
        return checkpoint if command.end == command.bounds[-1] else None
    if not command.drafter:
        return None
    own = command.of_drafter
    found = source.open(own)
    if other := own.fingerprint.difference(found.fingerprint()):
        raise ModelError(f"the drafter {own.model} has other weights here than on the coordinator: {other}")
    return source.fetch(own, found, read_of(found, is_last=command.is_last), report)


def _read(
    command: Load,
    claim: object,
    checkpoint: Checkpoint,
    drafter: Checkpoint | None,
    found: Survey,
    dtype: str | None,
    device: Device,
    report: OnLoading,
    disk: Disk | None,
    group: Pair | None,
) -> LoadedStage:
    held = HeldReport()

    def reading(done: int, total: int) -> None:
        held.now()
        report(Progress("load", done, total))

    what = checkpoint, found, command.start, command.end, dtype, reading, drafter
    drafter_dtype = resolve_dtype(command.drafter_dtype or command.dtype)
    model = load_stage(*what, drafter_dtype=drafter_dtype, sees=command.sees, group=group)
    if model.experts is not None and device is default_device():
        device = Device(computes_at_launch=True)  # each layer's choice of experts is evaluated before the launch
    if command.float32_head:
        model.use_float32_head()
    outcome = _tried(command, checkpoint, dtype, model, report, group)
    samples = sample_blocks(model) if outcome.why_no_blocks is None else []
    if model.experts is not None:
        model.experts.take_counts()  # of the trials
    if not samples:
        log.info("no KV is cached for other requests: %s", outcome.why_no_blocks)
    on_disk = StageDisk(disk, command, dtype, model.kv_places, samples) if disk and samples else None
    runner = StageRunner(model, command.stage, command.vocab_size, device, on_disk, group)
    runner.use(outcome)
    ready = _ready(command, found, model, runner, keeps_blocks=bool(samples))
    # Modules and layers stay alive. A full garbage collection during a step takes 60 ms if it visits them, and almost
    # no time once they are frozen.
    gc.collect()
    gc.freeze()
    num_arrays = len(samples[-1].arrays()) if samples else 0
    return LoadedStage(command, claim, checkpoint, runner, ready, on_disk, num_arrays, found.need, group)


def _tried(
    command: Load, checkpoint: Checkpoint, dtype: str | None, model: StageModel, report: OnLoading, group: Pair | None
) -> TrialOutcome:
    """Return the outcome of the stage's trials, made now or when it was loaded before.

    Raises:
        ModelError: KV in the requested format changes the output too much.
    """
    path = outcomes.path_of(command, checkpoint, dtype)
    outcome = outcomes.remembered(path)
    both_know = outcome is not None if group is None else group.all_of([outcome is not None])[0]
    if outcome is None or not both_know:
        outcome = outcomes.try_stage(model, command.kv_format, lambda it: report(Progress("try", 0, 0, it)))
        if outcome.is_sure:
            outcomes.remember(path, outcome)
    model.use_format(format_of(command.kv_format))
    if not outcome.kv_error <= _MAX_ERROR:
        raise ModelError(
            f"KV as {command.kv_format} changes what layers {command.start} to {command.end - 1} compute by "
            f"{100 * outcome.kv_error:.0f} %, which is more than rounding; use another kv_format"
        )
    return outcome


def _ready(command: Load, found: Survey, model: StageModel, runner: StageRunner, *, keeps_blocks: bool) -> Ready:
    """Return the Ready message of a stage, without the values that ``begin_anew`` finds."""
    row = None  # one row of the hidden states that the stage takes
    if model.row_spec is not None:
        width, dtype = model.row_spec
        row = TensorSpec(name_of(dtype), (width,))
    return Ready(
        stage=command.stage,
        weight_bytes=found.need.weights,
        kv_bytes_per_token=found.need.kv_per_token,
        kv_bytes_fixed=found.need.kv_fixed,
        kv_bytes_stored=0,
        free_bytes=0,
        rewind=NEVER if found.rewind == WITHIN_DRAFTS and not runner.rolls_back else found.rewind,
        keeps_blocks=keeps_blocks,
        kept=None,
        hidden=row,
        device=device_name(),
    )
