"""The same from files: each stage is surveyed and loaded on its own, and reads its own tensors only."""

from pathlib import Path
from typing import Any

import compare
import configs
import pytest
from mlx_lm.utils import load_model

from splitinfer.models.checkpoint import open_folder
from splitinfer.models.cut import StageModel
from splitinfer.models.loader import load_stage, survey

CONFIGS = configs.configurations()
CUTS = [
    ("llama", 1, 4), ("llama/sliding", 2, None), ("qwen3_5", 3, None), ("rwkv7", 2, None), ("hunyuan", 1, 4),
    ("gemma4_text", 5, None), ("gemma3n", 5, None), ("kimi_linear", 2, None), ("nemotron_h", 4, None),
    ("longcat_flash_ngram", 1, None), ("afm7", 5, None), ("mixtral", 2, 4),
]  # fmt: skip


def _ignore(*_progress: Any) -> None:
    pass


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v41"])
def test_what_only_long_sequences_need_is_loaded_too(name: str, tmp_path: Path) -> None:
    """An indexer's weights are read once there are more tokens than it may choose."""
    compare.save(tmp_path, CONFIGS[name])
    checkpoint = open_folder(tmp_path)
    assert survey(checkpoint, 0, CONFIGS[name]["num_hidden_layers"], None).tensors == set(checkpoint.tensors)


@pytest.mark.parametrize(("name", "cut", "bits"), CUTS)
def test_loaded_stages_answer_like_mlx_lm(name: str, cut: int, bits: int | None, tmp_path: Path) -> None:
    compare.save(tmp_path, CONFIGS[name], bits=bits)
    reference, _ = load_model(tmp_path)
    num_layers = len(reference.layers)
    tokens, expected = compare.reference(reference)
    checkpoint = open_folder(tmp_path)
    found = [survey(checkpoint, *ends, None) for ends in ((0, cut), (cut, num_layers))]
    stages = [
        load_stage(checkpoint, f, *ends, None, _ignore)
        for f, ends in zip(found, ((0, cut), (cut, num_layers)), strict=True)
    ]
    logits = compare.run(stages, tokens, compare.CHUNK)
    assert compare._equal(logits, compare.run([StageModel(reference, 0, num_layers)], tokens, compare.CHUNK))
    assert compare._difference(logits, expected) < compare.TOLERANCE
    for stage, others in zip(found, [range(cut, num_layers), range(cut)], strict=True):
        foreign = {f".{i}." for i in others}
        assert not [t for t in stage.tensors if any(f".layers{i}" in t for i in foreign)]
