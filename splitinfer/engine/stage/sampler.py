"""Samples tokens from logits, keyed by position.

Sampling adds Gumbel noise to the scaled log probabilities and takes the largest, which draws from their softmax. The
noise of a row comes from the key of the position it fills (``core.rng``) and is drawn at the *tokenizer's* vocabulary
size, so neither the other rows, nor the cut, nor a padded vocabulary can change it. Filters are mlx-lm's, in its order.

On a GPU the dozen small operations after the head are compiled into one call, and each new constant needs another
compilation. So settings are data if that changes no bit, and rows of one *structure* (``_Structure``) share a call.
Everything that is reported of a step is computed with it: a later operation would wait for the next step.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx

from splitinfer.core.plan import SampledToken, Slice
from splitinfer.core.rng import position_key
from splitinfer.core.sampling_params import MAX_LOGPROBS
from splitinfer.engine.stage.history import History, Row
from splitinfer.engine.stage.masking import adjusted, masked
from splitinfer.models.border.tensors import numbers_of
from splitinfer.models.library.mlx_lm import sample_utils
from splitinfer.models.memory import on_gpu
from splitinfer.system.gpu_roads import Road

_MIN_TOP_P = 1e-30  # some GPUs have no smaller float32, and 0 would exclude every token
_MIN_TEMPERATURE = 1e-6  # greedy except for ties; a lower one would leave the range of float32
_MAX_TAILS = 64  # structures whose compiled functions are cached
_MAX_EXACT = 2**24  # integers that float32 holds exactly: token ids are reported beside log probabilities


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """The tokens chosen for ``rows`` of one structure, [n] and not yet evaluated, and their log probabilities.

    ``logprobs``: float32 [n, 1 + 2 k], row-major: the token's log probability, the log probabilities of the k most
    likely tokens in any order, and their ids. k is 0 or ``MAX_LOGPROBS``, or the vocabulary's size if that is less.
    """

    rows: tuple[int, ...]
    tokens: mx.array
    logprobs: mx.array


@dataclass(frozen=True, slots=True)
class _Structure:
    """The settings that decide which operations choose a row's token; the rest is data. Greedy rows have no filters."""

    samples: bool
    has_top_p: bool
    has_min_p: bool
    top_k: int
    is_adjusted: bool
    is_masked: bool
    num_top: int

    @classmethod
    def of(cls, row: Row) -> "_Structure":
        """Return the structure of a row."""
        p, samples = row.params, row.params.temperature > 0
        return cls(
            samples=samples,
            has_top_p=samples and p.top_p < 1.0,
            has_min_p=samples and p.min_p > 0.0,
            top_k=p.top_k if samples else 0,
            is_adjusted=p.changes_logits,
            is_masked=row.mask is not None,
            num_top=MAX_LOGPROBS if p.logprobs else 0,
        )


class _Data(NamedTuple):
    """The settings of n rows, as a function's arguments: keys, uint32 [n, 2], and float32 arrays [n, 1]."""

    keys: mx.array
    inverse_temperature: mx.array
    top_p: mx.array
    log_min_p: mx.array

    @classmethod
    def of(cls, rows: Sequence[Row], keys: mx.array | None = None) -> "_Data":
        """Return the settings of these rows. A filter that is off has an arbitrary number."""
        params = [row.params for row in rows]
        if keys is None:
            keys = mx.array([position_key(row.seed, row.position) for row in rows], dtype=mx.uint32)
        return cls(
            keys,
            _column([1.0 / max(p.temperature, _MIN_TEMPERATURE) for p in params]),
            _column([max(p.top_p, _MIN_TOP_P) for p in params]),
            _column([math.log(p.min_p) if p.min_p > 0 else 0.0 for p in params]),
        )


_Outputs = tuple[mx.array, mx.array]  # tokens, and ``TokenChoice.logprobs``
_Tail = Callable[..., _Outputs]


class Sampler:
    """Chooses tokens. ``vocab_size``: the number of tokens that noise is drawn for. ``compiled``: None: on a GPU."""

    def __init__(self, vocab_size: int, *, compiled: bool | None = None) -> None:
        self._vocab_size = vocab_size
        self._compiled = on_gpu() and Road.COMPILED_SAMPLER.is_open if compiled is None else compiled
        self._tail = lru_cache(_MAX_TAILS)(self._make_tail)
        self._noise = mx.vmap(lambda key: mx.random.gumbel((vocab_size,), key=key))

    def choose(self, logits: mx.array, rows: Sequence[Row], keys: mx.array | None = None) -> list[TokenChoice]:
        """Build the graph that chooses a token for each row, without evaluating it.

        Args:
            logits: [n, vocabulary], one line for each row.
            keys: uint32 [n, 2], the rows' random keys if their positions are not known yet.
        """
        alike = defaultdict[_Structure, list[int]](list)
        for i, row in enumerate(rows):
            alike[_Structure.of(row)].append(i)
        return [self._choose_alike(logits, rows, keys, structure, indices) for structure, indices in alike.items()]

    def tokens(self, logits: mx.array, rows: Sequence[Row], keys: mx.array | None = None) -> mx.array:
        """Return the [n] tokens of ``choose`` in the order of the rows, not evaluated."""
        if all(row.params.temperature == 0 and not row.params.changes_logits and row.mask is None for row in rows):
            return mx.argmax(logits, axis=-1)  # without the log probabilities
        return in_order(self.choose(logits, rows, keys))

    def _choose_alike(
        self, logits: mx.array, rows: Sequence[Row], keys: mx.array | None, structure: _Structure, indices: list[int]
    ) -> TokenChoice:
        picked = logits if len(indices) == len(rows) else logits[mx.array(indices)]
        own_rows = [rows[i] for i in indices]
        if structure.is_adjusted:
            picked = adjusted(picked, own_rows)
        if structure.is_masked:
            picked = masked(picked, own_rows)
        own_keys = None if keys is None else keys[mx.array(indices)]
        data = _Data.of(own_rows, own_keys) if structure.samples else ()
        tokens, report = self._tail(structure)(picked, *data)
        return TokenChoice(tuple(indices), tokens, report)

    def _make_tail(self, structure: _Structure) -> _Tail:
        """Return the function for rows of this structure."""

        def tail(logits: mx.array, *arrays: mx.array) -> _Outputs:
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            scores = self._scores(logprobs, structure, _Data(*arrays)) if structure.samples else logprobs
            tokens = mx.argmax(scores, axis=-1)
            return tokens, reported(logprobs, tokens, structure.num_top)

        return mx.compile(tail) if self._compiled else tail

    def _scores(self, logprobs: mx.array, structure: _Structure, data: _Data) -> mx.array:
        """Return [n, vocabulary] numbers. The token with the largest number of a row is the one drawn."""
        noise = self._fit(self._noise(data.keys), logprobs.shape[-1])
        filtered = _filtered(logprobs, structure, data)
        return filtered * data.inverse_temperature.astype(filtered.dtype) + noise

    def _fit(self, noise: mx.array, width: int) -> mx.array:
        """Return [n, width] noise for a vocabulary that is padded, which is never chosen, or smaller than noise's."""
        if width <= self._vocab_size:
            return noise[:, :width]
        never = mx.full((noise.shape[0], width - self._vocab_size), -mx.inf)
        return mx.concatenate([noise, never], axis=1)


def in_order(choices: Sequence[TokenChoice]) -> mx.array:
    """Return [n] chosen tokens in the order of the rows. There must be at least one choice."""
    tokens = mx.concatenate([one.tokens for one in choices]) if len(choices) > 1 else choices[0].tokens
    order = [i for one in choices for i in one.rows]
    return tokens if order == sorted(order) else tokens[mx.argsort(mx.array(order))]


def read(choices: Sequence[TokenChoice], rows: Sequence[Row]) -> list[SampledToken]:
    """Return the chosen tokens in the order of the rows. Waits until the choices are evaluated, and computes nothing. A
    log probability of NaN is always reported: a number of that row overflowed, so its token is not valid."""
    tokens: dict[int, SampledToken] = {}
    for choice in choices:
        ids, lines = numbers_of(choice.tokens), numbers_of(choice.logprobs)
        for row, token, line in zip(choice.rows, ids, lines, strict=True):
            tokens[row] = with_logprobs(token, line, rows[row].params.logprobs)
    return [tokens[i] for i in range(len(rows))]


def with_logprobs(token: int, line: list[float], num_top: int | None) -> SampledToken:
    """Return a token with its log probabilities. ``line``: its row of ``TokenChoice.logprobs``; ``num_top``: how many
    of the most likely tokens to report; ``None``: no log probabilities, unless the token's is NaN."""
    if num_top is None or math.isnan(line[0]):
        return SampledToken(token, math.nan if math.isnan(line[0]) else None)
    k = len(line) // 2
    pairs = zip(map(int, line[1 + k :]), line[1 : 1 + k], strict=True)
    ranked = sorted((pair for pair in pairs if pair[1] > -math.inf), key=lambda pair: (-pair[1], pair[0]))
    return SampledToken(token, line[0], tuple(ranked[:num_top]))


def reported(logprobs: mx.array, tokens: mx.array, num_top: int) -> mx.array:
    """Return ``TokenChoice.logprobs`` for ``tokens`` [n], given [n, vocabulary] log probabilities."""
    own, num_top = mx.take_along_axis(logprobs, tokens[:, None], axis=-1), min(num_top, logprobs.shape[-1])
    own = own.astype(mx.float32)
    if not num_top:
        return own
    values = logprobs.astype(mx.float32)
    assert values.shape[-1] <= _MAX_EXACT
    top = mx.argpartition(-values, kth=num_top - 1, axis=-1)[:, :num_top]
    return mx.concatenate([own, mx.take_along_axis(values, top, axis=-1), top.astype(mx.float32)], axis=-1)


def _filtered(logprobs: mx.array, structure: _Structure, data: _Data) -> mx.array:
    if structure.has_top_p:
        logprobs = sample_utils.apply_top_p(logprobs, data.top_p)  # accepts an array, because it only multiplies by it
    if structure.has_min_p:
        # As mlx-lm's ``apply_min_p``, which takes the logarithm of a Python number. Here the logarithm is data.
        least = mx.max(logprobs, axis=-1, keepdims=True) + data.log_min_p.astype(logprobs.dtype)
        logprobs = mx.where(logprobs < least, -mx.inf, logprobs)
    if 0 < structure.top_k < logprobs.shape[-1]:
        logprobs = sample_utils.apply_top_k(logprobs, structure.top_k)
    return logprobs


def _column(values: list[float]) -> mx.array:
    return mx.array(values, dtype=mx.float32)[:, None]


# -- a prompt's own tokens -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scores:
    """The log probabilities of one slice's prompt tokens, not yet evaluated. ``logprobs``: one line for each of
    ``tokens``, as in ``TokenChoice``; ``num_top``: how many of the most likely tokens to report."""

    seq_id: int
    tokens: tuple[int, ...]
    num_top: int
    logprobs: mx.array


def scored(
    logits: mx.array, slices: Sequence[Slice], histories: Mapping[int, History]
) -> tuple[mx.array, tuple[Scores, ...]]:
    """Split the [rows, vocabulary] logits of slices into the logits to sample from and the scores of prompt tokens."""
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
    """Wait until scores are evaluated, and return, by sequence, its slice's tokens with their log probabilities."""
    return {
        one.seq_id: tuple(
            with_logprobs(token, line, one.num_top)
            for token, line in zip(one.tokens, numbers_of(one.logprobs), strict=True)
        )
        for one in scores
    }
