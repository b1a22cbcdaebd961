"""Log probabilities of a prompt's own tokens: each from the row before it, on the last stage.

They are what the model gives, whatever else the request asks for, and are computed in float32, as mlx-lm's evaluation
does it. A step has the logits of a few of a prompt's rows only (``core.scheduler.scheduler``), never of all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from splitinfer.core.plan import SampledToken, Slice
from splitinfer.core.sampling_params import MAX_LOGPROBS
from splitinfer.engine.stage.history import History
from splitinfer.engine.stage.sampler import reported, with_logprobs
from splitinfer.models.tensors import on_host


@dataclass(frozen=True, slots=True)
class Scores:
    """Those of one slice, not yet evaluated. ``logprobs``: a line for each of ``tokens``, as in ``sampler.Choice``;
    ``num_top``: of the most likely tokens, how many are wanted."""

    seq_id: int
    tokens: tuple[int, ...]
    num_top: int
    logprobs: mx.array


def scored(
    logits: mx.array, slices: Sequence[Slice], histories: Mapping[int, History]
) -> tuple[mx.array, tuple[Scores, ...]]:
    """From the [rows, vocabulary] logits of some slices those that are sampled from, and the scores of the others."""
    if not any(part.scored for part in slices):
        return logits, ()
    sampled, scores, at = list[int](), [], 0
    for part in slices:
        behind = at + len(part.scored)
        if part.scored:
            num_top = histories[part.seq_id].params.prompt_logprobs or 0
            scores.append(_scores(logits[at:behind], part, num_top))
        sampled += range(behind, at := at + part.num_rows)
    return logits[mx.array(sampled, dtype=mx.int32)], tuple(scores)


def _scores(logits: mx.array, part: Slice, num_top: int) -> Scores:
    values = logits.astype(mx.float32)
    logprobs = values - mx.logsumexp(values, axis=-1, keepdims=True)
    lines = reported(logprobs, mx.array(part.scored, dtype=mx.int32), MAX_LOGPROBS if num_top else 0)
    return Scores(part.seq_id, part.scored, num_top, lines)


def read_scores(scores: Sequence[Scores]) -> dict[int, tuple[SampledToken, ...]]:
    """By sequence, its slice's tokens with their log probabilities. Waits until they are evaluated."""
    return {
        one.seq_id: tuple(
            with_logprobs(token, line, one.num_top)
            for token, line in zip(one.tokens, on_host(one.logprobs), strict=True)
        )
        for one in scores
    }
