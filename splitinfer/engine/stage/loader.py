"""From a ``Load`` order to a stage that runs: the same steps on the coordinator and on a worker.

open -> survey -> compare fingerprints -> does it fit? -> fetch files -> read weights. What it needs and
what is free is reported before anything is read.
"""

import gc
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from splitinfer.core.kv.block_tree import DiskBlock, Key
from splitinfer.core.kv.format import format_of
from splitinfer.core.plan import TensorSpec
from splitinfer.engine.stage.disk import StageDisk
from splitinfer.engine.stage.runner import StageRunner
from splitinfer.engine.versions import device_name
from splitinfer.errors import ModelError
from splitinfer.kvstore.store import Disk
from splitinfer.models.checkpoint import Checkpoint
from splitinfer.models.cut import StageModel
from splitinfer.models.hub import fetch, open_model
from splitinfer.models.kv_trial import off_by, try_blocks
from splitinfer.models.loader import Survey, load_stage, resolve_dtype, survey
from splitinfer.models.memory import check_fit, free_bytes, on_gpu, set_limits
from splitinfer.models.openblas import use_transposed_products
from splitinfer.models.tensors import name_of
from splitinfer.wire.messages import Load, Progress, Ready

log = logging.getLogger(__name__)

_MOST_OFF = 0.7  # relative error by few bits of KV; more, and something else is wrong
_WRITE = 1.0  # seconds for KV still to be written to disk, when the stage goes

Report = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class LoadedStage:
    """A stage in memory, and what it is. ``disk``: where it keeps KV, if it does."""

    order: Load
    runner: StageRunner
    ready: Ready
    disk: StageDisk | None

    def offer(self) -> Ready:
        """What it is and has at the moment, with nobody's KV in memory."""
        self.runner.reset()
        kept = None if self.disk is None else self.disk.offer()
        return replace(self.ready, free_bytes=free_bytes(), kept=kept)

    def kept(self, keys: Iterable[Key]) -> tuple[DiskBlock, ...]:
        """The tokens of these blocks, as far as they are on this stage's disk."""
        return () if self.disk is None else self.disk.kept(keys)

    def close(self) -> None:
        """Write the KV that is still to be written, for as long as somebody who ends a process would wait."""
        if self.disk is not None:
            self.disk.close(_WRITE)

    def serves(self, order: Load) -> bool:
        """Whether this carries the order out as it is: the same but for KV, and room for as much of that; who brings
        the hidden states is another matter."""
        same = replace(self.order, kv_tokens=order.kv_tokens, upstream_key=order.upstream_key)
        return order.kv_tokens <= self.order.kv_tokens and same == order


def load(order: Load, name: str, report: Report, disk: Disk | None = None) -> LoadedStage:
    """Carry out a Load order. ``name`` is the stage's, for messages; ``disk`` is for KV, if the order asks for it.

    Raises:
        ModelError: the model is not here, is another one, cannot be cut there, or does not fit.
    """
    checkpoint = open_model(order.model)
    difference = order.fingerprint.difference(checkpoint.fingerprint())
    if difference:
        raise ModelError(f"{name} has other weights for {order.model} than the coordinator: {difference}")
    dtype = resolve_dtype(order.dtype, gpu=on_gpu())
    found = survey(checkpoint, order.start, order.end, dtype, format_of(order.kv_format))
    free = check_fit(found.need, order.kv_tokens, f"stage {name} (layers {order.start} to {order.end - 1})")
    report(Progress("survey", 0, found.need.weights, found.need.sentence(order.kv_tokens, free)))
    fetch(
        order.model, checkpoint, found.files, lambda done, total, file: report(Progress("download", done, total, file))
    )
    set_limits(found.need, order.kv_tokens)
    return _read(order, checkpoint, found, dtype, report, disk if order.kv_root else None)


def _read(
    order: Load, checkpoint: Checkpoint, found: Survey, dtype: str | None, report: Report, disk: Disk | None
) -> LoadedStage:
    model = load_stage(
        checkpoint, found, order.start, order.end, dtype, lambda done, total: report(Progress("load", done, total))
    )
    use_transposed_products(model.whole)
    kv_format = format_of(order.kv_format)
    if kv_format is not None:
        off = off_by(model, kv_format)
        log.info("with KV as %s the stage's output differs by %.2g", kv_format.name, off)
        if not off <= _MOST_OFF:
            raise ModelError(
                f"KV as {kv_format.name} changes what layers {order.start} to {order.end - 1} compute by "
                f"{100 * off:.0f} %, which is more than rounding; use another kv_format"
            )
    need, trial = found.need, try_blocks(model)
    if trial.sample is None:
        log.info("no KV is kept for other requests: %s", trial.why_not)
    on_disk = (
        StageDisk.open(disk, order, dtype, model.own_places, trial.sample)
        if disk is not None and trial.sample is not None
        else None
    )
    ready = Ready(
        stage=order.stage,
        weight_bytes=need.weights,
        kv_bytes_per_token=need.kv_per_token,
        kv_bytes_fixed=need.kv_fixed,
        kv_bytes_stored=need.kv_stored,
        free_bytes=free_bytes(),
        rewind=found.rewind,
        keeps_blocks=trial.sample is not None,
        kept=None,
        hidden=_row(model),
        device=device_name(),
    )
    runner = StageRunner(model, order.stage, order.vocab_size, on_disk)
    runner.prepare()
    # Modules and layers stay. A full collection of garbage, in the middle of some step, takes 60 ms to look
    # at them again, and none without.
    gc.collect()
    gc.freeze()
    return LoadedStage(order, runner, ready, on_disk)


def _row(model: StageModel) -> TensorSpec | None:
    if model.hidden_spec is None:
        return None
    width, dtype = model.hidden_spec
    return TensorSpec(name_of(dtype), (width,))
