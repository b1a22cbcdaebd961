"""The prediction heads of a checkpoint (MTP): one decoder layer that drafts from the target's own last hidden state.

    hidden state of token i, behind the last norm ─ norm ─┐
    embedding of token i + 1 ────────────────────── norm ─┴─ fc ─ decoder layer, own KV ─ norm ─ the target's head
                                                                                            └─ for the next draft

The result predicts token i + 2; the hidden state that it comes from stands for the target's own in the next draft. See
DeepSeek-V3 (arXiv 2412.19437), section 2.2. Checkpoints of Qwen3-Next and Qwen3.5 to 3.8 have such heads as ``mtp.*``;
mlx-lm leaves them out when it converts or loads; any file ``model*.safetensors`` of the model's folder may hold them.

The decoder layer is a copy of one of the target's own layers with attention, with the heads' weights: so no
architecture is written twice. It runs the rows of many sequences as a stage does (``rows``), and its KV is one more
cache of each sequence (``WithHeads``): it is rolled back, kept, written to disk and joined as a layer's is. The entry
of token i comes from hidden state i - 1 and token i, so this KV has the length of the layers'.
"""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from splitinfer.errors import ModelError
from splitinfer.models.caches import can_quantise
from splitinfer.models.cohort import SequenceCaches
from splitinfer.models.cut import StageModel
from splitinfer.models.growing import GrowingKVCache
from splitinfer.models.kv_blocks import KVBlock, cut
from splitinfer.models.layers import find_layers, type_name
from splitinfer.models.mlx_lm import make_prompt_cache, switch_layers
from splitinfer.models.quantised import attention
from splitinfer.models.rows import NewKV, attend_by_rows

PREFIX = "mtp."
_LINEAR = {nn.Linear: nn.QuantizedLinear, switch_layers.SwitchLinear: switch_layers.QuantizedSwitchLinear}
_OF = {quantised: plain for plain, quantised in _LINEAR.items()}
_NORM = re.compile(r"(norm|norm_embedding|norm_hidden)\.weight$")
_EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(\w+)\.(weight|scales|biases)")
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
            raise ModelError(f"draft mtp: {type_name(model)} keeps its embedding or its last norm in another place")
        return cls(embed, norm, heads[0] if heads else embed.as_linear)


class Heads(nn.Module):  # type: ignore[misc]
    """The heads: ``fc``, two norms before it, ``layers``, and a norm behind them."""

    def __init__(self, model: nn.Module, arrays: Mapping[str, mx.array]) -> None:
        super().__init__()
        own = _renamed(arrays)
        target, like = Target.of(model), _attention_layer(model)
        count = 1 + max((int(name.split(".")[1]) for name in own if name.startswith("layers.")), default=0)
        try:
            self.fc = _linear(nn.Linear(1, 1, bias=False), "fc", own)
            self.pre_fc_norm_embedding = _filled(_copied(target.norm), "pre_fc_norm_embedding.", own)
            self.pre_fc_norm_hidden = _filled(_copied(target.norm), "pre_fc_norm_hidden.", own)
            self.layers = [_filled(_copied(like), f"layers.{i}.", own) for i in range(count)]
            self.norm = _filled(_copied(target.norm), "norm.", own)
        except KeyError as error:
            raise ModelError(f"the prediction heads of {type_name(model)} lack {PREFIX}{error.args[0]}") from None
        hidden = target.norm.weight.shape[-1]
        if self.norm.weight.shape != target.norm.weight.shape:
            raise ModelError(
                f"the prediction heads are for hidden states of {self.norm.weight.shape[-1]} numbers, and those of "
                f"{type_name(model)} have {hidden}; they belong to another model"
            )

    def __call__(self, embedded: mx.array, hidden: mx.array, caches: Sequence["HeadRows"]) -> mx.array:
        """[T, 1, d] hidden states of T rows, from the embeddings of their tokens and the hidden states before them."""
        rows = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        x = self.fc(mx.concatenate(rows, axis=-1))
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, mask=None, cache=cache)
        return cast(mx.array, self.norm(x))


def tensors_of(names: Sequence[str]) -> list[str]:
    """The names that belong to prediction heads."""
    return [name for name in names if name.startswith(PREFIX)]


def _renamed(arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """The heads' tensors without their prefix, in mlx-lm's form: experts side by side, and norms about 1. Published
    ones are about 0, and some of them negative, which those about 1 are not."""
    norms = [arrays[name] for name in tensors_of(list(arrays)) if arrays[name].ndim == 1 and _NORM.search(name)]
    is_about_0 = mx.stack([norm.min() for norm in norms]).min() < 0 if norms else mx.array(False)
    own: dict[str, mx.array] = {}
    experts: dict[str, dict[int, mx.array]] = {}
    for name in tensors_of(list(arrays)):
        key, array = name.removeprefix(PREFIX), arrays[name]
        found = _EXPERT.fullmatch(key)
        if found:
            experts.setdefault(f"{found[1]}.switch_mlp.{found[3]}.{found[4]}", {})[int(found[2])] = array
        elif key.endswith(".experts.gate_up_proj"):
            base = key.removesuffix(".experts.gate_up_proj")
            gate, up = mx.split(array, 2, axis=-2)
            own[f"{base}.switch_mlp.gate_proj.weight"], own[f"{base}.switch_mlp.up_proj.weight"] = gate, up
        elif key.endswith(".experts.down_proj"):
            own[key.replace(".experts.down_proj", ".switch_mlp.down_proj.weight")] = array
        else:
            own[key] = array + is_about_0.astype(array.dtype) if array.ndim == 1 and _NORM.search(key) else array
    return own | {name: mx.stack([each[i] for i in sorted(each)]) for name, each in experts.items()}


def _attention_layer(model: nn.Module) -> nn.Module:
    """A layer of the model with plain keys and values."""
    layers, caches = find_layers(model), make_prompt_cache(model)
    for slot, cache in zip(layers, caches, strict=False):
        if can_quantise(cache):
            return cast(nn.Module, slot.layer)
    raise ModelError(f"draft mtp: {type_name(model)} has no layer with attention of the usual kind")


def _copied(module: nn.Module) -> nn.Module:
    """The same modules, which share their arrays."""
    return copy.deepcopy(module, {id(array): array for _, array in tree_flatten(module.parameters())})


def _filled(module: Any, prefix: str, arrays: Mapping[str, mx.array]) -> Any:
    """A module with the parameters ``prefix...`` of ``arrays``, whose linear layers may be quantised otherwise."""
    for key, child in list(module.items()):
        if type(child) in _LINEAR or type(child) in _OF:
            module[key] = _linear(child, prefix + key, arrays)
        elif isinstance(child, nn.Module):
            _filled(child, f"{prefix}{key}.", arrays)
        elif isinstance(child, mx.array):
            module[key] = arrays[prefix + key]
    return module


def _linear(like: Any, name: str, arrays: Mapping[str, mx.array]) -> Any:
    """A linear layer, or that of experts, with the tensors ``name.*``."""
    plain = _OF.get(type(like), type(like))
    weight, scales = arrays[f"{name}.weight"], arrays.get(f"{name}.scales")
    made: Any = nn.Module.__new__(plain if scales is None else _LINEAR[plain])
    nn.Module.__init__(made)
    made.weight = weight
    if scales is not None:
        inputs = weight.shape[-1] if type(like) in _LINEAR and name == "fc" else _inputs(like)
        made.scales, made.mode = scales, "affine"
        made.group_size, made.bits = inputs // scales.shape[-1], weight.shape[-1] * 32 // inputs
        made.biases = arrays[f"{name}.biases"]
    if f"{name}.bias" in arrays:
        made.bias = arrays[f"{name}.bias"]
    return made


def _inputs(linear: Any) -> int:
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


class WithHeads:
    """A last stage and its heads, whose KV is one more cache of each sequence.

    Raises:
        ModelError: the heads cannot run on this stage.
    """

    def __init__(self, stage: StageModel, heads: Heads) -> None:
        self.stage, self.heads, self.target = stage, heads, Target.of(stage.whole)
        attend_by_rows(stage.whole)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the heads' KV for a token."""
        caches = self.make_caches()
        list(self.probe(caches))
        own = caches.own[-len(self.heads.layers) :]
        return sum(a.shape[1] * a.shape[3] * a.itemsize for cache in own for a in (cache.keys, cache.values))

    def sample(self) -> KVBlock:
        """A block of a few tokens, as it would be kept, with the heads' KV.

        Raises:
            ModelError: the norm and head that the heads would use are not what the model computes its logits with.
        """
        caches, rows = self.make_caches(), 4
        hidden = self.stage.made_up_hidden(rows, 0)
        logits = self.stage(mx.zeros((1, rows), mx.int32), caches, None if hidden is None else hidden[None], rows)[0]
        last = self.stage.take_last_hidden()
        assert last is not None
        states = self.target.norm(last[0])
        own, parts = self.logits(states), [(caches, rows, mx.tri(rows, rows).astype(mx.bool_))]
        self.run(mx.zeros(rows, mx.int32), states, parts, mx.arange(rows))
        if not mx.allclose(own, logits.astype(own.dtype), rtol=0.05, atol=0.05 * float(mx.abs(logits).max())):
            raise ModelError(f"draft mtp: {type_name(self.stage.whole)} computes its logits in another way")
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
        return self.heads(self.target.embed(tokens[:, None]), hidden[:, None], caches)[:, 0]

    def logits(self, hidden: mx.array) -> mx.array:
        """[n, vocabulary] from [n, d] of ``run``."""
        return cast(mx.array, self.target.head(hidden[:, None])[:, 0])

    def probe(self, caches: SequenceCaches | None = None) -> Iterator[mx.array]:
        """What a call for two rows computes, not evaluated."""
        caches, size = caches or self.make_caches(), self.target.norm.weight.shape[-1]
        visible = mx.ones((2, 2), mx.bool_)
        hidden = self.run(
            mx.zeros(2, mx.int32),
            mx.zeros((2, size), self.target.norm.weight.dtype),
            [(caches, 2, visible)],
            mx.arange(2),
        )
        yield self.logits(hidden)
        yield self.target.norm(hidden)
