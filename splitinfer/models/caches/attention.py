"""Computes how much memory attention needs besides keys and values.

Where MLX has a fused kernel, that is next to nothing. Elsewhere it is the scores of a whole chunk against the whole
context, in the dtype of the numbers, one tensor at a time:

    unfused   q [heads, rows, d] @ k^T  ─▶  scores [heads, rows, context]  ─softmax, in place─▶  @ v

Chunks of 512 rows and 32 heads make 1 GiB at 32k (jundot/omlx #2025 measured as much on a Mac). MLX's source says which
layers are fused (``ScaledDotProductAttention::use_fallback``, 0.32): on Metal, for over 8 rows, a head size that
queries and values share and that has a kernel (192 and 256 are passed over as slower); on CUDA
(``supports_sdpa_cudnn``), half precision with both sizes multiples of 8 and at most 128; on the CPU, none. Models that
compute scores of their own (DeepSeek V3) pass them as a mask, which takes memory whether MLX's part is fused or not.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from splitinfer.common.model_config import positive

STEP_ROWS = 512  # tokens in a step on a GPU, unless the user set another ``token_budget``

_METAL_SIZES = (64, 72, 80, 96, 128)
_CUDA_MOST, _CUDA_MULTIPLE = 128, 8
_HALF = 2  # bytes
_observing = threading.Lock()


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention of one layer: ``heads`` query heads with ``query_dim`` and ``value_dim`` numbers (0 if the model
    computes attention itself) of ``itemsize`` bytes. ``window``: the most keys that a row sees; ``None``: all.
    ``adds_scores``: the model passes scores of its own for each head as a mask, as DeepSeek does for positions."""

    heads: int
    query_dim: int
    value_dim: int
    itemsize: int
    window: int | None = None
    adds_scores: bool = False

    def is_fused(self, backend: str) -> bool:
        """Return whether MLX has a kernel for more than 8 rows on ``backend``: "metal", "cuda" or "cpu"."""
        if backend == "metal":
            return self.query_dim == self.value_dim and self.query_dim in _METAL_SIZES
        if backend == "cuda":
            sizes = (self.query_dim, self.value_dim)
            return self.itemsize == _HALF and all(0 < n <= _CUDA_MOST and n % _CUDA_MULTIPLE == 0 for n in sizes)
        return False

    def tensors(self, backend: str) -> int:
        """Return how many tensors of scores exist at the same time: the model's own, and MLX's."""
        return self.adds_scores + (not self.is_fused(backend))

    def scores(self, rows: int, context: int) -> int:
        """Return the bytes of the scores of ``rows`` against ``context`` tokens."""
        return self.heads * rows * (context if self.window is None else min(context, self.window)) * self.itemsize


def score_bytes(layers: Iterable[Attention], backend: str, rows: int, context: int) -> int:
    """Return the bytes that a stage needs for scores: the maximum over its layers.

    ``rows``: of a step. ``context``: the most tokens of a sequence. Return 0 on the CPU: its steps are short, it can
    swap, and no run has failed for lack of this memory so far.
    """
    if backend == "cpu":
        return 0
    return max((layer.scores(rows, context) * layer.tensors(backend) for layer in layers), default=0)


def backend() -> str:
    """Return where MLX computes: "metal", "cuda" or "cpu"."""
    if mx.default_device() != mx.Device(mx.gpu):
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def from_config(config: Mapping[str, Any], itemsize: int) -> tuple[Attention, ...]:
    """Return the attention that a configuration tells, for a model that does not call MLX's function. Return an empty
    tuple if the configuration has no number of heads."""
    heads = positive(config, "num_attention_heads", "n_heads", "n_head")
    return () if heads is None else (Attention(heads, 0, 0, itemsize),)


Calls = list[tuple[Attention, int]]
"""Attention calls, each with its number of keys."""


def layers_of(calls: Calls, context: int) -> tuple[Attention, ...]:
    """Return the distinct layers among ``calls``. A layer with fewer keys than ``context`` tokens has a window."""
    return tuple(dict.fromkeys(replace(layer, window=keys if keys < context else None) for layer, keys in calls))


@contextmanager
def observed() -> Iterator[Calls]:
    """Record the attention calls that models make on this thread during the ``with`` block."""
    found, thread = Calls(), threading.get_ident()
    with _observing:
        original = mx.fast.scaled_dot_product_attention

        def noting(q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
            if threading.get_ident() == thread:
                mask = options.get("mask")  # may have heads, too: [B, heads, rows, tokens]
                has_heads = isinstance(mask, mx.array) and mask.ndim == 4 and mask.shape[1] > 1
                layer = Attention(q.shape[1], q.shape[-1], v.shape[-1], q.itemsize, adds_scores=has_heads)
                found.append((layer, k.shape[2]))
            return original(q, k, v, **options)

        mx.fast.scaled_dot_product_attention = noting
        try:
            yield found
        finally:
            mx.fast.scaled_dot_product_attention = original
