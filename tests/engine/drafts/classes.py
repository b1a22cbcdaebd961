"""Targets with drafters of mlx-vlm's classes, of random weights, and what those classes draft themselves."""

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import tiny
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import load_model
from tiny import _spread
from trained import LEAVING

from splitinfer.models.library import mlx_vlm

sys.path.insert(0, str(Path(__file__).parents[2] / "matrix"))
import compare
import configs
import vlm_configs

Drafts = Callable[[list[int], int], list[int]]
OF_VLM = ("deepseek_v4", "glm5_next", "hy_v4", "inkling", "qwen4_exp")
_HEADS: dict[str, Any] = {"num_nextn_predict_layers": 1, "mtp_num_hidden_layers": 1}


def _behind(last: int, name: str) -> str:
    name = name.removeprefix("mtp.").removeprefix("mtp_block.").replace("shared_head_norm", "shared_head.norm")
    return f"model.layers.{last}.{name}"


def _hy_v4(_last: int, name: str) -> str:
    own = name.removeprefix("decoder.")
    return f"model.mtp_layers.0.{own.replace('norm.', 'final_layernorm.') if name.startswith('norm.') else own}"


STORED: dict[str, Callable[[int, str], str]] = {
    "glm_moe_dsa": _behind, "glm5_next": _behind, "hy_v4": _hy_v4,
    "nemotron_h": lambda _, name: f"mtp.{name}", "qwen4_exp": lambda _, name: f"mtp.{name}",
    "deepseek_v4": lambda _, name: f"mtp.0.{name}",
    "inkling": lambda _, name: f"model.mtp.{name.replace('blocks.', 'layers.')}",
}  # fmt: skip
"""By architecture: the name in a checkpoint of a parameter of mlx-vlm's class."""
MORE = {
    "nemotron_h": {"mtp_hybrid_override_pattern": ["*", "E"], "num_hidden_layers": 7},
    "inkling": {"num_mtp_layers": 2, "dense_intermediate_size": 32},
}  # fmt: skip


def _drafter(config: dict[str, Any]) -> Any:
    """An instance of mlx-vlm's class for the heads of a configuration, with random weights."""
    splitter = mlx_vlm.module("speculative.drafters.mtp_split").get_mtp_splitter(source_config=config)
    text = splitter.read_text_config(config)
    package = mlx_vlm.module(f"speculative.drafters.{splitter.output_model_type}")
    told = {"model_type": splitter.output_model_type, "text_config": text, **splitter.extra_config(text)}
    made = package.Model(package.ModelConfig.from_dict(told))
    mx.random.seed(7)
    made.update(tree_map_with_path(_spread, made.parameters()))
    return made


def saved(name: str, folder: Path, **changes: Any) -> tuple[Any, Any]:
    """Write a checkpoint with heads. Return its model and the drafter."""
    config = copy.deepcopy(vlm_configs.CONFIGS[name] if name in OF_VLM else configs.configurations()[name])
    text = config.get("text_config", config)
    text.update(_HEADS | MORE.get(name, {}) | changes)
    config["num_hidden_layers"] = text["num_hidden_layers"]
    drafter = _drafter(copy.deepcopy(config))
    own = {STORED[name](text["num_hidden_layers"], key): array for key, array in tree_flatten(drafter.parameters())}
    make = compare.mlx_vlms if name in OF_VLM else compare.mlx_lms
    folder.mkdir()
    target = compare.save(folder, config, make if name in OF_VLM else None, change=lambda weights: weights | own)
    return target, drafter


def hidden_of(name: str, target: Any, tokens: list[int]) -> mx.array:
    """What mlx-vlm gives its drafter of the target's hidden states."""
    ids = mx.array([tokens])
    if name not in OF_VLM:
        return (target.backbone if name == "nemotron_h" else target.model)(ids)
    told = {"capture_layer_ids": []} if name == "qwen4_exp" else {}
    return target(ids, cache=target.make_cache(), return_hidden=True, **told).hidden_states[-1]


# -- drafters of blocks, and assistants -----------------------------------------------------------------

_SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 160, "max_position_embeddings": 512, "rope_theta": 1e4,
    "rms_norm_eps": 1e-5, "num_target_layers": 4,
}  # fmt: skip
_BLOCK = {"mask_token_id": 159, "target_layer_ids": LEAVING, "block_size": 5, "num_target_layers": 4}
_DSPARK = {**_BLOCK, "projector_type": "dspark", "markov_rank": 8}
_GEMMA4 = {
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2, "sliding_window": 24,
    "num_hidden_layers": 6, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "head_dim": 16,
    "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "hidden_size": 64,
    "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 160,
    "rms_norm_eps": 1e-6, "use_double_wide_mlp": False,
}  # fmt: skip
_V4 = {
    "hidden_size": 64, "vocab_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 1, "q_lora_rank": 16, "qk_rope_head_dim": 8, "o_groups": 2, "o_lora_rank": 8, "hc_mult": 2,
    "hc_sinkhorn_iters": 2, "sliding_window": 64, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "moe_intermediate_size": 32, "compress_ratios": [0, 0, 0, 0], "num_hash_layers": 0,
    "scoring_func": "sqrtsoftplus", "norm_topk_prob": True, "routed_scaling_factor": 1.5,
}  # fmt: skip
FOLDERS: dict[str, dict[str, Any]] = {
    "dspark": {"model_type": "qwen3", "architectures": ["Qwen3DSparkModel"], **_SIZES, "dflash_config": _DSPARK},
    "dspark, sliding": {
        "model_type": "qwen3", "architectures": ["Qwen3DSparkModel"], **_SIZES, "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "dflash_config": {**_DSPARK, "causal": True, "sample_from_anchor": False},
    },
    "gemma4_dflash": {
        "model_type": "gemma4", "architectures": ["DFlashDraftModel"], **_SIZES, "num_target_layers": 6,
        "block_size": 5, "dflash_config": {**_BLOCK, "num_target_layers": 6},
    },
    "gemma4_dspark": {
        "model_type": "gemma4_text", "architectures": ["Gemma4DSparkModel"], **_SIZES, **_DSPARK,
        "layer_types": ["full_attention"] * 3, "global_head_dim": 32, "num_global_key_value_heads": 1,
        "rope_parameters": {"full_attention": {"rope_theta": 1e6, "rope_type": "default"}},
    },
    "laguna": {
        "model_type": "laguna", **_SIZES, "draft_vocab_size": 160, "layer_types": ["sliding_attention"] * 3,
        "sliding_window": 24, "gating": "per-head", "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
        "dflash_config": {**_BLOCK, "causal": True},
    },
    "muse_glimmer": {
        "model_type": "muse_glimmer_assistant", **_SIZES, **_BLOCK, "layer_types": ["sliding_attention"] * 3,
        "sliding_window": 24,
    },
    "deepseek_v4_dspark": {
        "model_type": "deepseek_v4_dspark", "text_config": _V4, "n_mtp_layers": 2, **_BLOCK, "markov_rank": 8,
    },
    "gemma4_assistant": {
        "model_type": "gemma4_assistant", "backbone_hidden_size": 64,
        "text_config": {
            **_GEMMA4, "num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    },
}  # fmt: skip
"""By class: the config.json of a drafter in a folder of its own."""
FOLDERS["gemma4_assistant, ordered"] = FOLDERS["gemma4_assistant"] | {
    "use_ordered_embeddings": True, "num_centroids": 16, "centroid_intermediate_top_k": 4,
}  # fmt: skip
FOLDERS["gemma4_assistant, shared"] = FOLDERS["gemma4_assistant"]  # of a model whose last layers share keys and values


def _made(config: dict[str, Any]) -> Any:
    package, _ = mlx_vlm.module("utils").get_model_and_args(copy.deepcopy(config))
    return package.Model(package.ModelConfig.from_dict(copy.deepcopy(config)))


def in_a_folder(name: str, folder: Path, **sizes: int) -> tuple[Path, Path, Drafts]:
    """Write a target and a drafter of a class in a folder of its own. Return both, and what the class itself drafts.
    ``sizes``: changes to both configurations."""
    config = FOLDERS[name] | (sizes if "text_config" not in FOLDERS[name] else {})
    if "text_config" in config:
        config["text_config"] = config["text_config"] | sizes
    if "draft_vocab_size" in config:
        config["draft_vocab_size"] = config["vocab_size"]
    if name.startswith(("gemma4_assistant", "gemma4_dflash")):
        shared = {"num_kv_shared_layers": 2 * ("shared" in name)}
        target = tiny.save(folder / "target", "llama", **{"model_type": "gemma4_text", **_GEMMA4, **shared, **sizes})
    else:
        target = tiny.save(folder / "target", "llama", **sizes)
    made, drafter = _made(config), folder / "drafter"
    mx.random.seed(7)
    made.update(tree_map_with_path(_spread, made.parameters()))
    if "ordered" in name:
        made.masked_embedding.token_ordering = mx.random.permutation(sizes.get("vocab_size", 160)).astype(mx.int32)
    drafter.mkdir(parents=True)
    (drafter / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(drafter / "model.safetensors"), dict(tree_flatten(made.parameters())))
    theirs = _of_assistant if name.startswith("gemma4_assistant") else _of_blocks
    return target, drafter, theirs(load_model(target)[0], made)


def _bound(target: Any, made: Any) -> None:
    """Bind as to a target of mlx-vlm's, which alone has what the class asks for."""
    made.validate_target_compatibility = lambda _target: None
    told = SimpleNamespace(num_hidden_layers=4, vocab_size=target.args.vocab_size)
    head = target.get("lm_head") or target.model.embed_tokens.as_linear
    made.bind(SimpleNamespace(model=target.model, lm_head=head, config=told, rollback_speculative_cache=None))


def best(logits: mx.array) -> mx.array:
    return logits.argmax(axis=-1)


class _Noting:
    """A layer that notes its hidden states."""

    def __init__(self, layer: Any, found: list[mx.array]) -> None:
        self._layer, self._found = layer, found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._layer(*args, **kwargs)
        self._found.append(result[0] if isinstance(result, tuple) else result)
        return result


def _of_blocks(target: Any, made: Any) -> Drafts:
    _bound(target, made)
    if "Gemma4" in type(made).__name__:
        made._project_context_kv = lambda _hidden: None  # asks for projections that its layers do not have

    layers, found = target.model.layers, list[mx.array]()
    target.model.layers = [_Noting(layer, found) for layer in layers]

    def drafts(tokens: list[int], count: int) -> list[int]:
        found.clear()
        target(mx.array([tokens[:-1]]), cache=target.make_cache() if hasattr(target, "make_cache") else None)
        hidden = mx.concatenate([found[i] for i in LEAVING], axis=-1)
        return list(map(int, made.draft_block(tokens[-1], hidden, made.make_cache(), count + 1, best)[0].tolist()))

    return drafts


def _of_assistant(target: Any, made: Any) -> Drafts:
    _bound(target, made)

    def drafts(tokens: list[int], count: int) -> list[int]:
        caches, n = target.make_cache(), len(tokens) - 1
        hidden, kv = target.model(mx.array([tokens[:-1]]), cache=caches), dict[str, Any]()
        for layer, cache in zip(target.layers, caches, strict=False):
            keys, values = cache.state[:2]
            last = slice(-24, None) if layer.layer_type == "sliding_attention" else slice(None)
            kv[layer.layer_type] = keys[:, :, last], values[:, :, last]
        made.set_shared_kv(kv, n, position=max(n - 1, 0), kv_valid_len=n)
        return made.draft_block(tokens[-1], hidden[:, -1:], None, count + 1, best, greedy=True)[0].tolist()

    return drafts
