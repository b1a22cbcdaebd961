"""Stages in this process that run slices as plans have them, without an engine."""

from collections.abc import Sequence
from itertools import pairwise

import mlx.core as mx
import mlx.nn as nn

from splitinfer.models.caches.rollback import Rollback
from splitinfer.models.caches.rows import SequenceRows
from splitinfer.models.cut.cut import StageModel
from splitinfer.models.rows.kv_pool import KVPool
from splitinfer.models.rows.step import StepModel, arrays_to_evaluate


def cut_at(model: nn.Module, *borders: int) -> list[StageModel]:
    return [StageModel(model, start, end) for start, end in pairwise((0, *borders, len(model.layers)))]


class Planned:
    """The steps of some stages, and their pools."""

    def __init__(
        self, stages: Sequence[StageModel], way: Rollback = Rollback.MODULES, *, exact: bool | None = None
    ) -> None:
        self.stages = stages
        self.steps = [StepModel(stage, exact=exact) for stage in stages]
        self.pools = [KVPool(stage, way) for stage in stages]

    def open(self, *seq_ids: int) -> None:
        for pool in self.pools:
            for seq_id in seq_ids:
                pool.open(seq_id)

    def run(self, *slices: tuple[int, int, list[int], int], follows: bool = False) -> mx.array:
        """What the last stage returns for slices of (sequence, start, tokens, number of drafts)."""
        hidden = None
        for pool, step in zip(self.pools, self.steps, strict=True):
            parts = []
            for seq_id, start, tokens, drafts in slices:
                caches, count = pool.at(seq_id, start), len(tokens)
                parts.append(SequenceRows(caches, start, count, count, pool.begin(seq_id, drafts, follows=follows)))
            outputs = step.run(parts, [token for _, _, tokens, _ in slices for token in tokens], hidden)
            hidden = mx.concatenate(outputs)
            mx.eval(hidden, arrays_to_evaluate(parts))
        assert hidden is not None
        return hidden
