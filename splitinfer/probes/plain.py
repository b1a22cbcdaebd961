"""What plain mlx-lm says of an answer: how far, in logits, each token is below the one that mlx-lm would choose there
itself, after the same tokens. 0 is its own choice. So every token is judged, whatever came before it.

Where arithmetic is batch invariant, tokens must be mlx-lm's. Elsewhere, as on Metal, another one may win by rounding:
by as much as mlx-lm's own logits move when it computes the same rows in other numbers, or by a few units in the last
place of the largest logit, whichever is more. Any other token is wrong.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from splitinfer.core.rng import position_key
from splitinfer.core.sequence import SamplingParams
from splitinfer.models.blas import is_batch_invariant

RIGHT, ROUNDING, WRONG = "right", "right but for rounding", "wrong"
GREEDY = SamplingParams(seed=0)
TIMES_MOVED, _UNITS = 4.0, 8.0  # of a gap: both logits move, and other kernels move them otherwise
_STEP = 2048  # prompt tokens at once, mlx-lm's default
_MOST_ROWS = 256  # from which rounding is measured
_ODD = 7  # rows: neither one nor all, and no power of two


def gaps(
    model: Any, prompt: Sequence[int], answer: Sequence[int], sampling: SamplingParams = GREEDY, vocab_size: int = 0
) -> list[float]:
    """Return how far each token of an answer is below mlx-lm's choice, in logits, one row at a time as it decodes. With
    a temperature the choice is sampled, among ``vocab_size`` tokens: its random key is the position's, as a pipeline's
    is."""
    cache, new, found = make_prompt_cache(model), prompt[-1], list[float]()
    _read(model, prompt[:-1], _STEP, cache)
    for position, token in enumerate(answer, len(prompt)):
        row, scale = model(mx.array([[new]]), cache=cache)[0, -1], sampling.temperature or 1.0
        if sampling.temperature:
            key = mx.array(position_key(sampling.seed or 0, position), dtype=mx.uint32)
            noise = mx.random.gumbel((vocab_size,), key=key)
            row = (row - mx.logsumexp(row, keepdims=True))[:vocab_size] * (1.0 / scale) + noise
        row = row.astype(mx.float32)
        found.append(scale * (row.max() - row[token]).item() if 0 <= token < row.size else mx.inf)
        new = token
    return found


def rounding(model: Any, tokens: Sequence[int], sizes: Sequence[int] = (_MOST_ROWS, _ODD)) -> dict[str, Any]:
    """Return how far mlx-lm's own logits for some tokens move when other numbers of rows are computed at once,
    ``sizes``."""
    tokens = tokens[-_MOST_ROWS:]
    first, *others = (_read(model, tokens, size, make_prompt_cache(model)).astype(mx.float32) for size in sizes)
    return {
        "logits_move": max(float(mx.abs(other - first).max()) for other in others),
        "largest_logit": mx.abs(first).max().item(),
        "epsilon": mx.finfo(model(mx.array([tokens[:1]])).dtype).eps,
        "exact": is_batch_invariant(),
    }


def _read(model: Any, tokens: Sequence[int], size: int, cache: Any) -> mx.array:
    """Return the logits of the last chunk and those before it, [N, vocabulary]; of a long text only the last
    chunk's."""
    rows = mx.zeros((0, 0))
    kept = list[mx.array]()
    for at in range(0, len(tokens), size):
        rows = model(mx.array([tokens[at : at + size]]), cache=cache)[0]
        kept = [*kept, rows] if len(tokens) <= _MOST_ROWS else []
        mx.eval(kept, [each.state for each in cache])
    return mx.concatenate(kept) if kept else rows


def tolerance(rounding: Mapping[str, Any]) -> float:
    """Return the gap, in logits, up to which another token is rounding.

    >>> tolerance({"exact": True, "logits_move": 0.0})
    0.0
    >>> tolerance({"exact": False, "logits_move": 0.0625, "epsilon": 2**-10, "largest_logit": 16.0})
    0.25
    """
    if rounding["exact"]:
        return 0.0
    units: float = _UNITS * rounding["epsilon"] * rounding["largest_logit"]
    return max(TIMES_MOVED * float(rounding["logits_move"]), units)


def verdict(gaps: Sequence[float], allowed: float) -> dict[str, Any]:
    """Return what the gaps of an answer's tokens mean, in one word and a sentence."""
    other = [at for at, gap in enumerate(gaps) if gap != 0]
    wrong = [at for at in other if not gaps[at] <= allowed]  # a NaN is wrong, too
    if wrong:
        at = wrong[0]
        said = (
            f"token {at + 1} of {len(gaps)} is {gaps[at]:.2g} logits below mlx-lm's choice; rounding is {allowed:.2g}"
        )
        return {"verdict": WRONG, "said": said, "at": at + 1, "gap": gaps[at]}
    if other:
        said = f"{len(other)} of {len(gaps)} tokens are others than mlx-lm's, within {max(gaps):.2g} logits"
        return {"verdict": ROUNDING, "said": said, "at": other[0] + 1, "gap": max(gaps)}
    return {"verdict": RIGHT, "said": f"all {len(gaps)} tokens are mlx-lm's choice"}
