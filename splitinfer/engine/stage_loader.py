"""From a ``Load`` order to a stage that runs: the same steps on the coordinator and on a worker.

open -> survey -> compare fingerprints -> does it fit? -> fetch files -> read weights. What it needs and
what is free is reported before anything is read.
"""

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from splitinfer.engine.stage_runner import StageRunner
from splitinfer.engine.versions import device_name
from splitinfer.errors import ModelError
from splitinfer.models.checkpoint import Checkpoint
from splitinfer.models.cut import StageModel
from splitinfer.models.hub import fetch, open_model
from splitinfer.models.kv_trial import why_no_blocks
from splitinfer.models.loader import Survey, load_stage, resolve_dtype, survey
from splitinfer.models.memory import check_fit, free_bytes, on_gpu, set_limits
from splitinfer.models.products import turn_products
from splitinfer.wire.messages import Load, Progress, Ready

log = logging.getLogger(__name__)

Report = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class LoadedStage:
    """A stage in memory, and what it is."""

    order: Load
    runner: StageRunner
    ready: Ready

    def serves(self, order: Load) -> bool:
        """Whether this carries the order out as it is: the same but for KV, and room for as much of that."""
        return order.kv_tokens <= self.order.kv_tokens and replace(self.order, kv_tokens=order.kv_tokens) == order


def load(order: Load, name: str, report: Report) -> LoadedStage:
    """Carry out a Load order. ``name`` is the stage's, for messages.

    Raises:
        ModelError: the model is not here, is another one, cannot be cut there, or does not fit.
    """
    checkpoint = open_model(order.model)
    difference = order.fingerprint.difference(checkpoint.fingerprint())
    if difference:
        raise ModelError(f"{name} has other weights for {order.model} than the coordinator: {difference}")
    dtype = resolve_dtype(order.dtype, gpu=on_gpu())
    found = survey(checkpoint, order.start, order.end, dtype)
    free = check_fit(found.need, order.kv_tokens, f"stage {name} (layers {order.start} to {order.end - 1})")
    report(Progress("survey", 0, found.need.weights, found.need.sentence(order.kv_tokens, free)))
    fetch(
        order.model, checkpoint, found.files, lambda done, total, file: report(Progress("download", done, total, file))
    )
    set_limits(found.need, order.kv_tokens)
    return _read(order, checkpoint, found, dtype, report)


def _keeps_blocks(model: StageModel) -> bool:
    reason = why_no_blocks(model)
    if reason is not None:
        log.info("no KV is kept for other requests: %s", reason)
    return reason is None


def _read(order: Load, checkpoint: Checkpoint, found: Survey, dtype: str | None, report: Report) -> LoadedStage:
    model = load_stage(
        checkpoint, found, order.start, order.end, dtype, lambda done, total: report(Progress("load", done, total))
    )
    turn_products(model.whole)
    need = found.need
    ready = Ready(
        stage=order.stage,
        weight_bytes=need.weights,
        kv_bytes_per_token=need.kv_per_token,
        kv_bytes_fixed=need.kv_fixed,
        kv_bytes_stored=need.kv_stored,
        free_bytes=free_bytes(),
        rewind=found.rewind,
        keeps_blocks=_keeps_blocks(model),
        device=device_name(),
    )
    runner = StageRunner(model, order.stage, order.vocab_size)
    runner.prepare()
    # Modules and layers stay. A full collection of garbage, in the middle of some step, takes 60 ms to look
    # at them again, and none without.
    gc.collect()
    gc.freeze()
    return LoadedStage(order, runner, ready)
