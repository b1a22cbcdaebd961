"""Tiny random models of many architectures, written as the folders that mlx-lm loads.

The reference for every test is plain mlx-lm on the same folder.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import _get_classes

Folder = Callable[..., Path]
"""The fixture ``tiny_folder``: the folder of a tiny model, by its name and changes to its configuration."""

_COMMON = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 160, "rms_norm_eps": 1e-5}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_LONG = {"max_position_embeddings": 512, "rope_theta": 10000.0}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_hidden_layers": 4, "tie_word_embeddings": False, **_HEADS, **_LONG},
    "qwen3": {
        "model_type": "qwen3", "num_hidden_layers": 4, "head_dim": 16, "tie_word_embeddings": True, **_HEADS, **_LONG,
    },
    "gemma3_text": {
        "model_type": "gemma3_text", "num_hidden_layers": 6, "head_dim": 16, "sliding_window": 24,
        "sliding_window_pattern": 3, "query_pre_attn_scalar": 16, "rope_global_base_freq": 1e6,
        "rope_local_base_freq": 1e4, **_HEADS, **_LONG,
    },
    "gpt_oss": {
        "model_type": "gpt_oss", "num_hidden_layers": 4, "head_dim": 16, "sliding_window": 24,
        "num_local_experts": 4, "num_experts_per_tok": 2,
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256},
        **_HEADS, **_LONG,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe", "num_hidden_layers": 4, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 64, "norm_topk_prob": True,
        "tie_word_embeddings": False, **_HEADS, **_LONG,
    },
    "qwen3_next": {
        "model_type": "qwen3_next", "num_hidden_layers": 4, "head_dim": 16, "full_attention_interval": 2,
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 3, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 64, "mlp_only_layers": [], "moe_intermediate_size": 64,
        "partial_rotary_factor": 0.5, "norm_topk_prob": True, "tie_word_embeddings": False, **_HEADS, **_LONG,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3", "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
        "moe_intermediate_size": 64, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
        "n_shared_experts": 1, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32,
        "v_head_dim": 32, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "topk_method": "noaux_tc",
        "scoring_func": "sigmoid", "norm_topk_prob": True, "moe_layer_freq": 1, "rope_scaling": None,
        "attention_bias": False, **_LONG,
    },
}  # fmt: skip

SAME_CHUNKS_ONLY = frozenset({"qwen3_next", "deepseek_v3", "qwen4_exp", "glm5_next"})
"""Architectures whose arithmetic depends on how many rows come together (recurrent; MLA's absorbed path)."""


def build(name: str, seed: int = 0, **changes: Any) -> tuple[nn.Module, dict[str, Any]]:
    """A model with random weights of a size that makes its tokens vary, and its configuration."""
    config = {**_COMMON, **CONFIGS[name], **changes}
    mx.random.seed(seed)
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    model.update(tree_map_with_path(_spread, model.parameters()))
    return model, config


def _spread(path: str, x: mx.array) -> mx.array:
    """Weights large enough that layers matter; norms and tables stay as they are."""
    if x.ndim < 2 or not mx.issubdtype(x.dtype, mx.floating):
        return x
    scale = 1.0 if "embed" in path else 2.5 / x.shape[-1] ** 0.5
    return mx.random.normal(x.shape, dtype=mx.float32) * scale


def save(folder: Path, name: str, *, bits: int | None = None, dtype: mx.Dtype = mx.float32, **changes: Any) -> Path:
    """Write a tiny model's folder: config.json and two weight files, quantised if ``bits`` is given."""
    model, config = build(name, **changes)
    if bits is not None:
        nn.quantize(model, group_size=32, bits=bits)
        config["quantization"] = {"group_size": 32, "bits": bits}
    weights = {
        k: v.astype(dtype) if mx.issubdtype(v.dtype, mx.floating) else v for k, v in tree_flatten(model.parameters())
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(weights, key=_layer_of)
    half = len(names) // 2
    for i, part in enumerate((names[:half], names[half:]), 1):
        mx.save_safetensors(str(folder / f"model-{i:05}-of-00002.safetensors"), {n: weights[n] for n in part})
    return folder


def _layer_of(name: str) -> tuple[int, str]:
    numbers = [int(p) for p in name.split(".") if p.isdigit()]
    if numbers:
        return numbers[0], name
    return (-1 if "embed" in name else 10_000), name
