"""A drafter that was trained on its target's hidden states: what each stage reads of it, and what the last one runs.

It is among the model's own tensors (``mtp``), or in a folder of its own whose config.json says of what kind it is
(``eagle3``, ``dflash``). Every stage taps its layers; the last one has the rest.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from splitinfer.errors import ModelError
from splitinfer.models.caches.cohort import SequenceCaches
from splitinfer.models.caches.rows import attend_by_rows
from splitinfer.models.cut.cut import StageModel
from splitinfer.models.drafters import dflash, eagle3
from splitinfer.models.drafters.dflash import DFlash, is_dflash
from splitinfer.models.drafters.eagle3 import Eagle3, is_eagle3
from splitinfer.models.drafters.heads import BlockPart, HeadRows, check_width
from splitinfer.models.drafters.mtp import PREFIX, PredictionHeads, tensors_of
from splitinfer.models.folder.checkpoint import Checkpoint
from splitinfer.models.library.layers import type_name
from splitinfer.models.load.building import cast_floats

Heads = PredictionHeads | Eagle3 | DFlash


class WithHeads:
    """A last stage and its heads, whose caches are the last of each sequence.

    Raises:
        ModelError: the heads cannot run on this stage.
    """

    def __init__(self, stage: StageModel, heads: Heads) -> None:
        self.heads = heads  # not the stage, which has this: a cycle is freed late
        attend_by_rows(stage.whole)

    def bytes_per_token(self, caches: SequenceCaches) -> int:
        """Return the bytes of the heads' KV for a token. ``caches``: the stage's, empty."""
        self.run_nothing(caches)
        own = caches.own[-len(self.heads.layers) :]
        return sum(a.shape[1] * a.shape[3] * a.itemsize for cache in own for a in (cache.keys, cache.values))

    def run(
        self,
        tokens: mx.array,
        hidden: mx.array,
        parts: Sequence[tuple[SequenceCaches, int, mx.array]],
        positions: mx.array,
    ) -> mx.array:
        """Return [T, d] of T rows, and their entries in the heads' KV.

        Args:
            tokens: [T] ids; ``hidden``: [T, d] states before them, behind the target's last norm.
            parts: of each sequence its caches, its number of rows, and which tokens each sees.
            positions: [T], for the rotary embedding.
        """
        caches = [
            HeadRows([(own.own[layer - len(self.heads.layers)], n, visible) for own, n, visible in parts], positions)
            for layer in range(len(self.heads.layers))
        ]
        heads = cast(PredictionHeads | Eagle3, self.heads)
        return heads(heads.embed(tokens[:, None]), hidden[:, None], caches)[:, 0]

    def run_blocks(self, tokens: mx.array | None, context: mx.array, parts: Sequence[BlockPart]) -> mx.array | None:
        """Return [B, d] of the rows of blocks; and the entries of the context's rows in the heads' KV.

        Args:
            tokens: [B] ids, of all blocks in the order of ``parts``. Return None if there is none.
            context: [C, d] states, of all parts.
        """
        blocks = cast(DFlash, self.heads)
        blocks.keep(context, parts)
        if tokens is None:
            return None
        return blocks(blocks.embed(tokens[:, None]), [part for part in parts if part.rows])[:, 0]

    def logits(self, hidden: mx.array) -> mx.array:
        """Return [n, vocabulary] from [n, d] of ``run``."""
        return self.heads.logits(hidden[:, None])[:, 0]

    def run_nothing(self, caches: SequenceCaches, rows: int = 2) -> mx.array:
        """Return [n, vocabulary] of so many rows of made-up hidden states, not evaluated. ``caches``: the stage's."""
        tokens, like = mx.zeros(rows, mx.int32), self.heads.norm.weight
        hidden = self.heads.states(mx.zeros((rows, like.shape[-1]), like.dtype))
        if not self.heads.at_once:
            visible = mx.tri(rows, rows).astype(mx.bool_)
            return self.logits(self.run(tokens, hidden, [(caches, rows, visible)], mx.arange(rows)))
        found = self.run_blocks(tokens, hidden, [BlockPart(caches, 0, rows, mx.array(rows), rows)])
        assert found is not None
        return cast(DFlash, self.heads).behind(self.logits(found), found, tokens)


TrainedArrays = Mapping[str, mx.array]


def is_trained(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint is that of a drafter that runs on the last stage."""
    return is_eagle3(checkpoint.config) or is_dflash(checkpoint.config)


def at_once(checkpoint: Checkpoint) -> int:
    """Return the most tokens that a drafter drafts at once; 0 where it drafts one after the other."""
    return dflash.at_once(checkpoint.config) if is_dflash(checkpoint.config) else 0


def read_of(drafter: Checkpoint, *, is_last: bool) -> frozenset[str]:
    """Return the names of the tensors that a stage reads of a drafter in a folder of its own: of the projection, or
    all."""
    return frozenset(name for name in drafter.tensors if is_last or name.removeprefix("model.").startswith("fc."))


def join(stage: StageModel, drafter: Checkpoint, arrays: TrainedArrays, dtype: str | None) -> dict[str, mx.array]:
    """Have a stage tap the layers that a drafter reads, and run it if it is the last one (``StageModel.heads``); what
    the stage has of its weights, by name, not evaluated.

    Raises:
        ModelError: there is no drafter, it belongs to another model, or this one cannot have any.
    """
    kind, own = (_of_folder if is_trained(drafter) else _mtp), dict[str, mx.array]()
    try:
        parts, make = kind(stage, drafter, arrays)
        for index, part in parts.items():
            if isinstance(part, nn.Module) and stage.start <= index < stage.end:
                cast_floats(part, dtype)
                own |= {f"taps.{index}.{name}": array for name, array in tree_flatten(part.parameters())}
        stage.tap(parts)
        if not stage.is_last:
            return own
        heads = make()
        cast_floats(heads, dtype)
        stage.heads = WithHeads(stage, heads)
        stage.heads.run_nothing(stage.make_caches())
    except (ValueError, TypeError, AttributeError) as error:
        raise ModelError(
            f"the drafter in {drafter.folder} does not fit the layers of {type_name(stage.whole)} ({error}); it "
            "belongs to another model, or is of a form that is not known"
        ) from error
    return own | {f"heads.{name}": array for name, array in tree_flatten(heads.parameters())}


_Kind = tuple[dict[int, Callable[[mx.array], mx.array]], Callable[[], Heads]]


def _mtp(stage: StageModel, drafter: Checkpoint, arrays: TrainedArrays) -> _Kind:
    if not tensors_of(arrays, stage.num_layers):
        raise ModelError(
            f"{drafter.folder} has no prediction heads ({PREFIX}* or model.layers.{stage.num_layers}.*): mlx-lm "
            "leaves them out when it converts; copy these tensors from the original repository into a file "
            "model-mtp.safetensors of this folder, or draft with a small model or 'ngram'"
        )
    return {stage.num_layers - 1: lambda hidden: hidden}, lambda: PredictionHeads(stage.whole, arrays)


def _of_folder(stage: StageModel, drafter: Checkpoint, arrays: TrainedArrays) -> _Kind:
    config, model = drafter.config, stage.whole
    module, kind = (dflash, DFlash) if is_dflash(config) else (eagle3, Eagle3)
    taps = module.taps_of(config, model, arrays)
    if not (stage.is_first and stage.is_last):
        check_width(model, module.renamed(arrays))
    return taps, lambda: kind(config, model, arrays)
