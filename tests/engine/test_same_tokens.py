"""The promise: plain mlx-lm, whole and cut, any transport, any chunking, give the same tokens."""

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
from effort import thorough
from stages import pipeline, plain_greedy, plain_sampled, prompt, tokens_of

from splitinfer.demo import TARGET

PROMPT = prompt(70)  # longer than the tiny models' sliding windows
NUM = 24


def cuts(name: str, num_stages: int) -> list[int]:
    n = tiny.CONFIGS[name]["num_hidden_layers"]
    return {1: [n], 2: [1, n - 1], 3: [1, 2, n - 3]}[num_stages]


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_greedy_is_mlx_lm(name: str, tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder(name)
    expected = plain_greedy(folder, PROMPT, NUM)
    assert len(set(expected)) > 5, "a model that repeats itself proves little"
    for num_stages in thorough((1, 3), (1, 2, 3)):
        with pipeline(folder, cuts(name, num_stages), token_budget=16) as llm:
            assert tokens_of(llm, PROMPT, max_tokens=NUM) == expected, f"{num_stages} stages"


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_sampling_takes_every_road_alike(name: str, tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder(name)
    sampled = {"max_tokens": NUM, "temperature": 0.8, "top_p": 0.95, "min_p": 0.01, "top_k": 60, "seed": 5}
    roads = _roads(same_chunks=name in tiny.SAME_CHUNKS_ONLY)
    outcomes = {}
    for num_stages, scheme, chunk_size in roads:
        with pipeline(folder, cuts(name, num_stages), scheme, token_budget=chunk_size) as llm:
            outcomes[num_stages, scheme, chunk_size] = tokens_of(llm, PROMPT, **sampled)
    first = outcomes[roads[0]]
    assert all(tokens == first for tokens in outcomes.values()), outcomes
    assert len(set(first)) > 5


def _roads(*, same_chunks: bool) -> list[tuple[int, str, int]]:
    """Numbers of stages, transports and sizes of a chunk: each at least once, or all that there are."""
    if same_chunks:
        usual, every = [(1, "inproc", 16), (2, "tcp", 16), (3, "inproc", 16)], [(2, "inproc", 16), (3, "tcp", 16)]
    else:
        usual = [(1, "inproc", 512), (2, "tcp", 7), (3, "inproc", 1), (3, "tcp", 16)]
        every = [(1, "inproc", 16), (2, "inproc", 16), (2, "tcp", 16), (3, "inproc", 16)]
    return thorough(usual, usual + every)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_quantised(name: str, tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder(name, bits=4)
    expected = plain_greedy(folder, PROMPT, NUM)
    with pipeline(folder, cuts(name, 2), token_budget=16) as llm:
        assert tokens_of(llm, PROMPT, max_tokens=NUM) == expected


@pytest.mark.parametrize("num_stages", [1, pytest.param(2, marks=pytest.mark.fast), 3])
def test_demo_model(num_stages: int) -> None:
    shapes = {1: [12], 2: [5, 7], 3: [3, 5, 4]}
    with pipeline(TARGET, shapes[num_stages], "tcp", token_budget=8) as llm:
        assert llm.tokenizer is not None
        tokens = llm.encode("Once upon a time there was a poor woodcutter who")
        assert tokens_of(llm, tokens, max_tokens=32) == plain_greedy(TARGET, tokens, 32)
        expected = plain_sampled(TARGET, tokens, 40, temperature=0.8, seed=3, vocab_size=llm.tokenizer.vocab_size)
        assert tokens_of(llm, tokens, max_tokens=40, temperature=0.8, seed=3) == expected
    assert len(set(expected)) > 20


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_crosses_the_link_exactly(dtype: str, tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder("llama")
    outcomes = []
    for shape in ([4], [2, 2], [1, 2, 1]):
        with pipeline(folder, shape, "tcp", dtype=dtype, token_budget=16) as llm:
            outcomes.append(tokens_of(llm, PROMPT, max_tokens=NUM, temperature=0.8, seed=1))
    assert outcomes[0] == outcomes[1] == outcomes[2]
