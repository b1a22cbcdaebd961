"""Linear layers whose rounding depends on the number of rows, as that of a GPU's kernels does."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.switch_layers import SwitchLinear


class RowNoise:
    """Relative errors of ``size`` before the result is rounded to its dtype, others for each number of rows; with
    ``each_call``, others for each call too."""

    def __init__(self, size: float, *, each_call: bool = False) -> None:
        self.size, self._each_call, self._calls = size, each_call, 0
        self._patterns: dict[tuple[int, int, int], mx.array] = {}

    def __call__(self, y: mx.array, rows: int) -> mx.array:
        """``y`` [..., d] of a call with that many rows, in float32, with errors."""
        self._calls += self._each_call
        key = (rows, self._calls % 7, y.shape[-1])
        if key not in self._patterns:
            seed = mx.random.key(100 * rows + self._calls % 7)
            self._patterns[key] = 1 + self.size * mx.random.normal((y.shape[-1],), key=seed)
            mx.eval(self._patterns[key])
        return y * self._patterns[key]

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Give every linear layer and every layer of experts these errors, until ``patch`` is undone."""
        experts = SwitchLinear.__call__

        def linear(layer: nn.Linear, x: mx.array) -> mx.array:
            weight = layer.weight.astype(mx.float32)
            return self(x.astype(mx.float32) @ weight.T, x.size // x.shape[-1]).astype(x.dtype)

        def switch(layer: SwitchLinear, x: mx.array, indices: mx.array, **kwargs: bool) -> mx.array:
            y = experts(layer, x, indices, **kwargs)
            return self(y.astype(mx.float32), indices.size // indices.shape[-1]).astype(y.dtype)

        patch.setattr(nn.Linear, "__call__", linear)
        patch.setattr(SwitchLinear, "__call__", switch)
