"""Products and attention whose rounding depends on the number of rows, as that of a GPU's kernels does."""

import zlib
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

from splitinfer.models import blas
from tests.emulation import metal

_SIZE = 1e-3  # of errors, in the float32 of a processor; a step of bfloat16 is 4e-3
Put = Callable[[Any, str, Any], None]


@cache
def round_like(name: str) -> None:
    """Have this process's products round like the kernels of a chip of ``metal.CHIPS``, once and for good; "": as they
    do."""
    if name:
        RowNoise(_SIZE, chip=metal.CHIPS[name]).install()


class RowNoise:
    """Relative errors of ``size`` before a result is rounded to its dtype: others for each kernel of ``chip``, by MLX's
    source, and without a chip for each number of rows; with ``each_call``, others for each call too."""

    def __init__(self, size: float, *, each_call: bool = False, chip: metal.Chip | None = None) -> None:
        self.size, self._each_call, self._calls, self._chip = size, each_call, 0, chip
        self._patterns: dict[Hashable, mx.array] = {}

    def __call__(self, y: mx.array, rows: int, kernel: Callable[[metal.Chip], str]) -> mx.array:
        """``y`` [..., d] in float32, with the errors of the kernel that computes it on the chip."""
        self._calls += self._each_call
        key = (rows if self._chip is None else kernel(self._chip), self._calls % 7, y.shape[-1])
        if key not in self._patterns:
            drawn = np.random.default_rng(zlib.crc32(repr(key).encode())).standard_normal(y.shape[-1])
            self._patterns[key] = mx.array(1 + self.size * drawn, dtype=mx.float32)
        return y * self._patterns[key]

    def install(self, put: Put = setattr) -> None:
        """Give every product in MLX, with weights, with the words of quantised ones, or with those of experts, and
        attention these errors, wherever they are called. ``put``: sets an attribute, such as a monkeypatch's, which
        undoes it."""
        put(blas, "_maps", lambda: None)  # so no two ways to compute a row are taken for exact
        multiply, of_words, attend = mx.array.__matmul__, mx.quantized_matmul, mx.fast.scaled_dot_product_attention
        of_experts, of_experts_words = mx.gather_mm, mx.gather_qmm

        def product(a: mx.array, b: mx.array) -> mx.array:
            if min(a.ndim, b.ndim) < 2 or not mx.issubdtype(a.dtype, mx.floating):
                return multiply(a, b)
            rows, width, out = _rows(a, b), *b.shape[-2:]
            y = self(
                multiply(_wide(a), _wide(b)),
                rows,
                lambda chip: metal.dense(chip, rows, width, out, is_alone=b.ndim == 2),
            )
            return y.astype(mx.result_type(a, b))

        def sum_and_product(c: mx.array, a: mx.array, b: mx.array, alpha: float = 1.0, beta: float = 1.0) -> mx.array:
            return (beta * c + alpha * product(_wide(a), _wide(b))).astype(mx.result_type(a, b, c))

        def product_with_words(x: mx.array, w: mx.array, *given: Any, transpose: bool = True, **how: Any) -> mx.array:
            rows, width = _rows(x, w), x.shape[-1]
            y = of_words(_wide(x), w, *given, transpose=transpose, **how).astype(mx.float32)
            mode, out = how.get("mode", "affine"), y.shape[-1]
            return self(y, rows, lambda chip: metal.quantised(chip, rows, width, out, mode, transpose)).astype(x.dtype)

        def product_of_experts(a: mx.array, b: mx.array, *given: Any, **how: Any) -> mx.array:
            y, *found = self._of_experts(of_experts(_wide(a), _wide(b), *given, **how), b.shape[0], how)
            return self(y, *found).astype(a.dtype)

        def product_of_experts_words(x: mx.array, w: mx.array, *given: Any, **how: Any) -> mx.array:
            y = of_experts_words(_wide(x), w, *given, **how)
            y, *found = self._of_experts(y, w.shape[0], how, is_quantised=True)
            return self(y, *found).astype(x.dtype)

        def attention(q: mx.array, k: mx.array, v: mx.array, **more: Any) -> mx.array:
            rows, repeats = q.shape[2], q.shape[1] // k.shape[1]
            has_mask = isinstance(more.get("mask"), mx.array)
            y = attend(q, k, v, **more).astype(mx.float32)
            return self(
                y, rows, lambda chip: metal.attention(chip, rows, k.shape[2], q.shape[3], repeats, has_mask=has_mask)
            ).astype(q.dtype)

        put(mx.array, "__matmul__", product)
        put(mx, "matmul", product)
        put(mx, "addmm", sum_and_product)
        put(mx, "quantized_matmul", product_with_words)
        put(mx, "gather_mm", product_of_experts)
        put(mx, "gather_qmm", product_of_experts_words)
        put(mx.fast, "scaled_dot_product_attention", attention)

    @staticmethod
    def _of_experts(y: mx.array, num_experts: int, how: dict[str, Any], *, is_quantised: bool = False) -> Any:
        pairs, is_sorted = y.size // y.shape[-1], bool(how.get("sorted_indices"))
        of = lambda _chip: metal.experts(pairs, num_experts, is_sorted=is_sorted, is_quantised=is_quantised)  # noqa: E731
        return y.astype(mx.float32), pairs, of


def _wide(array: mx.array) -> mx.array:
    return array.astype(mx.float32)


def _rows(a: mx.array, b: mx.array) -> int:
    """The rows that are computed together: all of ``a`` by one matrix, or those of each by its own."""
    return a.size // a.shape[-1] if b.ndim == 2 else a.shape[-2]
