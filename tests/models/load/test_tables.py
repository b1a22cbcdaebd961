"""Large tables of which only rows are looked up stay on disk, and every logit is the same to the last bit."""

import sys
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "matrix"))
import compare
import configs

from splitinfer.models.folder.checkpoint import open_folder
from splitinfer.models.library import mlx_vlm
from splitinfer.models.load import loader, tables
from splitinfer.models.load.layer_kinds import describe

Change = Callable[[dict[str, mx.array]], dict[str, mx.array]]

needs_mlx_vlm = pytest.mark.skipif(not mlx_vlm.is_installed(), reason="mlx-vlm is not installed")
CONFIGS = configs.configurations()
_EMBEDDING = {"model.embed_tokens"}
_PER_LAYER = {"language_model.model.embed_tokens_per_layer"}
_GEMMA4 = {"language_model.model.embed_tokens", *_PER_LAYER}


@pytest.mark.parametrize(
    ("name", "wanted", "dtype"),
    [
        ("gemma2", [_EMBEDDING, set()], "bfloat16"),  # its head is its embedding
        pytest.param("gemma4", [_GEMMA4, _PER_LAYER], None, marks=pytest.mark.nightly),
    ],
)
def test_tables_on_disk(
    name: str, wanted: list[set[str]], dtype: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _check(tmp_path, CONFIGS[name], wanted, dtype, monkeypatch)


@pytest.mark.nightly
@needs_mlx_vlm
@pytest.mark.parametrize("stored", ["float32", "mxfp4"])
def test_engram_on_disk(stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import vlm_configs

    wanted = [{"embed_tokens", "layers.1.engram.embed"}, {"layers.4.engram.embed"}]
    config = vlm_configs.CONFIGS["deepseek_v41"]
    packed = stored == "mxfp4"
    _check(tmp_path, config, wanted, None, monkeypatch, compare.mlx_vlms, as_released if packed else dict)


def as_released(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """With the tables in four bits and their scales as bytes, in files as they are released."""
    found = dict(weights)
    for name in [name for name in weights if name.endswith(".engram.embed.weight")]:
        words, scales, *_ = mx.quantize(weights[name], group_size=32, bits=4, mode="mxfp4")
        found |= {name: words.view(mx.uint8), name.replace(".weight", ".scale"): scales}
    return found


@pytest.mark.nightly
@needs_mlx_vlm
def test_a_table_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part is small; which one a token's rows are in, the model finds out by itself."""
    import vlm_configs

    config = vlm_configs.CONFIGS["qwen4_exp/ple"]
    table = "model.layers.{}.ple.ple_embedding.ngram_embedding.shards.{}"
    wanted = [{table.format(layer, part) for part in range(4)} for layer in (0, 2)]
    wanted[0].add("model.embed_tokens")  # larger than all parts of one
    _check(tmp_path, config, wanted, None, monkeypatch, compare.mlx_vlms, large=4 * 60 * 8 * 4, cut=2)


@pytest.mark.parametrize("name", ["llama", "gemma2"])  # gemma2's head is its embedding
def test_a_plan_counts_none_of_them(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare.save(tmp_path, CONFIGS[name])
    counted = [describe(open_folder(tmp_path), None, name).profile]
    monkeypatch.setattr(tables, "LARGE", 1)
    counted.append(describe(open_folder(tmp_path), None, name).profile)
    is_head = name == "gemma2"
    assert [profile.embedding for profile in counted] == [4 * 32 * configs.VOCAB, counted[0].embedding * is_head]
    assert counted[0].head == counted[1].head


def test_a_table_whose_file_is_gone_is_missed_while_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that goes later is still mapped."""
    num_layers = len(compare.save(tmp_path, CONFIGS["llama"]).layers)
    monkeypatch.setattr(tables, "LARGE", 1)
    _, (stage,) = compare.loaded(open_folder(tmp_path), [num_layers])
    (tmp_path / "model.safetensors").unlink()
    mx.eval(stage(mx.array([[1, 2]]), stage.make_caches(), None, 1))


def _check(
    folder: Path,
    config: configs.Config,
    wanted: list[set[str]],
    dtype: str | None,
    monkeypatch: pytest.MonkeyPatch,
    make: compare.Make | None = None,
    change: Change = dict,
    large: int = 1,
    cut: int | None = None,
) -> None:
    monkeypatch.setattr(loader, "_LONG", (64, 512))
    num_layers = len(compare.save(folder, config, make, change=change).layers)
    checkpoint, cuts = open_folder(folder), [cut or num_layers - 3, num_layers]
    tokens = (mx.arange(compare.NUM_PROMPT + 4) * 37 + 11)[None] % configs.VOCAB
    whole, in_memory = compare.loaded(checkpoint, cuts, dtype)
    assert not any(one.tables for one in whole)
    expected = compare.run(in_memory, tokens, compare.CHUNK)
    monkeypatch.setattr(tables, "LARGE", large)
    found, on_disk = compare.loaded(checkpoint, cuts, dtype)
    assert [{table.path for table in one.tables} for one in found] == wanted
    assert [one.tensors for one in found] == [one.tensors for one in whole]  # they must be there
    for less, all_of_it in zip(found, whole, strict=True):
        assert less.need.weights == all_of_it.need.weights - sum(table.nbytes for table in less.tables)
    assert all(stage.reads_tokens for stage, one in zip(on_disk, found, strict=True) if one.tables)
    assert compare.equal(compare.run(on_disk, tokens, compare.CHUNK), expected)
