"""Runs a drafter on the last stage (``heads``), with the rows of many sequences as a stage has them (``rows``). Its KV
is one more cache of each sequence, as long as the layers'. The entry of token i comes from hidden state i - 1 and token
i, or, where several tokens are drafted at once, from hidden state i alone."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import mlx.core as mx

from splitinfer.models.cohort import SequenceCaches
from splitinfer.models.cut import StageModel
from splitinfer.models.dflash import DFlash
from splitinfer.models.eagle3 import Eagle3
from splitinfer.models.growing import GrowingKVCache
from splitinfer.models.heads import BlockPart, HeadRows
from splitinfer.models.kv_blocks import KVBlock, cut
from splitinfer.models.mlx_lm import make_prompt_cache
from splitinfer.models.mtp import PredictionHeads
from splitinfer.models.rows import attend_by_rows

Heads = PredictionHeads | Eagle3 | DFlash


class WithHeads:
    """A last stage and its heads, whose KV is one more cache of each sequence.

    Raises:
        ModelError: the heads cannot run on this stage.
    """

    def __init__(self, stage: StageModel, heads: Heads) -> None:
        self.stage, self.heads = stage, heads
        attend_by_rows(stage.whole)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the heads' KV for a token."""
        caches = self.make_caches()
        list(self.probe(caches))
        own = caches.own[-len(self.heads.layers) :]
        return sum(a.shape[1] * a.shape[3] * a.itemsize for cache in own for a in (cache.keys, cache.values))

    def sample(self) -> KVBlock:
        """A block of a few tokens, as it would be kept, with the heads' KV."""
        caches, rows = self.make_caches(), 4
        hidden = self.stage.made_up_hidden(rows, 0)
        self.stage(mx.zeros((1, rows), mx.int32), caches, None if hidden is None else hidden[None], rows)
        self._run_nothing(caches, rows)
        return cut(caches, self.own_places, 0, rows)

    @property
    def own_places(self) -> list[int]:
        """The places of the stage's own caches, and of the heads'."""
        before = len(make_prompt_cache(self.stage.whole))
        return [*self.stage.own_places, *range(before, before + len(self.heads.layers))]

    def make_caches(self) -> SequenceCaches:
        """Empty caches for one sequence; the heads' are the last."""
        caches, own = self.stage.make_caches(), [GrowingKVCache() for _ in self.heads.layers]
        caches.full += own
        caches.own += own
        return caches

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        """The stage's own layers."""
        return self.stage(*args, **kwargs)

    def run(
        self,
        tokens: mx.array,
        hidden: mx.array,
        parts: Sequence[tuple[SequenceCaches, int, mx.array]],
        positions: mx.array,
    ) -> mx.array:
        """[T, d] of T rows, and their entries in the heads' KV.

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
        """[B, d] of the rows of blocks; and the entries of the context's rows in the heads' KV.

        Args:
            tokens: [B] ids, of all blocks in the order of ``parts``; ``None`` if there is none.
            context: [C, d] states, of all parts.
        """
        blocks = cast(DFlash, self.heads)
        blocks.keep(context, parts)
        if tokens is None:
            return None
        return blocks(blocks.embed(tokens[:, None]), [part for part in parts if part.rows])[:, 0]

    def logits(self, hidden: mx.array) -> mx.array:
        """[n, vocabulary] from [n, d] of ``run``."""
        return self.heads.logits(hidden[:, None])[:, 0]

    def probe(self, caches: SequenceCaches | None = None) -> Iterator[mx.array]:
        """What a call for two rows computes, not evaluated."""
        yield self._run_nothing(caches or self.make_caches(), 2)

    def _run_nothing(self, caches: SequenceCaches, rows: int) -> mx.array:
        """[n, vocabulary] of so many rows of made-up hidden states."""
        tokens, hidden = mx.zeros(rows, mx.int32), self.heads.states(self.heads.zeros(rows))
        if not self.heads.at_once:
            visible = mx.tri(rows, rows).astype(mx.bool_)
            return self.logits(self.run(tokens, hidden, [(caches, rows, visible)], mx.arange(rows)))
        found = self.run_blocks(tokens, hidden, [BlockPart(caches, 0, rows, mx.array(rows), rows)])
        assert found is not None
        return cast(DFlash, self.heads).behind(self.logits(found), found, tokens)
