"""Drafters that run one sequence after the other: those of mlx-vlm's classes, unchanged.

A class makes its own caches and masks. Prediction heads (``LibraryHeads``) make the entry of a token of its hidden
state and of the token after it:

    hidden states of the target     h0   h1   h2   h3
    tokens after them               t1   t2   t3   s4       s4 was sampled after h3
    entries                         e0   e1   e2   e3 ──▶ draft of token 5, and a hidden state for the next draft

DSpark and its like (``LibraryBlocks``) make entries of hidden states alone and draft a block, as ``dflash`` does.
Gemma 4's assistants (``Assistant``) have no entries: they read the target's own keys and values.

The number of right drafts must be known before any of them runs; the graphs of the other drafters find it out.
"""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from splitinfer.common.model_config import mapping, strings
from splitinfer.errors import ModelError
from splitinfer.models.caches.caches import Mark, WindowKVCache, heads_caches
from splitinfer.models.caches.cohort import SequenceCaches
from splitinfer.models.caches.quantised import Packed
from splitinfer.models.cut.cut import StageModel
from splitinfer.models.drafters import heads
from splitinfer.models.drafters.heads import HeadArrays, Heads, Target, check_vocabulary
from splitinfer.models.library import mlx_vlm
from splitinfer.models.library.layers import find_layers, type_name

_AS_THEY_LEAVE = ("deepseek_v4_mtp", "inkling_mtp", "qwen4_exp_mtp")
"""The drafters that read the hidden states behind the last layer; others read what the target's head reads."""
_PROJECTIONS = ("fc", "encoder.fc", "stages.0.main_proj")
"""Where classes of blocks keep the projection of hidden states; the first may have a norm for each of them."""
_NORMS = "aux_hidden_norms"

Ids = list[int] | tuple[int, ...]
Sample = Callable[[mx.array], mx.array] | None
_Rows = tuple[mx.array, mx.array]


class OfSequences(Heads):
    """A drafter that runs one sequence after the other."""

    def draft(
        self, caches: SequenceCaches, ids: Ids, hidden: mx.array, token: Ids, count: int, sample: Sample
    ) -> mx.array | None:
        """Append entries, and return int [count] drafts, or None if count is 0.

        Args:
            ids: the next n tokens; hidden: [n, ...], the hidden states behind them.
            token: the one behind them, which was sampled; empty if more of the prompt follows.
            sample: makes tokens [..., n] of the next n drafts' logits [..., n, vocabulary].
        """
        raise NotImplementedError

    def nothing(self, caches: SequenceCaches, tokens: mx.array, hidden: mx.array) -> mx.array:
        """Return what is drafted behind made-up hidden states [n, ...] in empty caches: a chunk of a prompt, then one
        row. Nothing is evaluated."""
        self.draft(caches, [0] * (len(tokens) - 1), hidden[:-1], [], 0, None)
        return cast(mx.array, self.draft(caches, [0], hidden[-1:], [0], 2, lambda logits: logits.argmax(axis=-1)))


class OneByOne(OfSequences):
    """Prediction heads, whose last entry of a chunk is made of a wrong token until the next slice comes."""

    def draft(
        self, caches: SequenceCaches, ids: Ids, hidden: mx.array, token: Ids, count: int, sample: Sample
    ) -> mx.array | None:
        """Return drafts as ``OfSequences.draft``."""
        after, rows, at = [*ids[1:], *token], hidden, caches.heads_at
        if caches.tail is not None and caches.tail[0] == at:
            _, row, before = caches.tail
            before.restore()
            after, rows, caches.heads_at = [ids[0], *after], mx.concatenate([row, hidden]), at - 1
        caches.tail = None
        read = self._run(caches, mx.array(after), rows[: len(after)], 0) if after else None
        if not token:
            caches.tail = (caches.heads_at + 1, hidden[-1:], Mark(caches.heads))
            self._run(caches, mx.array(ids[-1:]), hidden[-1:], 0)
        if read is None or sample is None:
            return None
        before, at, drafts = Mark(caches.heads), caches.heads_at, list[mx.array]()
        for number in range(count):
            if number:
                read = self._run(caches, drafts[-1], read[1][None], number)
            drafts.append(sample(self.logits(read[0][None])))
        before.restore()
        caches.heads_at = at
        return mx.concatenate(drafts)

    def _run(self, caches: SequenceCaches, tokens: mx.array, hidden: mx.array, number: int) -> _Rows:
        """Append entries of tokens [n] and the hidden states before them. Return the last row's hidden states: [d] for
        logits, and [...] for the next draft. ``number``: 0 for known tokens, else how many drafts were before this."""
        read, kept = self.forward(tokens[None], hidden[None], caches.heads, caches.heads_at, number)
        caches.heads_at += len(tokens)
        return read[0, -1], kept[0, -1]


class _OfLibrary(OfSequences):
    """mlx-vlm's ``drafter`` for a target that has a class of mlx-vlm or of mlx-lm."""

    def __init__(self, drafter: Any, model: nn.Module) -> None:
        super().__init__()
        self.drafter, self.like = drafter, len(find_layers(model)) - 1
        self._target = target = Target.of(model)
        told = drafter.config
        text = getattr(told, "text_config", None) or told
        check_vocabulary({"vocab_size": text.vocab_size}, model, target.embed.weight.shape[0])
        if (size := getattr(told, "backbone_hidden_size", text.hidden_size)) != target.size:
            raise ModelError(
                f"the drafter is for hidden states of {size} numbers, and those of {type_name(model)} have "
                f"{target.size}; it belongs to another model"
            )
        drafter.validate_target_compatibility = lambda _model: None  # asks for mlx-vlm's own way of going back
        inner = SimpleNamespace(embed_tokens=target.embed.__call__, embed_scale=target.scale, layers=find_layers(model))
        own = SimpleNamespace(num_hidden_layers=len(inner.layers), vocab_size=text.vocab_size)
        self._model = SimpleNamespace(model=inner, config=own, lm_head=target.head, rollback_speculative_cache=None)

    @property
    def cast_predicate(self) -> Any:
        """The function that says which parameters may be cast to half precision, by their names."""
        may_halve = getattr(self.drafter, "cast_predicate", lambda _name: True)
        return lambda name: may_halve(name.removeprefix("drafter."))

    def make_caches(self) -> list[Any]:
        """Return empty caches for one sequence."""
        return heads_caches(self.drafter.make_cache())

    def states(self, kept: mx.array) -> mx.array:
        """Return the rows that the drafter reads, made from the rows [T, w] after the target's last layer."""
        return self._target.read_by_head(kept)


class LibraryHeads(_OfLibrary, OneByOne):
    """Prediction heads."""

    def __init__(self, drafter: Any, model: nn.Module) -> None:
        super().__init__(drafter, model)
        drafter._input_embed, drafter._lm_head_fn = self._target.embed, self._target.head
        self._as_they_leave = drafter.config.model_type in _AS_THEY_LEAVE

    def check(self, stage: StageModel) -> None:
        """Raise ModelError if a loaded stage does not compute its logits as the heads expect."""
        if not self._as_they_leave:
            self._target.check(stage)

    def states(self, kept: mx.array) -> mx.array:
        """Return the rows that the heads read, made from the rows [T, w] after the target's last layer."""
        return kept if self._as_they_leave else super().states(kept)

    def forward(self, tokens: mx.array, hidden: mx.array, caches: Sequence[Any], start: int, number: int) -> _Rows:
        """Return [1, n, d] hidden states for logits, and [1, n, ...] for further drafts. Appends n entries.

        Args:
            tokens: [1, n] ids; hidden: [1, n, ...] the hidden states before them.
            start: how many entries there are.
            number: 0 for tokens that are known, else the number of drafts before this one.
        """
        drafter = self.drafter
        drafter._cache, drafter._next_position, drafter._round_appended = list(caches), start, max(0, number - 1)
        if hasattr(drafter, "_forward_seq"):  # has a block of its own for each draft
            block = min(drafter._round_appended, len(drafter.blocks) - 1)
            found = drafter._forward_seq(tokens, hidden, block, mx.int32)
        else:
            found = drafter._forward_tokens(tokens, hidden, mx.int32)
        drafter._cache = []  # it would hold the caches of a sequence that has ended
        return found if isinstance(found, tuple) else (found, found)

    def logits(self, hidden: mx.array) -> mx.array:
        """Return logits [n, vocabulary] from hidden states [n, d]."""
        made = getattr(self.drafter, "_block_logits", self._target.head)(hidden[:, None])[:, 0]
        missing = self._target.embed.weight.shape[0] - made.shape[-1]
        return mx.pad(made, [(0, 0), (0, missing)], constant_values=-mx.inf) if missing > 0 else made


class _LastKVCache(WindowKVCache):
    """Returns the keys and values of its window alone, because these classes mask none of them."""

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return the keys and values of the last ``window`` tokens, oldest first."""
        keys, values = super().keys_and_values()
        return keys[..., -self.window :, :], values[..., -self.window :, :]


class LibraryBlocks(_OfLibrary):
    """A drafter of blocks (DSpark, Laguna's and Muse Glimmer's), without its projection of hidden states."""

    def __init__(self, drafter: Any, model: nn.Module) -> None:
        super().__init__(drafter, model)
        self.at_once = drafter.config.block_size - 1
        holder = drafter.stages[0] if "stages" in drafter else drafter.get("encoder", drafter)
        holder["main_proj" if "main_proj" in holder else "fc"] = nn.Identity()  # the stages have its columns
        drafter._project_context_kv = lambda _hidden: None  # would keep a copy of the layers' weights
        if _NORMS in drafter:
            drafter[_NORMS] = []
            drafter._combine_hidden = drafter.hidden_norm.__call__

    def make_caches(self) -> list[Any]:
        """Return empty caches for one sequence."""
        made = self.drafter.make_cache()
        windows = [getattr(cache, "max_size", 0) for cache in made]
        return [_LastKVCache(n) if n else own for n, own in zip(windows, heads_caches(made), strict=True)]

    def states(self, kept: mx.array) -> mx.array:
        """Return [T, d]: the sum of the taps."""
        return kept[:, : self._target.size]

    def draft(
        self, caches: SequenceCaches, ids: Ids, hidden: mx.array, token: Ids, count: int, sample: Sample
    ) -> mx.array | None:
        """Return drafts as ``OfSequences.draft``."""
        caches.heads_at += len(hidden)
        self.drafter.bind(self._model)
        if not count:
            self.drafter._hidden(mx.zeros((1, 1), mx.int32), hidden[None], caches.heads)
            return None
        made = self.drafter.draft_block(mx.array(token), hidden[None], caches.heads, 1 + count, sample)
        return cast(mx.array, made[0])


class Assistant(_OfLibrary):
    """An assistant of Gemma 4. Its layers attend to the keys and values of the target's last layers.

    Raises:
        ModelError: the last stage lacks these layers or has a half of each, or they are of another form.
    """

    def __init__(self, drafter: Any, stage: StageModel) -> None:
        super().__init__(drafter, stage.whole)
        self._places = dict[str, int]()
        inner, layers = self._target.inner, [slot.layer for slot in find_layers(stage.whole)]
        for index, place in enumerate(getattr(inner, "previous_kvs", range(len(layers)))):
            self._places[layers[index].layer_type] = place
        if missing := sorted({*self._places.values()} - {*stage.own_places}):
            raise ModelError(
                f"the assistant reads the keys and values of layer {missing[0]} (counted from 0), which the last stage "
                f"does not have: give it layers {missing[0]} to {len(layers) - 1}"
            )
        for own in (layer.self_attn for layer in drafter.model.layers):
            there = layers[self._places[own.layer_type]].self_attn
            if (own.n_kv_heads, own.head_dim) != (there.n_kv_heads, there.head_dim):
                raise ModelError(
                    f"the assistant reads {own.n_kv_heads} heads of {own.head_dim} numbers, and the last stage has "
                    f"{there.n_kv_heads} of {there.head_dim}; it belongs to another model, or the stage is across two "
                    "machines"
                )

    def draft(
        self, caches: SequenceCaches, ids: Ids, hidden: mx.array, token: Ids, count: int, sample: Sample
    ) -> mx.array | None:
        """Return drafts as ``OfSequences.draft``."""
        caches.heads_at += len(hidden)
        if not count:
            return None
        end, window = caches.heads_at, self.drafter.config.text_config.sliding_window
        found = {kind: self._kv(caches.kv_cache(place), kind, end) for kind, place in self._places.items()}
        found["sliding_attention"] = [array[:, :, -window:] for array in found["sliding_attention"]]
        self.drafter.bind(self._model)
        self.drafter.set_shared_kv(found, end, position=max(end - 1, 0), kv_valid_len=end)
        # Without logits for a sequence that was never run, because to make them would evaluate a part of the graph.
        is_empty = any(caches.kv_cache(place).empty() for place in self._places.values())
        drafts = self.drafter.draft_block(mx.array(token), hidden[None, -1:], [], 1 + count, sample, greedy=is_empty)
        self.drafter._shared_kv = None  # it would hold them, and the next step copy them
        return cast(mx.array, drafts[0])

    def _kv(self, cache: Any, kind: str, end: int) -> list[mx.array]:
        """Return a layer's keys and values of the tokens before ``end``; zeros for a sequence that was never run."""
        if cache.empty():
            like = next(one.self_attn for one in self.drafter.model.layers if one.layer_type == kind)
            return [mx.zeros((1, like.n_kv_heads, end, like.head_dim))] * 2
        keys, values = cache.keys, cache.values
        if hasattr(cache, "decode"):
            keys, values = cache.decode(keys, values)
        numbers = (array.numbers() if isinstance(array, Packed) else array for array in (keys, values))
        return [array[:, :, : end - getattr(cache, "base", 0)] for array in numbers]


# -- folders and checkpoints -------------------------------------------------------------------------


def is_assistant(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json belongs to an assistant of Gemma 4."""
    return str(config.get("model_type")) in ("gemma4_assistant", "gemma4_unified_assistant")


def is_blocks(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json belongs to a drafter of blocks that mlx-vlm runs."""
    told, kind = mapping(config, "dflash_config"), str(config.get("model_type"))
    names = [kind, *strings(config, "architectures"), str(told.get("projector_type"))]
    return (
        any("dspark" in name.lower() for name in names)
        or bool({**config, **told}.get("markov_rank"))
        or (kind in ("laguna", "muse_glimmer_assistant") and ("dflash_config" in config or kind != "laguna"))
    )


def told_of_blocks(config: Mapping[str, Any]) -> Any:
    """Return the configuration of a drafter of blocks as mlx-vlm's class reads it.

    Raises:
        ModelError: mlx-vlm is not installed, or refuses it.
    """
    if not mlx_vlm.is_installed():
        raise ModelError("this drafter needs mlx-vlm: pip install mlx-vlm on every machine")
    try:
        package, _ = mlx_vlm.module("utils").get_model_and_args(dict(config))
        return package.ModelConfig.from_dict(dict(config))
    except (ValueError, TypeError, KeyError, ImportError) as error:
        raise ModelError(f"mlx-vlm cannot read the drafter's config.json ({error})") from error


def taps_of(config: Mapping[str, Any], model: nn.Module, arrays: HeadArrays) -> dict[int, Any]:
    """Return ``heads.taps_of`` for the layers in a drafter's configuration. Some classes have a norm for each.

    Raises:
        ModelError: the drafter belongs to another model.
    """
    told, own = told_of_blocks(config), projection_of(arrays)
    parts: dict[int, Any] = heads.taps_of(told.target_layer_ids, model, own, getattr(told, "num_target_layers", None))
    if f"{_NORMS}.0.weight" in own:
        text = {"rms_norm_eps": told.rms_norm_eps}
        norms = [heads.norm(f"{_NORMS}.{i}", own, text) for i in range(len(parts))]
        parts = {layer: nn.Sequential(norm, parts[layer]) for layer, norm in zip(parts, norms, strict=True)}
    return parts


def projection_of(names: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a drafter's names of the projection of hidden states, and of norms before it, stand for; the
    projection's names begin with ``fc.``."""
    own = {name.removeprefix("model."): value for name, value in names.items()}
    found = {name: value for name, value in own.items() if name.startswith(_NORMS)}
    for start in map("{}.".format, _PROJECTIONS):
        found |= {f"fc.{name.removeprefix(start)}": value for name, value in own.items() if name.startswith(start)}
    return found


def splitter_of(config: Mapping[str, Any]) -> Any:
    """Return mlx-vlm's splitter for a checkpoint's heads. Return None if mlx-vlm is not installed, or has no class for
    them."""
    if not mlx_vlm.is_installed():
        return None
    found = mlx_vlm.module("speculative.drafters.mtp_split").get_mtp_splitter(source_config=dict(config))
    if found is not None and found.output_model_type.endswith("_dspark"):
        raise ModelError(
            "the checkpoint's DSpark reads hidden states of several layers, so it needs a folder of its own: draft: "
            f"FOLDER, after python -m mlx_vlm.speculative.drafters.{found.output_model_type}.split --model MODEL "
            "--output FOLDER"
        )
    if found is None or not hasattr(mlx_vlm.module(f"speculative.drafters.{found.output_model_type}"), "Model"):
        return None
    return found


def heads_within(config: Mapping[str, Any], arrays: HeadArrays) -> Any:
    """Return mlx-vlm's drafter made of the heads among a checkpoint's ``arrays``, without evaluating them. Return None
    if it has no class for them, or there are no heads."""
    splitter = splitter_of(config)
    if splitter is None:
        return None
    text = splitter.read_text_config(dict(config))
    own = [name for name in arrays if splitter.select_keys(name, text)]
    if not own:
        return None
    splitter.iter_selected = lambda _path, _text: [(None, own)]
    splitter.supports_mlx_source = False  # would look at the file; names in MLX's form stay as they are
    splitter.load_shard = lambda _file, names: {name: arrays[name] for name in names}
    return splitter.load(None, lazy=True, source_config=dict(config))
