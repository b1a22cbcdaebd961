"""Every architecture of mlx-lm, cut everywhere: right to the last bit, or refused; and the table says so. The same
from files: each stage reads its own tensors only."""

from importlib.metadata import version
from pathlib import Path

import compare
import configs
import pytest
import table
from mlx_lm.utils import load_model

from splitinfer.models.cut.cut import StageModel
from splitinfer.models.folder.checkpoint import open_folder
from splitinfer.models.load.loader import survey

CONFIGS = configs.configurations()
KNOWN, ROWS = table.written()
KINDS = ["llama", "gpt_oss", "gemma3n", "deepseek_v3", "mamba2", "qwen3_next", "hunyuan"]
"""One for each kind of cache and of border: plain; windows, with experts; shared keys and values, with windows; latent;
states; states beside keys and values; several arrays that cross. Toys are refused (``test_refusals``)."""


@pytest.mark.parametrize(("name", "each_alone"), [
    *((name, False) for name in KINDS), *(pytest.param(name, True, marks=pytest.mark.nightly) for name in CONFIGS),
])  # fmt: skip
def test_cuts(name: str, each_alone: bool) -> None:
    row = table.row(name, compare.examine(CONFIGS[name], each_alone=each_alone))
    if version("mlx-lm") == KNOWN:
        assert table.comparable(ROWS.get(name, "")) == table.comparable(row), "scripts/matrix --write"


@pytest.mark.skipif(version("mlx-lm") != KNOWN, reason="the table is for another mlx-lm: scripts/matrix")
def test_no_architecture_is_forgotten() -> None:
    described = {configs.architecture(name) for name in CONFIGS} | set(configs.LEFT_OUT)
    assert described == set(configs.architectures())
    assert sorted(ROWS) == sorted([*CONFIGS, *configs.LEFT_OUT]), "scripts/matrix --write"


CUTS = [("gemma3n", 5, None), ("mixtral", 2, 4)]
NIGHTLY = [
    ("llama", 1, 4), ("llama/sliding", 2, None), ("qwen3_5", 3, None), ("rwkv7", 2, None), ("hunyuan", 1, 4),
    ("gemma4_text", 5, None), ("kimi_linear", 2, None), ("nemotron_h", 4, None), ("longcat_flash_ngram", 1, None),
    ("afm7", 5, None),
]  # fmt: skip


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v41"])
def test_what_only_long_sequences_need_is_loaded_too(name: str, tmp_path: Path) -> None:
    """An indexer's weights are read once there are more tokens than it may choose."""
    compare.save(tmp_path, CONFIGS[name])
    checkpoint = open_folder(tmp_path)
    assert survey(checkpoint, 0, CONFIGS[name]["num_hidden_layers"], None).tensors == set(checkpoint.tensors)


@pytest.mark.parametrize(
    ("name", "cut", "bits"), [*CUTS, *(pytest.param(*one, marks=pytest.mark.nightly) for one in NIGHTLY)]
)
def test_loaded_stages_answer_like_mlx_lm(name: str, cut: int, bits: int | None, tmp_path: Path) -> None:
    compare.save(tmp_path, CONFIGS[name], bits=bits)
    reference, _ = load_model(tmp_path)
    num_layers, checkpoint = len(reference.layers), open_folder(tmp_path)
    tokens, expected = compare.reference(reference)
    found, stages = compare.loaded(checkpoint, [cut, num_layers])
    logits = compare.run(stages, tokens, compare.CHUNK)
    assert compare.equal(logits, compare.run([StageModel(reference, 0, num_layers)], tokens, compare.CHUNK))
    assert compare.difference(logits, expected) < compare.TOLERANCE
    for stage, others in zip(found, [range(cut, num_layers), range(cut)], strict=True):
        assert not [t for t in stage.tensors if any(f".layers.{i}." in t for i in others)]
