"""Plain mlx-lm's own tokens on the built-in demo model, in this process, one row at a time.

Each token has a *margin*: how far, in logits, the next likely one was from being chosen. *Rounding* is how far the same
logits move when mlx-lm itself computes the same rows in other numbers: all at once, and in chunks. So what a pipeline
may differ by is measured on this very device, and nothing is assumed about it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from splitinfer.core.rng import position_key
from splitinfer.core.sequence import SamplingParams
from splitinfer.demo import TARGET
from splitinfer.llm.prompts import tokenizer_of
from splitinfer.models.blas import is_batch_invariant
from splitinfer.models.hub import open_model
from splitinfer.models.loader import resolve_dtype
from splitinfer.models.memory import on_gpu

PROMPT = "Once upon a time there was a poor woodcutter who"
_CHUNK = 7  # rows: neither one nor all, and no power of two


@dataclass(frozen=True, slots=True)
class Expected:
    """An answer's tokens, and the margin of each in logits. ``logits``: [N, vocabulary]."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    margins: tuple[float, ...]
    logits: mx.array


class PlainModel:
    """The demo model as mlx-lm loads it, in the dtype that "auto" gives a stage here."""

    def __init__(self) -> None:
        self._model, _ = load_model(TARGET)
        dtype = resolve_dtype("auto", gpu=on_gpu())
        if dtype is not None:
            self._model.set_dtype(getattr(mx, dtype))
        tokenizer = tokenizer_of(open_model("demo"))
        assert tokenizer is not None
        self.vocab_size, self.prompt = tokenizer.vocab_size, tuple(tokenizer.encode(PROMPT))

    def answer(self, prompt: Sequence[int], num_tokens: int, sampling: SamplingParams) -> Expected:
        """What mlx-lm answers, its random key that of the token's position, as a pipeline's is."""
        cache, tokens, margins, rows = make_prompt_cache(self._model), list[int](), list[float](), list[mx.array]()
        new = list(prompt)
        for position in range(len(prompt), len(prompt) + num_tokens):
            rows.append(self._model(mx.array([new]), cache=cache)[0, -1:])
            token, margin = self._choose(rows[-1][0], position, sampling)
            tokens.append(token)
            margins.append(margin)
            new = [token]
        return Expected(tuple(prompt), tuple(tokens), tuple(margins), mx.concatenate(rows))

    def rounding(self, expected: Expected) -> dict[str, Any]:
        """How far the same logits move when more rows are computed at once, and how large they are."""
        tokens, count = [*expected.prompt, *expected.tokens[:-1]], len(expected.tokens)
        wanted, most = expected.logits.astype(mx.float32), 0.0
        for size in (len(tokens), _CHUNK):
            cache, rows = make_prompt_cache(self._model), list[mx.array]()
            for at in range(0, len(tokens), size):
                rows.append(self._model(mx.array([tokens[at : at + size]]), cache=cache)[0])
            moved = mx.abs(mx.concatenate(rows)[-count:].astype(mx.float32) - wanted).max()
            most = max(most, cast(float, moved.item()))
        return {
            "logits_move": most,
            "largest_logit": cast(float, mx.abs(wanted).max().item()),
            "epsilon": mx.finfo(expected.logits.dtype).eps,
            "dtype": self.dtype,
            "exact": is_batch_invariant(),
        }

    @cached_property
    def dtype(self) -> str:
        """The dtype of its norms, which are never quantised."""
        return str(self._model.model.norm.weight.dtype).removeprefix("mlx.core.")

    def _choose(self, logits: mx.array, position: int, sampling: SamplingParams) -> tuple[int, float]:
        """The token of one row's logits [vocabulary], and its margin."""
        scores = logits - mx.logsumexp(logits, keepdims=True)
        scale = sampling.temperature or 1.0
        if sampling.temperature:
            key = mx.array(position_key(sampling.seed or 0, position), dtype=mx.uint32)
            noise = mx.random.gumbel((self.vocab_size,), key=key)
            scores = scores[: self.vocab_size] * (1.0 / scale) + noise
        top = cast(list[float], mx.sort(scores.astype(mx.float32))[-2:].tolist())
        return cast(int, mx.argmax(scores).item()), scale * (top[1] - top[0])
