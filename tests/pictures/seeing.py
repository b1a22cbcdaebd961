"""Tiny random models that see, as folders, and what mlx-vlm itself answers."""

import base64
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path
from PIL import Image
from tiny import _spread

from splitinfer.core.rng import position_key
from splitinfer.demo import TARGET
from splitinfer.models.library import mlx_vlm
from splitinfer.pictures.families import Prepared, family_of
from tests.matrix.configs import _BASE

VOCAB = 160
_PLACEHOLDER = 150

_TEXT: dict[str, Any] = {**_BASE, "vocab_size": VOCAB, "head_dim": 8, "max_position_embeddings": 1024}
_SECTIONS = {"type": "default", "rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
_QWENS = {
    "depth": 3, "hidden_size": 16, "intermediate_size": 32, "out_hidden_size": 32, "num_heads": 2, "patch_size": 4,
    "spatial_patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3,
    "num_position_embeddings": 16, "in_chans": 3, "embed_dim": 16,
}  # fmt: skip
_IDS = {
    "image_token_id": _PLACEHOLDER, "image_token_index": _PLACEHOLDER, "video_token_id": 151,
    "vision_start_token_id": 152, "vision_end_token_id": 153, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def _model(name: str, text: Mapping[str, Any], vision: Mapping[str, Any], **others: Any) -> dict[str, Any]:
    return {**_TEXT, **_IDS, "model_type": name, "text_config": {**_TEXT, **text}, "vision_config": vision, **others}


CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_vl": _model(
        "qwen3_vl",
        {"model_type": "qwen3_vl_text", "rope_scaling": _SECTIONS},
        {**_QWENS, "model_type": "qwen3_vl", "deepstack_visual_indexes": [0, 2]},
    ),
    "qwen2_5_vl": _model(
        "qwen2_5_vl",
        {"model_type": "qwen2_5_vl", "rope_scaling": _SECTIONS},
        {**_QWENS, "model_type": "qwen2_5_vl", "window_size": 16, "fullatt_block_indexes": [1]},
    ),
    "mistral3": _model(
        "mistral3",
        {"model_type": "mistral"},
        {
            "model_type": "pixtral", "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "head_dim": 8,
            "num_attention_heads": 2, "image_size": 64, "patch_size": 4, "num_channels": 3, "rms_norm_eps": 1e-5,
        },
        spatial_merge_size=2, vision_feature_layer=-1, projector_hidden_act="gelu", multimodal_projector_bias=False,
    ),
    "gemma4": _model(
        "gemma4",
        {
            "model_type": "gemma4_text", "num_hidden_layers": 4, "global_head_dim": 16, "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0, "sliding_window": 48, "use_bidirectional_attention": "vision",
            "layer_types": ["sliding_attention", "full_attention"] * 2, "rope_parameters": None,
            "num_key_value_heads": 2, "num_global_key_value_heads": 2, "vocab_size_per_layer_input": VOCAB,
            "tie_word_embeddings": True,
        },
        {
            "model_type": "gemma4_vision", "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32,
            "head_dim": 8, "global_head_dim": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "patch_size": 4,
            "pooling_kernel_size": 2, "default_output_length": 24, "position_embedding_size": 64,
        },
        tie_word_embeddings=True, boi_token_id=154, eoi_token_id=155, audio_token_id=156,
    ),
}  # fmt: skip
FAMILIES = tuple(CONFIGS)


def save(folder: Path, name: str, seed: int = 0, **changes: Any) -> Path:
    config = json.loads(json.dumps({**CONFIGS[name], **changes}))
    mx.random.seed(seed)
    utils = mlx_vlm.module("utils")
    package, _ = utils.get_model_and_args(config)
    args = package.ModelConfig.from_dict(json.loads(json.dumps(config)))
    model = package.Model(utils.update_module_configs(args, package, config, ["text", "vision"]))
    model.update(tree_map_with_path(_spread, model.parameters()))
    if name == "gemma4":  # its tied head would say its last token again
        table = model.language_model.model.embed_tokens
        table.weight = table.weight * 0.1
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 64, "max_pixels": 48 * 64}))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    return folder


def save_talking(folder: Path) -> Path:
    """A tiny model that sees, with the demo model's tokenizer and a template that knows pictures."""
    names = {"<|image_pad|>": 2048, "<|vision_start|>": 2049, "<|vision_end|>": 2050, "<|video_pad|>": 2051}
    ids = {
        "image_token_id": 2048, "image_token_index": 2048, "vision_start_token_id": 2049, "vision_end_token_id": 2050,
        "video_token_id": 2051, "video_token_index": 2051, "eos_token_id": 0, "vocab_size": 2056,
    }  # fmt: skip
    text = {**CONFIGS["qwen3_vl"]["text_config"], "vocab_size": 2056}
    save(folder, "qwen3_vl", **ids, text_config=text)
    tokenizer = json.loads((TARGET / "tokenizer.json").read_text())
    tokenizer["added_tokens"] += [
        {**tokenizer["added_tokens"][0], "id": number, "content": name} for name, number in names.items()
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((TARGET / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": _TEMPLATE}))
    return folder


_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '\\n' }}{% endfor %}"
)


def png(width: int = 40, height: int = 32, seed: int = 1) -> bytes:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    return file.getvalue()


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def picture(folder: Path, rows: int = 3, columns: int = 4, seed: int = 1) -> Prepared:
    config = json.loads((folder / "config.json").read_text())
    family = family_of(folder, config, lambda _text: None)
    step = family.patch * family.merge
    noise = np.random.default_rng(seed).integers(0, 256, (rows * step, columns * step, 3))
    return family.prepared(noise.astype(np.uint8))


def expanded(tokens: Sequence[int], pictures: Sequence[Prepared]) -> list[int]:
    """A prompt as mlx-vlm's processors write it."""
    left, found = iter(pictures), list[int]()
    for token in tokens:
        one = next(left) if token == _PLACEHOLDER else None
        found += [token] if one is None else [*one.before, *one.token_ids, *one.after]
    return found


def prompt(*lengths: int) -> list[int]:
    """Texts of so many tokens, with a placeholder between them."""
    found = list[int]()
    for number, length in enumerate(lengths):
        found += [(i * 37 + 11 * number + i * i) % 140 + 3 for i in range(length)]
        found += [152, _PLACEHOLDER, 153] if number < len(lengths) - 1 else []
    return found


def answer(
    folder: Path,
    tokens: Sequence[int],
    pictures: Sequence[Prepared],
    count: int,
    choose: Callable[[mx.array, int], Any],
) -> list[int]:
    """What mlx-vlm generates from one call for the whole prompt."""
    model = mlx_vlm.module("utils").load_model(folder)
    model.set_dtype(mx.float32)
    ids = mx.array([expanded(tokens, pictures)])
    cache = mlx_vlm.module("models.cache").make_prompt_cache(model.language_model)
    features = model.get_input_embeddings(ids, *_values(pictures)[0], **_values(pictures)[1])
    given = {name: value for name, value in features.to_dict().items() if value is not None}
    if "gemma" in str(type(model)):
        given["mm_token_type_ids"] = (ids == _PLACEHOLDER).astype(mx.int32)
    found, y = list[int](), ids
    for i in range(count):
        logits = model.language_model(y, cache=cache, **given).logits[:, -1, :]
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        found.append(int(choose(logprobs, ids.shape[1] + i).item()))
        y, given = mx.array([[found[-1]]]), {}
    return found


def _values(pictures: Sequence[Prepared]) -> tuple[list[Any], dict[str, Any]]:
    if not pictures:
        return [], {}
    values = [one.values for one in pictures]
    if "image_grid_thw" in pictures[0].named:
        grids = mx.array(np.concatenate([one.named["image_grid_thw"] for one in pictures]))
        return [mx.array(np.concatenate(values))], {"image_grid_thw": grids}
    if "image_sizes" in pictures[0].named:
        most = np.max([one.shape for one in values], axis=0)
        padded = [np.pad(one, [(0, m - n) for m, n in zip(most, one.shape, strict=True)]) for one in values]
        return [mx.array(np.concatenate(padded))], {"image_sizes": [one.named["image_sizes"][0] for one in pictures]}
    return [[mx.array(one[0]) for one in values]], {}


def greedy(logprobs: mx.array, _position: int) -> mx.array:
    return mx.argmax(logprobs, axis=-1)


def sampled(logprobs: mx.array, position: int) -> mx.array:
    """The token that temperature 0.8 and seed 5 give at a position."""
    noise = mx.random.gumbel((VOCAB,), key=mx.array(position_key(5, position), dtype=mx.uint32))
    return mx.argmax(logprobs * (1.0 / 0.8) + noise, axis=-1)
