"""mlx-vlm's language models: cut everywhere as mlx-lm's are, loaded from files, and imported without the rest of it."""

import json
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("mlx_vlm") is None:
    pytest.skip("mlx-vlm is not installed", allow_module_level=True)

import compare
import mlx.core as mx
import mlx.nn as nn
import table
import vlm_configs
from mlx.utils import tree_flatten

from splitinfer.errors import ModelError
from splitinfer.models.border.border import Border, TokenRow
from splitinfer.models.cut.cut import StageModel
from splitinfer.models.cut.structure import ModelStructure
from splitinfer.models.folder.checkpoint import open_folder
from splitinfer.models.library import light_imports, mlx_vlm
from splitinfer.models.load.loader import survey

KNOWN, ROWS = table.written("mlx-vlm")
same_release = pytest.mark.skipif(version("mlx-vlm") != KNOWN, reason="the table is for another: scripts/matrix --vlm")


@same_release
@pytest.mark.parametrize(("name", "each_alone"), [
    ("hy_v4", False), ("limite", False),  # a choice among tokens crosses the first one's cuts
    *(pytest.param(name, True, marks=pytest.mark.nightly) for name in vlm_configs.CONFIGS),
])  # fmt: skip
def test_cuts(name: str, each_alone: bool) -> None:
    finding = compare.examine(vlm_configs.CONFIGS[name], each_alone=each_alone, make=compare.mlx_vlms)
    rows = [table.row(name, finding), table.row(name, replace(finding, any_chunking=False))]
    assert table.comparable(ROWS[name]) in map(table.comparable, rows), "scripts/matrix --vlm --write"


@same_release
def test_the_table_has_every_configuration() -> None:
    assert sorted(ROWS) == sorted(vlm_configs.CONFIGS), "scripts/matrix --vlm --write"


LOADED = ("klear", "deepseek_v41", "glm5_next", "deepseek_v4", "hunyuan_vl", "limite")


@pytest.mark.parametrize("name", ["qwen4_exp/ple", *(pytest.param(name, marks=pytest.mark.nightly) for name in LOADED)])
def test_loaded_stages_answer_like_mlx_vlm(name: str, tmp_path: Path) -> None:
    """mlx-lm has no class for them."""
    model = saved(name, tmp_path)
    weights = dict(mx.load(str(tmp_path / "model.safetensors")))  # type: ignore[call-overload]
    tokens, expected = compare.reference(model, 4)
    last = len(model.layers)
    found, stages = compare.loaded(open_folder(tmp_path), [last - 1, last])
    assert all(one.tensors < set(weights) for one in found)
    assert compare.difference(compare.run(stages, tokens, compare.CHUNK), expected) < compare.TOLERANCE


def saved(name: str, folder: Path) -> nn.Module:
    """A language model with random weights, written as a checkpoint."""
    return compare.save(folder, (vlm_configs.CONFIGS | vlm_configs.MASKED)[name], compare.mlx_vlms)


def test_n_grams_are_never_left_out_silently(tmp_path: Path) -> None:
    """mlx-vlm's class leaves its Engram out where it finds no file to make n-grams of tokens from."""
    model = compare.build(vlm_configs.CONFIGS["deepseek_v41"], make=compare.mlx_vlms)
    model.engram_hash = None
    with pytest.raises(ValueError, match=r"neither engram_token_map.json nor tokenizer.json"):
        mlx_vlm.with_ngrams(model, tmp_path)


def test_a_model_without_a_language_model_is_one_sentence(tmp_path: Path) -> None:
    config = {"model_type": "dinov2", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    package = mlx_vlm.module("models.dinov2")
    weights = dict(tree_flatten(package.Model(package.ModelConfig.from_dict(config)).parameters()))
    (tmp_path / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    with pytest.raises(ModelError, match="dinov2 has no language model"):
        survey(open_folder(tmp_path), 0, 1, None)


def test_a_model_that_fills_in_masked_tokens_is_refused(tmp_path: Path) -> None:
    """Its logits are of the tokens that are masked, and not of the next one. One that does either is run."""
    saved("llada2_moe", tmp_path)
    with pytest.raises(ModelError, match="llada2_moe fills in many masked tokens at a time"):
        survey(open_folder(tmp_path), 0, 1, None)
    saved("nemotron_labs_diffusion", tmp_path)
    survey(open_folder(tmp_path), 0, 1, None)


def test_a_choice_among_tokens_crosses_once_there_are_enough() -> None:
    """hy_v4's shared layers are given what an earlier layer chose, once there are more tokens than it may choose."""
    config = vlm_configs.CONFIGS["hy_v4"]
    model = compare.build(config, make=compare.mlx_vlms)
    structure = ModelStructure(model)
    crossing = [row for k in range(1, 4) for row in structure.border(k).rows if row.is_whole]
    assert crossing
    assert {row.since for row in crossing} == {config["index_topk"] + 1}
    assert all(stage.sends_whole_numbers for stage in [StageModel(model, 0, 2, structure)])


@pytest.mark.parametrize(("name", "looks"), [("qwen4_exp/ple", True), ("qwen3_vl", False)])
def test_a_model_that_looks_at_its_tokens_is_known(name: str, looks: bool) -> None:
    """Its graph is that of these tokens, so it must not be built before they are known."""
    assert ModelStructure(compare.build(vlm_configs.CONFIGS[name], make=compare.mlx_vlms)).reads_tokens is looks


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_whole_numbers_cross_with_every_bit(dtype: mx.Dtype) -> None:
    border = Border(1, (TokenRow((0, 0), 1, (1, 4), dtype), TokenRow((0, 3), 1, (1, 3), mx.int32, since=6)), ())
    hidden = mx.random.normal((1, 5, 4)).astype(dtype)
    chosen = mx.array([-1, 2**31 - 1, -(2**31), 2**24 + 1, 7], mx.int32)[None, :, None] * mx.ones((1, 1, 3), mx.int32)
    packed = border.pack([hidden, chosen])
    assert packed.shape == (1, 5, border.width)
    assert packed.dtype == dtype
    for got, wanted in zip(border.unpack(packed, 6), (hidden, chosen), strict=True):
        assert mx.array_equal(got, wanted).item()
    assert border.unpack(border.pack([hidden, None]), 5)[1] is None
    assert not border.unpack(border.made_up(5, 0)[None], 6)[1].any().item()


def test_indices_before_an_array_write_into_it():
    """MLX checks none; see ``models.library.light_imports``."""
    put = light_imports._mx.put_along_axis
    ones = mx.ones((1, 4), mx.bool_)
    for indices, wanted in (([-9, -4, -5, -6], [1, 0, 0]), ([-1, 0, 2, 2], [1, 0, 1])):
        written = put(mx.zeros((1, 3), mx.bool_), mx.array([indices]), ones, axis=-1)
        assert written.tolist() == [[bool(one) for one in wanted]]
    rows = mx.array([[2, 0]], mx.uint32)
    assert put(mx.zeros((1, 3)), rows, mx.ones((1, 2)), axis=-1).tolist() == [[1, 0, 1]]
