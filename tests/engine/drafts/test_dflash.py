"""DFlash and DFlash2 on the last stage: a block of drafts at once, from hidden states of all stages. The tokens are
those without drafts, and the drafts are those of a plain computation."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import tiny
from effort import thorough
from mlx_lm.utils import load_model
from stages import pipeline, prompt
from trained import LEAVING, noted_proposals, quantised, rounded, save_dflash, weights_of

from splitinfer.core.sequence import SamplingParams
from splitinfer.core.speculation.flight import Flight
from splitinfer.engine.device.device import Work
from splitinfer.engine.device.mlx_device import MlxDevice
from splitinfer.engine.profiling.drafts import describe_heads
from splitinfer.errors import ModelError
from splitinfer.models.checkpoint import open_folder
from splitinfer.models.dflash import DFlash, taps_of
from splitinfer.models.growing import GrowingKVCache
from splitinfer.models.heads import BlockPart
from splitinfer.models.layer_kinds import describe

NUM = 14
SEVERAL = [
    (prompt(20 + 9 * i, seed=i), SamplingParams(max_tokens=NUM, ignore_eos=True, **how))
    for i, how in enumerate(({}, {"temperature": 0.8, "seed": 5}, {"temperature": 1.0, "seed": 6}))
]


@pytest.mark.parametrize(("name", "cuts", "codec", "second"), [
    ("llama", [1, 2, 1], "int8", False), ("qwen3_next", [2, 2], "none", True),
    *thorough((), (("qwen3", [4], "none", True), ("qwen3_moe", [3, 1], "fp8", False))),
], ids=str)  # fmt: skip
def test_tokens_are_those_without_drafts(name: str, cuts: list[int], codec: str, second: bool, tmp_path: Path) -> None:
    """In batches and chunks, with blocks of different lengths in a step."""
    folder, drafter = tiny.save(tmp_path / name, name), save_dflash(tmp_path / "drafter", second=second)
    with pipeline(folder, cuts, token_budget=16, codec=codec) as llm:
        expected = [llm.submit(*one).result().token_ids for one in SEVERAL]
    with pipeline(folder, cuts, token_budget=16, codec=codec, draft=str(drafter)) as llm:
        for flights in ((None,) * 3, (Flight(3), Flight(7), Flight(1))):
            together = [llm.submit(*one, flight=flight) for one, flight in zip(SEVERAL, flights, strict=True)]
            assert [one.result().token_ids for one in together] == expected
        assert llm.stats()["speculation"]["sent"] > 10


@pytest.mark.parametrize(("second", "told"), [
    (False, {}), (False, {"dflash_config": {"causal": True}}), (True, {}),
    (False, {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9}),
], ids=str)  # fmt: skip
def test_drafts_are_those_of_a_plain_computation(
    second: bool, told: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, drafter = tiny.save(tmp_path / "llama", "llama"), save_dflash(tmp_path / "drafter", second=second, **told)
    proposed, rounds, launch = noted_proposals(monkeypatch), list[int](), MlxDevice.launch

    def noted(self: MlxDevice, outputs: Any, pending: Any, work: Work, began: float) -> Any:
        rounds.append(work.is_draft)
        return launch(self, outputs, pending, work, began)

    monkeypatch.setattr(MlxDevice, "launch", noted)
    with pipeline(folder, [1, 2, 1], token_budget=16, draft=str(drafter)) as llm:
        params = SamplingParams(max_tokens=10, ignore_eos=True)
        under_way = [llm.submit(prompt(20 + 15 * i, seed=i), params, flight=Flight(3 + 2 * i)) for i in range(2)]
        assert all(one.result().token_ids for one in under_way)
    assert len(proposed) >= sum(rounds) > 8, "a block is one round, on whatever device"
    plain = Plain(folder, drafter)
    assert [drafts for _, drafts in proposed] == [plain.drafts(tokens, len(drafts)) for tokens, drafts in proposed]


class Plain:
    """A whole Llama of mlx-lm and a drafter, by their formula alone."""

    def __init__(self, folder: Path, drafter: Path) -> None:
        self.whole, self.w = load_model(folder)[0], weights_of(drafter)
        self.model, self.config = self.whole.model, json.loads((drafter / "config.json").read_text())
        self.own = self.config["dflash_config"]

    def norm(self, name: str, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.w[f"{name}.weight"], 1e-5)

    def times(self, name: str, x: mx.array) -> mx.array:
        return x @ self.w[f"{name}.weight"].T

    def context(self, tokens: list[int]) -> mx.array:
        hidden, found = self.model.embed_tokens(mx.array([tokens])), []
        for layer in self.model.layers:
            hidden = layer(hidden, "causal")
            found.append(hidden)
        return self.norm("hidden_norm", self.times("fc", mx.concatenate([found[i] for i in LEAVING], axis=-1)))

    def heads(self, name: str, x: mx.array, first: int) -> mx.array:
        part = name[-6]  # q, k or v
        y = self.times(name, x).reshape(1, x.shape[1], -1, 16)
        if part == "v":
            return y.swapaxes(1, 2)
        y = self.norm(name.replace("_proj", "_norm"), y).swapaxes(1, 2)
        return mx.fast.rope(y, 16, traditional=False, base=10000.0, scale=1.0, offset=first)

    def attend(self, i: int, x: mx.array, context: mx.array) -> mx.array:
        at, n, rows = f"layers.{i}.self_attn.", context.shape[1], x.shape[1]
        q = self.heads(f"{at}q_proj", x, n)
        k, v = (
            mx.concatenate([self.heads(f"{at}{p}_proj", context, 0), self.heads(f"{at}{p}_proj", x, n)], axis=2)
            for p in "kv"
        )
        seen = mx.ones((rows, n + rows), mx.bool_)
        if self.own.get("causal"):
            seen = mx.arange(n + rows)[None] <= n + mx.arange(rows)[:, None]
        if self.config.get("layer_types", ["", ""])[i] == "sliding_attention":
            seen = seen & (mx.arange(n + rows)[None] > n - self.config["sliding_window"])
        found = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.25, mask=seen)
        return self.times(f"{at}o_proj", found.swapaxes(1, 2).reshape(1, rows, -1))

    def mlp(self, i: int, x: mx.array) -> mx.array:
        gate, up = self.times(f"layers.{i}.mlp.gate_proj", x), self.times(f"layers.{i}.mlp.up_proj", x)
        return self.times(f"layers.{i}.mlp.down_proj", gate * mx.sigmoid(gate) * up)

    def around(self, name: str, x: mx.array, inner: Callable[[mx.array], mx.array]) -> mx.array:
        if f"{name}.base_kernel" not in self.w:
            return inner(x)
        own = self.times(f"{name}.kernel_projection", x).reshape(x.shape[1], 2, 2, 4)
        return self.over(name, inner(self.over(name, x, own[:, 0], 0)), own[:, 1], 1)

    def over(self, name: str, x: mx.array, own: mx.array, side: int) -> mx.array:
        kernel = self.w[f"{name}.base_kernel"][side][None] + mx.repeat(own, 16, axis=-1)
        before = mx.concatenate([mx.zeros((1, 1, 64)), x[:, :-1]], axis=1)
        return kernel[None, :, 0] * x + kernel[None, :, 1] * before

    def drafts(self, tokens: list[int], count: int) -> list[int]:
        context = self.context(tokens[:-1])
        x = self.model.embed_tokens(mx.array([[tokens[-1], *[self.own["mask_token_id"]] * count]]))
        for i in range(2):
            y = self.norm(f"layers.{i}.input_layernorm", x)
            x = x + self.around(f"layers.{i}.attention_conv", y, lambda y, i=i: self.attend(i, y, context))
            y = self.norm(f"layers.{i}.post_attention_layernorm", x)
            x = x + self.around(f"layers.{i}.mlp_conv", y, lambda y, i=i: self.mlp(i, y))
        hidden = self.norm("norm", x)[0, 1:]
        logits, found = self.whole.lm_head(hidden), [tokens[-1]]
        for row, state in zip(logits, hidden, strict=True):
            found.append(self.choose(row, state, found[-1]))
        return found[1:]

    def choose(self, row: mx.array, state: mx.array, before: int) -> int:
        name = "candidate_selector."
        if f"{name}predecessor_codebook" not in self.w:
            return row.argmax().item()
        edge = self.w[f"{name}predecessor_codebook"][before] * self.times(f"{name}hidden_projection", state)
        best = mx.argsort(row)[-self.own["selector_top_k"] :]
        return best[(row[best] + self.w[f"{name}successor_codebook"][best] @ edge).argmax()].item()


def test_what_a_plan_knows(tmp_path: Path) -> None:
    folder, drafter = tiny.save(tmp_path / "qwen3", "qwen3"), save_dflash(tmp_path / "drafter")
    described = describe(open_folder(folder), "float32", "some/model")
    found = describe_heads("drafter", open_folder(drafter), described, "float32")
    assert (found.kv_per_token, found.at_once, found.like) == (2 * 2 * 32 * 4, 7, described.profile.layers[3].kind)
    assert found.weights == sum(array.nbytes for array in weights_of(drafter).values()) - 64 * 128 * 4  # other stages'


@pytest.mark.parametrize(("told", "reason"), [
    ({"dflash_config": {"target_layer_ids": [0, 2, 7]}}, "not layer 7; it belongs to another model"),
    ({"dflash_config": {"target_layer_ids": [0, 2]}}, "2 hidden states of 96 numbers, and those of .* have 64"),
    ({"dflash_config": {"target_layer_ids": None}}, "does not say which hidden states it reads"),
    ({"num_target_layers": 36}, "a model of 36 layers, and .* has 4"),
    ({"vocab_size": 5000}, "a vocabulary of 5,000 tokens, and .* has 160"),
    ({"dflash_config": {"mask_token_id": 160}}, "no mask_token_id among the model's tokens"),
    ({"num_hidden_layers": 1}, r"has layers\.1\..*a form that is not known"),
    ({"num_hidden_layers": 3}, r"lacks layers\.2\."),
    ({"hidden_act": "gelu"}, "an activation that is not known"),
    ({"size": 32}, "computes 32 numbers, and the embedding and the head of .* have 64"),
], ids=str)  # fmt: skip
def test_drafters_of_other_models_are_refused(told: dict[str, Any], reason: str, tmp_path: Path) -> None:
    model, _ = tiny.build("llama")
    drafter = save_dflash(tmp_path / "drafter", **told)
    own, arrays = json.loads((drafter / "config.json").read_text()), weights_of(drafter)
    with pytest.raises(ModelError, match=reason):
        _ = taps_of(own, model, arrays), DFlash(own, model, arrays)


@pytest.mark.parametrize("second", [False, True])
def test_a_quantised_drafter_is_the_one_that_its_numbers_stand_for(second: bool, tmp_path: Path) -> None:
    model, _ = tiny.build("llama")
    drafter = save_dflash(tmp_path / "drafter", second=second)
    own, plain, found = json.loads((drafter / "config.json").read_text()), weights_of(drafter), list[mx.array]()
    tables = {name: plain.pop(name) for name in list(plain) if not name.endswith(".weight")}
    for form in (rounded, quantised):
        arrays = form(plain) | tables
        made, caches = DFlash(own, model, arrays), [GrowingKVCache() for _ in range(2)]
        taps = taps_of(own, model, arrays)
        kept = sum(taps[layer](mx.arange(192.0).reshape(3, 64) / 64 + layer) for layer in LEAVING)
        parts = [BlockPart(type("", (), {"own": caches})(), 0, 3, mx.array(3), 4)]  # type: ignore[arg-type]
        made.keep(made.states(kept), parts)
        hidden = made(made.embed(mx.array([7, 159, 159, 159])[:, None]), parts)[:, 0]
        found.append(made.behind(made.logits(hidden), hidden, mx.array([7, 7, 8, 9])))
    assert mx.allclose(mx.maximum(found[0], -99), mx.maximum(found[1], -99), rtol=1e-4, atol=1e-4)
