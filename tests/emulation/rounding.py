"""Layers whose rounding depends on the number of rows, as that of a GPU's kernels does."""

import zlib
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from splitinfer.models import blas
from tests.emulation import metal

_SIZE = 1e-3  # of errors, in the float32 of a processor; a step of bfloat16 is 4e-3
Put = Callable[[Any, str, Any], None]


@cache
def round_like(name: str) -> None:
    """Have this process's layers round like the kernels of a chip of ``metal.CHIPS``, once and for good; "": as they
    do."""
    if name:
        blas._maps = lambda: None  # so no two ways to compute a row are taken for exact
        RowNoise(_SIZE, chip=metal.CHIPS[name]).install()


class RowNoise:
    """Relative errors of ``size`` before a result is rounded to its dtype: others for each kernel of ``chip``, by MLX's
    source, and without a chip for each number of rows; with ``each_call``, others for each call too."""

    def __init__(self, size: float, *, each_call: bool = False, chip: metal.Chip | None = None) -> None:
        self.size, self._each_call, self._calls, self._chip = size, each_call, 0, chip
        self._patterns: dict[Hashable, mx.array] = {}

    def __call__(self, y: mx.array, kernel: Hashable) -> mx.array:
        """``y`` [..., d] of a kernel, in float32, with that kernel's errors."""
        self._calls += self._each_call
        key = (kernel, self._calls % 7, y.shape[-1])
        if key not in self._patterns:
            seed = mx.random.key(zlib.crc32(repr(key).encode()))
            self._patterns[key] = 1 + self.size * mx.random.normal((y.shape[-1],), key=seed)
            mx.eval(self._patterns[key])
        return y * self._patterns[key]

    def install(self, put: Put = setattr) -> None:
        """Give every linear layer, every layer of experts and, on a chip, attention these errors. ``put``: sets an
        attribute, such as a monkeypatch's, which undoes it."""
        experts, packed_experts = SwitchLinear.__call__, QuantizedSwitchLinear.__call__
        attend = mx.fast.scaled_dot_product_attention

        def linear(layer: nn.Linear, x: mx.array) -> mx.array:
            weight = layer.weight.astype(mx.float32)
            y = self(x.astype(mx.float32) @ weight.T, self._kernel(metal.dense, x, weight.shape[0]))
            return (y + layer.bias if "bias" in layer else y).astype(x.dtype)

        def packed(layer: nn.QuantizedLinear, x: mx.array) -> mx.array:
            how = {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
            weight = mx.dequantize(layer.weight, layer.scales, layer.get("biases"), **how).astype(mx.float32)
            y = self(x.astype(mx.float32) @ weight.T, self._kernel(metal.quantised, x, weight.shape[0]))
            return (y + layer.bias if "bias" in layer else y).astype(x.dtype)

        def switch(layer: SwitchLinear, x: mx.array, indices: mx.array, **kwargs: bool) -> mx.array:
            y = experts(layer, x, indices, **kwargs)
            return self(y.astype(mx.float32), _experts_kernel(indices, kwargs, self._chip)).astype(y.dtype)

        def packed_switch(layer: QuantizedSwitchLinear, x: mx.array, indices: mx.array, **kwargs: bool) -> mx.array:
            y = packed_experts(layer, x, indices, **kwargs)
            return self(y.astype(mx.float32), _experts_kernel(indices, kwargs, self._chip)).astype(y.dtype)

        def attention(q: mx.array, k: mx.array, v: mx.array, **more: Any) -> mx.array:
            assert self._chip is not None
            kernel = metal.attention(self._chip, q.shape[2], k.shape[2], q.shape[3], q.shape[1] // k.shape[1])
            return self(attend(q, k, v, **more).astype(mx.float32), kernel).astype(q.dtype)

        put(nn.Linear, "__call__", linear)
        put(SwitchLinear, "__call__", switch)
        if self._chip is not None:
            put(nn.QuantizedLinear, "__call__", packed)
            put(QuantizedSwitchLinear, "__call__", packed_switch)
            put(mx.fast, "scaled_dot_product_attention", attention)

    def _kernel(self, of: Callable[[metal.Chip, int, int, int], str], x: mx.array, out: int) -> Hashable:
        width = x.shape[-1]
        rows = x.size // width
        return rows if self._chip is None else of(self._chip, rows, width, out)


def _experts_kernel(indices: mx.array, how: dict[str, bool], chip: metal.Chip | None) -> Hashable:
    """Each row of experts is a product of its own, but where many are sorted (Q:1905, M:2838)."""
    if chip is None:
        return indices.size // indices.shape[-1]
    return "sorted" if how.get("sorted_indices") else "gathered"
