"""Drafts with DFlash and DFlash2: a few layers draft a block of tokens at once, from hidden states of several layers.

    hidden states of the tokens so far, concatenated ─ fc ─ norm ─▶ keys and values of every layer, kept
    [ last token | mask | mask | mask ]  ─ embedding of the target ─▶ layers ─ norm ─ head of the target
                   draft  draft  draft   ◀───────────────────────────────────────────────┘

A block's rows see the hidden states of all tokens before it and, unless the drafter is causal, each other. The rows
themselves are not kept. DFlash2 adds short convolutions over the block around each attention and MLP, whose kernels
depend on the row; and for each place it chooses among the best tokens according to the token chosen before. Both follow
mlx-vlm's ``qwen3_dflash`` and ``dflash2``.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from splitinfer.common.model_config import mapping, strings
from splitinfer.errors import ModelError
from splitinfer.models.caches.cohort import SequenceCaches
from splitinfer.models.drafters import heads
from splitinfer.models.drafters.heads import (
    BlockPart,
    DrafterLayer,
    HeadArrays,
    HeadRows,
    Target,
    TrainedDrafter,
    linear,
    norm,
)  # fmt: skip
from splitinfer.models.library.layers import type_name

_BLOCK = 16  # tokens, including the one before the drafts, if a configuration says nothing
_NOT_READ = ("fc.", "embed_tokens.", "lm_head.", "rotary_emb.")  # by this class, or by any


def is_dflash(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json belongs to a DFlash or DFlash2 drafter."""
    return any(name.startswith("DFlash") for name in strings(config, "architectures"))


def told_in(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with the values of its ``dflash_config`` on top."""
    return {**config, **mapping(config, "dflash_config")}


def at_once(config: Mapping[str, Any]) -> int:
    """Return the largest number of drafts in a block."""
    return int(told_in(config).get("block_size") or _BLOCK) - 1


def taps_of(
    config: Mapping[str, Any], model: nn.Module, arrays: HeadArrays
) -> dict[int, Callable[[mx.array], mx.array]]:
    """Return ``heads.taps_of`` for the layers in a drafter's configuration.

    Raises:
        ModelError: the drafter belongs to another model.
    """
    told = told_in(config)
    if not (layers := told.get("target_layer_ids")):
        raise ModelError("the drafter's config.json does not say which hidden states it reads (target_layer_ids)")
    return heads.taps_of([int(i) for i in layers], model, renamed(arrays), told.get("num_target_layers"))


def renamed(arrays: HeadArrays) -> dict[str, mx.array]:
    """Return a drafter's tensors under the names that ``DFlash`` uses."""
    own = {name.removeprefix("model."): array for name, array in arrays.items()}
    return {f"{name}.weight" if name.endswith("_codebook") else name: array for name, array in own.items()}


class DFlash(TrainedDrafter):
    """The drafter without ``fc``: a norm of hidden states, ``layers``, a norm, and DFlash2's selector.

    Raises:
        ModelError: the drafter belongs to another target, lacks a tensor or value, or has an unknown one.
    """

    def __init__(self, config: Mapping[str, Any], model: nn.Module, arrays: HeadArrays) -> None:
        told, own = told_in(config), renamed(arrays)
        size, there = int(own["fc.weight"].shape[0]), Target.of(model).size
        super().__init__(told, model, own, lambda i: _Layer(told, size, i, own))
        self._told, self._mask, self.at_once = told, int(told.get("mask_token_id", -1)), at_once(config)
        self._scale *= told.get("input_embedding_scale", 1.0)
        if not 0 <= self._mask < self._rows or self.at_once < 1:
            raise ModelError(
                "the drafter's config.json has no mask_token_id among the model's tokens, or no block_size"
            )
        if told.get("hidden_act", "silu") != "silu":
            raise ModelError(f"the drafter has an unknown activation ({told['hidden_act']})")
        if self._width != size or there != size:
            raise ModelError(
                f"the drafter computes {size} numbers, and the embedding and the head of {type_name(model)} have "
                f"{there}; it belongs to another model"
            )
        known = {name for name, _ in tree_flatten(self.parameters())}
        unknown = sorted(name for name in own if name not in known and not name.startswith(_NOT_READ))
        if unknown:
            raise ModelError(f"the drafter has an unknown tensor ({unknown[0]}), so its form is not supported")

    def _add(self, text: Mapping[str, Any], own: HeadArrays) -> None:
        self.hidden_norm = norm("hidden_norm", own, text)
        if "candidate_selector.hidden_projection.weight" in own:
            self.candidate_selector = _Selector(text, self._size, own)

    def states(self, kept: mx.array) -> mx.array:
        """Return [T, d]: the sum of the taps, after the norm."""
        return cast(mx.array, self.hidden_norm(super().states(kept)))

    def keep(self, context: mx.array, parts: Sequence[BlockPart]) -> None:
        """Write states [C, d] of all parts into the caches of their sequences."""
        positions = mx.concatenate([mx.arange(part.start, part.end) for part in parts])
        for number, layer in enumerate(self.layers):
            (keys, values), at = layer.self_attn.kv(context[:, None], positions), 0
            for part in parts:
                rows = slice(at, at := at + part.end - part.start)
                kv = keys[rows].transpose(2, 1, 0, 3), values[rows].transpose(2, 1, 0, 3)
                part.caches.heads[number].update_and_fetch(*kv)

    def run_blocks(self, tokens: Sequence[mx.array], parts: Sequence[BlockPart]) -> mx.array:
        """Return hidden states [B, d] of the rows of all blocks. ``tokens``: for each block its first token, [1]."""
        ids = [[token, mx.full((part.rows - 1,), self._mask)] for token, part in zip(tokens, parts, strict=True)]
        x = self.embed(mx.concatenate(list(chain.from_iterable(ids)))[:, None])
        positions = mx.concatenate([part.position + mx.arange(part.rows) for part in parts])
        for number, layer in enumerate(self.layers):
            rows = [(part.caches.heads[number], part.rows, layer.visible(part)) for part in parts]
            x = layer(x, HeadRows(rows, positions), [part.rows for part in parts])
        return cast(mx.array, self.norm(x)[:, 0])

    def nothing(self, caches: SequenceCaches, tokens: mx.array, hidden: mx.array) -> mx.array:
        """Return what is drafted behind made-up hidden states [n, d] in empty caches. Nothing is evaluated."""
        parts = [BlockPart(caches, 0, len(hidden), mx.array(len(hidden)), len(tokens))]
        self.keep(hidden, parts)
        found = self.run_blocks([tokens[:1]], parts)
        return self.behind(self.logits(found), found, tokens)

    def logits(self, hidden: mx.array) -> mx.array:
        """Return logits [n, vocabulary] from hidden states [n, d]."""
        found = self._head(hidden[:, None])[:, 0] * self._told.get("output_multiplier", 1.0)
        cap = self._told.get("final_logit_softcapping")
        return cast(mx.array, mx.tanh(found / cap) * cap if cap else found)

    def behind(self, logits: mx.array, hidden: mx.array, before: mx.array) -> mx.array:
        """Return the drafts' logits [n, vocabulary]. DFlash2 adds scores from ``hidden`` [n, d] and ``before`` [n]."""
        selector = self.get("candidate_selector")
        return logits if selector is None else selector(logits, hidden, before)


class _Layer(DrafterLayer):
    """A decoder layer whose keys and values come from the hidden states and from the block itself."""

    def __init__(self, told: Mapping[str, Any], size: int, number: int, own: HeadArrays) -> None:
        name = f"layers.{number}."
        super().__init__(told, size, size, name, own)
        for part in ("attention_conv", "mlp_conv"):
            if f"{name}{part}.base_kernel" in own:
                self[part] = _Convolution(told, size, f"{name}{part}.", own)
        kinds = told.get("layer_types") or ()
        slides = number < len(kinds) and kinds[number] == "sliding_attention"
        few = told.get("draft_window_size")
        self._window = int(told["sliding_window"]) if slides else int(few) + 1 if few else None
        self._is_causal = bool(told.get("causal", told.get("dflash_query_causal", told.get("is_causal", False))))

    def visible(self, part: BlockPart) -> mx.array:
        """Return bool [rows, entries]: which entries each row of a block sees. Of the tokens before the block it sees
        the last ``window`` - 1 (from the row on if causal); of the block, all rows, or if causal those up to itself."""
        entries, rows, is_causal = mx.arange(part.end + part.rows)[None], mx.arange(part.rows)[:, None], self._is_causal
        is_before, is_own, last = entries < part.position, entries >= part.end, part.position + rows * is_causal
        at = mx.where(is_own, entries - part.end + part.position, entries)
        seen = is_before | (is_own & (at <= last) if is_causal else is_own)
        if self._window is not None:
            is_near = at > last - self._window
            seen = seen & (is_near if is_causal else is_own | is_near)
        return mx.broadcast_to(seen, (part.rows, part.end + part.rows))

    def __call__(self, x: mx.array, cache: HeadRows, blocks: Sequence[int]) -> mx.array:
        """Return [B, 1, d] for the rows of all blocks. ``blocks``: the number of rows of each."""
        x = x + self._around("attention_conv", self.input_layernorm(x), lambda y: self.self_attn(y, cache), blocks)
        return x + self._around("mlp_conv", self.post_attention_layernorm(x), self.mlp, blocks)

    def _around(self, name: str, x: mx.array, inner: Callable[[mx.array], mx.array], blocks: Sequence[int]) -> mx.array:
        convolution = self.get(name)
        return inner(x) if convolution is None else convolution(x, inner, blocks)


# -- DFlash2 -----------------------------------------------------------------------------------------


class _Convolution(nn.Module):  # type: ignore[misc]
    """Convolves each block's rows before and after a part of a layer. Each group of numbers has a kernel, plus the
    row's."""

    def __init__(self, told: Mapping[str, Any], size: int, name: str, own: HeadArrays) -> None:
        super().__init__()
        self._group, self.base_kernel = int(told["conv_group_size"]), own[f"{name}base_kernel"]
        self.kernel_projection = linear(f"{name}kernel_projection", own, size)

    def __call__(self, x: mx.array, inner: Callable[[mx.array], mx.array], blocks: Sequence[int]) -> mx.array:
        own = self.kernel_projection(x).reshape(len(x), *self.base_kernel.shape[:2], -1)
        return self._over(inner(self._over(x, own[:, 0], 0, blocks)), own[:, 1], 1, blocks)

    def _over(self, x: mx.array, own: mx.array, side: int, blocks: Sequence[int]) -> mx.array:
        """Return [B, 1, d]: each row convolved with the rows before it in its block. ``own``: [B, taps, groups]."""
        places = mx.concatenate([mx.arange(count) for count in blocks])[:, None, None]
        rows, found = x.reshape(len(x), -1, self._group), mx.zeros((len(x), 1, 1), x.dtype)
        for back in range(self.base_kernel.shape[1]):
            base = self.base_kernel[side, back].reshape(1, -1, self._group).astype(x.dtype)
            moved = mx.concatenate([mx.zeros_like(rows[:back]), rows[: max(0, len(x) - back)]])
            found = found + (base + own[:, back, :, None]) * mx.where(places >= back, moved, 0)
        return found.reshape(x.shape)


class _Selector(nn.Module):  # type: ignore[misc]
    def __init__(self, told: Mapping[str, Any], size: int, own: HeadArrays) -> None:
        super().__init__()
        name, self._most = "candidate_selector.", int(told["selector_top_k"])
        self.hidden_projection = linear(f"{name}hidden_projection", own, size)
        rank = int(told["selector_rank"])
        self.predecessor_codebook = linear(f"{name}predecessor_codebook", own, rank, nn.Embedding)
        self.successor_codebook = linear(f"{name}successor_codebook", own, rank, nn.Embedding)

    def __call__(self, logits: mx.array, hidden: mx.array, before: mx.array) -> mx.array:
        """Return [n, vocabulary]: for the best tokens of each row their scores given the token before, else -inf."""
        best = mx.argpartition(logits, -self._most, axis=-1)[..., -self._most :]
        edge = self.predecessor_codebook(before) * self.hidden_projection(hidden)
        scores = (edge[:, None] * self.successor_codebook(best)).sum(axis=-1)
        scores = mx.take_along_axis(logits, best, axis=-1) + scores
        return mx.put_along_axis(mx.full(logits.shape, -mx.inf, scores.dtype), best, scores, axis=-1)
