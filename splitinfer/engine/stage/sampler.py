"""Samples tokens from logits, keyed by position.

Sampling adds Gumbel noise to the scaled log probabilities and takes the largest (the Gumbel-max trick), which draws
from their softmax. The noise of a row comes from the key of the position it fills (``core.rng``) and is drawn at the
*tokenizer's* vocabulary size, so neither the other rows of the batch, nor the cut, nor a model's padding of its
vocabulary can change it. Filters are mlx-lm's own functions in mlx-lm's order.

What follows the head is a dozen small operations on one row for each sequence. On a GPU each would be a launch of its
own, so there they are compiled into one call. MLX's CPU backend has no launches to save, and its compiler takes seconds
for the first token of each kind; there they are not compiled.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
import numpy as np

from splitinfer.core.plan import SampledToken
from splitinfer.core.rng import position_key
from splitinfer.core.sequence import REPETITION_CONTEXT, SamplingParams
from splitinfer.models.memory import on_gpu
from splitinfer.models.mlx_lm import apply_min_p, apply_top_k, apply_top_p, make_repetition_penalty

_Tail = Callable[[mx.array, mx.array | None], tuple[mx.array, mx.array]]
_MIN_TEMPERATURE = 1e-6  # greedy but for ties; a lower one would leave the range of float32
_MAX_TAILS = 64  # settings whose compiled functions are cached


@dataclass(frozen=True, slots=True)
class Row:
    """What one row's token depends on: ``position`` is the one it fills, ``recent`` the tokens before it."""

    params: SamplingParams
    seed: int
    position: int
    recent: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """Rows with equal settings, not yet evaluated: [n] tokens, and [n, vocabulary] log probabilities if asked for."""

    rows: tuple[int, ...]
    tokens: mx.array
    logprobs: mx.array | None

    def arrays(self) -> list[mx.array]:
        """The arrays that have to be evaluated."""
        return [self.tokens] if self.logprobs is None else [self.tokens, self.logprobs]


class Sampler:
    """Chooses tokens. ``vocab_size``: the number of values noise is drawn for. ``compiled``: by default on a GPU."""

    def __init__(self, vocab_size: int, *, compiled: bool | None = None) -> None:
        self._vocab_size = vocab_size
        self._compiled = on_gpu() if compiled is None else compiled
        self._tails: OrderedDict[tuple[object, ...], _Tail] = OrderedDict()  # by settings, last used last
        self._noise = mx.vmap(lambda key: mx.random.gumbel((vocab_size,), key=key))

    def choose(self, logits: mx.array, rows: Sequence[Row]) -> list[Choice]:
        """Build the graph that chooses a token for each row of [n, vocabulary] logits, without evaluating it."""
        alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
        for i, row in enumerate(rows):
            alike[_settings(row.params)].append(i)
        return [self._choose_alike(logits, rows, indices) for indices in alike.values()]

    def _choose_alike(self, logits: mx.array, rows: Sequence[Row], indices: list[int]) -> Choice:
        picked = logits if len(indices) == len(rows) else logits[mx.array(indices)]
        own_rows = [rows[i] for i in indices]
        params = own_rows[0].params
        if params.repetition_penalty != 1.0:
            picked = _penalized(picked, own_rows)
        keys = None
        if params.temperature > 0:
            keys = mx.array([position_key(row.seed, row.position) for row in own_rows], dtype=mx.uint32)
        tokens, logprobs = self._tail(params)(picked, keys)
        return Choice(tuple(indices), tokens, None if params.logprobs is None else logprobs)

    def _tail(self, params: SamplingParams) -> _Tail:
        """The function for rows with these settings."""
        settings = _settings(params)
        if settings not in self._tails:
            tail = self._make_tail(params)
            self._tails[settings] = mx.compile(tail) if self._compiled else tail
        self._tails.move_to_end(settings)
        while len(self._tails) > _MAX_TAILS:
            self._tails.popitem(last=False)
        return self._tails[settings]

    def _make_tail(self, params: SamplingParams) -> _Tail:
        def tail(logits: mx.array, keys: mx.array | None) -> tuple[mx.array, mx.array]:
            logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
            if keys is None:
                return mx.argmax(logprobs, axis=-1), logprobs
            noise = self._fit(self._noise(keys), logprobs.shape[-1])
            scaled = _filtered(logprobs, params) * (1.0 / max(params.temperature, _MIN_TEMPERATURE))
            return mx.argmax(scaled + noise, axis=-1), logprobs

        return tail

    def _fit(self, noise: mx.array, width: int) -> mx.array:
        """Fit noise to a vocabulary that is padded (the padding is never chosen) or smaller than the tokenizer's."""
        if width <= self._vocab_size:
            return noise[:, :width]
        never = mx.full((noise.shape[0], width - self._vocab_size), -mx.inf)
        return mx.concatenate([noise, never], axis=1)


def read(choices: Sequence[Choice], rows: Sequence[Row]) -> list[SampledToken]:
    """Evaluate the choices; return the chosen tokens in the order of the rows."""
    tokens: dict[int, SampledToken] = {}
    for choice in choices:
        for at, (row, token) in enumerate(zip(choice.rows, _ints(choice.tokens), strict=True)):
            tokens[row] = _with_logprobs(token, choice, at, rows[row].params.logprobs)
    return [tokens[i] for i in range(len(rows))]


def _with_logprobs(token: int, choice: Choice, at: int, num_top: int | None) -> SampledToken:
    if choice.logprobs is None or num_top is None:
        return SampledToken(token)
    line = choice.logprobs[at].astype(mx.float32)
    values = np.array(line)
    num_top = min(num_top, len(values))
    top = np.argpartition(-values, num_top - 1)[:num_top].tolist() if num_top else []
    ranked = sorted(((i, float(values[i])) for i in top), key=lambda pair: (-pair[1], pair[0]))
    return SampledToken(token, float(values[token]), tuple(ranked))


def _ints(array: mx.array) -> list[int]:
    return cast(list[int], array.tolist())


def _settings(params: SamplingParams) -> tuple[object, ...]:
    """Rows with equal settings are chosen in one call."""
    p = params
    return (p.temperature, p.top_p, p.min_p, p.top_k, p.repetition_penalty, p.logprobs)


def _filtered(logprobs: mx.array, params: SamplingParams) -> mx.array:
    if params.top_p < 1.0:
        logprobs = apply_top_p(logprobs, params.top_p)
    if params.min_p > 0.0:
        logprobs = apply_min_p(logprobs, params.min_p)
    if 0 < params.top_k < logprobs.shape[-1]:
        logprobs = apply_top_k(logprobs, params.top_k)
    return logprobs


def _penalized(logits: mx.array, rows: list[Row]) -> mx.array:
    """Apply mlx-lm's repetition penalty, row by row, because each has other recent tokens.

    Ids without a logit are left out: MLX does not check bounds, and plans come from a peer.
    """
    penalty = make_repetition_penalty(rows[0].params.repetition_penalty, REPETITION_CONTEXT)
    recent = [[token for token in row.recent if 0 <= token < logits.shape[-1]] for row in rows]
    lines = [penalty(mx.array(tokens), logits[i : i + 1]) for i, tokens in enumerate(recent)]
    return mx.concatenate(lines) if len(lines) > 1 else lines[0]
