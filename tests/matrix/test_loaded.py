"""The same from files: each stage is surveyed and loaded on its own, and reads its own tensors only."""

from pathlib import Path

import compare
import configs
import pytest
from mlx_lm.utils import load_model

from splitinfer.models.cut.cut import StageModel
from splitinfer.models.folder.checkpoint import open_folder
from splitinfer.models.load.loader import survey

CONFIGS = configs.configurations()
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
