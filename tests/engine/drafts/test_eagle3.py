"""EAGLE-3 on the last stage, its hidden states from all stages: the tokens are those without drafts, and the drafts are
those of a plain computation."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import tiny
from effort import thorough
from mlx_lm.utils import load_model
from stages import pipeline, prompt
from trained import LEAVING, noted_proposals, quantised, rounded, save_eagle3, weights_of

from splitinfer.core.sequence import SamplingParams
from splitinfer.core.speculation.flight import Flight
from splitinfer.demo import TARGET
from splitinfer.errors import ModelError
from splitinfer.models.checkpoint import open_folder
from splitinfer.models.cut import StageModel
from splitinfer.models.eagle3 import Eagle3, layers_of, taps_of
from splitinfer.models.growing import GrowingKVCache
from splitinfer.models.heads import HeadRows
from splitinfer.models.trained import join

NUM = 14
SEVERAL = [
    (prompt(20 + 9 * i, seed=i), SamplingParams(max_tokens=NUM, ignore_eos=True, **how))
    for i, how in enumerate(({}, {"temperature": 0.8, "seed": 5}, {"temperature": 1.0, "seed": 6}))
]


@pytest.mark.parametrize(("name", "cuts", "codec"), [
    ("llama", [1, 2, 1], "none"), ("qwen3_next", [2, 2], "int8"),
    *thorough((), (("qwen3", [4], "none"), ("qwen3_moe", [3, 1], "fp8"), ("llama", [1, 3], "fp16"))),
], ids=str)  # fmt: skip
def test_tokens_are_those_without_drafts(name: str, cuts: list[int], codec: str, tmp_path: Path) -> None:
    """In batches, chunks, and by codecs, which pack the rows of taps by themselves."""
    folder, drafter = tiny.save(tmp_path / name, name), save_eagle3(tmp_path / "drafter")
    with pipeline(folder, cuts, token_budget=16, codec=codec) as llm:
        expected = [llm.submit(*one).result().token_ids for one in SEVERAL]
    with pipeline(folder, cuts, token_budget=16, codec=codec, draft=str(drafter)) as llm:
        for flight in (None, Flight(3)):
            together = [llm.submit(*one, flight=flight) for one in SEVERAL]
            assert [one.result().token_ids for one in together] == expected
        assert llm.stats()["speculation"]["sent"] > 10


@pytest.mark.parametrize("entering", [True, False], ids=["as they enter", "as they leave"])
def test_drafts_are_those_of_a_plain_computation(
    entering: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.save(tmp_path / "llama", "llama")
    drafter = save_eagle3(tmp_path / "drafter", entering=entering, norm_before_residual=not entering)
    proposed = noted_proposals(monkeypatch)
    with pipeline(folder, [1, 2, 1], token_budget=16, draft=str(drafter)) as llm:
        params = SamplingParams(max_tokens=10, ignore_eos=True)
        under_way = [llm.submit(prompt(20 + 15 * i, seed=i), params, flight=Flight(3)) for i in range(2)]
        assert all(one.result().token_ids for one in under_way)
    assert len(proposed) > 8
    plain = Plain(folder, drafter)
    assert [drafts for _, drafts in proposed] == [plain.drafts(tokens, len(drafts)) for tokens, drafts in proposed]


class Plain:
    """A whole Llama of mlx-lm and a drafter, by their formula alone."""

    def __init__(self, folder: Path, drafter: Path) -> None:
        self.model, self.w = load_model(folder)[0].model, weights_of(drafter)
        self.residual_is_normed = json.loads((drafter / "config.json").read_text())["norm_before_residual"]

    def norm(self, name: str, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.w[f"{name}.weight"], 1e-5)

    def times(self, name: str, x: mx.array) -> mx.array:
        return x @ self.w[f"{name}.weight"].T

    def features(self, tokens: list[int]) -> mx.array:
        hidden, found = self.model.embed_tokens(mx.array([tokens])), []
        for layer in self.model.layers:
            hidden = layer(hidden, "causal")
            found.append(hidden)
        return self.times("fc", mx.concatenate([found[i] for i in LEAVING], axis=-1))

    def layer(self, ids: list[int], hidden: mx.array) -> mx.array:
        normed = self.norm("midlayer.hidden_norm", hidden)
        embedded = self.norm("midlayer.input_layernorm", self.model.embed_tokens(mx.array([ids])))
        x = mx.concatenate([embedded, normed], axis=-1)
        q, k, v = (
            self.times(f"midlayer.self_attn.{part}_proj", x).reshape(1, len(ids), -1, 16).swapaxes(1, 2)
            for part in "qkv"
        )
        q, k = (mx.fast.rope(a, 16, traditional=False, base=10000.0, scale=1.0, offset=0) for a in (q, k))
        found = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.25, mask="causal")
        attended = self.times("midlayer.self_attn.o_proj", found.swapaxes(1, 2).reshape(1, len(ids), -1))
        h = (normed if self.residual_is_normed else hidden) + attended
        x = self.norm("midlayer.post_attention_layernorm", h)
        gate = self.times("midlayer.mlp.gate_proj", x)
        return h + self.times("midlayer.mlp.down_proj", gate * mx.sigmoid(gate) * self.times("midlayer.mlp.up_proj", x))

    def drafts(self, tokens: list[int], count: int) -> list[int]:
        hidden, ids, found = self.features(tokens[:-1]), tokens[1:], list[int]()
        while len(found) < count:
            states = self.layer(ids, hidden)
            best = self.times("lm_head", self.norm("norm", states[:, -1])).argmax(-1)
            found.append((best + self.w["d2t"][best]).item())
            hidden, ids = mx.concatenate([hidden, states[:, -1:]], axis=1), [*ids, found[-1]]
        return found


@pytest.mark.parametrize(("config", "reason"), [
    ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "not layer 8; it belongs to another model"),
    ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "2 hidden states of 96 numbers, and those of .* have 64"),
    ({"vocab_size": 5000}, "a vocabulary of 5,000 tokens, and .* has 160"),
    ({"norm_before_fc": True}, "norm_before_fc"),
    ({"num_hidden_layers": 2}, "lacks layers.1"),
], ids=str)  # fmt: skip
def test_drafters_of_other_models_are_refused(config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    model, _ = tiny.build("llama")
    drafter = save_eagle3(tmp_path / "drafter", **config)
    own, arrays = json.loads((drafter / "config.json").read_text()), weights_of(drafter)
    with pytest.raises(ModelError, match=reason):
        _ = taps_of(own, model, arrays), Eagle3(own, model, arrays)


def test_a_quantised_drafter_is_the_one_that_its_numbers_stand_for(tmp_path: Path) -> None:
    """Its projection in three parts, its embedding, its layers and its head."""
    model, _ = tiny.build("llama")
    drafter = save_eagle3(tmp_path / "drafter")
    own = json.loads((drafter / "config.json").read_text())
    plain = weights_of(drafter) | {"embed_tokens.weight": mx.random.normal((160, 64))}
    table, found = plain.pop("d2t"), list[mx.array]()
    for arrays in (rounded(plain), quantised(plain)):
        made = Eagle3(own, model, arrays | {"d2t": table})
        taps = taps_of(own, model, arrays)
        features = sum(taps[layer](mx.arange(64.0)[None] / 64 + layer) for layer in LEAVING)
        positions, visible = mx.arange(1), mx.ones((1, 1), mx.bool_)
        rows = HeadRows([(GrowingKVCache(), 1, visible)], positions)
        found.append(made.logits(made(made.embed(mx.array([[7]])), features[:, None], [rows])))
    assert mx.isfinite(found[0]).sum() == table.size == 40
    assert mx.allclose(mx.maximum(found[0], -99), mx.maximum(found[1], -99), rtol=1e-4, atol=1e-4)


def test_an_embedding_of_another_size_is_refused(tmp_path: Path) -> None:
    model, _ = tiny.build("llama")
    drafter = save_eagle3(tmp_path / "drafter")
    arrays = weights_of(drafter) | {"embed_tokens.weight": mx.zeros((160, 32))}
    with pytest.raises(ModelError, match="embeddings of 64 numbers, and its own have 32"):
        Eagle3(json.loads((drafter / "config.json").read_text()), model, arrays)


def test_tokens_that_a_target_or_a_drafter_lacks(tmp_path: Path) -> None:
    """MLX does not check indices."""
    model, _ = tiny.build("llama")
    drafter = save_eagle3(tmp_path / "drafter")
    own, arrays = json.loads((drafter / "config.json").read_text()), weights_of(drafter)
    made = Eagle3(own, model, arrays | {"d2t": arrays["d2t"] + 130})
    with pytest.raises(ModelError, match="tokens that the model does not have"):
        made.check(StageModel(model, 0, 4))
    table = mx.random.normal((100, 64))
    made = Eagle3(own, model, arrays | {"embed_tokens.weight": table})
    assert mx.array_equal(made.embed(mx.array([99, 150])), table[mx.array([99, 99])])


def test_a_drafter_that_is_wider_than_a_row_between_stages(tmp_path: Path) -> None:
    model, _ = tiny.build("llama")
    drafter = save_eagle3(tmp_path / "drafter")
    arrays = weights_of(drafter)
    arrays["fc.weight"] = mx.zeros((96, arrays["fc.weight"].shape[1]))
    with pytest.raises(ModelError, match="96 numbers, and a row on a link has 64"):
        join(StageModel(model, 0, 2), open_folder(drafter), arrays, None)


def test_a_drafter_is_no_model() -> None:
    with pytest.raises(ModelError, match="holds a drafter for another model"), pipeline("demo-drafter", [1]):
        pass


def test_layers_where_a_drafter_names_none() -> None:
    assert layers_of({}, 32) == [1, 15, 28]


def test_the_shipped_drafter_is_mostly_right_and_changes_no_token() -> None:
    """Its first drafts are right at about 0.85 of the places of a greedy tale, and at 0.62 of one at temperature 1."""
    asked = [("Once upon a time there was a poor woodcutter", SamplingParams(24, t, seed=1)) for t in (0.0, 1.0)]
    found = []
    for draft in ("none", "demo-drafter"):
        with pipeline(TARGET, [5, 7], draft=draft) as llm:
            found.append([llm.submit(llm.encode(text), params, flight=Flight(3)).result().token_ids
                          for text, params in asked])  # fmt: skip
    counts = llm.stats()["speculation"]
    assert found[0] == found[1]
    assert sum(counts["accepted_at"]) > 0.5 * sum(counts["tried_at"]) > 5
