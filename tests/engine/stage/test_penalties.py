"""Biases and penalties against sums written out in NumPy, and what an answer is."""

from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from splitinfer.core.plan import SampledToken, Slice
from splitinfer.core.sequence import SamplingParams
from splitinfer.engine.stage.history import History, Row
from splitinfer.engine.stage.masking import adjusted

VOCAB = 12
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=30).map(tuple)
params = st.builds(
    SamplingParams,
    presence_penalty=st.floats(-2, 2, width=16),
    frequency_penalty=st.floats(-2, 2, width=16),
    logit_bias=st.dictionaries(st.integers(0, VOCAB + 5), st.floats(-100, 100, width=16), max_size=4),
)
rows = st.builds(Row, params=params, seed=st.just(0), position=st.just(1), recent=st.just(()), answer=tokens)


def written_out(line: np.ndarray[Any, Any], row: Row) -> np.ndarray[Any, Any]:
    """OpenAI's formula, token by token."""
    line, bias = line.copy(), dict(row.params.logit_bias)
    for token in range(VOCAB):
        count = row.answer.count(token)
        line[token] += np.float32(bias.get(token, 0.0))
        line[token] -= np.float32(row.params.presence_penalty * (count > 0) + row.params.frequency_penalty * count)
    return line


@given(st.lists(rows, min_size=1, max_size=5))
def test_the_sum_is_as_written_out(many: list[Row]):
    logits = mx.random.normal((len(many), VOCAB), key=mx.random.key(len(many)))
    lines = np.array(adjusted(logits, many))
    for line, before, row in zip(lines, np.array(logits), many, strict=True):
        np.testing.assert_allclose(line, written_out(before, row), rtol=1e-6, atol=1e-5)


def test_bias_comes_before_the_repetition_penalty():
    """As in mlx-lm: a bias makes 2 out of -1, and a penalty of 2 makes 1 out of that."""
    both = SamplingParams(logit_bias=((0, 3.0),), repetition_penalty=2.0)
    (line,) = adjusted(mx.array([[-1.0, 0.0]]), [Row(both, 0, 1, (0,))]).tolist()  # type: ignore[misc]
    assert line == [1.0, 0.0]


def test_the_dtype_stays():
    row = Row(SamplingParams(presence_penalty=1.0), 0, 1, (), (2,))
    changed = adjusted(mx.zeros((1, VOCAB), dtype=mx.bfloat16), [row])
    assert changed.dtype == mx.bfloat16
    assert changed.tolist() == [[0.0, 0.0, -1.0, *[0.0] * (VOCAB - 3)]]


PENALIZED = SamplingParams(presence_penalty=1.0)


def answers(history: History, part: Slice) -> list[tuple[int, ...]]:
    return [row.answer for row in history.rows(part)]


def test_the_prompt_is_no_part_of_the_answer_however_it_is_cut():
    history = History(PENALIZED, 0, [], 4)
    assert answers(history, Slice(1, 0, (5, 6), 0)) == []
    assert answers(history, Slice(1, 2, (7, 8), 1)) == [()]
    assert answers(history, Slice(1, 4, (9,), 1)) == [(9,)]


def test_a_replayed_answer_is_still_the_answer():
    history = History(PENALIZED, 0, [5, 6], 4)  # two tokens were cached
    assert answers(history, Slice(1, 2, (7, 8, 9, 3), 1)) == [(9, 3)]


def test_each_draft_counts_for_the_rows_behind_it_and_a_wrong_one_no_longer():
    history = History(PENALIZED, 0, [5], 1)
    part = Slice(1, 1, (7, 8, 9), 3, num_drafts=2)
    assert answers(history, part) == [(7,), (7, 8), (7, 8, 9)]
    history.verdict(part, [SampledToken(8), SampledToken(2), SampledToken(3)])
    assert answers(history, Slice(1, 3, (2,), 1)) == [(7, 8, 2)]
