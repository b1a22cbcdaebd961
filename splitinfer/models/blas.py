"""Which BLAS computes this process's products: what holds of them, and how OpenBLAS computes few rows faster.

The reference BLAS in MLX's Linux wheels sums each element of a product by itself and in one order, so a row computed
among many is bitwise the row computed alone. OpenBLAS, Accelerate and GPUs choose another kernel for another shape, and
results differ by rounding. Of x·Wᵀ with few rows OpenBLAS spends much of the time on packing W, and less of it on
(W·xᵀ)ᵀ: decode reads its weights 1.1 to 1.45 times as fast (``scripts/README.md``). Only float32 reaches a BLAS.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import AllToShardedLinear, ShardedToAllLinear

from splitinfer.models.memory import on_gpu

_A_BLAS = re.compile(r"/lib(open)?blas[^/]*\.so[^/]*$")
MAX_ROWS = 64
MIN_SIZE = 2**18  # numbers of a weight; for smaller ones transposing costs more than it saves


def preloaded_blas(maps: str) -> str | None:
    """The BLAS that replaces the wheel's, from a process's table of mapped files; ``None`` if there is none."""
    paths = {line.split()[-1] for line in maps.splitlines() if "/" in line}
    found = sorted(path for path in paths if _A_BLAS.search(path) and "/mlx" not in path)
    return found[0] if found else None


def is_batch_invariant() -> bool:
    """Whether a row's result is bitwise the same for any number of rows."""
    maps = _maps()
    return maps is not None and preloaded_blas(maps) is None


def has_openblas() -> bool:
    """Whether OpenBLAS computes this process's products."""
    maps = _maps()
    return maps is not None and "openblas" in (preloaded_blas(maps) or "")


def _maps() -> str | None:
    """This process's table of mapped files, on Linux without a GPU; else ``None``."""
    if on_gpu() or sys.platform != "linux":
        return None
    try:
        return Path("/proc/self/maps").read_text(encoding="utf-8")
    except OSError:
        return None


# -- products of few rows --------------------------------------------------------------------------


def transposed_product(weight: mx.array, x: mx.array) -> mx.array:
    """[..., out] from [out, in] weights and [..., in] rows."""
    rows = x.reshape(-1, x.shape[-1])
    y: mx.array = mx.contiguous((weight @ rows.T).T).reshape(*x.shape[:-1], -1)
    return y


def _is_for_few_rows(weight: mx.array, x: mx.array) -> bool:
    is_few = weight.size >= MIN_SIZE and 0 < x.size <= MAX_ROWS * x.shape[-1]
    return is_few and x.dtype == weight.dtype == mx.float32


class _Linear(nn.Linear):  # type: ignore[misc]
    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array
        if not _is_for_few_rows(self.weight, x):
            y = super().__call__(x)
            return y
        y = transposed_product(self.weight, x)
        return y + self.bias if "bias" in self else y


class _Embedding(nn.Embedding):  # type: ignore[misc]
    def as_linear(self, x: mx.array) -> mx.array:
        """The logits of a model whose head is its embedding table."""
        return transposed_product(self.weight, x) if _is_for_few_rows(self.weight, x) else super().as_linear(x)


class _Halved(AllToShardedLinear):  # type: ignore[misc]
    """A rank's outputs of a layer that both have (``halves``)."""

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = _Linear.__call__(self, x) if _is_for_few_rows(self.weight, x) else super().__call__(x)
        return y


class _Summed(ShardedToAllLinear):  # type: ignore[misc]
    """A layer of whose inputs a rank has a half."""

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array
        if not _is_for_few_rows(self.weight, x):
            y = super().__call__(x)
            return y
        y = mx.distributed.all_sum(transposed_product(self.weight, x), group=self.group)
        return y + self.bias if "bias" in self else y


_TRANSPOSED: dict[type, type] = {
    nn.Linear: _Linear,
    nn.Embedding: _Embedding,
    AllToShardedLinear: _Halved,
    ShardedToAllLinear: _Summed,
}


def use_transposed_products(model: nn.Module, *, wanted: Callable[[], bool] = has_openblas) -> None:
    """Have every plain linear layer of a model compute few rows as transposed products, if OpenBLAS is in use."""
    if not wanted():
        return

    def replace_class(_path: str, module: Any) -> None:
        module.__class__ = _TRANSPOSED.get(type(module), type(module))

    model.apply_to_modules(replace_class)
