"""Changes logits by what a request asks for and by what came before: biases and penalties.

They act on the logits before they become log probabilities, in mlx-lm's order: bias, repetition (mlx-lm's own function,
over the last tokens of prompt and answer), then presence and frequency, which count all tokens of the *answer*, as in
OpenAI's API (mlx-lm's count the last 20 tokens, the prompt's included):

    logit[t] + bias[t] - (presence if count[t] > 0) - frequency * count[t]

All depend on a row's own sequence and position alone, so no batch, cut or draft changes them. Ids without a logit are
left out: MLX does not check bounds, and plans come from a peer.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import mlx.core as mx

from splitinfer.core.sampling_params import REPETITION_CONTEXT, SamplingParams
from splitinfer.engine.stage.history import Row
from splitinfer.models.mlx_lm import make_repetition_penalty


def adjusted(logits: mx.array, rows: Sequence[Row]) -> mx.array:
    """[n, vocabulary] logits with each row's bias and penalties; none is evaluated."""
    logits = _added(logits, [dict(row.params.logit_bias) for row in rows])
    if any(row.params.repetition_penalty != 1.0 for row in rows):
        logits = _with_repetition_penalty(logits, rows)
    return _added(logits, [answer_penalty(row.params, row.answer) for row in rows])


def answer_penalty(params: SamplingParams, answer: Sequence[int]) -> dict[int, float]:
    """What the tokens of an answer add to their logits.

    >>> answer_penalty(SamplingParams(presence_penalty=0.5, frequency_penalty=0.25), (7, 9, 7))
    {7: -1.0, 9: -0.75}
    """
    if not params.has_answer_penalty:
        return {}
    counts = Counter(answer)
    return {token: -params.presence_penalty - params.frequency_penalty * n for token, n in counts.items()}


def _added(logits: mx.array, additions: Sequence[Mapping[int, float]]) -> mx.array:
    """Logits plus each row's numbers by token, as one operation for all rows."""
    entries = [
        (row, token, number)
        for row, addition in enumerate(additions)
        for token, number in addition.items()
        if 0 <= token < logits.shape[-1]
    ]
    if not entries:
        return logits
    rows, tokens, numbers = zip(*entries, strict=True)
    return logits.at[mx.array(rows), mx.array(tokens)].add(mx.array(numbers, dtype=logits.dtype))


def _with_repetition_penalty(logits: mx.array, rows: Sequence[Row]) -> mx.array:
    """Apply mlx-lm's repetition penalty, row by row, because each has other recent tokens."""
    lines = []
    for i, row in enumerate(rows):
        penalty = make_repetition_penalty(row.params.repetition_penalty, REPETITION_CONTEXT)
        recent = [token for token in row.recent if 0 <= token < logits.shape[-1]]
        lines.append(penalty(mx.array(recent), logits[i : i + 1]))
    return mx.concatenate(lines) if len(lines) > 1 else lines[0]
