"""Drafters on the last stage, trained on the target's own hidden states: what the kinds of them have in common.

    hidden state of token i, or a row made of several ─┐
    embedding of token i + 1 ──────────────────────────┴─ layers, own KV ─┬─ logits of token i + 2
                                                                          └─ in its place, for the next draft

``mtp`` and ``eagle3`` draft one token after the other, ``dflash`` several at once. ``with_heads`` runs them all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from splitinfer.errors import ModelError
from splitinfer.models.cohort import SequenceCaches
from splitinfer.models.cut import StageModel
from splitinfer.models.layers import find_layers, type_name
from splitinfer.models.mlx_lm import switch_layers
from splitinfer.models.quantised import attention
from splitinfer.models.rows import NewKV

_LINEAR = {
    nn.Linear: nn.QuantizedLinear,
    switch_layers.SwitchLinear: switch_layers.QuantizedSwitchLinear,
    nn.Embedding: nn.QuantizedEmbedding,
}
_OF = {quantised: plain for plain, quantised in _LINEAR.items()}
_MODES = {(32, 4): "mxfp4", (16, 4): "nvfp4", (32, 8): "mxfp8"}  # by group size and bits, of weights without biases
_EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)


@dataclass(frozen=True, slots=True)
class Target:
    """What heads use of the target: its embedding, its last norm and its head."""

    embed: Any
    norm: Any
    head: Any

    @classmethod
    def of(cls, model: nn.Module) -> "Target":
        """Those of a model.

        Raises:
            ModelError: they are not where most models have them.
        """
        slots = find_layers(model)
        holders = [m for _, m in model.named_modules() if any(v is slots[0].holder for v in m.values())]
        inner = holders[0] if holders else {}
        embed, norm = inner.get("embed_tokens"), inner.get("norm")
        heads = [m["lm_head"] for _, m in model.named_modules() if "lm_head" in m]
        if not isinstance(embed, _EMBEDDINGS) or not isinstance(norm, nn.Module):
            raise ModelError(f"{type_name(model)} keeps its embedding or its last norm in another place")
        return cls(embed, norm, heads[0] if heads else embed.as_linear)

    def check(self, stage: StageModel) -> None:
        """Raise ModelError where the norm and head are not what the model computes its logits with."""
        hidden, rows = stage.made_up_hidden(4, 0), 4
        given = None if hidden is None else hidden[None]
        logits = stage(mx.zeros((1, rows), mx.int32), stage.make_caches(), given, rows)[0]
        last = stage.take_tapped()
        assert last is not None
        own = self.head(self.norm(last)).astype(logits.dtype)
        if not mx.allclose(own, logits, rtol=0.05, atol=0.05 * float(mx.abs(logits).max())):
            raise ModelError(f"draft mtp: {type_name(stage.whole)} computes its logits in another way")


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


class HeadRows:
    """The cache that a layer is given: of the rows of many sequences. ``parts``: of each sequence its cache, its number
    of rows, and which of its tokens each row sees, bool [n, tokens]. ``offset``: [T] positions."""

    def __init__(self, parts: Sequence[tuple[Any, int, mx.array]], positions: mx.array) -> None:
        self._parts, self.offset = parts, positions

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[NewKV, NewKV]:
        """Placeholders for [T, heads, 1, d] keys and values, which ``attend`` stores."""
        return NewKV(self, keys), NewKV(self, values)

    def attend(
        self, queries: mx.array, keys: NewKV, values: NewKV, scale: float, _mask: Any, sinks: mx.array | None
    ) -> mx.array:
        """[T, heads, 1, d]: each sequence's attention over its own keys and values."""
        found, at = [], 0
        for cache, count, visible in self._parts:
            rows = slice(at, at := at + count)
            q, k, v = (array[rows].transpose(2, 1, 0, 3) for array in (queries, keys.array, values.array))
            k, v = cache.update_and_fetch(k, v)
            found.append(attention(q, k, v, scale, visible, sinks).transpose(2, 1, 0, 3))
        return mx.concatenate(found) if len(found) > 1 else found[0]


@dataclass(frozen=True, slots=True)
class BlockPart:
    """One sequence in a call of ``DFlash``: ``context`` rows of hidden states from position ``start`` on; and a block
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
