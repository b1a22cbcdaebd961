"""Large tables of which only rows are looked up stay on disk, and every logit is the same to the last bit."""

import json
import sys
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

sys.path.insert(0, str(Path(__file__).parents[1] / "matrix"))
import compare
import configs
import effort

from splitinfer.models import loader, mlx_vlm, tables
from splitinfer.models.checkpoint import Checkpoint, open_folder
from splitinfer.models.cut import StageModel
from splitinfer.models.layer_kinds import describe
from splitinfer.models.loader import Survey, load_stage, survey

CONFIGS = configs.configurations()
_EMBEDDING = {"model.embed_tokens"}
_PER_LAYER = {"language_model.model.embed_tokens_per_layer"}
_GEMMA4 = {"language_model.model.embed_tokens", *_PER_LAYER}


def _written(folder: Path, config: configs.Config, make: compare.Make | None = None) -> int:
    """Write a model with random weights; the number of its layers."""
    model = compare.build(config, make=make)
    prefix = "" if make is None else "language_model."
    weights = {f"{prefix}{path}": array for path, array in tree_flatten(model.parameters())}
    if config["model_type"] == "deepseek_v41":
        weights |= {f"image_{part}": mx.zeros((config["hidden_size"],)) for part in ("start", "end", "newline")}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "engram_token_map.json").write_text(json.dumps(compare.TOKEN_MAP))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return len(model.layers)


def _loaded(checkpoint: Checkpoint, cuts: list[int], dtype: str | None = None) -> tuple[list[Survey], list[StageModel]]:
    found = [survey(checkpoint, start, end, dtype) for start, end in pairwise(cuts)]
    ends = zip(found, pairwise(cuts), strict=True)
    return found, [load_stage(checkpoint, one, start, end, dtype, lambda *_: None) for one, (start, end) in ends]


@pytest.mark.parametrize(
    ("name", "wanted", "dtype"),
    [
        ("gemma2", [_EMBEDDING, set()], "bfloat16"),  # its head is its embedding
        effort.long("gemma4", [_GEMMA4, _PER_LAYER], None),
    ],
)
def test_tables_on_disk(
    name: str, wanted: list[set[str]], dtype: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _check(tmp_path, CONFIGS[name], wanted, dtype, monkeypatch)


@pytest.mark.long
@pytest.mark.skipif(not mlx_vlm.is_installed(), reason="mlx-vlm is not installed")
def test_engram_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import vlm_configs

    wanted = [{"embed_tokens", "layers.1.engram.embed"}, {"layers.4.engram.embed"}]
    _check(tmp_path, vlm_configs.CONFIGS["deepseek_v41"], wanted, None, monkeypatch, compare.mlx_vlms)


def test_a_plan_counts_none_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _written(tmp_path, CONFIGS["llama"])
    counted = [describe(open_folder(tmp_path), None, "llama").profile]
    monkeypatch.setattr(tables, "LARGE", 1)
    counted.append(describe(open_folder(tmp_path), None, "llama").profile)
    assert [profile.embedding for profile in counted] == [4 * 32 * configs.VOCAB, 0]
    assert counted[0].head == counted[1].head


def _check(
    folder: Path,
    config: configs.Config,
    wanted: list[set[str]],
    dtype: str | None,
    monkeypatch: pytest.MonkeyPatch,
    make: compare.Make | None = None,
) -> None:
    monkeypatch.setattr(loader, "_LONG", (64, 512))
    num_layers = _written(folder, config, make)
    checkpoint, cuts = open_folder(folder), [0, num_layers - 3, num_layers]
    tokens = (mx.arange(compare.NUM_PROMPT + 4) * 37 + 11)[None] % configs.VOCAB
    whole, in_memory = _loaded(checkpoint, cuts, dtype)
    assert not any(one.tables for one in whole)
    expected = compare._run(in_memory, tokens, compare.CHUNK)
    monkeypatch.setattr(tables, "LARGE", 1)
    found, on_disk = _loaded(checkpoint, cuts, dtype)
    assert [{table.path for table in one.tables} for one in found] == wanted
    assert [one.tensors for one in found] == [one.tensors for one in whole]  # they must be there
    for less, all_of_it in zip(found, whole, strict=True):
        assert less.need.weights == all_of_it.need.weights - sum(table.nbytes for table in less.tables)
    assert [stage.reads_tokens for stage in on_disk] == [bool(one.tables) for one in found]
    assert compare._equal(compare._run(on_disk, tokens, compare.CHUNK), expected)
