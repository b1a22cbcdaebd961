"""Drafters on the last stage, trained on the target's own hidden states: what they have in common, and how they run.

    hidden state of token i, or a row made of several ─┐
    embedding of token i + 1 ──────────────────────────┴─ a decoder layer or two, own KV ─ logits of token i + 2
                                                                              └─ in the place of the hidden state, for
                                                                                 the next draft

A *kind* of them is a class of the form ``Heads``, which draft one token after the other: the prediction heads of a
checkpoint (``mtp``), and ``eagle3``; or of the form ``Blocks``, which draft several at once: ``dflash``. All run the
rows of many sequences as a stage does (``rows``), and their KV is one more cache of each sequence (``WithHeads``): it
is rolled back, kept, written to disk and joined as a layer's is. The entry of token i comes from hidden state i - 1 and
token i, or, of ``Blocks``, from hidden state i alone; so this KV has the length of the layers'.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import mlx.core as mx
import mlx.nn as nn

from splitinfer.models.cohort import SequenceCaches
from splitinfer.models.cut import StageModel
from splitinfer.models.growing import GrowingKVCache
from splitinfer.models.kv_blocks import KVBlock, cut
from splitinfer.models.mlx_lm import make_prompt_cache, switch_layers
from splitinfer.models.quantised import attention
from splitinfer.models.rows import NewKV, attend_by_rows

_LINEAR = {
    nn.Linear: nn.QuantizedLinear,
    switch_layers.SwitchLinear: switch_layers.QuantizedSwitchLinear,
    nn.Embedding: nn.QuantizedEmbedding,
}
_OF = {quantised: plain for plain, quantised in _LINEAR.items()}
_MODES = {(32, 4): "mxfp4", (16, 4): "nvfp4", (32, 8): "mxfp8"}  # by group size and bits, of weights without biases


class _Common(Protocol):
    """``layers``: those with KV; ``like``: the target's layer that costs as much as one of them; ``at_once``: the most
    tokens that are drafted at once, 0 where they are drafted one after the other."""

    layers: Sequence[Any]
    like: int
    at_once: int

    def parameters(self) -> Any:
        """Its own weights."""
        ...

    def zeros(self, n: int) -> mx.array:
        """[n, d] hidden states of nothing."""
        ...

    def states(self, kept: mx.array) -> mx.array:
        """[T, d] hidden states as it takes them, from what the stage keeps of a step."""
        ...

    def check(self, stage: StageModel) -> None:
        """Raise ModelError where a loaded stage does not compute what they assume."""
        ...

    def embed(self, tokens: mx.array) -> mx.array:
        """The tokens' embeddings."""
        ...

    def logits(self, hidden: mx.array) -> mx.array:
        """[n, 1, vocabulary] from [n, 1, d]."""
        ...


class Heads(_Common, Protocol):
    """A kind of drafter that drafts one token after the other."""

    def __call__(self, embedded: mx.array, hidden: mx.array, caches: Sequence["HeadRows"]) -> mx.array:
        """[T, 1, d] hidden states of T rows, from the embeddings of their tokens and the hidden states before them."""
        ...


class Blocks(_Common, Protocol):
    """A kind of drafter that drafts a block at once."""

    def masks(self, n: int) -> mx.array:
        """[n] tokens that stand for drafts in a block."""
        ...

    def keep(self, context: mx.array, parts: Sequence["BlockPart"]) -> None:
        """Write [C, d] hidden states into the caches of the sequences that they are of."""
        ...

    def __call__(self, embedded: mx.array, parts: Sequence["BlockPart"]) -> mx.array:
        """[B, 1, d] of the rows of all blocks, whose embeddings are given."""
        ...

    def behind(self, logits: mx.array, hidden: mx.array, before: mx.array) -> mx.array:
        """[n, vocabulary] of drafts, by ``logits``, the ``hidden`` states [n, d] and the [n] tokens before them."""
        ...


# -- weights -----------------------------------------------------------------------------------------


def filled(module: Any, prefix: str, arrays: Mapping[str, mx.array]) -> Any:
    """A module with the parameters ``prefix...`` of ``arrays``, whose linear layers may be quantised otherwise.

    Raises:
        KeyError: one is not there.
    """
    for key, child in list(module.items()):
        if type(child) in _LINEAR or type(child) in _OF:
            module[key] = linear(prefix + key, arrays, inputs_of(child), _OF.get(type(child), type(child)))
        elif isinstance(child, nn.Module):
            filled(child, f"{prefix}{key}.", arrays)
        elif isinstance(child, mx.array):
            module[key] = arrays[prefix + key]
    return module


def linear(name: str, arrays: Mapping[str, mx.array], inputs: int, kind: Any = nn.Linear) -> Any:
    """A linear layer for so many inputs, or that of experts, or an embedding of so many numbers: with the tensors
    ``name.*``, quantised as they are.

    Raises:
        KeyError: one is not there.
    """
    weight, scales = arrays[f"{name}.weight"], arrays.get(f"{name}.scales")
    made: Any = nn.Module.__new__(kind if scales is None else _LINEAR[kind])
    nn.Module.__init__(made)
    made.weight = weight
    if scales is not None:
        made.scales, made.biases = scales, arrays.get(f"{name}.biases")
        made.group_size, made.bits = inputs // scales.shape[-1], weight.shape[-1] * 32 // inputs
        made.mode = _MODES[made.group_size, made.bits] if made.biases is None else "affine"
    if f"{name}.bias" in arrays:
        made.bias = arrays[f"{name}.bias"]
    return made


def inputs_of(linear: Any) -> int:
    """The numbers that a linear layer takes."""
    return int(linear.weight.shape[-1] if type(linear) in _LINEAR else linear.scales.shape[-1] * linear.group_size)


# -- running -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HeadPart:
    """One sequence's rows [first, last) of a call. ``visible``: bool [n, tokens], which of its tokens each sees."""

    cache: Any
    first: int
    last: int
    visible: mx.array


class HeadRows:
    """The cache that a layer of the heads is given: of the rows of many sequences. ``offset``: [T] positions."""

    def __init__(self, parts: Sequence[HeadPart], positions: mx.array) -> None:
        self._parts, self.offset = parts, positions

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[NewKV, NewKV]:
        """Placeholders for [T, heads, 1, d] keys and values, which ``attend`` stores."""
        return NewKV(self, keys), NewKV(self, values)

    def attend(
        self, queries: mx.array, keys: NewKV, values: NewKV, scale: float, _mask: Any, sinks: mx.array | None
    ) -> mx.array:
        """[T, heads, 1, d]: each sequence's attention over its own keys and values."""
        found = []
        for part in self._parts:
            rows = slice(part.first, part.last)
            q, k, v = (array[rows].transpose(2, 1, 0, 3) for array in (queries, keys.array, values.array))
            k, v = part.cache.update_and_fetch(k, v)
            found.append(attention(q, k, v, scale, part.visible, sinks).transpose(2, 1, 0, 3))
        return mx.concatenate(found) if len(found) > 1 else found[0]


@dataclass(frozen=True, slots=True)
class BlockPart:
    """One sequence in a call of ``Blocks``: ``context`` rows of hidden states from position ``start`` on; and a block
    of so many ``rows``, the first of which is the token at ``position``, int32. What is between it and the end of the
    context was drafted, and wrong."""

    caches: SequenceCaches
    start: int
    context: int
    position: mx.array
    rows: int

    @property
    def end(self) -> int:
        """Behind the last row of the context."""
        return self.start + self.context

    @property
    def positions(self) -> mx.array:
        """[rows] of the block."""
        return self.position + mx.arange(self.rows)


class WithHeads:
    """A last stage and its heads, whose KV is one more cache of each sequence.

    Raises:
        ModelError: the heads cannot run on this stage.
    """

    def __init__(self, stage: StageModel, heads: Heads | Blocks) -> None:
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
        caches = []
        for layer in range(len(self.heads.layers)):
            rows, at = [], 0
            for own, count, visible in parts:
                rows.append(HeadPart(own.own[layer - len(self.heads.layers)], at, at := at + count, visible))
            caches.append(HeadRows(rows, positions))
        heads = cast(Heads, self.heads)
        return heads(heads.embed(tokens[:, None]), hidden[:, None], caches)[:, 0]

    def run_blocks(self, tokens: mx.array | None, context: mx.array, parts: Sequence[BlockPart]) -> mx.array | None:
        """[B, d] of the rows of blocks; and the entries of the context's rows in the heads' KV.

        Args:
            tokens: [B] ids, of all blocks in the order of ``parts``; ``None`` if there is none.
            context: [C, d] states, of all parts.
        """
        blocks = cast(Blocks, self.heads)
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
        return cast(Blocks, self.heads).behind(self.logits(found), found, tokens)
