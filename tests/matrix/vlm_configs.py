"""Tiny configurations of mlx-vlm's language models: those that mlx-lm lacks, and some that both have.

As in ``configs``, every kind of layer stands on both sides of some cut. Numbers of tokens that a layer may choose are
smaller than the prompts, so that layers do choose.
"""

from typing import Any

from configs import _BASE, _EXPERTS, _INDEXED, _LATENT, _LINEAR, _SLIDING_FULL, _SPECIFIC, VOCAB, WINDOW, Config

_VISION: Config = {
    "model_type": "vision", "depth": 2, "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32,
    "out_hidden_size": 32, "num_heads": 2, "num_attention_heads": 2, "patch_size": 4, "image_size": 8,
    "mm_tokens_per_image": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3, "num_channels": 3,
    "num_position_embeddings": 16, "deepstack_visual_indexes": [], "embed_dim": 16, "projection_dim": 32,
    "layer_norm_eps": 1e-5, "rms_norm_eps": 1e-5,
}  # fmt: skip
_IMAGES: Config = {
    "image_token_id": 120, "video_token_id": 121, "vision_start_token_id": 122, "vision_end_token_id": 123,
    "image_token_index": 120, "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": 1,
    "image_start_token_id": 122, "image_end_token_id": 123, "video_start_token_id": 124, "video_end_token_id": 125,
}  # fmt: skip
_SECTIONS: Config = {"type": "default", "rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}


def _with_tower(
    name: str,
    text: str = "",
    tower: str = "",
    seeing: Config | None = None,
    others: Config | None = None,
    **changes: Any,
) -> Config:
    """A model with a tower for pictures, of the type ``tower``, in front of a language model of the type ``text``.
    ``seeing``: of the tower; ``others``: of neither."""
    language = {**_BASE, "model_type": text or f"{name}_text", "head_dim": 8, **changes}
    vision = {**_VISION, "model_type": tower or name, **(seeing or {})}
    projector = {"model_type": "mlp_gelu", "input_dim": 16, "n_embed": 32}
    parts = {"text_config": language, "vision_config": vision, "projector_config": projector}
    return {**_BASE, **_IMAGES, "model_type": name, **parts, **(others or {})}


def _alone(name: str, **changes: Any) -> Config:
    """A language model whose configuration is the whole one."""
    return {**_BASE, **_IMAGES, "model_type": name, "head_dim": 8, **changes}


def _without(config: Config, *names: str) -> Config:
    """Some classes refuse what they do not know."""
    return {name: value for name, value in config.items() if name not in names}


_EXPERTS_EVERYWHERE: Config = {**_EXPERTS, "mlp_only_layers": [], "shared_expert_intermediate_size": 16}
_HALF: Config = {**_LINEAR, "rope_parameters": {**_SECTIONS, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}}
_GRANITE: Config = {
    "embedding_multiplier": 1.0, "attention_multiplier": 0.3, "logits_scaling": 1.0, "residual_multiplier": 1.0,
    "mlp_bias": False,
}  # fmt: skip
_QWEN4: Config = {
    **_LINEAR, **_EXPERTS_EVERYWHERE, "num_hidden_layers": 4, "hc_count": 2, "hc_lowrank": 8,
    "max_position_embeddings": 128,
    "indexer_n_heads": 2, "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 4,
    "layer_types": ["linear_attention", "qwen_sparse_attention"] * 2, "linear_key_head_dim": 32,
    "rope_parameters": {**_SECTIONS, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5},
}  # fmt: skip
_NGRAMS: Config = {
    "seed": 97, "eos_token_id": 2, "ple_layer_ids": [1, 3], "ple_embed_dim": 32, "ngram_vocab_size_base": 50,
    "split_ngram_parts": 4, "make_ngram_vocab_size_divisible_by": 4, "heads_per_ngram": 2,
}  # fmt: skip
_CONVOLUTIONS: Config = {
    "norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3, "layer_types": ["conv", "full_attention"] * 2,
    "block_dim": 32, "block_ff_dim": 64, "block_multiple_of": 8, "block_ffn_dim_multiplier": 1,
    "block_auto_adjust_ff_dim": False,
}  # fmt: skip
_OMNI: Config = {
    **_BASE, **_EXPERTS_EVERYWHERE, "model_type": "qwen3_omni_moe_text", "head_dim": 8, "rope_scaling": _SECTIONS,
}  # fmt: skip

_ALIKE: dict[str, Config] = {
    name: _with_tower(name, text, tower)
    for (text, tower), names in {
        ("", ""):
            "inkling pixtral molmo2 jina_vlm muse_glimmer moondream2 gemma4_unified falcon_ocr falcon_perception got",
        ("cohere2", "siglip_vision_model"): "aya_vision",
        ("llama", "clip_vision_model"): "llava llava_next",
        ("llama", ""): "idefics3",
        ("qwen2", "siglip_vision_model"): "internvl_chat llava_onevision",
        ("gemma", "siglip_vision_model"): "paligemma",
        ("mistral", "pixtral"): "mistral3",
        ("llava_qwen2", ""): "fastvlm",
        ("llama", "idefics3"): "smolvlm",
        ("deepseek_v2", "vision"): "deepseekocr unlimited_ocr deepseekocr_2",
        ("qwen2", ""): "dots_ocr",
        ("qwen2", "moonvit"): "locateanything",
        ("llama", "siglip_vision_model"): "llmjpvl",
    }.items()
    for name in names.split()
}  # fmt: skip
_ALIKE |= {name: _alone(name) for name in ["phi4mm", "flint", "phi3_v", "z1t", "nemotron_labs_diffusion"]}
_ALIKE |= {name: _alone(name, **_EXPERTS) for name in ["klear", "xing4_0", "k2_horizon", "minimax_m3"]}

CONFIGS: dict[str, Config] = {
    **_ALIKE,
    "qwen3_vl": _with_tower("qwen3_vl", rope_scaling=_SECTIONS),
    "qwen3_vl_moe": _with_tower("qwen3_vl_moe", rope_scaling=_SECTIONS, **_EXPERTS_EVERYWHERE),
    "qwen2_vl": _with_tower("qwen2_vl", "qwen2_vl", rope_scaling=_SECTIONS),
    "qwen2_5_vl": _with_tower("qwen2_5_vl", "qwen2_5_vl", rope_scaling=_SECTIONS),
    "qwen3_5": _with_tower("qwen3_5", **_HALF),
    "gemma4": _with_tower(
        "gemma4", num_hidden_layers=7, global_head_dim=16, vocab_size_per_layer_input=VOCAB, num_kv_shared_layers=3,
        hidden_size_per_layer_input=8, sliding_window=WINDOW, layer_types=[*_SLIDING_FULL, *_SLIDING_FULL[:3]],
        rope_parameters=None, num_key_value_heads=1,
    ),
    "glm5_next": _with_tower(
        "glm5_next", **{
            **_LATENT, "num_hidden_layers": 8, "num_attention_heads": 4, "qk_rope_head_dim": 0, "n_group": 1,
            "layer_types": ["linear_attention", "deepseek_sparse_attention"] * 4, "index_topk": 8, "index_kpool": 4,
            "indexer_types": ["full", "full", "shared", "shared", "shared", "full", "shared", "shared"],
            "index_head_dim": 16, "index_n_heads": 2, "linear_head_dim": 32, "linear_num_heads": 2,
            "linear_conv_kernel_dim": 3, "hc_mult": 2, "hc_sinkhorn_iters": 2, "first_k_dense_replace": 1,
        },
    ),
    "qwen4_exp": _with_tower("qwen4_exp", **_QWEN4),
    "qwen4_exp/ple": _with_tower("qwen4_exp", **_QWEN4, **_NGRAMS),
    "deepseek_v4": _alone(
        "deepseek_v4", **{
            **_EXPERTS, "num_hidden_layers": 6, "num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 16,
            "qk_rope_head_dim": 8, "o_groups": 2, "o_lora_rank": 8, "scoring_func": "sqrtsoftplus", "hc_mult": 2,
            "hc_sinkhorn_iters": 2, "num_hash_layers": 1, "sliding_window": WINDOW, "index_n_heads": 2,
            "index_head_dim": 16, "index_topk": 4, "index_block": 4, "index_keep": 2,
            "compress_ratios": [0, 4, 128, 4, 4, 0],
        },
    ),
    "deepseek_v41": _alone(
        "deepseek_v41", **{
            **_EXPERTS, "num_hidden_layers": 6, "num_key_value_heads": 1, "head_dim": 32, "q_lora_rank": 32,
            "qk_rope_head_dim": 8, "o_groups": 2, "o_lora_rank": 16, "scoring_func": "sqrtsoftplus", "hc_mult": 2,
            "moe_intermediate_size": 32,
            "hc_sinkhorn_iters": 2, "sliding_window": WINDOW, "rms_norm_eps": 1e-6, "n_routed_experts": 4,
            "compress_ratios": [0, 2, 2, 0, 1, 1], "kv_source_layer_ids": [1, 4], "index_n_heads": 2,
            "index_source_layer_ids": [1, 2, 4, 5], "index_head_dim": 32, "index_topk": 4,
            "candidate_source_layer_id": 4, "candidate_topk_blocks": 2, "candidate_block_size": 4,
            "engram_layer_ids": [1, 4], "engram_num_embeddings": [240, 306], "engram_max_ngram_size": 3,
            "engram_vocab_size": 50, "engram_n_heads": 2, "engram_head_dim": 32, "engram_pad_token_id": 2,
            "engram_compressed_vocab_size": VOCAB - 2, "vision_num_layers": 1, "vision_hidden_size": 16,
            "vision_num_heads": 2, "vision_intermediate_size": 32,
        },
    ),
    "hy_v4": _alone("hy_v4", **{**_INDEXED, "hc_mult": 2, "n_group": 1, "max_position_embeddings": 128}),
    "cohere2_moe": _alone("cohere2_moe", **_EXPERTS, sliding_window=WINDOW),
    "glm4v": _with_tower("glm4v", rope_scaling=_SECTIONS, eos_token_id=[2]),
    "lfm2_vl": _with_tower("lfm2_vl", "lfm2", **_CONVOLUTIONS),
    "kimi_vl": _with_tower("kimi_vl", "deepseek_v3", "moonvit", **_LATENT),
    "kimi_k25": _with_tower("kimi_k25", "kimi_k25", "moonvit", **_LATENT),
    "deepseek_vl_v2": _with_tower("deepseek_vl_v2", "deepseek_v2", "vision", **_LATENT),
    "minimax_m3_vl": _with_tower("minimax_m3_vl", **_EXPERTS),
    "granite_vision": _with_tower("granite_vision", "granite", "siglip_vision_model", **_GRANITE),
    "youtu_vl": _with_tower("youtu_vl", **_LATENT),
    "minicpmv4_6": _with_tower("minicpmv4_6", tower="siglip_vision_model", **_LINEAR),
    "paddleocr_vl": _alone("paddleocr_vl", rope_scaling=_SECTIONS),
    "cohere_compass": _with_tower("cohere_compass", tower="cohere_compass_vision", rope_scaling=_SECTIONS),
    "internvl": _with_tower("internvl", "qwen3", rope_parameters=_SECTIONS),
    "qwen3_5_moe": _with_tower("qwen3_5_moe", **{**_EXPERTS_EVERYWHERE, **_HALF}),
    "mistral_large3": _with_tower("mistral_large3", tower="pixtral", **_LATENT),
    "glm4v_moe": _with_tower(
        "glm4v_moe", **_EXPERTS, partial_rotary_factor=0.5, use_qk_norm=False, attention_bias=False,
        rope_scaling=_SECTIONS,
    ),
    "mimo_v2": _alone(
        "mimo_v2", **_EXPERTS, v_head_dim=8, swa_head_dim=8, swa_v_head_dim=8, swa_num_attention_heads=4,
        swa_num_key_value_heads=2, hybrid_layer_pattern=[0, 1, 1, 0], moe_layer_freq=[0, 1, 1, 1],
        sliding_window_size=WINDOW, partial_rotary_factor=0.5,
    ),
    "step3p7": _with_tower(
        "step3p7", "step3p5", num_attention_groups=2, moe_num_experts=4, moe_top_k=2, share_expert_dim=32,
        moe_layers_enum="1,2,3", layer_types=_SLIDING_FULL, sliding_window=WINDOW,
        attention_other_setting={"num_attention_heads": 4, "num_attention_groups": 2},
    ),
    "zaya1_vl": _with_tower(
        "zaya1_vl", tower="qwen2_5_vl", ffn_hidden_size=64, num_experts=4, zaya_mlp_expansion=16, num_query_groups=2,
    ),
    "longcat_flash_sparse": _alone(
        "longcat_flash_sparse", **_LATENT, num_layers=3, ffn_hidden_size=64, expert_ffn_hidden_size=32, moe_topk=2,
        zero_expert_num=1, index_n_heads=2, index_head_dim=16, index_topk=8,
    ),
    "kolibri1": _alone("kolibri1", **_EXPERTS_EVERYWHERE, sliding_window=WINDOW, layer_types=_SLIDING_FULL),
    "minicpmv4_7": _with_tower("minicpmv4_7", tower="siglip_vision_model", **_LINEAR),
    "qwen3_5_text": _alone("qwen3_5_text", **_HALF),
    "qwen3_5_moe_text": _alone("qwen3_5_moe_text", **{**_EXPERTS_EVERYWHERE, **_HALF}),
    "clef": _with_tower(
        "clef", tower="qwen3_5",
        others={"head_config": {
            "hidden_size": 32, "width": 16, "routing_layers": 1, "layers": 1, "heads": 2, "feedforward": 16,
        }},
        **_HALF,
    ),
    "decider2": _alone("decider2", **_HALF),
    "ernie4_5_moe_vl": {
        **_without(_alone("ernie4_5_moe_vl"), "head_dim"), "moe_num_experts": [4, 4], "moe_intermediate_size": [32, 16],
        "moe_k": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 2, "moe_num_shared_experts": 1,
        "mrope_section": [1, 1, 2], "freq_allocation": 2, "pixel_hidden_size": 16,
        "vision_config": {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "patch_size": 4},
    },
    "glm_ocr": {
        **_IMAGES, "model_type": "glm_ocr",
        "text_config": {**_without(_BASE, "rope_theta"), "head_dim": 8, "rope_parameters": _SECTIONS},
        "vision_config": {"depth": 1, "hidden_size": 16, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32},
    },
    "granite4_vision": _with_tower(
        "granite4_vision", "granitemoehybrid", "siglip_vision_model", {"hidden_size": 64, "num_attention_heads": 1},
        {"deepstack_layer_map": [[0, 1]]}, **_GRANITE,
    ),
    "hrm_text": _alone("hrm_text", num_layers_per_stack=1, H_cycles=1, L_cycles=2),
    "hunyuan_vl": _with_tower(
        "hunyuan_vl", "hunyuan_vl", attention_head_dim=8,
        rope_scaling={"type": "xdrope", "xdrope_section": [1, 1, 1, 1], "alpha": 1000.0},
    ),
    "idefics2": _with_tower(
        "idefics2", "mistral", others={"perceiver_config": {
            "model_type": "perceiver", "num_key_value_heads": 2, "resampler_depth": 1, "resampler_head_dim": 8,
            "resampler_n_heads": 4, "resampler_n_latents": 4,
        }},
    ),
    "indic_ocr": _with_tower("indic_ocr", tower="qwen3_5", **_HALF),
    "limite": _alone(
        "limite", rope_n_pairs=2, ve_layers=[1, 2], ve_dim=8, ve_gate_channels=4, attn_gate_channels=8,
        mudd_layers=[2, 3], mudd_tap_idx={"2": [0, 1], "3": [0, 2]}, mudd_inter=8, mudd_taps=2, global_layers=[1, 3],
        xsa_layers=[1, 2], sliding_window=WINDOW, softcap_logits={"kind": "sigmoid", "a": 30.0, "b": 0.0, "c": 3.0},
    ),
    "llava_bunny": _with_tower(
        "llava_bunny", "qwen2", "siglip_vision_model",
        others={"auto_map": {"AutoModelForCausalLM": "bunny"}, "mm_hidden_size": 16},
    ),
    "mage_vl": _with_tower("mage_vl", "qwen3", "mage_vl_vision", {"hidden_size": 64}),
    "mllama": _with_tower("mllama", "mllama", cross_attention_layers=[1, 3]),
    "molmo": _with_tower(
        "molmo", "molmo", d_model=32, n_heads=4, n_kv_heads=2, n_layers=4, mlp_hidden_size=64, embedding_size=VOCAB,
        additional_vocab_size=4,
    ),
    "molmo_point": _with_tower(
        "molmo_point", "molmo2_text", "molmo2", others={"adapter_config": {
            "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
            "intermediate_size": 16, "text_hidden_size": 32, "vit_layers": [-1, -2],
        }},
    ),
    "moondream3": _with_tower(
        "moondream3", "moondream3", num_key_value_heads=4, rope_dim=4, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, moe_start_layer=1,
    ),
    "multi_modality": _with_tower(
        "multi_modality", "llama", "vision", {"params": {}},
        {"projector_config": {
            "cls": "MlpProjector", "model_type": "mlp_gelu",
            "params": {"projector_type": "mlp_gelu", "input_dim": 16, "n_embed": 32, "depth": 1},
        }},
    ),
    "nemotron_h_nano_omni": _with_tower(
        "nemotron_h_nano_omni", "nemotron_h", num_hidden_layers=7, **_SPECIFIC["nemotron_h"],
    ),
    "phi4_siglip": {
        "model_type": "phi4-siglip", "mm_hidden_size": 16,
        "text_config": _without(_BASE, "max_position_embeddings", "tie_word_embeddings", "attention_bias"),
        "vision_config": {
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "patch_size": 4, "num_patches": 4,
        },
    },
    "plamo2vl": _with_tower(
        "plamo2vl", "plamo2", "siglip_vision_model", hidden_size_per_head=8, mamba_num_heads=4, mamba_d_state=8,
        mamba_d_conv=3, full_attention_idx=[1, 3], attention_window_size=WINDOW,
    ),
    "qwen3_omni_moe": {
        "model_type": "qwen3_omni_moe", "enable_audio_output": False,
        "thinker_config": {
            **_IMAGES, "text_config": _OMNI,
            "vision_config": {**_VISION, "model_type": "qwen3_omni_moe_vision_encoder"},
            "audio_config": {
                "d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16,
                "num_hidden_layers": 1, "output_dim": 32, "downsample_hidden_size": 8,
            },
        }, "talker_config": {"text_config": _OMNI, "code_predictor_config": _OMNI, "num_code_groups": 2},
        "code2wav_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "decoder_dim": 16},
    },
}  # fmt: skip

MASKED: dict[str, Config] = {"llada2_moe": _alone("llada2_moe", **_EXPERTS)}
"""Models that are not asked for the next token."""
