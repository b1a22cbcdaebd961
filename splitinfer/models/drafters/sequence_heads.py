"""Prediction heads that run one sequence after the other: those of mlx-vlm's classes, unchanged.

A class makes its own caches and masks. The entry of a token is made of its hidden state and of
the token after it:

    hidden states of the target     h0   h1   h2   h3
    tokens after them               t1   t2   t3   s4       s4 was sampled after h3
    entries                         e0   e1   e2   e3 ──▶ draft of token 5, and a hidden state for the next draft

So the number of right drafts must be known before the heads run; the graphs of ``mtp``'s heads find it out.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import mlx.core as mx
import mlx.nn as nn

from splitinfer.errors import ModelError
from splitinfer.models.caches.caches import heads_caches
from splitinfer.models.cut.cut import StageModel
from splitinfer.models.drafters.heads import HeadArrays, Target, check_vocabulary
from splitinfer.models.library import mlx_vlm
from splitinfer.models.library.layers import find_layers, type_name

_AS_THEY_LEAVE = ("deepseek_v4_mtp", "inkling_mtp", "qwen4_exp_mtp")
"""The drafters that read the hidden states behind the last layer; others read what the target's head reads."""


class LibraryHeads(nn.Module):  # type: ignore[misc]
    """mlx-vlm's ``drafter`` for a target that has a class of mlx-vlm or of mlx-lm.

    Attributes:
        like: the index of the target layer that costs as much as the heads.
        at_once: 0, because tokens are drafted one after the other.
    """

    at_once = 0

    def __init__(self, drafter: Any, model: nn.Module) -> None:
        super().__init__()
        self.drafter, self.like = drafter, len(find_layers(model)) - 1
        self._target = target = Target.of(model)
        drafter._input_embed, drafter._lm_head_fn = target.embed, target.head
        self._as_they_leave = drafter.config.model_type in _AS_THEY_LEAVE
        text = drafter.config.text_config
        check_vocabulary({"vocab_size": text.vocab_size}, model, target.embed.weight.shape[0])
        if text.hidden_size != target.size:
            raise ModelError(
                f"the prediction heads are for hidden states of {text.hidden_size} numbers, and those of "
                f"{type_name(model)} have {target.size}; they belong to another model"
            )

    @property
    def cast_predicate(self) -> Any:
        """The function that says which parameters may be cast to half precision, by their names."""
        may_halve = getattr(self.drafter, "cast_predicate", lambda _name: True)
        return lambda name: may_halve(name.removeprefix("drafter."))

    def make_caches(self) -> list[Any]:
        """Return empty caches for one sequence."""
        return heads_caches(self.drafter.make_cache())

    def check(self, stage: StageModel) -> None:
        """Raise ModelError if a loaded stage does not compute its logits as the heads expect."""
        if not self._as_they_leave:
            self._target.check(stage)

    def states(self, kept: mx.array) -> mx.array:
        """Return the rows that the heads read, made from the rows [T, w] after the target's last layer."""
        return kept if self._as_they_leave else self._target.read_by_head(kept)

    def run(
        self, tokens: mx.array, hidden: mx.array, caches: Sequence[Any], start: int, number: int
    ) -> tuple[mx.array, mx.array]:
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
        """Return logits [n, 1, vocabulary] from hidden states [n, 1, d]."""
        made = getattr(self.drafter, "_block_logits", self._target.head)(hidden)
        missing = self._target.embed.weight.shape[0] - made.shape[-1]
        return mx.pad(made, [(0, 0), (0, 0), (0, missing)], constant_values=-mx.inf) if missing > 0 else made


class _Splitter(Protocol):
    """mlx-vlm's class that finds the heads in a checkpoint and gives them their names."""

    def read_text_config(self, config: dict[str, Any]) -> dict[str, Any]: ...
    def select_keys(self, key: str, text_config: dict[str, Any]) -> bool: ...
    def load(self, path: Any, *, lazy: bool, source_config: dict[str, Any]) -> Any: ...


def splitter_of(config: Mapping[str, Any]) -> _Splitter | None:
    """Return mlx-vlm's splitter for a checkpoint's heads. Return None if mlx-vlm is not installed, or has no class for
    them."""
    if not mlx_vlm.is_installed():
        return None
    found = mlx_vlm.module("speculative.drafters.mtp_split").get_mtp_splitter(source_config=dict(config))
    if found is None or not hasattr(mlx_vlm.module(f"speculative.drafters.{found.output_model_type}"), "Model"):
        return None
    return cast(_Splitter, found)


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
    served: Any = splitter
    served.iter_selected = lambda _path, _text: [(None, own)]
    served.supports_mlx_source = False  # would look at the file; names in MLX's form stay as they are
    served.load_shard = lambda _file, names: {name: arrays[name] for name in names}
    return splitter.load(None, lazy=True, source_config=dict(config))
