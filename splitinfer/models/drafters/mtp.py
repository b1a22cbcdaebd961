"""Drafts with a checkpoint's prediction heads (MTP): a decoder layer reads the target's own last hidden state.

    hidden state, after the last norm ─ norm ─┐
    embedding ───────────────────────── norm ──┴─ fc ─ decoder layer ─ norm ─ the target's head
                                                                        └─ for the next draft

See DeepSeek-V3 (arXiv 2412.19437), section 2.2. mlx-lm leaves the heads out; checkpoints use one of two forms:

    mtp.*                   Qwen3-Next, Qwen3.5 to 3.8; there, norms are about 0 instead of 1; maybe without prefix
    model.layers.N.*        GLM, DeepSeek: the layer after the last of N; its copies of embedding and head are not read

The decoder layer is a copy of one of the target's own attention layers, with the heads' weights. ``LatentHeads`` have
latent attention, which does not run by rows.
"""

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from splitinfer.errors import ModelError
from splitinfer.models.caches.caches import can_quantise, heads_caches, is_list
from splitinfer.models.cut.cut import StageModel
from splitinfer.models.drafters.heads import HeadRows, HeadsByRows, Target, filled, linear
from splitinfer.models.drafters.sequence_heads import OneByOne
from splitinfer.models.library.layers import copied, find_layers, type_name
from splitinfer.models.library.mlx_lm import base
from splitinfer.models.library.mlx_lm import cache as mlx_caches

MTP = "mtp"  # in a layout's ``draft``
PREFIX = "mtp."
_BARE = "pre_fc_norm_hidden.weight"  # among heads whose names have no prefix: in a file or folder of their own
_WITHIN = re.compile(r"(?:(?:language_model|model)\.)*(?:mtp|mtp_layers)\.(.+)")
_NORM = re.compile(r"(norm|norm_embedding|norm_hidden)\.weight$")
_EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(\w+)\.(weight|scales|biases)")
_AS_LAYER = {
    "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "shared_head.norm": "norm",
}  # fmt: skip
_COPIES = ("embed_tokens.", "shared_head.head.", "rotary_emb.")


class PredictionHeads(HeadsByRows):
    """The heads: ``fc``, two norms before it, ``layers`` with KV, and a norm after them."""

    def __init__(self, model: nn.Module, arrays: Mapping[str, mx.array]) -> None:
        super().__init__()
        own = _renamed(arrays, len(find_layers(model)))
        if is_latent(own):
            own = _in_its_form(model, own)
        self._target = target = Target.of(model)
        size = target.size
        caches = mlx_caches.make_prompt_cache(model)
        self.like = _layer_like(model, caches, own)
        self._cache = caches[self.like]
        like = find_layers(model)[self.like].layer
        count = 1 + max((int(name.split(".")[1]) for name in own if name.startswith("layers.")), default=0)
        try:
            self.fc = linear("fc", own, 2 * size)
            self.pre_fc_norm_embedding = filled(copied(target.norm), "pre_fc_norm_embedding.", own)
            self.pre_fc_norm_hidden = filled(copied(target.norm), "pre_fc_norm_hidden.", own)
            self.layers = [filled(copied(like), f"layers.{i}.", own) for i in range(count)]
            self.norm = filled(copied(target.norm), "norm.", own)
        except KeyError as error:
            raise ModelError(f"the prediction heads of {type_name(model)} lack {PREFIX}{error.args[0]}") from None
        if self.norm.weight.shape != target.norm.weight.shape:
            raise ModelError(
                f"the prediction heads are for hidden states of {self.norm.weight.shape[-1]} numbers, and those of "
                f"{type_name(model)} have {size}; they belong to another model"
            )

    def check(self, stage: StageModel) -> None:
        """Raise ModelError if a loaded stage does not compute its logits with the last norm and the head."""
        self._target.check(stage)

    def states(self, kept: mx.array) -> mx.array:
        """Return hidden states [T, d] after the last norm, from the output of the target's last layer."""
        return cast(mx.array, self._target.norm(kept))

    def embed(self, tokens: mx.array) -> mx.array:
        """Return the tokens' embeddings."""
        return cast(mx.array, self._target.embed(tokens))

    def __call__(self, embedded: mx.array, hidden: mx.array, caches: Sequence[HeadRows]) -> mx.array:
        """Return hidden states [T, 1, d] from the embeddings of T tokens and the hidden states before them."""
        x = self._fused(embedded, hidden)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, mask=None, cache=cache)
        return cast(mx.array, self.norm(x))

    def _fused(self, embedded: mx.array, hidden: mx.array) -> mx.array:
        rows = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        return cast(mx.array, self.fc(mx.concatenate(rows, axis=-1)))

    def logits(self, hidden: mx.array) -> mx.array:
        """Return logits [n, vocabulary] from hidden states [n, d]."""
        return cast(mx.array, self._target.head(hidden[:, None])[:, 0])


class LatentHeads(OneByOne, PredictionHeads):
    """Heads with latent attention (DeepSeek-V3, GLM-4.7-Flash). They run one sequence after the other."""

    def make_caches(self) -> list[Any]:
        """Return empty caches for one sequence."""
        return heads_caches([copy.deepcopy(self._cache) for _ in self.layers])

    def forward(
        self, tokens: mx.array, hidden: mx.array, caches: Sequence[Any], _start: int, _number: int
    ) -> tuple[mx.array, mx.array]:
        """Return [1, n, d] hidden states, twice, as ``sequence_heads.LibraryHeads.forward``."""
        x = self._fused(self.embed(tokens), hidden)
        for layer, cache in zip(self.layers, caches, strict=True):
            first = cache[0] if is_list(cache) else cache
            x = layer(x, mask=base.create_attention_mask(x, first, return_array=True), cache=cache)
        return (found := self.norm(x)), found


def is_latent(names: Iterable[str]) -> bool:
    """Return whether heads with tensors of these names have latent attention."""
    return any("kv_a_proj" in name for name in names)


def _in_its_form(model: Any, own: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Return heads' tensors in the form of the model's layers, which its class makes of a checkpoint's: it takes them
    for the last layer's."""
    there, prefix = f"model.layers.{len(find_layers(model)) - 1}.", "layers.0."
    made = model.sanitize({n.replace(prefix, there, 1): array for n, array in own.items() if n.startswith(prefix)})
    made = {name.replace(there, prefix, 1): array for name, array in made.items()}
    return made | {name: array for name, array in own.items() if not name.startswith(prefix)}


def tensors_of(names: Iterable[str], num_layers: int | None) -> dict[str, str]:
    """Return the names that belong to prediction heads, in either form, each with its name among ``mtp.*``. Copies of
    the target's own tensors get "". ``num_layers``: the target's number of layers, if known."""
    names = list(names)
    found = {name: match[1] for name in names if (match := _WITHIN.fullmatch(name))}
    if not found and _BARE in names:
        found = {name: name for name in names if name.startswith(("fc.", "layers.", "norm.", "pre_fc_norm_"))}
    if found or num_layers is None:
        return found
    behind = re.compile(rf"(?:\w+\.)*layers\.{num_layers}\.(.+)")
    rest = {name: match[1] for name in names if (match := behind.fullmatch(name))}
    return {name: _own_name(one) for name, one in rest.items()} if "eh_proj.weight" in rest.values() else {}


def _own_name(rest: str) -> str:
    """Return the name among ``mtp.*`` of a tensor of the layer after the last."""
    if any(copy in rest for copy in _COPIES):
        return ""
    module, _, kind = rest.rpartition(".")
    return f"{_AS_LAYER[module]}.{kind}" if module in _AS_LAYER else f"layers.0.{rest}"


def _renamed(arrays: Mapping[str, mx.array], num_layers: int | None = None) -> dict[str, mx.array]:
    """Return the heads' tensors by their own names, in mlx-lm's form: experts side by side, and norms about 1. Norms
    published as ``mtp.*`` are about 0: some are negative, which norms about 1 never are."""
    names = tensors_of(arrays, num_layers)
    norms = [arrays[name] for name in names if arrays[name].ndim == 1 and _NORM.search(name)]
    is_about_0 = mx.array(False)
    if norms and not any(name.endswith(".enorm.weight") for name in names):
        is_about_0 = mx.stack([norm.min() for norm in norms]).min() < 0
    own: dict[str, mx.array] = {}
    experts: dict[str, dict[int, mx.array]] = {}
    for name, key in names.items():
        array, found = arrays[name], _EXPERT.fullmatch(key)
        if found:
            experts.setdefault(f"{found[1]}.switch_mlp.{found[3]}.{found[4]}", {})[int(found[2])] = array
        elif key.endswith(".experts.gate_up_proj"):
            base = key.removesuffix(".experts.gate_up_proj")
            gate, up = mx.split(array, 2, axis=-2)
            own[f"{base}.switch_mlp.gate_proj.weight"], own[f"{base}.switch_mlp.up_proj.weight"] = gate, up
        elif key.endswith(".experts.down_proj"):
            own[key.replace(".experts.down_proj", ".switch_mlp.down_proj.weight")] = array
        elif key:
            own[key] = array + is_about_0.astype(array.dtype) if array.ndim == 1 and _NORM.search(key) else array
    return own | {name: mx.stack([each[i] for i in sorted(each)]) for name, each in experts.items()}


def _layer_like(model: nn.Module, caches: Sequence[Any], own: Mapping[str, mx.array]) -> int:
    """Return the first layer with plain keys and values, or any if they are latent, whose weights are all in the heads'
    ``own``: other layers may have experts in place of an MLP. Without such a layer return the first."""
    slots, wanted = find_layers(model), {name.removeprefix("layers.0.") for name in own}
    able = [i for i, (_, cache) in enumerate(zip(slots, caches, strict=False)) if is_latent(own) or can_quantise(cache)]
    if not able:
        raise ModelError(f"draft mtp: {type_name(model)} has no layer with plain keys and values")
    return next((i for i in able if _weights(slots[i].layer) <= wanted), able[0])


def _weights(layer: Any) -> set[str]:
    return {name for name, _ in tree_flatten(layer.parameters()) if not name.endswith((".scales", ".biases"))}
