"""Taps: the hidden states of some of a target's layers, concatenated and projected (``fc``) to one row for each
token, as a drafter with a folder of its own takes them. ``fc`` is linear, and a product with a concatenation is a
sum of products: so each stage multiplies the hidden states of its layers by its columns of ``fc``, and what the last
stage needs comes as one row beside the hidden state (``StageModel.tap``). Also what such drafters have in common
beyond that."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from splitinfer.errors import ModelError
from splitinfer.models.heads import HeadRows, Target, linear
from splitinfer.models.layers import find_layers, type_name
from splitinfer.models.mlx_lm import rope_utils

Arrays = Mapping[str, mx.array]
_EPS, _THETA = 1e-6, 1e4  # where a configuration says nothing


def taps_of(layers: Sequence[int], model: nn.Module, own: Arrays) -> dict[int, Callable[[mx.array], mx.array]]:
    """For each layer whose hidden states a drafter reads, its columns of the projection ``fc``.

    Raises:
        ModelError: the drafter belongs to another model, or has no such projection.
    """
    num_layers = len(find_layers(model))
    wrong = [i for i in layers if not 0 <= i < num_layers]
    if wrong or len(set(layers)) < len(layers):
        which = f", so not layer {wrong[0]}" if wrong else ""
        raise ModelError(
            f"the drafter reads the hidden states behind layers {list(layers)} (counted from 0), and the model has "
            f"{num_layers} layers{which}; it belongs to another model"
        )
    if "fc.weight" not in own:
        raise ModelError("the drafter has no projection of hidden states (fc.weight)")
    columns, size = own["fc.weight"].shape[-1], size_of(model)
    if "fc.scales" not in own and columns != size * len(layers):
        raise ModelError(
            f"the drafter is for {len(layers)} hidden states of {columns / len(layers):g} numbers, and those of "
            f"{type_name(model)} have {size}; it belongs to another model"
        )
    whole = linear("fc", own, size * len(layers))
    return {layer: _columns(whole, i, len(layers)) for i, layer in enumerate(layers)}


def check_width(model: nn.Module, own: Arrays) -> None:
    """Raise ModelError where the drafter's hidden states do not fit in a row between two stages."""
    width, size = own["fc.weight"].shape[0], size_of(model)
    if width > size:
        raise ModelError(f"the drafter's hidden states have {width} numbers, and a row on a link has {size}")


def _columns(whole: Any, part: int, parts: int) -> Any:
    """One of so many equal parts of a linear layer's inputs; the first has its bias."""
    names = [name for name in ("weight", "scales", "biases") if whole.get(name) is not None]
    own = {f"fc.{name}": mx.split(whole[name], parts, axis=-1)[part] for name in names}
    if part == 0 and "bias" in whole:
        own["fc.bias"] = whole["bias"]
    inputs = own["fc.weight"].shape[-1] if "scales" not in names else whole.group_size * own["fc.scales"].shape[-1]
    return linear("fc", own, inputs)


def size_of(model: nn.Module) -> int:
    """The numbers of a target's hidden state."""
    return int(Target.of(model).norm.weight.shape[-1])


def check_vocabulary(text: Mapping[str, Any], model: nn.Module, rows: int) -> None:
    """Raise ModelError where a drafter's configuration has more tokens than the target's embedding has ``rows``."""
    if text.get("vocab_size", rows) > rows:
        raise ModelError(
            f"the drafter is for a vocabulary of {text['vocab_size']:,} tokens, and {type_name(model)} has "
            f"{rows:,}; it belongs to another model"
        )


def norm(name: str, own: Arrays, text: Mapping[str, Any]) -> nn.RMSNorm:
    """A norm of a drafter, by its configuration."""
    made = nn.RMSNorm(1, eps=float(text.get("rms_norm_eps", _EPS)))
    made.weight = own[f"{name}.weight"]
    return made


def rope(text: Mapping[str, Any], width: int) -> Any:
    """A drafter's rotary embedding, by its configuration."""
    given = text.get("rope_parameters") or {}
    scaling = text.get("rope_scaling") or (given if given.get("rope_type", "default") != "default" else None)
    theta = float(given.get("rope_theta") or text.get("rope_theta") or _THETA)
    by_pairs = not text.get("rope_is_neox_style", True)
    return rope_utils.initialize_rope(width, theta, by_pairs, scaling, text.get("max_position_embeddings"))


class Attention(nn.Module):  # type: ignore[misc]
    """Attention of a drafter's layer, over a cache that takes the rows of many sequences."""

    def __init__(self, text: Mapping[str, Any], inputs: int, size: int, name: str, own: Arrays) -> None:
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
        """[T, heads, 1, d] keys and values of [T, 1, d] rows."""
        return self._heads("k", x, positions), self._heads("v", x)

    def __call__(self, x: mx.array, cache: HeadRows) -> mx.array:
        queries, kv = self._heads("q", x, cache.offset), cache.update_and_fetch(*self.kv(x, cache.offset))
        found = cache.attend(queries, *kv, self._width**-0.5, None, self.get("attention_sink_bias"))
        return cast(mx.array, self.o_proj(found.transpose(0, 2, 1, 3).reshape(len(x), 1, -1)))


class MLP(nn.Module):  # type: ignore[misc]
    """The MLP of a drafter's layer."""

    def __init__(self, text: Mapping[str, Any], size: int, name: str, own: Arrays) -> None:
        super().__init__()
        for part in ("gate_proj", "up_proj", "down_proj"):
            self[part] = linear(name + part, own, int(text["intermediate_size"]) if part == "down_proj" else size)

    def __call__(self, x: mx.array) -> mx.array:
        return cast(mx.array, self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x)))
