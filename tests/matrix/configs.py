"""A tiny configuration of every architecture that the installed mlx-lm has.

Small enough that a forward pass takes milliseconds, and built so that every kind of layer (sliding and
full attention, recurrent and attention, dense and experts) stands on both sides of some cut. Windows
are shorter than the prompts. An architecture whose options change what its layers share has variants,
named ``architecture/variant``; it counts as right only if all of them are.
"""

import ast
import pkgutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mlx_lm import models as mlx_lm_models

Config = dict[str, Any]

VOCAB = 128
WINDOW = 12

_BASE: Config = {
    "hidden_size": 32, "intermediate_size": 64, "vocab_size": VOCAB, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip
_SLIDING_FULL = ["sliding_attention", "full_attention"] * 2
_WINDOWS: Config = {"sliding_window": WINDOW, "layer_types": _SLIDING_FULL, "head_dim": 8}
_EXPERTS: Config = {
    "num_experts": 4, "num_experts_per_tok": 2, "num_local_experts": 4, "n_routed_experts": 4, "num_shared_experts": 1,
    "n_shared_experts": 1, "moe_intermediate_size": 16, "norm_topk_prob": True, "routed_scaling_factor": 1.5,
    "decoder_sparse_step": 1, "mlp_only_layers": [1], "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc",
}  # fmt: skip
_LATENT: Config = {
    **_EXPERTS, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "moe_layer_freq": 1, "rope_scaling": None,
}  # fmt: skip
_INDEXED: Config = {**_LATENT, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 16}
_LINEAR: Config = {
    "head_dim": 8, "full_attention_interval": 2, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 3, "partial_rotary_factor": 0.5,
    "shared_expert_intermediate_size": 16, "rope_parameters": {"type": "default", "rope_theta": 10000.0},
}  # fmt: skip
_MAMBA: Config = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_n_groups": 1,
    "mamba_conv_bias": True, "mamba_proj_bias": False, "mamba_expand": 2, "mamba_num_heads": 4, "mamba_head_dim": 16,
    "ssm_state_size": 16, "state_size": 16, "conv_kernel": 4, "n_groups": 1, "use_bias": False, "use_conv_bias": True,
    "layer_norm_epsilon": 1e-5, "num_heads": 4, "head_dim": 16, "time_step_rank": 4, "time_step_limit": [0.001, 100.0],
}  # fmt: skip
_KDA: Config = {
    "linear_attn_config": {
        "kda_layers": [1, 3], "full_attn_layers": [2, 4], "num_heads": 4, "head_dim": 32, "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
    },
    "num_experts_per_token": 2, "num_expert_group": 1, "model_max_length": 512, "head_dim": 8, "mla_use_nope": True,
}  # fmt: skip
_GPT: Config = {
    "n_embd": 32, "n_head": 4, "n_layer": 4, "n_ctx": 512, "n_positions": 512, "n_inner": 64,
    "layer_norm_epsilon": 1e-5, "layer_norm_eps": 1e-5, "rotary_dim": 4, "num_key_value_heads": None,
}  # fmt: skip
_BAILING: Config = {
    **_EXPERTS, "use_qk_norm": True, "group_norm_size": 2, "layer_group_size": 2, "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}  # fmt: skip
_GRANITE: Config = {
    "logits_scaling": 1.0, "attention_multiplier": 0.3, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
    "mlp_bias": False,
}  # fmt: skip
_GEMMA3: Config = {
    "num_hidden_layers": 6, "head_dim": 16, "sliding_window": WINDOW, "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 16, "rope_local_base_freq": 1e4,
}  # fmt: skip
_GEMMA3N: Config = {
    "num_hidden_layers": 7, "head_dim": 8, "num_kv_shared_layers": 3, "vocab_size_per_layer_input": VOCAB,
    "sliding_window": WINDOW, "rope_local_base_freq": 1e4, "final_logit_softcapping": 30.0,
    "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention",
                    "sliding_attention", "full_attention", "sliding_attention"],
    "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0], "hidden_size_per_layer_input": 8,
    "altup_num_inputs": 2, "altup_coef_clip": 120.0, "altup_correct_scale": True, "altup_active_idx": 0,
    "laurel_rank": 8,
}  # fmt: skip
_GEMMA4: Config = {
    "num_hidden_layers": 7, "head_dim": 8, "global_head_dim": 16, "num_kv_shared_layers": 3, "sliding_window": WINDOW,
    "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8, "tie_word_embeddings": True,
    "layer_types": _GEMMA3N["layer_types"],
}  # fmt: skip
_GEMMA4_EXPERTS: Config = {
    **_GEMMA4, "num_hidden_layers": 4, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
    "layer_types": _SLIDING_FULL, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
    "moe_intermediate_size": 16, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
}  # fmt: skip
_SCALED: Config = {
    "rope_theta": 1e4, "rope_type": "default", "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 16,
}  # fmt: skip
_GPT_OSS_ROPE: Config = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}
_CONVOLUTIONS: Config = {"norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3, "full_attn_idxs": [1, 3]}
_LFM2: Config = {
    "block_dim": 32, "block_multiple_of": 16, "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": True,
    "block_ff_dim": 48,
}  # fmt: skip
_LLAMA4: Config = {
    "attention_chunk_size": WINDOW, "head_dim": 8, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 48,
    "num_experts_per_tok": 1, "num_local_experts": 2, "rope_scaling": None, "use_qk_norm": True,
    "num_hidden_layers": 8, "model_type": "llama4_text",
}  # fmt: skip
_LONGCAT: Config = {
    **_LATENT, "attention_method": "MLA", "zero_expert_type": "identity", "ffn_hidden_size": 48, "moe_topk": 2,
    "expert_ffn_hidden_size": 16, "zero_expert_num": 2, "num_layers": 4, "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True, "ngram_vocab_size_ratio": 3, "emb_neighbor_num": 3, "emb_split_num": 2,
}  # fmt: skip


def _text(model_type: str, **config: Any) -> Config:
    """What a vision model's configuration holds for its language part."""
    return {"text_config": {**_BASE, **config, "model_type": model_type}}


_ALIKE: dict[str, Config] = {
    name: config
    for names, config in {
        "bitnet llama mimo nanbeige nanochat olmo2 phi3 qwen2 smollm3 starcoder2 telechat3": {},
        "gemma gemma2 glm qwen3 seed_oss talkie": {"head_dim": 8},
        "Klear deepseek mixtral olmoe": _EXPERTS,
        "dots1 qwen3_moe": {**_EXPERTS, "head_dim": 8},
        "deepseek_v3 glm4_moe_lite youtu_llm": _LATENT,
        "gpt2 gpt_bigcode gptj": _GPT,
    }.items()
    for name in names.split()
}

_SPECIFIC: dict[str, Config] = {
    **_ALIKE,
    "afm7": {
        "hidden_dim": 32, "num_layers": 6, "num_kv_reuse_layers": 2, "num_heads": 4, "num_kv_heads": 2,
        "hidden_dim_scale_factor": 2.0,
    },
    "afmoe": {**_EXPERTS, **_WINDOWS, "num_dense_layers": 1},
    "apertus": {"mlp_bias": False, "post_norm": False, "qk_norm": True},
    "baichuan_m1": {"sliding_window": WINDOW, "sliding_window_layers": [0, 2], "conv_window": 2},
    "bailing_hybrid": {**_LATENT, **_BAILING, "num_key_value_heads": 4, "head_dim": 8},
    "bailing_moe": _BAILING,
    "bailing_moe_linear": {**_BAILING, "num_hidden_layers": 5},
    "bailing_moe_v3": {**_LATENT, "layer_group_size": 2, "head_dim": 32, "moe_shared_expert_intermediate_size": 16},
    "cohere": {"layer_norm_eps": 1e-5},
    "cohere2": {"head_dim": 8, "sliding_window": WINDOW, "sliding_window_pattern": 2, "layer_norm_eps": 1e-5},
    "dbrx": {
        "d_model": 32, "n_layers": 4, "n_heads": 4,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {
        **_LATENT, "topk_method": "group_limited_greedy",
        "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256, "mscale": 1.0,
                         "mscale_all_dim": 1.0},
    },
    "deepseek_v32": _INDEXED,
    "deepseek_v41": {
        **_EXPERTS, "num_hidden_layers": 6, "head_dim": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8, "o_groups": 2,
        "o_lora_rank": 16, "scoring_func": "sqrtsoftplus", "sliding_window": WINDOW, "rms_norm_eps": 1e-6,
        "compress_ratios": [0, 4, 4, 0, 4, 4], "kv_source_layer_ids": [1, 4], "index_source_layer_ids": [1, 4],
        "index_n_heads": 2, "index_head_dim": 32, "index_topk": 4, "hc_mult": 2, "hc_sinkhorn_iters": 2,
    },
    "ernie4_5": {"head_dim": 8, "use_bias": False},
    "ernie4_5_moe": {
        "use_bias": False, "moe_num_experts": 4, "moe_layer_start_index": 1, "moe_intermediate_size": 16, "moe_k": 2,
        "moe_num_shared_experts": 1,
    },
    "exaone": {"num_layers": 4, "layer_norm_epsilon": 1e-5},
    "exaone4": {
        "head_dim": 8, "sliding_window": WINDOW, "sliding_window_pattern": "LG",
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "exaone_moe": {**_EXPERTS, **_WINDOWS, "is_moe_layer": [False, True, True, True]},
    "falcon_h1": {
        **_MAMBA, "head_dim": 8, "mamba_d_ssm": 64, "attention_in_multiplier": 1.0, "lm_head_multiplier": 1.0,
        "embedding_multiplier": 1.0, "key_multiplier": 1.0,
    },
    "gear": {
        "head_dim": 8, "sliding_window": WINDOW,
        "layer_types": ["conv_mixer", "sliding_attention", "full_attention"] * 2, "num_hidden_layers": 6,
    },
    "gemma3": {**_text("gemma3_text", **_GEMMA3)},
    "gemma3_text": _GEMMA3,
    "gemma3n": {**_text("gemma3n_text", **_GEMMA3N)},
    "gemma4": {**_text("gemma4_text", **_GEMMA4)},
    "gemma4/experts": {**_text("gemma4_text", **_GEMMA4_EXPERTS)},
    "gemma4_text": _GEMMA4,
    "gemma4_text/experts": _GEMMA4_EXPERTS,
    "glm4": {"head_dim": 8, "partial_rotary_factor": 0.5},
    "glm4_moe": {**_EXPERTS, "head_dim": 8, "use_qk_norm": True, "partial_rotary_factor": 0.5, "rope_scaling": None},
    "glm_moe_dsa": {**_INDEXED, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
    "gpt_neox": {"layer_norm_eps": 1e-5, "rotary_emb_base": 10000, "rotary_pct": 0.5, "num_key_value_heads": None},
    "gpt_oss": {**_EXPERTS, "head_dim": 8, "sliding_window": WINDOW, "rope_scaling": _GPT_OSS_ROPE},
    "granite": _GRANITE,
    "granitemoe": {**_GRANITE, **_EXPERTS},
    "granitemoehybrid": {
        **_GRANITE, **_EXPERTS, **_MAMBA, "layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 16,
    },
    "helium": {"head_dim": 8, "mlp_bias": False},
    "hunyuan": {
        "moe_topk": 2, "num_experts": 4, "num_shared_expert": 1, "use_mixed_mlp_moe": True, "use_qk_norm": True,
        "use_cla": True, "cla_share_factor": 2, "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
    },
    "hunyuan_v1_dense": {"head_dim": 8, "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}},
    "internlm2": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "internlm3": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "iquestloopcoder": {"head_dim": 8, "loop_window_size": WINDOW},
    "jamba": {
        **_EXPERTS, **_MAMBA, "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "kimi_k25": {**_text("deepseek_v3", **_LATENT)},
    "kimi_k3": {
        **_text(
            "kimi_linear", **_LATENT, **_KDA, activation_situ_beta=1.0, activation_situ_linear_beta=1.0,
            attn_res_block_size=2, mla_use_output_gate=True, routed_expert_hidden_size=24,
        ),
    },
    "kimi_k3/no attention residual": {
        **_text("kimi_linear", **_LATENT, **_KDA, activation_situ_beta=1.0, activation_situ_linear_beta=1.0),
    },
    "kimi_linear": {**_LATENT, **_KDA},
    "kimi_vl": {**_text("deepseek_v3", **_LATENT)},
    "laguna": {
        **_EXPERTS, **_WINDOWS, "shared_expert_intermediate_size": 16, "num_attention_heads_per_layer": [4, 2, 4, 2],
        "rope_parameters": {
            "full_attention": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 1.0},
        },
    },
    "lfm2": {**_CONVOLUTIONS, **_LFM2},
    "lfm2-vl": {**_text("lfm2", **_CONVOLUTIONS, **_LFM2)},
    "lfm2_moe": {**_CONVOLUTIONS, **_EXPERTS, "use_expert_bias": True, "num_dense_layers": 1},
    "lille-130m": {**_GPT, "n_embd": 64, "block_size": 512, "n_kv_heads": 2},
    "llama/sliding": {"sliding_window": WINDOW, "layer_types": _SLIDING_FULL},
    "llama4": {**_text(**_LLAMA4)},
    "llama4_text": {**_LLAMA4, "no_rope_layers": [1, 1, 0, 1] * 2},
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": _LONGCAT,
    "mamba": {**_MAMBA, "intermediate_size": 64},
    "mamba2": {**_MAMBA, "intermediate_size": 64},
    "mellum": {
        **_EXPERTS, **_WINDOWS,
        "rope_parameters": {
            "full_attention": {"rope_theta": 1e4, "rope_type": "default"},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
    },
    "mimo_v2_flash": {
        **_EXPERTS, "hybrid_layer_pattern": [1, 0, 1, 0], "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False, "sliding_window_size": WINDOW,
        "layernorm_epsilon": 1e-5, "swa_rope_theta": 1e4, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
        "head_dim": 16, "v_head_dim": 8, "swa_head_dim": 16, "swa_v_head_dim": 8, "partial_rotary_factor": 0.5,
    },
    "minicpm": {"dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 1.0},
    "minicpm3": {
        **_LATENT, "dim_model_base": 32, "scale_depth": 1.4, "scale_emb": 1.0,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 4,
                         "original_max_position_embeddings": 512},
    },
    "minimax": {**_EXPERTS, "head_dim": 8, "rotary_dim": 4, "shared_intermediate_size": 16},
    "minimax_m3_vl": {
        **_text(
            "", **_EXPERTS, dense_intermediate_size=48, shared_intermediate_size=16, head_dim=8,
            mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
            layer_types=["full_attention", "minimax_m3_sparse"] * 2,
            index_n_heads=2, index_head_dim=8, index_block_size=4, index_topk_blocks=3,
        ),
    },
    "ministral3": {**_WINDOWS, "rope_parameters": _SCALED},
    "mistral3": {**_text("llama")},
    "mistral3/ministral3": {**_text("ministral3", **_WINDOWS, rope_parameters=_SCALED)},
    "mistral4": {**_LATENT, "rope_parameters": _SCALED},
    "muse_glimmer": {**_WINDOWS, "rms_norm_eps": 1e-5},
    "muse_spark": {
        **_text(
            "muse_spark_text", head_dim=8, post_norm_eps=1e-8, rope_parameters={"rope_theta": 1e4},
            layer_rope_theta=[1e4, 0.0, 1e4, 0.0], layer_types=_SLIDING_FULL, sliding_window=WINDOW,
            final_logit_softcapping=20.0, output_multiplier=1.0, num_local_experts=4, num_experts_per_tok=2,
            moe_hidden_size=16, moe_intermediate_size=16,
        ),
    },
    "nanbeige/two loops": {"num_loops": 2},
    "nemotron": {"norm_eps": 1e-5, "hidden_act": "relu2"},
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"replace_with_linear": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"n_heads_in_group": 2}, "ffn": {"no_op": True}},
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
        ], "num_hidden_layers": 5,
    },
    "nemotron_h": {
        **_EXPERTS, **_MAMBA, "hybrid_override_pattern": ["M", "E", "*", "M", "-", "*", "E"], "mlp_bias": False,
        "moe_shared_expert_intermediate_size": 16, "time_step_limit": None,
    },
    "olmo3": {"sliding_window": WINDOW, "layer_types": _SLIDING_FULL},
    "olmo_hybrid": {
        **_LINEAR, "linear_allow_neg_eigval": True, "layer_types": ["linear_attention", "full_attention"] * 2,
        "rope_parameters": None,
    },
    "openelm": {
        "head_dim": 8, "num_transformer_layers": 4, "model_dim": 32, "ffn_dim_divisor": 16,
        "num_query_heads": [4, 4, 8, 8], "num_kv_heads": [2, 2, 4, 4], "ffn_multipliers": [1.0, 1.5, 2.0, 2.0],
    },
    "phi": {"num_key_value_heads": 4, "partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5},
    "phi3small": {
        "vocab_size": 100352,  # it masks token ids up to there, by number
        "dense_attention_every_n_layers": 2, "ff_intermediate_size": 48, "gegelu_limit": 20.0,
        "layer_norm_epsilon": 1e-5,
        "blocksparse_block_size": 32, "blocksparse_num_local_blocks": 1, "blocksparse_vert_stride": 2,
    },
    "phimoe": {
        **_EXPERTS, "original_max_position_embeddings": 512,
        "rope_scaling": {"short_factor": [1.0] * 4, "long_factor": [1.0] * 4, "short_mscale": 1.0, "long_mscale": 1.0},
    },
    "phixtral": {"num_vocab": VOCAB, "model_dim": 32, "num_heads": 4, "num_layers": 4, "rotary_dim": 4},
    "pixtral": {**_text("mistral")},
    "plamo": {"n_shared_head": 2},
    "plamo2": {
        "hidden_size_per_head": 8, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_num_heads": 4, "mamba_step": 2,
        "attention_window_size": 512,
    },
    "plamo3": {"head_dim": 8, "window_size": WINDOW, "sliding_window_pattern": 2},
    "prism_hadamard_qwen35": {
        **_text("qwen3_5_text", **{**_LINEAR, "hidden_size": 128, "intermediate_size": 512, "head_dim": 32}),
        "schema_version": 1, "tensor_namespace": "mlx-lm-text",
        "quantization": {"bits": 2, "group_size": 128, "mode": "affine"},
        "modules": [
            {"path": f"model.layers.{i}.mlp.{name}", "embedding": False, "dtype": "float16", "block": block}
            for i in range(4) for name, block in (("gate_proj", 0), ("down_proj", 512))
        ],
    },
    "qwen": {"kv_channels": 8, "layer_norm_epsilon": 1e-5},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen2_vl": {**_text("qwen2")},
    "qwen3_5": {**_text("qwen3_5_text", **_LINEAR)},
    "qwen3_5_moe": {**_text("qwen3_5_moe_text", **_LINEAR, **_EXPERTS)},
    "qwen3_next": {**_EXPERTS, **_LINEAR},
    "qwen3_vl": {**_text("qwen3", head_dim=8)},
    "qwen3_vl_moe": {**_text("qwen3_moe", **_EXPERTS, head_dim=8)},
    "recurrent_gemma": {
        "conv1d_width": 4, "logits_soft_cap": 30.0, "attention_window_size": WINDOW, "num_key_value_heads": 1,
        "num_hidden_layers": 5, "block_types": ["recurrent", "recurrent", "attention"],
    },
    "rwkv7": {
        "norm_eps": 1e-5, "head_dim": 8, "a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
    },
    "solar_open": {**_EXPERTS, "head_dim": 8, "partial_rotary_factor": 0.5},
    "spark2_5": {
        **_WINDOWS,
        "rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e4}},
    },
    "stablelm": {"use_qkv_bias": False, "partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5},
    "step3p5": {
        "num_attention_groups": 2, **_WINDOWS,
        "attention_other_setting": {"num_attention_heads": 2, "num_attention_groups": 1}, "moe_num_experts": 4,
        "moe_top_k": 2, "moe_intermediate_size": 16, "share_expert_dim": 16, "moe_layers_enum": "1,2,3",
    },
}  # fmt: skip

LEFT_OUT = {
    "olmo": "mlx-lm's own module needs the package ai2-olmo, and fails on every prompt of more than one token",
}
"""Architectures that plain mlx-lm does not run, and why."""


def architectures() -> list[str]:
    """Every module of the installed mlx-lm that holds a model: the denominator of the table."""
    return sorted(info.name for info in pkgutil.iter_modules(mlx_lm_models.__path__) if _holds_a_model(info.name))


def _holds_a_model(name: str) -> bool:
    # Read, not imported: a module may end the process for want of a package.
    spec = find_spec(f"mlx_lm.models.{name}")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    imports = [alias for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    return "Model" in classes | {alias.asname or alias.name for alias in imports}


def configurations() -> Mapping[str, Config]:
    """Complete configurations by name, ``architecture`` or ``architecture/variant``."""
    return {name: {**_BASE, "model_type": architecture(name), **config} for name, config in _SPECIFIC.items()}


def architecture(name: str) -> str:
    return name.partition("/")[0]
