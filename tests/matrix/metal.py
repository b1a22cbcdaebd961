"""What two architectures compute with kernels of their own for Metal, in plain MLX.

Where there is no Metal, a comparison of whole and cut models needs some arithmetic in their place;
which one does not matter, because a cut never goes through a kernel.
"""

import importlib
from typing import Any

import mlx.core as mx


def install() -> None:
    """Put the stand-ins in place of the kernels, unless this machine has Metal."""
    if mx.metal.is_available():
        return
    bitlinear = importlib.import_module("mlx_lm.models.bitlinear_layers")
    bitlinear.BitLinear.execute_matmul_kernel = _ternary_matmul
    spark = importlib.import_module("mlx_lm.models.muse_spark")
    for name, function in _SPARK.items():
        assert hasattr(spark, name), f"muse_spark no longer uses {name}"
        setattr(spark, name, function)


def _ternary_matmul(layer: Any, x: mx.array, packed: mx.array) -> mx.array:
    parts = [((packed >> shift) & 3).astype(x.dtype) - 1 for shift in (0, 2, 4, 6)]
    scale = 1 / layer.weight_scale if layer.invert_weight_scales else layer.weight_scale
    return (x @ mx.concatenate(parts).T * scale).astype(x.dtype)


def _rms(x: mx.array, eps: float) -> mx.array:
    return mx.fast.rms_norm(x.astype(mx.float32), None, eps)


def _qk_norm(
    qkvg: mx.array, *, n_heads: int, n_kv_heads: int, head_dim: int, eps: float, query_scale: float
) -> tuple[mx.array, mx.array]:
    heads = qkvg[..., : (n_heads + n_kv_heads) * head_dim].reshape(*qkvg.shape[:-1], -1, head_dim)
    heads = _rms(heads, eps).astype(qkvg.dtype)
    return (heads[..., :n_heads, :] * query_scale).astype(qkvg.dtype), heads[..., n_heads:, :]


def _qk_norm_rope(
    qkvg: mx.array, *, rope_base: float, offset: Any, head_dim: int, **options: Any
) -> tuple[mx.array, ...]:
    def rotate(x: mx.array) -> mx.array:
        x = mx.swapaxes(x, 1, 2)
        x = mx.fast.rope(x, head_dim, traditional=True, base=rope_base, scale=1.0, offset=offset)
        return mx.swapaxes(x, 1, 2)

    return tuple(rotate(part) for part in _qk_norm(qkvg, head_dim=head_dim, **options))


def _rms_norm_sigmoid_gate(x: mx.array, gate: mx.array, *, eps: float) -> mx.array:
    normed = mx.swapaxes(_rms(x, eps), 1, 2).reshape(gate.shape)
    return (normed * mx.sigmoid(gate.astype(mx.float32))).astype(x.dtype)


def _pre_norm(stream: mx.array, norm: Any, *, dtype: mx.Dtype) -> mx.array:
    return (_rms(stream, norm.eps) * norm.weight).astype(dtype)


def _norm_add_norm(
    branch: mx.array, stream: mx.array, *, alpha: mx.array, beta: mx.array, post_weight: mx.array | None,
    post_eps: float, next_norm: Any,
) -> tuple[mx.array, mx.array | None]:  # fmt: skip
    scaled = branch if post_weight is None else branch * post_weight
    stream = alpha * stream + beta * _rms(scaled, post_eps)
    return stream, None if next_norm is None else _pre_norm(stream, next_norm, dtype=branch.dtype)


def _expert_routing(
    logits: mx.array, bias: mx.array, *, top_k: int, multiplier: float, score_eps: float, route_scale: float
) -> tuple[mx.array, mx.array]:
    scores = mx.sigmoid(logits * multiplier)
    chosen = mx.argsort(-(scores + bias), axis=-1)[..., :top_k]
    weights = mx.take_along_axis(scores, chosen, axis=-1)
    return chosen, weights / (weights.sum(axis=-1, keepdims=True) + score_eps) * route_scale


def _post_expert_norm_combine(experts: mx.array, weights: mx.array, *, norm_weight: mx.array, eps: float) -> mx.array:
    normed = _rms(experts * norm_weight, eps) * weights[..., None]
    return normed.sum(axis=-2).astype(experts.dtype)


_SPARK = {
    "qk_norm": _qk_norm,
    "qk_norm_rope": _qk_norm_rope,
    "rms_norm_sigmoid_gate": _rms_norm_sigmoid_gate,
    "pre_norm": _pre_norm,
    "norm_add_norm": _norm_add_norm,
    "expert_routing": _expert_routing,
    "post_expert_norm_combine": _post_expert_norm_combine,
}
