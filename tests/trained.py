"""Tiny models with drafters on their own hidden states, of random weights."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from splitinfer.core.speculation.speculation import Speculation

Arrays = dict[str, mx.array]

_BEHIND = {
    "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "eh_proj", "norm": "shared_head.norm",
}  # fmt: skip


def weights_of(folder: Path) -> Arrays:
    found: Arrays = {}
    for path in folder.glob("model*.safetensors"):
        found |= mx.load(str(path))  # type: ignore[arg-type]
    return found


def heads_for(folder: Path, *, size: int = 64, drop: str = "") -> Arrays:
    """Prediction heads for a tiny model: one of its layers with attention, the last, and random weights beside it."""
    weights, config = weights_of(folder), json.loads((folder / "config.json").read_text())
    layers = range(config["num_hidden_layers"])
    named = [p for p in map("model.layers.{}.".format, layers) if f"{p}self_attn.o_proj.weight" in weights]
    prefix = named[-1]
    mx.random.seed(7)
    heads = {f"mtp.layers.0.{name.removeprefix(prefix)}": a for name, a in weights.items() if name.startswith(prefix)}
    heads |= {"mtp.fc.weight": mx.random.normal((size, 2 * size)) / size**0.5}
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    heads |= {f"mtp.{name}.weight": 1 + 0.1 * mx.random.normal((size,)) for name in norms}
    return {name: array for name, array in heads.items() if not drop or drop not in name}


def add_heads(folder: Path, *, form: Callable[[Arrays], Arrays] = dict, size: int = 64, drop: str = "") -> Path:
    """Write them into the model's folder, in a form."""
    mx.save_safetensors(str(folder / "model-mtp.safetensors"), form(heads_for(folder, size=size, drop=drop)))
    return folder


def quantised(heads: Arrays) -> Arrays:
    found: Arrays = {}
    for name, array in heads.items():
        parts = mx.quantize(array, 32, 8) if array.ndim == 2 else (array,)
        kinds = (f".{kind}" for kind in ("weight", "scales", "biases"))
        found |= {name.removesuffix(".weight") + kind: part for kind, part in zip(kinds, parts, strict=False)}
    return found


def rounded(heads: Arrays) -> Arrays:
    """The numbers that ``quantised`` stands for."""
    return {n: mx.dequantize(*mx.quantize(a, 32, 8), 32, 8) if a.ndim == 2 else a for n, a in heads.items()}


def behind_the_last(heads: Arrays) -> Arrays:
    """The same as the layer behind the last of four, with a copy of the head that nobody should read."""
    found: Arrays = {"model.layers.4.shared_head.head.weight": mx.full((160, 64), mx.nan)}
    for name, array in heads.items():
        own = name.removeprefix("mtp.").removeprefix("layers.0.")
        module = own.removesuffix(".weight")
        found[f"model.layers.4.{_BEHIND[module]}.weight" if module in _BEHIND else f"model.layers.4.{own}"] = array
    return found


def published(heads: Arrays) -> Arrays:
    """Heads of DeepSeek as they are published: behind the last layer, one tensor for each expert, and latent keys and
    values that are projected together."""
    found: Arrays = {}
    for name, array in behind_the_last(heads).items():
        if ".switch_mlp." in name:
            found |= {name.replace("switch_mlp", f"experts.{i}"): one for i, one in enumerate(array)}
        elif ".embed_q." not in name and ".unembed_out." not in name:
            found[name] = array
    at = "mtp.layers.0.self_attn."
    both = [heads[f"{at}embed_q.weight"].swapaxes(1, 2), heads[f"{at}unembed_out.weight"]]
    projection = mx.concatenate(both, axis=1).reshape(-1, both[0].shape[-1])
    return found | {"model.layers.4.self_attn.kv_b_proj.weight": projection}


LEAVING = [0, 2, 3]  # the layers of a target of four behind which ``save_eagle3``'s drafters read


def save_eagle3(
    folder: Path,
    *,
    entering: bool = True,
    only: int | None = None,
    width: int = 64,
    leaving: Sequence[int] = LEAVING,
    **config: Any,
) -> Path:
    """An EAGLE-3 drafter with random weights for a tiny model, that may draft 40 tokens, or ``only`` one."""
    mx.random.seed(11)
    half, inner = width // 2, width * 3 // 2
    names = {f"self_attn.{part}_proj": (rows, 2 * width) for part, rows in (("q", width), ("k", half), ("v", half))}
    names |= {"self_attn.o_proj": (width, width), "mlp.down_proj": (width, inner)}
    names |= {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width)}
    found = {f"midlayer.{name}.weight": shape for name, shape in names.items()}
    found["fc.weight"] = (width, len(leaving) * width)
    chosen = mx.sort(mx.random.permutation(160)[:40]) if only is None else mx.array([only])
    weights = {name: mx.random.normal(shape) * 2.0 / shape[1] ** 0.5 for name, shape in found.items()}
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    for name in (*(f"midlayer.{norm}" for norm in norms), "norm"):
        weights[f"{name}.weight"] = 1 + 0.1 * mx.random.normal((width,))
    weights |= {"lm_head.weight": mx.random.normal((chosen.size, width)), "d2t": chosen - mx.arange(chosen.size)}
    ids = "eagle_aux_hidden_state_layer_ids"
    own = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": width,
        "num_hidden_layers": 1, "intermediate_size": inner, "num_attention_heads": 4, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5, "vocab_size": 160, "draft_vocab_size": int(chosen.size), "rope_theta": 10000.0,
        **({ids: [i + 1 for i in leaving]} if entering else {"eagle_config": {ids: list(leaving)}}),
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(own | config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def save_dflash(
    folder: Path, *, second: bool = False, size: int = 64, only: tuple[int, Path] | None = None, **told: Any
) -> Path:
    """A DFlash drafter with random weights for a tiny model; ``second``: DFlash2; ``only``: one that drafts one token
    alone, of a model with tied weights."""
    mx.random.seed(11)
    layers = 2
    of_layer = {f"self_attn.{part}_proj": (rows, 64) for part, rows in (("q", 64), ("k", 32), ("v", 32), ("o", 64))}
    of_layer |= {"mlp.gate_proj": (96, 64), "mlp.up_proj": (96, 64), "mlp.down_proj": (64, 96)}
    norms = {"input_layernorm": 64, "post_attention_layernorm": 64, "self_attn.q_norm": 16, "self_attn.k_norm": 16}
    if second:
        of_layer |= {f"{part}_conv.kernel_projection": (2 * 2 * 4, 64) for part in ("attention", "mlp")}
    shapes = {f"layers.{i}.{name}": shape for i in range(layers) for name, shape in of_layer.items()}
    shapes |= {"fc": (size, 64 * len(LEAVING))}
    weights = {f"{name}.weight": mx.random.normal(shape) * 2.0 / shape[1] ** 0.5 for name, shape in shapes.items()}
    vectors = {f"layers.{i}.{name}": width for i in range(layers) for name, width in norms.items()}
    for name, width in (vectors | {"hidden_norm": size, "norm": 64}).items():
        weights[f"{name}.weight"] = 1 + 0.1 * mx.random.normal((width,))
    own: dict[str, Any] = {"mask_token_id": 159, "target_layer_ids": LEAVING}
    if only is not None:  # all rows of drafts are the mask's embedding, which the last norm turns into the token's
        table = weights_of(only[1])["model.embed_tokens.weight"]
        weights |= {n: mx.zeros_like(a) for n, a in weights.items() if "o_proj" in n or "down_proj" in n}
        weights["norm.weight"] = table[only[0]] / mx.fast.rms_norm(table[159], mx.ones(64), 1e-5)
    if second:
        own |= {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 12}
        for i in range(layers):
            names = (f"layers.{i}.{part}_conv.base_kernel" for part in ("attention", "mlp"))
            weights |= {name: mx.random.normal((2, 2, 64)) for name in names}
        tables = {f"candidate_selector.{side}_codebook": (160, 8) for side in ("predecessor", "successor")}
        tables |= {"candidate_selector.hidden_projection.weight": (8, 64)}
        weights |= {name: mx.random.normal(shape) for name, shape in tables.items()}
    config = {
        "architectures": [f"DFlash{'2' if second else ''}DraftModel"], "model_type": "qwen3", "hidden_size": 64,
        "num_hidden_layers": layers, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "rms_norm_eps": 1e-5, "vocab_size": 160, "rope_theta": 10000.0, "block_size": 8,
        "num_target_layers": 4, "max_position_embeddings": 4096, "dflash_config": own | told.pop("dflash_config", {}),
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config | told))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


KINDS = ("mtp", "eagle3", "dflash", "dflash2")


def of_kind(kind: str, folder: Path, drafter: Path, only: int | None = None) -> str:
    """A drafter for the model in ``folder``, in a layout's words. ``only``: the one token that it drafts."""
    if kind in ("mtp", "latent"):
        add_heads(folder, form=dict if kind == "mtp" else published)
        return "mtp"
    if kind == "eagle3":
        return str(save_eagle3(drafter, only=only))
    one = None if only is None else (only, folder)
    return str(save_dflash(drafter, second=kind == "dflash2", only=one))


def noted_proposals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """What the last stage drafts from now on: tokens so far, and the drafts behind them."""
    proposed, propose = list[tuple[list[int], list[int]]](), Speculation.propose

    def noted(self: Speculation, seq: Any, drafts: Any) -> None:
        proposed.append((list(seq.tokens), list(drafts)))
        propose(self, seq, drafts)

    monkeypatch.setattr(Speculation, "propose", noted)
    return proposed
