"""Layers that cost the same are of one kind, whatever the architecture, and hold what the loading of a stage counts."""

from itertools import combinations
from pathlib import Path

import mlx.core as mx
import pytest
import tiny
from tiny import Folder

from splitinfer.core.kv.format import format_of
from splitinfer.errors import ModelError
from splitinfer.llm import LLM, Settings
from splitinfer.models.cut.structure import ModelStructure
from splitinfer.models.folder.checkpoint import open_folder
from splitinfer.models.load.building import made_up
from splitinfer.models.load.layer_kinds import describe, kinds_of
from splitinfer.models.load.loader import survey

KINDS = {
    "llama": [1] * 4,
    "qwen3": [1] * 4,
    "gemma3_text": [1, 1, 2] * 2,
    "gpt_oss": [1, 2] * 2,
    "qwen3_moe": [1] * 4,
    "qwen3_next": [1, 2] * 2,
    "deepseek_v3": [1, 2, 2, 2],
}


@pytest.mark.parametrize(
    "name", [n if n in ("gpt_oss", "qwen3_next") else pytest.param(n, marks=pytest.mark.nightly) for n in KINDS]
)
def test_kinds_and_bytes(name: str, tiny_folder: Folder):
    checkpoint = open_folder(tiny_folder(name))
    model = describe(checkpoint, None, name).profile
    assert [layer.kind for layer in model.layers] == [f"kind {number}" for number in KINDS[name]]
    for start, end in [(0, model.num_layers), (0, 1), (1, model.num_layers)]:
        need = survey(checkpoint, start, end, None).need
        assert model.weights(start, end) == need.weights
        own = model.layers[start:end]
        assert sum(layer.kv_per_token for layer in own) == need.kv_per_token
        assert sum(layer.kv_fixed for layer in own) == need.kv_fixed


@pytest.mark.parametrize("name", ["gpt_oss", "gemma3_text"])
def test_a_format_of_kv_that_cannot_be_is_one_sentence(name: str, tiny_folder: Folder):
    """As where a stage is loaded, although a whole model is only described here."""
    checkpoint, kv_format = open_folder(tiny_folder(name, head_dim=16)), format_of("k8v8")
    for ask in (
        lambda: describe(checkpoint, None, name, kv_format=kv_format),
        lambda: survey(checkpoint, 0, checkpoint.config["num_hidden_layers"], None, kv_format),
        lambda: LLM(model=str(checkpoint.folder), settings=Settings(kv_format="k8v8")),
    ):
        with pytest.raises(ModelError, match=f"^keys and values of {name} cannot be k8v8: its heads have 16 numbers"):
            ask()


def test_a_row_on_the_link(tiny_folder: Folder):
    checkpoint = open_folder(tiny_folder("llama"))
    assert describe(checkpoint, None, "m").profile.hidden_row == 64 * 4
    assert describe(checkpoint, "bfloat16", "m").profile.hidden_row == 64 * 2


def test_layers_of_other_sizes_are_of_other_kinds():
    model, _ = tiny.build("llama")
    larger, _ = tiny.build("llama", intermediate_size=192)
    model.layers[1].mlp = larger.layers[1].mlp
    assert kinds_of(ModelStructure(model)) == ["kind 1", "kind 2", "kind 1", "kind 1"]


def test_layers_of_other_switches_are_of_other_kinds_but_not_by_their_places():
    model, _ = tiny.build("llama")
    for i, layer in enumerate(model.layers):
        layer.number, layer.turns = i, i != 3
    assert kinds_of(ModelStructure(model)) == ["kind 1"] * 3 + ["kind 2"]


@pytest.mark.parametrize("bits", [None, 4])
def test_made_up_numbers_are_finite(bits: int | None, tmp_path: Path):
    """Through all layers, in half precision, and a router takes other experts for other tokens."""
    dtype = mx.float32 if bits is None else mx.float16  # MLX's CPU multiplies experts in float32 only
    checkpoint = open_folder(tiny.save(tmp_path / "m", "qwen3_moe", bits=bits, dtype=dtype))
    model = describe(checkpoint, None, "m", made_up(checkpoint)).structure.model
    logits = model(mx.arange(12)[None])
    assert mx.isfinite(logits).all()
    rows = logits[0].astype(mx.float32)
    large = 0.01 * mx.abs(rows).max()
    assert all(mx.abs(rows[a] - rows[b]).max() > large > 0 for a, b in combinations(range(0, 12, 3), 2))
    made = made_up(checkpoint)
    for name, info in checkpoint.tensors.items():
        assert (made[name].shape, made[name].dtype) == (info.shape, mx.uint32 if info.dtype == "U32" else dtype)
