"""A random model is one that mlx-lm and splitinfer load."""

import json
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm import generate, load
from random_model import ARCHITECTURES, END, Shape, build, byte_tokenizer, main, make
from stages import layout, plain_greedy, prompt, tokens_of

from splitinfer.errors import ConfigError
from splitinfer.llm import LLM

SMALL = {"layers": 3, "hidden": 32, "heads": 4, "kv_heads": 2, "mlp": 48, "vocab": 300}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_mlx_lm_and_splitinfer_load_it(architecture: str, tmp_path: Path) -> None:
    num_parameters = make(tmp_path, Shape(architecture, **SMALL))
    model, tokenizer = load(str(tmp_path))
    assert generate(model, tokenizer, prompt="Once", max_tokens=4) is not None
    assert tokenizer.decode(tokenizer.encode("Ein Märchen, 童话")) == "Ein Märchen, 童话"
    tokens = prompt(20)
    expected = plain_greedy(tmp_path, tokens, 16)
    assert len(set(expected)) > 4  # else it would prove nothing
    with LLM(layout(tmp_path, [3], [])) as llm:
        assert tokens_of(llm, tokens, max_tokens=16) == expected
        assert llm.tokenizer.vocab_size == 300
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = {path.name: mx.load(str(path)) for path in tmp_path.glob("model*.safetensors")}
    assert len(files) == 4
    assert {name: file for file, arrays in files.items() for name in arrays} == index["weight_map"]
    assert sum(array.size for arrays in files.values() for array in arrays.values()) == num_parameters
    assert index["metadata"]["total_size"] == num_parameters * 4


FEW_BITS = {**SMALL, "architecture": "qwen3", "hidden": 64, "mlp": 64, "bits": 4}


@pytest.mark.parametrize("more", [{}, {"experts": 4, "experts_per_token": 2}], ids=["dense", "experts"])
def test_few_bits_and_experts_are_as_mlx_lm_stores_them(more: dict[str, int], tmp_path: Path) -> None:
    num_parameters = make(tmp_path, Shape(**FEW_BITS, **more))
    model, _ = load(str(tmp_path))
    bits = {m.bits for m in model.modules() if hasattr(m, "bits")}
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert bits == {4}
    assert ("switch_mlp" in str(index["weight_map"])) is bool(more)
    assert index["metadata"]["total_parameters"] == num_parameters
    assert 5 <= 8 * index["metadata"]["total_size"] / num_parameters < 5.5  # with scales and biases
    with LLM(layout(tmp_path, [3], [])) as llm:
        assert tokens_of(llm, prompt(20), max_tokens=8) == plain_greedy(tmp_path, prompt(20), 8)


def test_the_seed_makes_the_model() -> None:
    def weights(seed: int) -> dict[str, mx.array]:
        return dict(tree_flatten(build(Shape(**SMALL, dtype="float16"), seed=seed).parameters()))

    one, again, other = weights(1), weights(1), weights(2)
    assert all(mx.array_equal(one[name], again[name]).item() for name in one)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert one[name].dtype == mx.float16
    assert not mx.array_equal(one[name], other[name]).item()
    assert not mx.array_equal(one[name], one[name.replace("layers.0", "layers.1")]).item()


@given(st.text(max_size=40), st.integers(257, 700))
def test_every_text_comes_back(text: str, vocab: int) -> None:
    tokenizer = byte_tokenizer(vocab)
    assert tokenizer.get_vocab_size() == vocab
    ids = tokenizer.encode(text).ids
    assert max(ids, default=0) < vocab
    if END not in text:
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"heads": 5}, "cannot be cut into 5 heads"),
        ({"kv_heads": 3}, "cannot share 3 KV heads"),
        ({"vocab": 200}, "vocab must be at least 257"),
        ({"architecture": "t5"}, "known: qwen2"),
        ({"bits": 4}, "multiples of 64"),
        ({"experts": 4, "experts_per_token": 2}, "for qwen3, not for qwen2"),
        ({"architecture": "qwen3", "experts": 4}, "cannot go to 0 of 4"),
    ],
)
def test_shapes_that_cannot_be_are_refused(wrong: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Shape(**{**SMALL, **wrong})  # type: ignore[arg-type]


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("two years of work")
    with pytest.raises(ConfigError, match="is not empty"):
        make(tmp_path, Shape(**SMALL))


def test_the_script_says_what_it_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    monkeypatch.setattr(sys, "argv", ["make_bench_model", str(tmp_path / "m"), *options, "--files", "2"])
    main()
    assert "qwen2, 3 layers" in capsys.readouterr().out
    assert len(list((tmp_path / "m").glob("*.safetensors"))) == 2
