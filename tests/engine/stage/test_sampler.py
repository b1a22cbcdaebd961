"""Tokens are chosen as mlx-lm chooses them, and a row's token depends on that row alone."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, make_logits_processors

from splitinfer.core.plan import SampledToken
from splitinfer.core.rng import position_key
from splitinfer.core.sampling_params import REPETITION_CONTEXT, SamplingParams
from splitinfer.engine.stage.history import Row
from splitinfer.engine.stage.masking import mask_of
from splitinfer.engine.stage.sampler import Sampler, read, reported
from splitinfer.models.library.graph import uncompiled

VOCAB = 97
GREEDY = SamplingParams()
WARM = SamplingParams(temperature=1.0)

FILTERS: list[dict[str, Any]] = [
    {},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"top_k": 5},
    {"top_p": 0.9, "min_p": 0.02},
    {"top_p": 0.9, "top_k": 12},
    {"top_p": 0.95, "min_p": 0.01, "top_k": 20},
    {"top_k": VOCAB},
]


def made_up(num_rows: int, width: int = VOCAB, seed: int = 0) -> mx.array:
    return mx.random.normal((num_rows, width), key=mx.random.key(seed)) * 3


def row(params: SamplingParams, position: int = 5, seed: int = 1, recent: Sequence[int] = ()) -> Row:
    return Row(params, seed, position, tuple(recent))


def choose(logits: mx.array, rows: Sequence[Row], vocab: int = VOCAB) -> list[SampledToken]:
    return read(Sampler(vocab).choose(logits, rows), rows)


def ids(logits: mx.array, rows: Sequence[Row], vocab: int = VOCAB) -> list[int]:
    return [token.token_id for token in choose(logits, rows, vocab)]


def log_softmax(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def by_mlx_lm(logits: mx.array, row: Row) -> int:
    """mlx-lm's own filters, in its order, and our draw: MLX's categorical has a random stream of its own."""
    params, lines = row.params, log_softmax(logits)
    if params.temperature == 0:
        return int(mx.argmax(lines).item())
    if 0 < params.top_p < 1:
        lines = apply_top_p(lines, params.top_p)
    if params.min_p:
        lines = apply_min_p(lines, params.min_p)
    if 0 < params.top_k < VOCAB:
        lines = apply_top_k(lines, params.top_k)
    noise = mx.random.gumbel((VOCAB,), key=mx.array(position_key(row.seed, row.position), dtype=mx.uint32))
    return int(mx.argmax(lines * (1 / params.temperature) + noise).item())


@pytest.mark.parametrize(("temperature", "dtype"), [(0.3, mx.bfloat16), (1.0, mx.float32), (0.0, mx.float32)])
def test_filters_are_mlx_lms(temperature: float, dtype: mx.Dtype):
    """Of rows whose settings differ in kind and in values, together."""
    many = [{name: v if v in (0, VOCAB) else v + i / 500 if v < 1 else v for name, v in filters.items()}
            for i in range(5) for filters in FILTERS]  # fmt: skip
    rows = [row(SamplingParams(temperature=temperature, **one), position=i, seed=i % 3) for i, one in enumerate(many)]
    logits = made_up(len(rows)).astype(dtype)
    with uncompiled():  # mlx-lm's would be compiled for each value
        expected = [by_mlx_lm(line, one) for line, one in zip(logits[:, None], rows, strict=True)]
    assert ids(logits, rows) == expected
    assert len(set(expected)) > 10


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9, "min_p": 0.1, "top_k": 7, "logprobs": 3}], ids=str)
def test_twenty_settings_are_compiled_once_for_each_number_of_rows(
    filters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """A function is traced when it is called with constants or shapes for which it was not compiled yet."""
    traced = Mock(wraps=reported)
    monkeypatch.setattr("splitinfer.engine.stage.sampler.reported", traced)
    sampler = Sampler(VOCAB, compiled=True)
    for i in range(20):
        values = {name: value + i / 300 if name in ("top_p", "min_p") else value for name, value in filters.items()}
        params = SamplingParams(temperature=0.1 + i / 10, **values)
        sampler.choose(made_up(1 + i % 2), [row(params, position=at) for at in range(1 + i % 2)])
    assert traced.call_count == 2


@pytest.mark.parametrize(("penalty", "num_recent"), [(0.7, 7), (1.3, REPETITION_CONTEXT), (2.0, 1)])
def test_the_repetition_penalty_is_mlx_lms(penalty: float, num_recent: int):
    logits = made_up(30)
    likely = mx.argsort(-logits, axis=-1)[:, :num_recent].tolist()  # penalise what would have been chosen
    (process,) = make_logits_processors(repetition_penalty=penalty, repetition_context_size=REPETITION_CONTEXT)
    expected = [process(mx.array(likely[i]), logits[i : i + 1]) for i in range(30)]
    params = SamplingParams(repetition_penalty=penalty, logprobs=5)
    tokens = choose(logits, [row(params, recent=likely[i]) for i in range(30)])
    assert [t.token_id for t in tokens] == [int(mx.argmax(line).item()) for line in expected]
    assert [t.logprob for t in tokens] == [float(mx.max(log_softmax(line)).item()) for line in expected]
    if (penalty, num_recent) == (2.0, 1):
        assert [t.token_id for t in tokens] != mx.argmax(logits, axis=-1).tolist()


MANY_PARAMS = [
    *(SamplingParams(temperature=t, **f) for t in (0.0, 1.5) for f in FILTERS),
    SamplingParams(temperature=1.5, repetition_penalty=30.0),
    SamplingParams(temperature=1.5, logprobs=4),
    SamplingParams(repetition_penalty=3.0, logprobs=0),
    SamplingParams(temperature=1.5, presence_penalty=2.0, logprobs=2),
    SamplingParams(frequency_penalty=1.5, logit_bias={3: 20.0, 8: -100.0}),
    SamplingParams(temperature=0.5, repetition_penalty=2.0, frequency_penalty=-1.0, logit_bias={5: 2.5}),
]


def mask(allowed: set[int]) -> mx.array:
    return mask_of(np.packbits([i in allowed for i in range(128)], bitorder="little").tobytes(), VOCAB)


some_tokens = st.sets(st.integers(0, VOCAB - 1), min_size=1)
some_rows = st.builds(
    Row,
    params=st.sampled_from(MANY_PARAMS),
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(1, 2**20),
    recent=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=REPETITION_CONTEXT).map(tuple),
    answer=st.lists(st.integers(0, VOCAB - 1), max_size=40).map(tuple),
    mask=st.none() | some_tokens.map(mask) | st.integers(0, VOCAB - 1).map(lambda token: mask({token})),
)


@given(st.lists(some_rows, min_size=1, max_size=7), st.integers(0, 100), st.randoms(use_true_random=False))
def test_the_rest_of_the_batch_changes_nothing(rows: list[Row], seed: int, random: Any):
    logits = made_up(len(rows), seed=seed)
    alone = [choose(logits[i : i + 1], [one])[0] for i, one in enumerate(rows)]
    assert choose(logits, rows) == alone
    order = list(range(len(rows)))
    random.shuffle(order)
    assert choose(logits[mx.array(order)], [rows[i] for i in order]) == [alone[i] for i in order]


def test_the_choice_follows_the_distribution():
    """Five thousand draws from four tokens, each within five standard deviations."""
    shares = np.array([0.5, 0.3, 0.15, 0.05])
    logits = mx.broadcast_to(mx.log(mx.array(shares, dtype=mx.float32))[None], (5000, 4))
    drawn = ids(logits, [row(WARM, position=i) for i in range(5000)], vocab=4)
    counts = np.bincount(drawn, minlength=4)
    assert (abs(counts - 5000 * shares) < 5 * np.sqrt(5000 * shares * (1 - shares))).all(), counts


def test_of_one_token_that_alone_may_come_the_log_probability_is_0():
    rows = [replace(row(params), mask=mask({30})) for params in (WARM, GREEDY, replace(WARM, logprobs=1))]
    tokens = choose(made_up(3), rows)
    assert [(token.token_id, token.logprob) for token in tokens] == [(30, None), (30, None), (30, 0.0)]


@pytest.mark.parametrize("padding", [1, 200])
def test_padding_of_the_vocabulary_changes_nothing_and_is_never_chosen(padding: int):
    logits = made_up(200)
    rows = [row(SamplingParams(temperature=t), position=i) for i, t in zip(range(200), [0.5, 1.0] * 100, strict=True)]
    # Padding that is as likely as the likeliest token, so that it would be chosen if it could be.
    padded = mx.concatenate([logits, mx.broadcast_to(mx.max(logits, axis=-1, keepdims=True), (200, padding))], axis=1)
    chosen = ids(padded, rows)
    assert chosen == ids(logits, rows)
    assert max(chosen) < VOCAB


def test_fewer_logits_than_the_tokenizer_has_tokens():
    logits = made_up(200)
    rows = [row(WARM, position=i) for i in range(200)]
    wider = mx.concatenate([logits, mx.full((200, 30), -mx.inf)], axis=1)
    assert ids(logits, rows, vocab=VOCAB + 30) == ids(wider, rows, vocab=VOCAB + 30)
    assert ids(logits, rows, vocab=VOCAB + 30) != ids(logits, rows), "noise is drawn at the tokenizer's size"


@pytest.mark.parametrize(
    ("num_top", "temperature", "dtype"), [(0, 0.0, mx.float32), (5, 1.5, mx.bfloat16), (20, 0.0, mx.float32)]
)
def test_logprobs_are_those_of_the_model(num_top: int, temperature: float, dtype: mx.Dtype):
    """Before filters and temperature, as mlx-lm reports them; the most likely first."""
    logits = made_up(10).astype(dtype)
    params = SamplingParams(temperature=temperature, top_k=3, logprobs=num_top)
    expected = np.array(log_softmax(logits).astype(mx.float32))
    for i, token in enumerate(choose(logits, [row(params, position=i) for i in range(10)])):
        assert token.logprob == expected[i, token.token_id]
        assert len(token.top) == num_top
        assert [value for _, value in token.top] == sorted(expected[i], reverse=True)[:num_top]
        assert all(value == expected[i, at] for at, value in token.top)
        assert len({at for at, _ in token.top}) == num_top
        if temperature == 0 and num_top:
            assert token.logprob == token.top[0][1]


def test_reading_computes_nothing(busy: Callable[[], AbstractContextManager[None]]):
    """It would wait on the device for the step launched meanwhile."""
    rows = [row(replace(WARM, logprobs=(None, 0, 4)[i % 3]), position=i) for i in range(9)]
    choices = Sampler(VOCAB).choose(made_up(9).astype(mx.bfloat16), rows)
    mx.eval([array for choice in choices for array in (choice.tokens, choice.logprobs) if array is not None])
    with busy():
        tokens = read(choices, rows)
    assert [len(token.top) for token in tokens] == [0, 0, 4] * 3


def test_compiled_into_one_call_the_tokens_are_the_same():
    """As on a GPU; MLX's CPU backend compiles it, too, if it is told to."""
    kinds = [replace(WARM, top_p=0.9), GREEDY, replace(WARM, logprobs=2, top_p=0.9, top_k=12)]
    rows = [row(kinds[i % 3], position=i, seed=i) for i in range(9)]
    logits = made_up(9)
    eager, compiled = (Sampler(VOCAB, compiled=flag) for flag in (False, True))
    for _ in range(2):
        chosen = read(compiled.choose(logits, rows), rows)
        assert [t.token_id for t in chosen] == [t.token_id for t in read(eager.choose(logits, rows), rows)]
    assert chosen[2].top == read(eager.choose(logits, rows), rows)[2].top
    assert chosen[2].logprob == pytest.approx(float(log_softmax(logits)[2, chosen[2].token_id].item()), abs=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_numbers_that_overflowed_is_told_from_others(temperature: float):
    """Whether its log probabilities are wanted or not; what MLX's argmax finds there is no token."""
    logits = made_up(4)
    logits[1, 60], logits[2, 3] = mx.nan, mx.inf
    params = SamplingParams(temperature=temperature)
    found = choose(logits, [row(replace(params, logprobs=(None, 2)[i % 2])) for i in range(4)])
    assert [token.logprob is not None and np.isnan(token.logprob) for token in found] == [False, True, True, False]


def test_the_smallest_top_p_leaves_the_likeliest_token():
    logits = made_up(3)
    rows = [row(SamplingParams(temperature=1.0, top_p=top_p)) for top_p in (1e-320, 1e-46, 1e-30)]
    assert ids(logits, rows) == logits.argmax(axis=-1).tolist()
