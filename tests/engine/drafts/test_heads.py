"""Prediction heads on the last stage: the tokens are those without drafts, whatever the heads are."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import tiny
from effort import thorough
from mlx_lm.utils import load_model
from stages import lose, pipeline, prompt
from trained import Arrays, add_heads, behind_the_last, heads_for, noted_proposals, quantised, rounded

from splitinfer.core.sequence import SamplingParams
from splitinfer.core.speculation.flight import Flight
from splitinfer.engine.profiling.drafts import describe_heads
from splitinfer.errors import ModelError
from splitinfer.models.checkpoint import open_folder
from splitinfer.models.layer_kinds import describe
from splitinfer.models.mtp import PredictionHeads, _renamed

NUM = 16
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "min_p": 0.01, "seed": 5}


def with_heads(tmp_path: Path, name: str, form: Callable[[Arrays], Arrays] = dict, **changes: Any) -> Path:
    return add_heads(tiny.save(tmp_path / name, name, **changes), form=form)


@pytest.mark.parametrize(("name", "cuts"), [
    ("qwen3_next", [2, 2]), ("qwen3", [4]), ("qwen3_moe", [1, 2, 1]),
    *thorough((), (("qwen3_next", [4]), ("qwen3_next", [1, 2, 1]), ("qwen3_next", [3, 1]), ("llama", [1, 3]))),
], ids=str)  # fmt: skip
def test_tokens_are_those_without_drafts(name: str, cuts: list[int], tmp_path: Path) -> None:
    folder = with_heads(tmp_path, name)
    with pipeline(folder, cuts, token_budget=16) as llm:
        requests = [(prompt(20 + 9 * i, seed=i), SamplingParams(max_tokens=NUM, ignore_eos=True, **how))
                    for i, how in enumerate(({}, SAMPLED, {}, SAMPLED | {"repetition_penalty": 1.3}))]  # fmt: skip
        expected = [llm.submit(tokens, params).result().token_ids for tokens, params in requests]
    with pipeline(folder, cuts, token_budget=16, draft="mtp") as llm:
        alone = [llm.submit(tokens, params).result().token_ids for tokens, params in requests[:2]]
        assert alone == expected[:2]
        for flight in (None, Flight(3)):
            together = [llm.submit(tokens, params, flight=flight) for tokens, params in requests]
            assert [one.result().token_ids for one in together] == expected
        assert llm.stats()["speculation"]["sent"] > 20


@pytest.mark.parametrize(("form", "name"), [(dict, "qwen3"), (quantised, "qwen3"), (behind_the_last, "qwen3_moe")])
def test_drafts_are_the_heads_own(form: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind each step: what the heads say when all tokens so far are run through the whole model and through them."""
    changes = {"mlp_only_layers": [0, 1]} if name == "qwen3_moe" else {}  # whose heads are like the third
    folder, proposed = with_heads(tmp_path, name, form, **changes), noted_proposals(monkeypatch)
    with pipeline(folder, [2, 2], token_budget=16, draft="mtp") as llm:
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        for one in [llm.submit(prompt(20 + 15 * i, seed=i), params, flight=Flight(3)) for i in range(2)]:
            one.result()
    assert len(proposed) > 8
    heads = Reference(folder, rounded if form is quantised else dict)
    assert [drafts for _, drafts in proposed] == [heads.drafts(tokens, len(drafts)) for tokens, drafts in proposed]


class Reference:
    """A whole model of mlx-lm and heads, by their formula alone."""

    def __init__(self, folder: Path, form: Callable[[Arrays], Arrays]) -> None:
        (folder / "model-mtp.safetensors").unlink()
        arrays = form(heads_for(folder))
        self.model, self.args = load_model(folder)[0], {k.removeprefix("mtp."): v for k, v in arrays.items()}
        self.layer = copy.deepcopy(self.model.layers[-1])
        self.head = getattr(self.model, "lm_head", None) or self.model.model.embed_tokens.as_linear
        self.layer.load_weights([
            (k.removeprefix("layers.0."), v) for k, v in self.args.items() if k.startswith("layers.0.")
        ])  # fmt: skip

    def norm(self, name: str, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.args[f"{name}.weight"], 1e-5)

    def drafts(self, tokens: list[int], count: int) -> list[int]:
        hidden, ids = self.model.model(mx.array([tokens[:-1]])), tokens[1:]
        found: list[int] = []
        while len(found) < count:
            embedded = self.model.model.embed_tokens(mx.array([ids]))
            rows = [self.norm("pre_fc_norm_embedding", embedded), self.norm("pre_fc_norm_hidden", hidden)]
            x = mx.concatenate(rows, axis=-1) @ self.args["fc.weight"].T
            states = self.norm("norm", self.layer(x, mask="causal"))
            found.append(self.head(states[:, -1]).argmax(-1).item())
            hidden, ids = mx.concatenate([hidden, states[:, -1:]], axis=1), [*ids, found[-1]]
        return found


def test_another_cut_and_the_same_prompt_again(tmp_path: Path) -> None:
    folder = with_heads(tmp_path, "qwen3", num_hidden_layers=3)
    with pipeline(folder, [1, 2], draft="mtp", token_budget=64, rejoin_timeout=20) as llm:
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        outs = [llm.submit(prompt(300, seed=2), params, flight=Flight(2)).result() for _ in range(2)]
        assert outs[0].token_ids == outs[1].token_ids
        assert outs[1].num_cached_tokens >= 256, "its KV is kept with the heads'"
        assert llm.stats()["speculation"]["drafter"] == "mtp"
        expected = [llm.submit(prompt(40, seed=i), params, flight=Flight()).result().token_ids for i in range(3)]
        drafter = llm.live_figures().profiles.model.draft
        assert drafter is not None
        assert (drafter.like, drafter.kv_per_token) == ("attention", 256)
        for disturb in (lambda: llm.recut([2, 1]), lambda: lose(llm), lambda: lose(llm)):
            under_way = [llm.submit(prompt(40, seed=i), params, flight=Flight(2)) for i in range(3)]
            next(events := iter(under_way[0]))
            disturb()
            assert [one.result().token_ids for one in under_way[1:]] == expected[1:]
            assert len(list(events)) > 0
            assert under_way[0].output.token_ids == expected[0]


def test_a_checkpoint_without_heads_is_refused(tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder("qwen3")
    reason = r"has no prediction heads.*copy these tensors"
    with pytest.raises(ModelError, match=reason), pipeline(folder, [4], draft="mtp"):
        pass


@pytest.mark.parametrize(("changes", "reason"), [
    ({"size": 32}, "belong to another model"), ({"drop": "pre_fc_norm_hidden"}, "lack mtp.pre_fc_norm_hidden"),
], ids=str)  # fmt: skip
def test_other_heads_are_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder = add_heads(tiny.save(tmp_path / "qwen3", "qwen3"), **changes)
    with pytest.raises(ModelError, match=reason), pipeline(folder, [4], draft="mtp"):
        pass


def test_latent_attention_is_refused() -> None:
    model, _ = tiny.build("deepseek_v3")
    names = ("eh_proj.weight", "self_attn.kv_a_proj_with_mqa.weight")
    with pytest.raises(ModelError, match=r"latent attention \(MLA\)"):
        PredictionHeads(model, {f"model.layers.4.{name}": mx.zeros((8, 8)) for name in names})


def test_published_norms_are_about_0(tmp_path: Path) -> None:
    own = {"mtp.norm.weight": mx.array([0.1, -0.2]), "mtp.fc.weight": mx.zeros((2, 4))}
    assert _renamed(own)["norm.weight"].tolist() == pytest.approx([1.1, 0.8])
    own["mtp.norm.weight"] = mx.array([1.1, 0.8])
    assert _renamed(own)["norm.weight"].tolist() == pytest.approx([1.1, 0.8])


def test_heads_that_are_always_right(tmp_path: Path) -> None:
    """A model whose next token follows from the last one alone, and heads that know how: every draft is right."""
    folder, size = tiny.save(tmp_path / "llama", "llama"), 64
    for path in folder.glob("model*.safetensors"):
        weights: dict[str, mx.array] = mx.load(str(path))  # type: ignore[assignment]
        silent = {k: mx.zeros_like(v) for k, v in weights.items() if "o_proj" in k or "down_proj" in k}
        mx.eval(weights)
        mx.save_safetensors(str(path), weights | silent)
    add_heads(folder)
    heads: dict[str, mx.array] = mx.load(str(folder / "model-mtp.safetensors"))  # type: ignore[assignment]
    mx.eval(heads)
    heads |= {name: mx.ones_like(array) for name, array in heads.items() if array.ndim == 1}
    heads["mtp.fc.weight"] = mx.concatenate([mx.eye(size), mx.zeros((size, size))], axis=1)
    mx.save_safetensors(str(folder / "model-mtp.safetensors"), heads)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    with pipeline(folder, [2, 2], draft="mtp", token_budget=64) as llm:
        for how in (params, replace(params, temperature=0.7, seed=3)):
            expected = llm.submit(prompt(20, seed=1), how, flight=Flight()).result().token_ids
            before = llm.stats()["speculation"]
            together = [llm.submit(prompt(20, seed=1), how, flight=Flight(count)) for count in (4, 2)]
            assert [one.result().token_ids for one in together] == [expected] * 2
            found = llm.stats()["speculation"]
            assert found["accepted"] - before["accepted"] >= 0.95 * (found["sent"] - before["sent"]) > 30


def test_what_a_plan_knows_of_heads(tmp_path: Path) -> None:
    folder = with_heads(tmp_path, "qwen3_moe", mlp_only_layers=[0, 1])
    checkpoint, own = open_folder(folder), heads_for(folder)
    described = describe(checkpoint, "float32", "some/model")
    found = describe_heads("mtp", checkpoint, described, "float32")
    third = described.profile.layers[2]
    assert found.weights == sum(array.nbytes for array in own.values())
    assert (found.like, found.kv_per_token) == (third.kind, third.kv_per_token)
    assert third.kind != described.profile.layers[0].kind
