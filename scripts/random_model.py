"""Makes random models of a given shape, to measure with: ``scripts/make_bench_model``.

A folder as mlx-lm loads it: config.json, weights in several files with their index, and a byte-level
tokenizer of the right size whose tokens beyond the 256 bytes stand for nothing. The weights are scaled so that
hidden states neither vanish nor explode from layer to layer, and that tokens vary.

MLX is lazy: the architecture is built without a single weight in memory, and each file's tensors are made
when the file is written. So a model needs as much memory as its largest file. ``build`` makes the same model in memory,
without a folder.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from splitinfer.errors import ConfigError
from splitinfer.models.library.mlx_lm import utils as mlx_lm_utils

ARCHITECTURES = ("qwen2", "qwen3", "llama")
END = "<|endoftext|>"  # Qwen's own: its tokenizer class would add it
SMALLEST_VOCABULARY = 257  # the bytes and the end
_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
_CONTEXT = 32768
_GROUP = 64  # weights that share a scale, as mlx-lm quantises by default
_BITS = (0, 2, 3, 4, 6, 8)


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model; by default 197 million parameters.

    bits: of quantised weights; 0: as ``dtype``.
    experts, experts_per_token: of each layer, each of ``mlp``; 0: dense. Only qwen3 has them here.
    """

    architecture: str = "qwen2"
    layers: int = 16
    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 8
    mlp: int = 2816
    vocab: int = 8192
    dtype: str = "float32"
    bits: int = 0
    experts: int = 0
    experts_per_token: int = 0

    def __post_init__(self) -> None:
        least = {"layers": 1, "hidden": 2, "heads": 1, "kv_heads": 1, "mlp": 1, "vocab": SMALLEST_VOCABULARY}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ConfigError(f"{name} must be at least {bound}, not {getattr(self, name)}")
        if self.hidden % self.heads or (self.hidden // self.heads) % 2:
            raise ConfigError(f"hidden {self.hidden} cannot be cut into {self.heads} heads of one even size")
        if self.heads % self.kv_heads:
            raise ConfigError(f"{self.heads} heads cannot share {self.kv_heads} KV heads evenly")
        for name, known in (("architecture", ARCHITECTURES), ("dtype", tuple(_DTYPES))):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} {getattr(self, name)!r} is unknown; known: {', '.join(known)}")
        self._check_bits()
        self._check_experts()

    def _check_bits(self) -> None:
        if self.bits not in _BITS:
            raise ConfigError(f"bits {self.bits} is unknown; known: {', '.join(map(str, _BITS))}")
        if self.bits and (self.hidden % _GROUP or self.mlp % _GROUP):
            raise ConfigError(f"to be quantised, hidden {self.hidden} and mlp {self.mlp} must be multiples of {_GROUP}")

    def _check_experts(self) -> None:
        if not self.experts and not self.experts_per_token:
            return
        if self.architecture != "qwen3":
            raise ConfigError(f"experts are there for qwen3, not for {self.architecture}")
        if not 1 <= self.experts_per_token <= self.experts:
            raise ConfigError(f"a token cannot go to {self.experts_per_token} of {self.experts} experts")

    def config(self) -> dict[str, Any]:
        """The model's config.json."""
        more: dict[str, Any] = {}
        if self.bits:
            more["quantization"] = {"group_size": _GROUP, "bits": self.bits}
        if self.experts:
            more |= {
                "model_type": "qwen3_moe",
                "num_experts": self.experts,
                "num_experts_per_tok": self.experts_per_token,
                "moe_intermediate_size": self.mlp,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
                "norm_topk_prob": True,
            }
        return {
            "model_type": self.architecture,
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.hidden // self.heads,
            "intermediate_size": self.mlp,
            "vocab_size": self.vocab,
            "max_position_embeddings": _CONTEXT,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
            "torch_dtype": self.dtype,
            "bos_token_id": 256,
            "eos_token_id": 256,
            **more,
        }


def make(folder: Path, shape: Shape, *, seed: int = 0, num_files: int = 4) -> int:
    """Write a model's folder and return its number of parameters.

    Raises:
        ConfigError: the folder is not empty, or cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty; a model needs a folder of its own")
        # config.json comes last: a folder that has one is whole.
        num_parameters = _write_weights(folder, shape, seed, num_files)
        _write_tokenizer(folder, shape.vocab)
        _write_json(folder / "config.json", shape.config())
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}") from error
    return num_parameters


def build(shape: Shape, *, seed: int = 0) -> nn.Module:
    """The model of a shape in memory, with the weights that ``make`` would write."""
    model = _lazy(shape, seed)
    for _, array in sorted(tree_flatten(model.parameters()), key=_place):
        mx.eval(array)  # one after the other, so that what they are made of is not in memory at once
    model.eval()
    return model


def _empty(shape: Shape) -> nn.Module:
    model_class, args_class = mlx_lm_utils._get_classes(shape.config())
    model: nn.Module = model_class(args_class.from_dict(shape.config()))
    return model


def _lazy(shape: Shape, seed: int) -> nn.Module:
    """The model with its weights, none of them evaluated."""
    model, dtype = _empty(shape), _DTYPES[shape.dtype]
    tensors = {name: tuple(array.shape) for name, array in sorted(tree_flatten(model.parameters()), key=_place)}
    keys = mx.random.split(mx.random.key(seed), len(tensors))
    named = zip(tensors.items(), keys, strict=True)
    model.load_weights([(name, random_tensor(name, tensor, key).astype(dtype)) for (name, tensor), key in named])
    if shape.bits:
        nn.quantize(model, _GROUP, shape.bits)
    return model


def _write_weights(folder: Path, shape: Shape, seed: int, num_files: int) -> int:
    arrays: dict[str, mx.array] = dict(sorted(tree_flatten(_lazy(shape, seed).parameters()), key=_place))
    total_size, file_of = sum(array.nbytes for array in arrays.values()), dict[str, str]()
    parts = [part.tolist() for part in np.array_split(list(arrays), min(num_files, len(arrays)))]
    for i, names in enumerate(parts, 1):
        file = f"model-{i:05}-of-{len(parts):05}.safetensors"
        mx.save_safetensors(str(folder / file), {name: arrays.pop(name) for name in names}, metadata={"format": "mlx"})
        file_of |= dict.fromkeys(names, file)
    num_parameters: int = sum(array.size for _, array in tree_flatten(_empty(shape).parameters()))
    total = {"total_size": total_size, "total_parameters": num_parameters}
    _write_json(folder / "model.safetensors.index.json", {"metadata": total, "weight_map": file_of})
    return num_parameters


def _place(item: tuple[str, Any]) -> tuple[int, str]:
    """Sort key by layer, so that a stage's tensors are adjacent: embedding, layers, norm and head."""
    name = item[0]
    layer = next((int(part) for part in name.split(".") if part.isdigit()), None)
    return ((-1 if "embed" in name else 2**31) if layer is None else layer), name


def random_tensor(name: str, shape: Sequence[int], key: mx.array) -> mx.array:
    """A weight: norms are 1, biases small, and matrices keep the magnitude of their input."""
    if len(shape) == 1 and "norm" in name:
        return mx.ones(shape)
    scale = 0.02 if len(shape) == 1 else 1.5 / shape[-1] ** 0.5
    return mx.random.normal(shape, key=key) * scale


def byte_tokenizer(vocab: int) -> Tokenizer:
    """Tokens 0 to 255 are the bytes, 256 is the end, and the rest are fillers that no text is encoded to."""
    tokens = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokens[END] = len(tokens)
    tokens |= {f"<{i}>": i for i in range(len(tokens), vocab)}
    tokenizer = Tokenizer(models.BPE(vocab=tokens, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return tokenizer


def _write_tokenizer(folder: Path, vocab: int) -> None:
    (folder / "tokenizer.json").write_text(byte_tokenizer(vocab).to_str(), encoding="utf-8")
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "eos_token": END}
    _write_json(folder / "tokenizer_config.json", {**names, "model_max_length": _CONTEXT})


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """``python scripts/random_model.py FOLDER``, with an option for each size of a ``Shape``."""
    parser = argparse.ArgumentParser("make_bench_model", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("out", type=Path, help="the folder to make; it must not hold anything")
    for each in fields(Shape):
        flag = f"--{each.name.replace('_', '-')}"
        parser.add_argument(flag, type=type(each.default), default=each.default, help=f"{each.default} if not given")
    parser.add_argument("--files", type=int, default=4, help="weight files")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    try:
        shape = Shape(**{each.name: getattr(given, each.name) for each in fields(Shape)})
        num_parameters = make(given.out, shape, seed=given.seed, num_files=max(1, given.files))
    except ConfigError as error:
        sys.exit(f"make_bench_model: {error}")
    stored = f"{shape.bits} bits" if shape.bits else shape.dtype
    sys.stdout.write(
        f"{given.out}: {shape.architecture}, {shape.layers} layers, {num_parameters:,} parameters in {stored}\n"
    )


if __name__ == "__main__":
    main()
