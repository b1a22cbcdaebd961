"""Drafters on the model's own hidden states: which ones belong to a model, and what a plan knows of them. Their drafts
are compared with mlx-vlm's own classes in ``test_beside_mlx_vlm``."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import tiny
from engine.door import Ask, Open, ask
from trained import (
    LEAVING,
    Arrays,
    add_heads,
    heads_for,
    quantised,
    rounded,
    save_dflash,
    save_eagle3,
    weights_of,
)  # fmt: skip

from splitinfer import Flight, SamplingParams
from splitinfer.demo import DRAFTER
from splitinfer.engine.profiling.drafts import describe_heads
from splitinfer.errors import ModelError
from splitinfer.models.caches.caches import CachePlace
from splitinfer.models.caches.cohort import SequenceCaches
from splitinfer.models.caches.growing import GrowingKVCache
from splitinfer.models.cut.cut import StageModel
from splitinfer.models.drafters.dflash import DFlash
from splitinfer.models.drafters.dflash import taps_of as taps_of_dflash
from splitinfer.models.drafters.eagle3 import Eagle3, layers_of, taps_of
from splitinfer.models.drafters.heads import BlockPart, HeadRows
from splitinfer.models.folder.checkpoint import open_folder
from splitinfer.models.load.layer_kinds import describe
from splitinfer.models.load.loader import survey
from splitinfer.models.load.trained import join


def read(drafter: Path) -> tuple[dict[str, Any], Arrays]:
    return json.loads((drafter / "config.json").read_text()), weights_of(drafter)


@pytest.mark.parametrize(("changes", "reason"), [
    (None, r"has no prediction heads.*copy these tensors"), ({"size": 32}, "belong to another model"),
    ({"drop": "pre_fc_norm_hidden"}, "lack mtp.pre_fc_norm_hidden"),
], ids=str)  # fmt: skip
def test_heads_that_are_missing_or_anothers_are_refused(
    changes: dict[str, Any] | None, reason: str, tmp_path: Path, pipeline: Open
) -> None:
    folder = tiny.save(tmp_path / "qwen3", "qwen3")
    if changes is not None:
        add_heads(folder, **changes)
    with pytest.raises(ModelError, match=reason), pipeline(folder, [4], draft="mtp"):
        pass


@pytest.mark.parametrize("place", ["beside", "beside, without prefix", "beside, around 0", "a folder of their own"])
def test_heads_draft_wherever_they_lie(
    place: str, tmp_path: Path, pipeline: Open, proposed: list[tuple[list[int], list[int]]]
) -> None:
    folder, found = tiny.save(tmp_path / "qwen3", "qwen3"), []
    heads, draft, own = heads_for(folder), "mtp", folder / "mtp.safetensors"
    if place == "beside, around 0":
        heads = {name: array - (array.ndim == 1) for name, array in heads.items()}
    elif place != "beside":
        heads = {name.removeprefix("mtp."): array for name, array in heads.items()}
    if place == "a folder of their own":
        own, draft = tmp_path / "heads" / "model.safetensors", str(tmp_path / "heads")
        own.parent.mkdir()
        text = json.loads((folder / "config.json").read_text())
        own.with_name("config.json").write_text(json.dumps({"model_type": "qwen3_5_mtp", "text_config": text}))
    mx.save_safetensors(str(own), heads)
    asked = replace(ask(20), flight=Flight(3))
    for name in (draft, "mtp"):
        with pipeline(folder, [1, 3], draft=name) as there:
            there.answers(asked)
        found.append(list(proposed))
        proposed.clear()
        own.unlink(missing_ok=True)
        add_heads(folder)
    assert found[0] == found[1] != []


def test_heads_of_another_model_in_a_folder_of_their_own(tmp_path: Path) -> None:
    folder = tmp_path / "heads"
    folder.mkdir()
    text = {"num_hidden_layers": 36}
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_5_mtp", "text_config": text}))
    mx.save_safetensors(str(folder / "model.safetensors"), {"fc.weight": mx.zeros((1, 1))})
    model, _ = tiny.build("qwen3")
    with pytest.raises(ModelError, match="for a model of 36 layers, and qwen3 has 4"):
        join(StageModel(model, 0, 4), open_folder(folder), {}, None)


def test_a_drafter_in_float32_beside_a_model_in_half_precision(tmp_path: Path, pipeline: Open) -> None:
    folder = add_heads(tiny.save(tmp_path / "qwen3", "qwen3", dtype=mx.bfloat16))
    checkpoint = open_folder(folder)
    half, whole = (
        survey(checkpoint, 0, 4, "bfloat16", drafter=checkpoint, drafter_dtype=dtype).need.weights
        for dtype in (None, "float32")
    )
    assert whole - half == sum(2 * array.size for array in heads_for(folder).values())
    with pipeline(folder, [2, 2], draft="mtp+float32", dtype="bfloat16", are_checked=False) as there:
        drafted = there.answers(replace(ask(20), flight=Flight(3)))
    with pipeline(folder, [2, 2], dtype="bfloat16", are_checked=False) as there:
        assert there.answers(ask(20)) == drafted


def test_a_drafter_of_which_next_to_nothing_is_right_says_so(
    drafter: Any, pipeline: Open, caplog: pytest.LogCaptureFixture
) -> None:
    folder, draft = drafter("eagle3", "qwen3", only=77)
    with pipeline(folder, [2, 2], draft=draft, token_budget=64) as there:
        there.answers(replace(ask(9, max_tokens=40, logit_bias={5: 100.0}), flight=Flight(1)))
        assert not caplog.messages
        there.answers(replace(ask(9, max_tokens=60, logit_bias={5: 100.0}), flight=Flight(1)))
    (said,) = caplog.messages
    assert said.startswith("0 of the first 50 drafts were right: the drafter may belong to another model")


@pytest.mark.parametrize(("kind", "told", "reason"), [
    ("eagle3", {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "not layer 8; it belongs to another model"),
    ("eagle3", {"eagle_aux_hidden_state_layer_ids": [1, 2]}, "2 hidden states of 96 numbers, and those of .* have 64"),
    ("eagle3", {"vocab_size": 5000}, "a vocabulary of 5,000 tokens, and .* has 160"),
    ("eagle3", {"norm_before_fc": True}, "norm_before_fc"),
    ("eagle3", {"num_hidden_layers": 2}, "lacks layers.1"),
    ("dflash", {"dflash_config": {"target_layer_ids": [0, 2, 7]}}, "not layer 7; it belongs to another model"),
    ("dflash", {"dflash_config": {"target_layer_ids": [0, 2]}}, "2 hidden states of 96 numbers, and .* have 64"),
    ("dflash", {"dflash_config": {"target_layer_ids": None}}, "does not say which hidden states it reads"),
    ("dflash", {"num_target_layers": 36}, "a model of 36 layers, and .* has 4"),
    ("dflash", {"vocab_size": 5000}, "a vocabulary of 5,000 tokens, and .* has 160"),
    ("dflash", {"dflash_config": {"mask_token_id": 160}}, "no mask_token_id among the model's tokens"),
    ("dflash", {"num_hidden_layers": 1}, r"unknown tensor \(layers\.1\..*its form is not supported"),
    ("dflash", {"num_hidden_layers": 3}, r"lacks layers\.2\."),
    ("dflash", {"hidden_act": "gelu"}, "an unknown activation"),
    ("dflash", {"size": 32}, "computes 32 numbers, and the embedding and the head of .* have 64"),
], ids=str)  # fmt: skip
def test_a_drafter_of_another_model_is_refused(kind: str, told: dict[str, Any], reason: str, tmp_path: Path) -> None:
    save, made, taps = {"eagle3": (save_eagle3, Eagle3, taps_of), "dflash": (save_dflash, DFlash, taps_of_dflash)}[kind]
    own, arrays = read(save(tmp_path / "drafter", **told))
    model, _ = tiny.build("llama")
    with pytest.raises(ModelError, match=reason):
        _ = taps(own, model, arrays), made(own, model, arrays)


def test_a_quantised_eagle3_is_the_one_that_its_numbers_stand_for(tmp_path: Path) -> None:
    """Its projection in three parts, its embedding, its layers and its head."""
    model, _ = tiny.build("llama")
    own, plain = read(save_eagle3(tmp_path / "drafter"))
    plain |= {"embed_tokens.weight": mx.random.normal((160, 64))}
    table, found = plain.pop("d2t"), list[mx.array]()
    for arrays in (rounded(plain), quantised(plain)):
        made, taps = Eagle3(own, model, arrays | {"d2t": table}), taps_of(own, model, arrays)
        features = sum(taps[layer](mx.arange(64.0)[None] / 64 + layer) for layer in LEAVING)
        rows = HeadRows([(GrowingKVCache(), 1, mx.ones((1, 1), mx.bool_))], mx.arange(1))
        found.append(made.logits(made(made.embed(mx.array([[7]])), features[:, None], [rows])[:, 0]))
    assert mx.isfinite(found[0]).sum() == table.size == 40
    assert mx.allclose(mx.maximum(found[0], -99), mx.maximum(found[1], -99), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("second", [False, True])
def test_a_quantised_dflash_is_the_one_that_its_numbers_stand_for(second: bool, tmp_path: Path) -> None:
    model, _ = tiny.build("llama")
    own, plain = read(save_dflash(tmp_path / "drafter", second=second))
    tables, found = {n: plain.pop(n) for n in list(plain) if not n.endswith(".weight")}, list[mx.array]()
    for form in (rounded, quantised):
        arrays = form(plain) | tables
        made, taps = DFlash(own, model, arrays), taps_of_dflash(own, model, arrays)
        kept = sum(taps[layer](mx.arange(192.0).reshape(3, 64) / 64 + layer) for layer in LEAVING)
        caches = SequenceCaches([], [], CachePlace(), made.make_caches())
        parts = [BlockPart(caches, 0, 3, mx.array(3), 4)]
        made.keep(made.states(kept), parts)
        hidden = made.run_blocks([mx.array([7])], parts)
        found.append(made.behind(made.logits(hidden), hidden, mx.array([7, 7, 8, 9])))
    assert mx.allclose(mx.maximum(found[0], -99), mx.maximum(found[1], -99), rtol=1e-4, atol=1e-4)


def test_tokens_that_a_target_or_a_drafter_lacks(tmp_path: Path) -> None:
    """MLX does not check indices."""
    model, _ = tiny.build("llama")
    own, arrays = read(save_eagle3(tmp_path / "drafter"))
    made = Eagle3(own, model, arrays | {"d2t": arrays["d2t"] + 130})
    with pytest.raises(ModelError, match="tokens that the model does not have"):
        made.check(StageModel(model, 0, 4))
    table = mx.random.normal((100, 64))
    made = Eagle3(own, model, arrays | {"embed_tokens.weight": table})
    assert mx.array_equal(made.embed(mx.array([99, 150])), table[mx.array([99, 99])])
    with pytest.raises(ModelError, match="embeddings of 64 numbers, and its own have 32"):
        Eagle3(own, model, arrays | {"embed_tokens.weight": mx.zeros((160, 32))})


def test_a_drafter_that_is_wider_than_a_row_between_stages(tmp_path: Path) -> None:
    model, _ = tiny.build("llama")
    drafter = save_eagle3(tmp_path / "drafter")
    arrays = weights_of(drafter)
    arrays["fc.weight"] = mx.zeros((96, arrays["fc.weight"].shape[1]))
    with pytest.raises(ModelError, match="96 numbers, and a row on a link has 64"):
        join(StageModel(model, 0, 2), open_folder(drafter), arrays, None)


def test_a_drafter_is_no_model_and_layers_where_it_names_none(pipeline: Open) -> None:
    assert layers_of({}, 32) == [1, 15, 28]
    with pytest.raises(ModelError, match="is a drafter for another model"), pipeline(DRAFTER, [1]):
        pass


@pytest.mark.nightly
def test_the_shipped_drafter_is_mostly_right_and_changes_no_token(pipeline: Open) -> None:
    """Its first drafts are right at about 0.85 of the places of a greedy tale."""
    with pipeline("demo", [5, 7], draft="demo-drafter") as there:
        tokens = tuple(there.llm.tokenizer.encode("Once upon a time there was a poor woodcutter"))
        there.answers(Ask(tokens, SamplingParams(24), flight=Flight(3)))
        counts = there.stats["speculation"]
    assert sum(counts["accepted_at"]) > 0.5 * sum(counts["tried_at"]) > 5


def test_what_a_plan_knows(tmp_path: Path) -> None:
    folder, drafter = tiny.save(tmp_path / "qwen3", "qwen3"), save_dflash(tmp_path / "drafter")
    described = describe(open_folder(folder), "float32", "some/model")
    found = describe_heads("drafter", open_folder(drafter), described, "float32")
    assert (found.kv_per_token, found.at_once, found.like) == (2 * 2 * 32 * 4, 7, described.profile.layers[3].kind)
    assert found.weights == sum(array.nbytes for array in weights_of(drafter).values()) - 64 * 128 * 4  # other stages'


def test_what_a_plan_knows_of_heads(tmp_path: Path) -> None:
    folder = add_heads(tiny.save(tmp_path / "qwen3_moe", "qwen3_moe", mlp_only_layers=[0, 1]))
    described = describe(open_folder(folder), "float32", "some/model")
    found, third = describe_heads("mtp", open_folder(folder), described, "float32"), described.profile.layers[2]
    assert found.weights == sum(array.nbytes for array in heads_for(folder).values())
    assert (found.like, found.kv_per_token) == (third.kind, third.kv_per_token)
    assert third.kind != described.profile.layers[0].kind
