"""The common parts of drafters on the last stage, which were trained on the target's own hidden states.

    hidden state of token i, or a row made of several ─┐
    embedding of token i + 1 ──────────────────────────┴─ layers, own KV ─┬─ logits of token i + 2
                                                                          └─ in its place, for the next draft

``mtp`` and ``eagle3`` draft one token after the other, ``dflash`` several at once. ``trained`` runs them all. They run
rows of all sequences together; ``sequence_heads`` runs one sequence after the other.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from splitinfer.errors import ModelError
from splitinfer.models.caches.cohort import SequenceCaches
from splitinfer.models.caches.growing import GrowingKVCache
from splitinfer.models.caches.quantised import attention
from splitinfer.models.caches.rows import NewKV
from splitinfer.models.cut.cut import StageModel
from splitinfer.models.library.layers import find_layers, type_name
from splitinfer.models.library.mlx_lm import rope_utils, switch_layers

_LINEAR = {
    nn.Linear: nn.QuantizedLinear,
    switch_layers.SwitchLinear: switch_layers.QuantizedSwitchLinear,
    nn.Embedding: nn.QuantizedEmbedding,
}
_OF = {quantised: plain for plain, quantised in _LINEAR.items()}
_MODES = {(32, 4): "mxfp4", (16, 4): "nvfp4", (32, 8): "mxfp8"}  # by group size and bits, for weights without biases
_EMBEDDINGS = (nn.Embedding, nn.QuantizedEmbedding)
_EMBED, _NORM = ("embed_tokens", "embeddings"), ("norm", "norm_f")  # where models keep the two
_MIXER = "hyper_connection_mixer"  # in a model with hyper-connections: makes one hidden state of its streams
_EPS, _THETA = 1e-6, 1e4  # if a configuration says nothing

HeadArrays = Mapping[str, mx.array]


@dataclass(frozen=True, slots=True)
class Target:
    """The parts of the target that heads use: its embedding, its last norm (None if it has none) and its head.
    ``inner``: the module that holds its layers."""

    embed: Any
    norm: Any
    head: Any
    inner: Any

    @classmethod
    def of(cls, model: nn.Module) -> "Target":
        """Return the parts of a model.

        Raises:
            ModelError: the model does not keep them where most models do.
        """
        slots = find_layers(model)
        holders = [m for _, m in model.named_modules() if any(v is slots[0].holder for v in m.values())]
        inner = holders[0] if holders else {}
        embed, norm = (next((inner[n] for n in names if n in inner), None) for names in (_EMBED, _NORM))
        heads = [m["lm_head"] for _, m in model.named_modules() if "lm_head" in m]
        if not isinstance(embed, _EMBEDDINGS) or (norm is None and _MIXER not in inner):
            raise ModelError(f"{type_name(model)} keeps its embedding or last norm in an unknown place")
        head, dtype = heads[0] if heads else embed.as_linear, embed(mx.zeros((1,), mx.int32)).dtype
        # In the model's dtype, because a product of two would copy the head in float32.
        return cls(embed, norm, lambda hidden: head(hidden.astype(dtype)), inner)

    @property
    def size(self) -> int:
        """How many numbers the hidden state of a token has that goes into the head."""
        return int(self.embed(mx.zeros((1,), mx.int32)).shape[-1])

    @property
    def scale(self) -> float:
        """The factor of embeddings, by which some models multiply them."""
        return float(getattr(self.embed, "embed_scale", getattr(self.inner, "embed_scale", 1.0)))

    @property
    def mixer(self) -> nn.Module:
        """The module that makes one hidden state of the streams of hyper-connections; without parameters if there is
        none."""
        return cast(nn.Module, self.inner.get(_MIXER, nn.Identity()))

    def contracted(self, rows: mx.array, then: Callable[[mx.array], mx.array] = lambda x: x) -> mx.array:
        """Return ``then`` of [T, d], made of rows [T, w] behind a layer. A model with hyper-connections has several
        streams side by side (w > d), and drafters read their mean, or what the model's own mixer makes of them."""
        if _MIXER in self.inner:
            return then(self.mixer(rows[None])[0])
        return then(rows if rows.shape[-1] == self.size else rows.reshape(len(rows), -1, self.size).mean(axis=1))

    def read_by_head(self, rows: mx.array) -> mx.array:
        """Return [T, d], which the model's head reads, of the rows [T, w] behind its last layer."""
        if rows.shape[-1] != self.size and "hc_head" in self.inner:
            rows = self.inner.hc_head(rows.reshape(1, len(rows), -1, self.size))[0]
        else:
            rows = self.contracted(rows)
        return rows if self.norm is None else cast(mx.array, self.norm(rows))

    def check(self, stage: StageModel) -> None:
        """Raise ModelError if the model does not compute its logits with this norm and head."""
        hidden, rows = stage.made_up_hidden(4, 0), 4
        given = None if hidden is None else hidden[None]
        logits = stage(mx.zeros((1, rows), mx.int32), stage.make_caches(), given, rows)[0]
        last = stage.take_tapped()
        assert last is not None
        own = self.head(self.read_by_head(last)).astype(logits.dtype)
        if not mx.allclose(own, logits, rtol=0.05, atol=0.05 * float(mx.abs(logits).max())):
            raise ModelError(
                f"draft mtp: {type_name(stage.whole)} does not compute its logits with its last norm and head"
            )


class Heads(nn.Module):  # type: ignore[misc]
    """A drafter on the last stage.

    Attributes:
        like: the index of a target layer that costs as much as one of the drafter's.
        at_once: the most tokens drafted at once; 0: tokens are drafted one after the other.
    """

    at_once = 0
    like: int

    def check(self, stage: StageModel) -> None:
        """Raise ModelError if a loaded stage is not as the drafter expects. Most use only parts of the target that are
        found by name."""


class HeadsByRows(Heads):
    """Heads whose ``layers`` run rows of many sequences together."""

    layers: list[Any]

    def make_caches(self) -> list[Any]:
        """Return empty caches for one sequence."""
        return [GrowingKVCache() for _ in self.layers]

    def run(
        self,
        tokens: mx.array,
        hidden: mx.array,
        parts: Sequence[tuple[SequenceCaches, int, mx.array]],
        positions: mx.array,
    ) -> mx.array:
        """Return hidden states [T, d] of T rows, and append the rows' entries to their sequences' caches.

        Args:
            tokens: [T] ids; hidden: [T, d], the hidden states before them.
            parts: for each sequence its caches, its number of rows, and which tokens each row sees, bool [n, tokens].
            positions: [T], for the rotary embedding.
        """
        caches = [
            HeadRows([(own.heads[layer], n, visible) for own, n, visible in parts], positions)
            for layer in range(len(self.layers))
        ]
        return cast(mx.array, self(self.embed(tokens[:, None]), hidden[:, None], caches)[:, 0])

    def nothing(self, caches: SequenceCaches, tokens: mx.array, hidden: mx.array) -> mx.array:
        """Return what is drafted behind made-up tokens [n] and hidden states [n, d] in empty caches; not evaluated."""
        visible = mx.tri(len(tokens), len(tokens)).astype(mx.bool_)
        found = self.run(tokens, hidden, [(caches, len(tokens), visible)], mx.arange(len(tokens)))
        return cast(mx.array, self.logits(found))


class TrainedDrafter(HeadsByRows):
    """A drafter in a folder of its own, without ``fc``: ``layers``, made by ``layer``, a norm, and an embedding or the
    target's. ``text``: the configuration of its layers.

    Raises:
        ModelError: it belongs to another target, or lacks a tensor or value.
    """

    def __init__(self, text: Mapping[str, Any], model: nn.Module, own: HeadArrays, layer: Callable[[int], Any]) -> None:
        super().__init__()
        target, self._size = Target.of(model), int(own["fc.weight"].shape[0])
        self._embed, self._head, self._rows = target.embed, target.head, target.embed.weight.shape[0]
        check_vocabulary(text, model, self._rows)
        self.like, self._scale = len(find_layers(model)) - 1, target.scale
        try:
            if "embed_tokens.weight" in own:
                self.embed_tokens = self._embed = linear("embed_tokens", own, self._size, nn.Embedding)
                self._scale = 1.0
            self.layers = [layer(i) for i in range(text["num_hidden_layers"])]
            self.norm = norm("norm", own, text)
            self._add(text, own)
        except KeyError as error:
            raise ModelError(f"the drafter lacks {error.args[0]}") from None

    def _add(self, text: Mapping[str, Any], own: HeadArrays) -> None:
        """Add the modules of this kind alone. Raises KeyError if a tensor or value is missing."""

    def states(self, kept: mx.array) -> mx.array:
        """Return [T, d]: the sum of the taps."""
        return kept[:, : self._size]

    def embed(self, tokens: mx.array) -> mx.array:
        """Return the tokens' embeddings."""
        own = self._embed.weight.shape[0]  # may be fewer than the target's; the target's last tokens are not text
        return cast(mx.array, self._embed(mx.minimum(tokens, own - 1)) * self._scale)

    @property
    def _width(self) -> int:
        return int(self._embed(mx.zeros((1,), mx.int32)).shape[-1])


class DrafterLayer(nn.Module):  # type: ignore[misc]
    """The modules of a drafter's decoder layer. ``inputs``: the numbers that its attention takes for a row."""

    def __init__(self, text: Mapping[str, Any], inputs: int, size: int, name: str, own: HeadArrays) -> None:
        super().__init__()
        self.input_layernorm = norm(f"{name}input_layernorm", own, text)
        self.post_attention_layernorm = norm(f"{name}post_attention_layernorm", own, text)
        self.self_attn = HeadAttention(text, inputs, size, f"{name}self_attn.", own)
        self.mlp = MLP(text, size, f"{name}mlp.", own)


# -- weights -----------------------------------------------------------------------------------------


def filled(module: Any, prefix: str, arrays: Mapping[str, mx.array]) -> Any:
    """Return ``module`` with the parameters ``prefix...`` of ``arrays``, whose quantisation may differ from its own.

    Raises:
        KeyError: a parameter is missing.
    """
    for key, child in list(module.items()):
        if (kind := _OF.get(type(child), type(child))) in _LINEAR:
            inputs = child.weight.shape[-1] if kind is type(child) else child.scales.shape[-1] * child.group_size
            module[key] = linear(prefix + key, arrays, inputs, kind)
        elif isinstance(child, nn.Module):
            filled(child, f"{prefix}{key}.", arrays)
        elif isinstance(child, mx.array):
            module[key] = arrays[prefix + key]
    return module


def linear(name: str, arrays: Mapping[str, mx.array], inputs: int, kind: Any = nn.Linear) -> Any:
    """Return a layer of class ``kind`` made from the tensors ``name.*``, quantised like them.

    ``inputs``: the inputs of a linear layer or of experts, or the numbers of an embedding.

    Raises:
        KeyError: a tensor is missing.
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


# -- running -----------------------------------------------------------------------------------------


class HeadRows:
    """The cache argument of a layer, for rows of many sequences. ``parts``: for each sequence its cache, its number of
    rows, and which of its tokens each row sees, bool [n, tokens]. ``offset``: [T] positions."""

    def __init__(self, parts: Sequence[tuple[Any, int, mx.array]], positions: mx.array) -> None:
        self._parts, self.offset = parts, positions

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[NewKV, NewKV]:
        """Return placeholders for [T, heads, 1, d] keys and values, which ``attend`` stores."""
        return NewKV(self, keys), NewKV(self, values)

    def attend(
        self, queries: mx.array, keys: NewKV, values: NewKV, scale: float, _mask: Any, sinks: mx.array | None
    ) -> mx.array:
        """Return [T, heads, 1, d]: each sequence's attention over its own keys and values."""
        found, at = [], 0
        for cache, count, visible in self._parts:
            rows = slice(at, at := at + count)
            q, k, v = (array[rows].transpose(2, 1, 0, 3) for array in (queries, keys.array, values.array))
            k, v = cache.update_and_fetch(k, v)
            found.append(attention(q, k, v, scale, visible, sinks).transpose(2, 1, 0, 3))
        return mx.concatenate(found) if len(found) > 1 else found[0]


@dataclass(frozen=True, slots=True)
class BlockPart:
    """A sequence in a step: rows of hidden states at the positions [start, end), and a block of ``rows`` rows that
    begins with the token at ``position``, int32. Tokens between the two were wrong drafts."""

    caches: SequenceCaches
    start: int
    end: int
    position: mx.array
    rows: int


# -- taps, and common parts of the drafters that read them -----------------------------------------
#
# Hidden states of several layers are concatenated and projected (``fc``) to one row for each token. A product with a
# concatenation is a sum of products. So each stage multiplies the hidden states of its layers by its columns of ``fc``,
# and the last stage gets the sum as one row beside the hidden state (``StageModel.tap``).


def taps_of(
    layers: Sequence[int], model: nn.Module, own: HeadArrays, told: int | None = None
) -> dict[int, Callable[[mx.array], mx.array]]:
    """Return the columns of the projection ``fc`` for each layer whose hidden states a drafter reads. ``told``: the
    target's number of layers, if the drafter says it.

    Raises:
        ModelError: the drafter belongs to another model, or has no such projection.
    """
    num_layers = len(find_layers(model))
    if told not in (None, num_layers):
        raise ModelError(
            f"the drafter is for a model of {told} layers, and {type_name(model)} has {num_layers}; it belongs to "
            "another model"
        )
    wrong = [i for i in layers if not 0 <= i < num_layers]
    if wrong or len(set(layers)) < len(layers):
        which = f", so not layer {wrong[0]}" if wrong else ""
        raise ModelError(
            f"the drafter reads the hidden states after layers {list(layers)} (counted from 0), and the model has "
            f"{num_layers} layers{which}; it belongs to another model"
        )
    if "fc.weight" not in own:
        raise ModelError("the drafter has no projection of hidden states (fc.weight)")
    columns, size = own["fc.weight"].shape[-1], Target.of(model).size
    if "fc.scales" not in own and columns != size * len(layers):
        raise ModelError(
            f"the drafter is for {len(layers)} hidden states of {columns / len(layers):g} numbers, and those of "
            f"{type_name(model)} have {size}; it belongs to another model"
        )
    whole = linear("fc", own, size * len(layers))
    return {layer: _columns(whole, i, len(layers)) for i, layer in enumerate(layers)}


def _columns(whole: Any, part: int, parts: int) -> Any:
    """Return part number ``part`` of ``parts`` equal parts of a linear layer's inputs. The first part has the bias."""
    names = [name for name in ("weight", "scales", "biases") if whole.get(name) is not None]
    own = {f"fc.{name}": mx.split(whole[name], parts, axis=-1)[part] for name in names}
    if part == 0 and "bias" in whole:
        own["fc.bias"] = whole["bias"]
    inputs = own["fc.weight"].shape[-1] if "scales" not in names else whole.group_size * own["fc.scales"].shape[-1]
    return linear("fc", own, inputs)


def check_vocabulary(text: Mapping[str, Any], model: nn.Module, rows: int) -> None:
    """Raise ModelError if a drafter's configuration has more tokens than the ``rows`` of the target's embedding."""
    if text.get("vocab_size", rows) > rows:
        raise ModelError(
            f"the drafter is for a vocabulary of {text['vocab_size']:,} tokens, and {type_name(model)} has "
            f"{rows:,}; it belongs to another model"
        )


def norm(name: str, own: HeadArrays, text: Mapping[str, Any]) -> nn.RMSNorm:
    """Return a drafter's norm with the weights ``name.weight`` of ``own``."""
    made = nn.RMSNorm(1, eps=float(text.get("rms_norm_eps", _EPS)))
    made.weight = own[f"{name}.weight"]
    return made


def rope(text: Mapping[str, Any], width: int) -> Any:
    """Return a drafter's rotary embedding for heads of ``width`` numbers."""
    given = text.get("rope_parameters") or {}
    scaling = text.get("rope_scaling") or (given if given.get("rope_type", "default") != "default" else None)
    theta = float(given.get("rope_theta") or text.get("rope_theta") or _THETA)
    by_pairs = not text.get("rope_is_neox_style", True)
    return rope_utils.initialize_rope(width, theta, by_pairs, scaling, text.get("max_position_embeddings"))


class HeadAttention(nn.Module):  # type: ignore[misc]
    """The attention of a drafter's layer, over a cache that takes rows of many sequences."""

    def __init__(self, text: Mapping[str, Any], inputs: int, size: int, name: str, own: HeadArrays) -> None:
        super().__init__()
        heads = int(text["num_attention_heads"])
        self._width = int(text.get("head_dim") or size // heads)
        for part in ("q_proj", "k_proj", "v_proj"):
            self[part] = linear(name + part, own, inputs)
        self.o_proj = linear(f"{name}o_proj", own, heads * self._width)
        for part in ("q_norm", "k_norm"):
            if f"{name}{part}.weight" in own:
                self[part] = norm(name + part, own, text)
        if f"{name}attention_sink_bias" in own:
            self.attention_sink_bias = own[f"{name}attention_sink_bias"]
        self._rope = rope(text, self._width)

    def _heads(self, part: str, x: mx.array, positions: mx.array | None = None) -> mx.array:
        found = self[f"{part}_proj"](x).reshape(len(x), 1, -1, self._width).transpose(0, 2, 1, 3)
        if f"{part}_norm" in self:
            found = self[f"{part}_norm"](found)
        return cast(mx.array, found if positions is None else self._rope(found, offset=positions))

    def kv(self, x: mx.array, positions: mx.array) -> tuple[mx.array, mx.array]:
        """Return keys and values [T, heads, 1, d] of rows [T, 1, d]."""
        return self._heads("k", x, positions), self._heads("v", x)

    def __call__(self, x: mx.array, cache: HeadRows) -> mx.array:
        queries, kv = self._heads("q", x, cache.offset), cache.update_and_fetch(*self.kv(x, cache.offset))
        found = cache.attend(queries, *kv, self._width**-0.5, None, self.get("attention_sink_bias"))
        return cast(mx.array, self.o_proj(found.transpose(0, 2, 1, 3).reshape(len(x), 1, -1)))


class MLP(nn.Module):  # type: ignore[misc]
    """The MLP of a drafter's layer."""

    def __init__(self, text: Mapping[str, Any], size: int, name: str, own: HeadArrays) -> None:
        super().__init__()
        for part in ("gate_proj", "up_proj", "down_proj"):
            self[part] = linear(name + part, own, int(text["intermediate_size"]) if part == "down_proj" else size)

    def __call__(self, x: mx.array) -> mx.array:
        return cast(mx.array, self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x)))
