"""Drafts of every kind are those of mlx-vlm's own classes, with the same weights, behind the same tokens."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import tiny
from engine.door import Open, ask
from mlx_lm.utils import load_model
from tiny import Folder
from trained import (
    LEAVING,
    Arrays,
    add_heads,
    behind_the_last,
    heads_for,
    quantised,
    rounded,
    save_dflash,
    save_eagle3,
    weights_of,
)  # fmt: skip

from splitinfer import Flight
from splitinfer.models.library import mlx_vlm

if find_spec("mlx_vlm") is None:
    pytest.skip("mlx-vlm is not installed", allow_module_level=True)

from engine.drafts.classes import best

Drafts = Callable[[list[int], int], list[int]]


def _config(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


def _eagle3(target: Any, drafter: Path) -> Drafts:
    config, module = _config(drafter), mlx_vlm.module("speculative.drafters.eagle3")
    entering = [i + 1 for i in LEAVING]
    told = {"draft_vocab_size": config["draft_vocab_size"], "norm_before_residual": config["norm_before_residual"]}
    told |= {"transformer_layer_config": config, "eagle_aux_hidden_state_layer_ids": entering}
    made = module.Model(module.ModelConfig.from_dict(told))
    own = {name.replace("midlayer.", "layers.0."): array for name, array in weights_of(drafter).items()}
    made.load_weights(list(made.sanitize(own).items()), strict=False)  # the embedding is the target's
    return _one_by_one(target, made, LEAVING)


def _mtp(form: Callable[[Arrays], Arrays], target: Any, folder: Path) -> Drafts:
    module = mlx_vlm.module("speculative.drafters.qwen3_5_mtp")
    rope = {"type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    text = _config(folder) | {"num_experts": 0, "rope_parameters": rope}
    made = module.Model(module.ModelConfig.from_dict({"text_config": text}))
    heads = {name.removeprefix("mtp."): array for name, array in form(heads_for(folder)).items()}
    made.load_weights(list(made.sanitize(heads).items()))
    return _one_by_one(target, made, None)


def _dflash(target: Any, drafter: Path) -> Drafts:
    config = _config(drafter)
    name = "dflash2" if "selector_rank" in config["dflash_config"] else "qwen3_dflash"
    module = mlx_vlm.module(f"speculative.drafters.{name}")
    made = module.Model(module.ModelConfig.from_dict(config))
    made.load_weights(list(made.sanitize(weights_of(drafter)).items()))
    made.validate_target_compatibility = lambda _target: None  # mlx-lm's classes have nothing to roll back with

    def drafts(tokens: list[int], count: int) -> list[int]:
        caches, hidden = made.reset(target), _hidden(target, tokens[:-1], LEAVING)
        found = made.draft_block(tokens[-1], hidden, caches, count + 1, best)
        return list(map(int, found[0].tolist()))

    return drafts


def _one_by_one(target: Any, made: Any, layers: list[int] | None) -> Drafts:
    def drafts(tokens: list[int], count: int) -> list[int]:
        made.reset(target)
        hidden = target.model(mx.array([tokens[:-1]])) if layers is None else _hidden(target, tokens[:-1], layers)
        made.prefill_from_target_hidden(mx.array([tokens[:-1]]), hidden, tokens[-1], best, greedy=True)
        return made.draft_block(tokens[-1], hidden[:, -1:], None, count + 1, best, greedy=True)[0].tolist()

    return drafts


def _hidden(target: Any, tokens: list[int], layers: list[int]) -> mx.array:
    hidden, found = target.model.embed_tokens(mx.array([tokens])), []
    for layer in target.model.layers:
        found.append(hidden := layer(hidden, "causal"))
    return mx.concatenate([found[i] for i in layers], axis=-1)


FORMS = {"as they are": (dict, dict), "quantised": (quantised, rounded), "behind the last": (behind_the_last, dict)}
"""How heads are written, and which numbers that stands for."""
MORE = [
    ("mtp", {"form": "as they are"}), ("mtp", {"form": "behind the last"}), ("eagle3", {"norm_before_residual": True}),
    ("dflash", {}), ("dflash", {"dflash_config": {"causal": True}}),
    ("dflash", {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "told"), [
    ("eagle3", {"norm_before_residual": False, "entering": False}), ("dflash", {"second": True}),
    ("mtp", {"form": "quantised"}),
    *(pytest.param(*one, marks=pytest.mark.nightly) for one in MORE),
], ids=str)  # fmt: skip
def test_drafts(
    kind: str,
    told: dict[str, Any],
    tiny_folder: Folder,
    tmp_path: Path,
    pipeline: Open,
    proposed: list[tuple[list[int], list[int]]],
) -> None:
    if kind == "mtp":
        form, numbers = FORMS[told["form"]]
        folder = tiny.save(tmp_path / "target", "qwen3_next", mlp_only_layers=[0, 1, 2, 3])
        drafter, theirs = add_heads(folder, form=form), partial(_mtp, numbers)
    else:
        folder, save = tiny_folder("llama"), save_eagle3 if kind == "eagle3" else save_dflash
        drafter, theirs = save(tmp_path / "drafter", **told), {"eagle3": _eagle3, "dflash": _dflash}[kind]
    draft = "mtp" if kind == "mtp" else str(drafter)
    with pipeline(folder, [1, 2, 1], token_budget=16, draft=draft, are_checked=False) as there:
        there.answers(*(replace(ask(20 + 15 * i, prompt=i), flight=Flight(3 + 2 * i)) for i in range(2)))
    assert len(proposed) > 15
    drafts = theirs(load_model(folder, strict=False)[0], drafter)
    assert [found for _, found in proposed] == [drafts(tokens, len(found)) for tokens, found in proposed]
