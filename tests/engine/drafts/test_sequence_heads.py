"""Prediction heads that mlx-vlm's classes run: drafts as from the class itself. Tokens: ``test_every_class``."""

import json
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from engine.door import Ask, Open, ask
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache
from mlx_lm.utils import load_model
from trained import LEAVING, heads_for, save_dflash, weights_of

from splitinfer import Flight
from splitinfer.models.drafters.sequence_heads import OneByOne
from splitinfer.models.library import mlx_vlm

if find_spec("mlx_vlm") is None:
    pytest.skip("mlx-vlm is not installed", allow_module_level=True)

from engine.drafts.classes import STORED, best, hidden_of, saved

BY_CHUNKS = ("deepseek_v4", "hy_v4")  # whose own hidden states depend on the chunks that they are computed in
NIGHTLY = pytest.mark.nightly
Proposed = list[tuple[list[int], list[int]]]


def _asked(one: Ask, count: int) -> Ask:
    """A request with tokens that all these models have, and blocks of ``count`` drafts."""
    return replace(one, tokens=tuple(token % 100 for token in one.tokens), flight=Flight(count))


def test_latent_heads_are_the_models_own_layer(drafter: Any, pipeline: Open, proposed: Proposed) -> None:
    """mlx-vlm has no class for them. A prompt in chunks ends with an entry that the next chunk replaces."""
    folder, _ = drafter("latent", "")
    target, own = load_model(folder, strict=False)[0], heads_for(folder)
    with pipeline(folder, [2, 2], token_budget=16, draft="mtp", are_checked=False) as there:
        there.answers(*(replace(ask(40 + 9 * i, prompt=i), flight=Flight(3)) for i in range(2)))
    assert len(proposed) > 8

    def step(ids: list[int], hidden: mx.array, cache: Any) -> mx.array:
        embedded = target.model.embed_tokens(mx.array([ids]))
        norms = {name: own[f"mtp.{name}.weight"] for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
        rows = [mx.fast.rms_norm(embedded, norms["pre_fc_norm_embedding"], 1e-5)]
        rows += [mx.fast.rms_norm(hidden, norms["pre_fc_norm_hidden"], 1e-5)]
        x = mx.concatenate(rows, axis=-1) @ own["mtp.fc.weight"].T
        x = target.layers[-1](x, create_attention_mask(x, cache, return_array=True), cache)
        return mx.fast.rms_norm(x, norms["norm"], 1e-5)[:, -1:]

    for tokens, found in proposed:
        cache, drafts = KVCache(), list[int]()
        hidden = step(tokens[1:], target.model(mx.array([tokens[:-1]])), cache)
        for _ in found:
            drafts.append(int(target.lm_head(hidden).argmax().item()))
            hidden = step(drafts[-1:], hidden, cache)
        assert drafts == found


@pytest.mark.parametrize(("name", "cuts"), [
    ("qwen4_exp", [2, 2]), *(pytest.param(*one, marks=NIGHTLY) for one in (("glm5_next", [4, 4]), ("hy_v4", [1, 3]))),
], ids=str)  # fmt: skip
def test_taps_of_streams_are_one_row_on_a_link(
    name: str, cuts: list[int], tmp_path: Path, pipeline: Open, proposed: Proposed
) -> None:
    """A drafter reads what the streams of hyper-connections mean. Its drafts are those of mlx-vlm's class where that
    names the hidden states."""
    target, _ = saved(name, tmp_path / "target", hidden_size=64)
    streams = target.args.hc_count if name == "qwen4_exp" else target.args.hc_mult
    told = {"mask_token_id": 120, "target_layer_ids": LEAVING}
    layers = len(target.layers)
    draft = save_dflash(tmp_path / "drafter", vocab_size=128, num_target_layers=layers, dflash_config=told)
    asked = _asked(ask(20), 3)
    with pipeline(tmp_path / "target", cuts, token_budget=64, draft=str(draft)) as there:
        there.answers(asked)
        assert there.stats["bytes_per_token"] == pytest.approx((streams + 1) * 64 * 4, rel=0.2)
    assert len(proposed) > 4
    module = mlx_vlm.module("speculative.drafters.qwen3_dflash")
    drafter = module.Model(module.ModelConfig.from_dict(json.loads((draft / "config.json").read_text())))
    drafter.load_weights(list(drafter.sanitize(weights_of(draft)).items()))
    for tokens, found in proposed if name == "qwen4_exp" else ():
        taps = target(mx.array([tokens[:-1]]), cache=target.make_cache(), capture_layer_ids=LEAVING).hidden_states
        caches = drafter.reset(target)
        block = drafter.draft_block(tokens[-1], mx.concatenate(taps, axis=-1), caches, len(found) + 1, best)
        assert found == block[0].tolist()


def _noted_states(monkeypatch: pytest.MonkeyPatch) -> dict[int, np.ndarray]:
    """By position, the hidden states of the one sequence that the heads read from now on."""
    found, draft = dict[int, np.ndarray](), OneByOne.draft

    def noted(self: Any, caches: Any, ids: Any, hidden: mx.array, *args: Any) -> Any:
        if any(ids):  # is not the made-up sequence of a survey
            found.update({caches.heads_at + i: np.array(row) for i, row in enumerate(hidden)})
        return draft(self, caches, ids, hidden, *args)

    monkeypatch.setattr(OneByOne, "draft", noted)
    return found


@pytest.mark.parametrize(("name", "cuts"), [
    ("nemotron_h", [2, -2]), ("hy_v4", [1, 1, -2]),
    *(pytest.param(*one, marks=NIGHTLY) for one in product(STORED, ([-1], [2, -2], [1, 1, -2]))),
], ids=str)  # fmt: skip
def test_drafts_are_those_of_mlx_vlms_class(
    name: str, cuts: list[int], tmp_path: Path, pipeline: Open, proposed: Proposed, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = saved(name, tmp_path / "target")
    layers = len(target.layers)
    cuts = [*cuts[:-1], layers - sum(cuts[:-1])]
    read = _noted_states(monkeypatch)
    asks = [_asked(ask(7 if name in BY_CHUNKS else 20 + 15 * i), 3 + i) for i in range(1 if name in BY_CHUNKS else 2)]
    with pipeline(tmp_path / "target", cuts, token_budget=64, draft="mtp", are_checked=False) as there:
        there.answers(*asks)
    assert len(proposed) > 4
    if name == "nemotron_h":
        drafter.validate_target_compatibility = lambda _target: None
        drafter.bind = lambda _target: None
        drafter._input_embed, drafter._lm_head_fn = target.backbone.embeddings, target.lm_head
    for tokens, found in proposed:
        drafter.reset(target)
        hidden = hidden_of(name, target, tokens[:-1])
        if name in BY_CHUNKS:
            given = mx.array(np.stack([read[position] for position in range(len(tokens) - 1)]))[None]
            if len(tokens) > 16 and name == "hy_v4":
                continue  # its heads choose among more tokens, and depend on the chunks, too
            assert len(tokens) > 8 or mx.allclose(given, hidden.reshape(given.shape), atol=1e-4)
            hidden = given
        drafter.prefill_from_target_hidden(mx.array([tokens[:-1]]), hidden, tokens[-1], best, greedy=True)
        block = drafter.draft_block(tokens[-1], hidden[:, -1:], None, len(found) + 1, best, greedy=True)
        assert found == block[0].tolist()
