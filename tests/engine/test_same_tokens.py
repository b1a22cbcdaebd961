"""The promise: plain mlx-lm, whole and cut, any transport, any chunking, give the same tokens."""

from typing import Any

import pytest
import tiny
from engine.door import Open, ask
from stages import plain_greedy, prompt
from tiny import Folder

NIGHTLY = pytest.mark.nightly
LENGTH, NUM = 70, 16  # a prompt longer than the tiny models' sliding windows
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "min_p": 0.01, "top_k": 60}
SAME = tiny.SAME_CHUNKS_ONLY


def _nightly(names: set[str]) -> list[Any]:
    """The other architectures, which ``tests/matrix`` cuts, too."""
    return [pytest.param(name, marks=NIGHTLY) for name in sorted(names)]


def cuts(name: str, num_stages: int) -> list[int]:
    n = tiny.CONFIGS[name]["num_hidden_layers"]
    return {1: [n], 2: [1, n - 1], 3: [1, 2, n - 3]}[num_stages]


@pytest.mark.parametrize("name", ["llama", "qwen3_next", *_nightly({*tiny.CONFIGS} - {"llama", "qwen3_next"})])
def test_greedy_is_mlx_lm(name: str, pipeline: Open, tiny_folder: Folder) -> None:
    """And sampling is that of one stage, which the door checks."""
    expected = plain_greedy(tiny_folder(name), prompt(LENGTH), NUM)
    assert len(set(expected)) > 5, "a model that repeats itself proves little"
    with pipeline(name, cuts(name, 3), token_budget=16) as there:
        greedy, _ = there.answers(ask(LENGTH, max_tokens=NUM), ask(LENGTH, max_tokens=NUM, **SAMPLED))
    assert greedy == expected


@pytest.mark.parametrize(("num_stages", "scheme", "chunk"), [(2, "tcp", 7), (3, "inproc", 1)])
@pytest.mark.parametrize("name", ["llama", *_nightly({*tiny.CONFIGS} - {"llama"})])
def test_every_road_gives_the_same(name: str, num_stages: int, scheme: str, chunk: int, pipeline: Open) -> None:
    with pipeline(name, cuts(name, num_stages), scheme=scheme, token_budget=16 if name in SAME else chunk) as there:
        there.answers(ask(LENGTH, max_tokens=NUM, **SAMPLED), ask(LENGTH, max_tokens=NUM))


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3_moe", marks=NIGHTLY)])
def test_quantised(name: str, pipeline: Open, tiny_folder: Folder) -> None:
    folder = tiny_folder(name, bits=4)
    with pipeline(folder, cuts(name, 2), token_budget=16) as there:
        assert there.answers(ask(LENGTH, max_tokens=NUM)) == [plain_greedy(folder, prompt(LENGTH), NUM)]


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=NIGHTLY)])
def test_half_precision_crosses_the_link_exactly(dtype: str, pipeline: Open) -> None:
    with pipeline("llama", [1, 2, 1], scheme="tcp", dtype=dtype, token_budget=16) as there:
        there.answers(ask(LENGTH, max_tokens=NUM, temperature=0.8))
