"""Drafts with EAGLE-3: a decoder layer reads hidden states of a low, a middle and a high layer (arXiv 2503.01840).

    three hidden states, concatenated ─ fc ───┐
                                                        ├─ norms ─ decoder layer ─┬─ norm ─ own head, own vocabulary
    embedding, the target's where the drafter has none ─┘                         └─ for the next draft

``eagle_aux_hidden_state_layer_ids`` at the top of a config.json names hidden states as they enter a layer; the default
is the target's layers 2, half and all but 3. In ``eagle_config`` it names hidden states as they leave a layer.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from splitinfer.common.model_config import mapping, strings
from splitinfer.errors import ModelError
from splitinfer.models.cut.cut import StageModel
from splitinfer.models.drafters import heads
from splitinfer.models.drafters.heads import DrafterLayer, HeadArrays, HeadRows, TrainedDrafter, linear, norm
from splitinfer.models.library.layers import find_layers, type_name

_IDS = "eagle_aux_hidden_state_layer_ids"


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json belongs to an EAGLE-3 drafter."""
    names = [*strings(config, "architectures"), config.get("speculators_model_type"), config.get("model_type")]
    return any("eagle3" in str(name).lower().replace("-", "") for name in names)


def layers_of(config: Mapping[str, Any], num_layers: int) -> list[int]:
    """Return the layers of a target whose output hidden states the drafter reads."""
    leaving = mapping(config, "eagle_config").get(_IDS)
    entering = config.get(_IDS) or [2, num_layers // 2, num_layers - 3]
    return [int(i) for i in leaving] if leaving else [int(i) - 1 for i in entering]


def taps_of(
    config: Mapping[str, Any], model: nn.Module, arrays: HeadArrays
) -> dict[int, Callable[[mx.array], mx.array]]:
    """Return the columns of the projection for each layer whose hidden states the drafter reads.

    Raises:
        ModelError: the drafter belongs to another model, or normalises the hidden states before the projection.
    """
    if config.get("norm_before_fc"):
        raise ModelError("the drafter normalises three hidden states together (norm_before_fc); stages cannot do that")
    return heads.taps_of(layers_of(config, len(find_layers(model))), model, renamed(arrays))


def renamed(arrays: HeadArrays) -> dict[str, mx.array]:
    """Return a drafter's tensors under the names that ``Eagle3`` uses."""
    return {name.removeprefix("model.").replace("midlayer.", "layers.0."): array for name, array in arrays.items()}


class Eagle3(TrainedDrafter):
    """The drafter without ``fc``: ``layers``, a norm, and a head over the tokens that it may draft.

    Raises:
        ModelError: the drafter belongs to another target, or lacks a tensor.
    """

    def __init__(self, config: Mapping[str, Any], model: nn.Module, arrays: HeadArrays) -> None:
        text, own = config.get("transformer_layer_config") or config, renamed(arrays)
        size = int(own["fc.weight"].shape[0])
        super().__init__(text, model, own, lambda i: _Layer(config, text, size, f"layers.{i}.", own))
        self._scale, self._place = 1.0, None
        if "d2t" in own:
            self._drafted = mx.arange(own["d2t"].size) + own["d2t"].astype(mx.int32)
            self._place = mx.full((self._rows,), -1, dtype=mx.int32)  # by token of the target, in the drafter's own
            self._place[self._drafted] = mx.arange(self._drafted.size, dtype=mx.int32)
        if self._width != (needed := own["layers.0.input_layernorm.weight"].size):
            whose = "its own" if "embed_tokens" in self else f"those of {type_name(model)}"
            raise ModelError(
                f"the drafter takes embeddings of {needed} numbers, and {whose} have {self._width}; it belongs to "
                "another model"
            )

    def _add(self, _text: Mapping[str, Any], own: HeadArrays) -> None:
        if "lm_head.weight" in own:
            self.lm_head = self._head = linear("lm_head", own, self._size)

    def check(self, stage: StageModel) -> None:
        """Raise ModelError if it drafts tokens that the target does not have."""
        if self._place is not None and not 0 <= int(self._drafted.min()) <= int(self._drafted.max()) < self._rows:
            raise ModelError("the drafter drafts tokens that the model does not have; it belongs to another model")

    def __call__(self, embedded: mx.array, hidden: mx.array, caches: Sequence[HeadRows]) -> mx.array:
        """Return hidden states [T, 1, d] from the embeddings of T tokens and the hidden states before them."""
        for i, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            hidden = layer(hidden, embedded if i == 0 else None, cache)
        return hidden

    def logits(self, hidden: mx.array) -> mx.array:
        """Return logits [n, vocabulary] from [n, d]; tokens that it cannot draft get minus infinity."""
        own = self._head(self.norm(hidden[:, None]))[:, 0]
        if self._place is None:
            return cast(mx.array, own)
        return mx.where(self._place >= 0, own[..., mx.maximum(self._place, 0)], -mx.inf)


class _Layer(DrafterLayer):
    """A decoder layer; the first takes embeddings, too."""

    def __init__(
        self, config: Mapping[str, Any], text: Mapping[str, Any], size: int, name: str, own: HeadArrays
    ) -> None:
        is_first = name == "layers.0."
        super().__init__(text, (1 + is_first) * size, size, name, own)
        if is_first:
            self.hidden_norm = norm(f"{name}hidden_norm", own, text)
        self._norm_before_residual = bool(config.get("norm_before_residual"))

    def __call__(self, hidden: mx.array, embedded: mx.array | None, cache: HeadRows) -> mx.array:
        if embedded is None:
            x, residual = self.input_layernorm(hidden), hidden
        else:
            normed = self.hidden_norm(hidden)
            x = mx.concatenate([self.input_layernorm(embedded), normed], axis=-1)
            residual = normed if self._norm_before_residual else hidden
        hidden = residual + self.self_attn(x, cache)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
