"""Joins a stage with a drafter that was trained on the target's hidden states.

The drafter is among the model's own tensors (``mtp``), or in a folder of its own whose config.json gives its kind
(``mtp``, ``eagle3``, ``dflash``, ``sequence_heads``). Every stage taps its layers for the drafter; the last stage runs
it.
"""

from collections.abc import Callable
from functools import partial
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from splitinfer.common.model_config import positive, text_part
from splitinfer.errors import ModelError
from splitinfer.models.caches.caches import arrays_of
from splitinfer.models.caches.cohort import SequenceCaches
from splitinfer.models.caches.rows import attend_by_rows
from splitinfer.models.cut.cut import StageModel
from splitinfer.models.drafters import dflash, eagle3, sequence_heads
from splitinfer.models.drafters.dflash import DFlash, is_dflash
from splitinfer.models.drafters.eagle3 import Eagle3, is_eagle3
from splitinfer.models.drafters.heads import HeadArrays, Heads, Target
from splitinfer.models.drafters.mtp import PREFIX, LatentHeads, PredictionHeads, is_latent, tensors_of
from splitinfer.models.drafters.sequence_heads import (
    Assistant,
    LibraryBlocks,
    LibraryHeads,
    heads_within,
    is_assistant,
    is_blocks,
    projection_of,
)  # fmt: skip
from splitinfer.models.folder.checkpoint import Checkpoint
from splitinfer.models.library import mlx_vlm
from splitinfer.models.library.layers import type_name
from splitinfer.models.load.building import build_drafter, cast_floats


class WithHeads:
    """The heads of a last stage, whose caches are each sequence's ``heads``.

    Raises:
        ModelError: the heads cannot run on this stage.
    """

    def __init__(self, stage: StageModel, heads: Heads, dtype: str | None) -> None:
        self.heads = heads  # not the stage, which refers to this object: a cycle is freed late
        attend_by_rows(stage.whole)
        stage(mx.zeros((1, 1), mx.int32), stage.make_caches(), None, 1)  # a graph that is never computed
        kept = stage.take_tapped()
        self._row = stage.row_spec if kept is None else (kept.shape[-1], kept.dtype)
        self._is_float32 = dtype == "float32"

    def states(self, kept: mx.array) -> mx.array:
        """Return the hidden states [T, ...] that the heads read, from the tapped rows [T, w]; in float32 if the heads
        are."""
        found = cast(mx.array, self.heads.states(kept))
        return found.astype(mx.float32) if self._is_float32 else found

    def bytes_per_token(self, caches: SequenceCaches) -> int:
        """Return the bytes of the heads' KV per token. ``caches``: empty caches of the stage."""
        self.run_nothing(caches, _MANY)
        arrays = [array for cache in caches.heads for array in arrays_of(cache)]
        return sum(a.shape[1] * a.shape[3] * a.itemsize if a.ndim == 4 else a.nbytes // _MANY for a in arrays)

    def run_nothing(self, caches: SequenceCaches, rows: int = 2) -> mx.array:
        """Return unevaluated logits or drafts from ``rows`` made-up hidden states. ``caches``: the stage's."""
        assert self._row is not None
        hidden = self.states(mx.zeros((rows, self._row[0]), self._row[1]))
        return cast(mx.array, self.heads.nothing(caches, mx.zeros(rows, mx.int32), hidden))


_MANY = 64  # tokens, to measure the bytes of one


def is_trained(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint is a drafter that runs on the last stage."""
    config = checkpoint.config
    return is_heads(checkpoint) or any(kind(config) for kind in (is_eagle3, is_dflash, is_blocks))


def is_heads(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint has prediction heads or an assistant, which read no hidden states of other stages."""
    return str(checkpoint.config.get("model_type")).endswith("_mtp") or is_assistant(checkpoint.config)


def at_once(checkpoint: Checkpoint) -> int:
    """Return the most tokens that a drafter drafts at once, or 0 if it drafts one after the other.

    Raises:
        ModelError: only mlx-vlm knows, and is not installed.
    """
    if is_blocks(checkpoint.config):
        return int(sequence_heads.told_of_blocks(checkpoint.config).block_size) - 1
    return dflash.at_once(checkpoint.config) if is_dflash(checkpoint.config) else 0


def read_of(drafter: Checkpoint, *, is_last: bool) -> frozenset[str]:
    """Return the tensors that a stage reads of a drafter in its own folder: the projection's of taps, or all if it
    ``is_last``."""
    if is_heads(drafter) and not is_last:
        return frozenset()
    return frozenset(name for name in drafter.tensors if is_last or projection_of({name: 0}))


def join(stage: StageModel, drafter: Checkpoint, arrays: HeadArrays, dtype: str | None) -> dict[str, mx.array]:
    """Make a stage tap its layers for a drafter, and run the drafter if it is the last stage (``StageModel.heads``).
    Return the stage's part of the drafter's weights by name, not evaluated.

    Raises:
        ModelError: there is no drafter, it belongs to another model, or this model cannot have one.
    """
    kind, own = (_of_folder if is_trained(drafter) and not is_heads(drafter) else _mtp), dict[str, mx.array]()
    if kind is _mtp and not stage.is_last:
        return own
    try:
        parts, make = kind(stage, drafter, arrays)
        for index, part in parts.items():
            if isinstance(part, nn.Module) and stage.start <= index < stage.end:
                cast_floats(part, dtype)
                own |= {f"taps.{index}.{name}": array for name, array in tree_flatten(part.parameters())}
        target = Target.of(stage.whole)
        if kind is not _mtp:
            if own:  # the stage reads it, too
                own |= {f"mixer.{name}": array for name, array in tree_flatten(target.mixer.parameters())}
            parts = {index: partial(target.contracted, then=part) for index, part in parts.items()}
        stage.tap(parts, target.size)
        if not stage.is_last:
            return own
        heads = make()
        cast_floats(heads, dtype)
        stage.heads = WithHeads(stage, heads, dtype)
        stage.heads.run_nothing(stage.make_caches())
    except (ValueError, TypeError, AttributeError) as error:
        raise ModelError(
            f"the drafter in {drafter.folder} does not fit the layers of {type_name(stage.whole)} ({error}); it "
            "belongs to another model, or has an unknown form"
        ) from error
    return own | {f"heads.{name}": array for name, array in tree_flatten(heads.parameters())}


_Kind = tuple[dict[int, Callable[[mx.array], mx.array]], Callable[[], Heads]]


def _mtp(stage: StageModel, drafter: Checkpoint, arrays: HeadArrays) -> _Kind:
    own, there = tensors_of(arrays, stage.num_layers), stage.num_layers
    layers = positive(text_part(drafter.config), "num_hidden_layers") or there
    if is_heads(drafter) and not is_assistant(drafter.config) and layers != there:
        raise ModelError(f"the heads are for a model of {layers} layers, and {type_name(stage.whole)} has {there}")
    if "fc.weight" in own.values() and not is_latent(own):
        kind: Callable[[], Heads] = partial(PredictionHeads, stage.whole, arrays)
    elif is_assistant(drafter.config):
        kind = partial(Assistant, build_drafter(drafter, arrays), stage)
    elif is_heads(drafter):
        kind = partial(LibraryHeads, build_drafter(drafter, arrays), stage.whole)
    elif (found := heads_within(drafter.config, arrays)) is not None:
        kind = partial(LibraryHeads, found, stage.whole)
    elif "fc.weight" in own.values():
        kind = partial(LatentHeads, stage.whole, arrays)
    elif own:
        need = "mlx-vlm has no class for them" if mlx_vlm.is_installed() else "pip install mlx-vlm adds their class"
        raise ModelError(f"the prediction heads of {type_name(stage.whole)} have a form of their own, and {need}")
    else:
        raise ModelError(
            f"{drafter.folder} has no prediction heads ({PREFIX}* or model.layers.{stage.num_layers}.*): mlx-lm "
            "leaves them out when it converts; copy these tensors from the original repository into a file "
            "model-mtp.safetensors of this folder, or draft with a small model or 'ngram'"
        )
    return {stage.num_layers - 1: lambda hidden: hidden}, kind


def _of_folder(stage: StageModel, drafter: Checkpoint, arrays: HeadArrays) -> _Kind:
    config, model = drafter.config, stage.whole
    if is_blocks(config):
        taps, own = sequence_heads.taps_of(config, model, arrays), projection_of(arrays)
    else:
        module, kind = (dflash, DFlash) if is_dflash(config) else (eagle3, Eagle3)
        taps, own = module.taps_of(config, model, arrays), module.renamed(arrays)
    width, size = own["fc.weight"].shape[0], Target.of(model).size
    if width > size and not (stage.is_first and stage.is_last):
        raise ModelError(f"the drafter's hidden states have {width} numbers, and a row on a link has {size}")
    if is_blocks(config):
        return taps, lambda: LibraryBlocks(build_drafter(drafter, arrays), model)
    return taps, lambda: kind(config, model, arrays)
