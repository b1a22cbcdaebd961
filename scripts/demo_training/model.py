"""The model that is trained: mlx-lm's own ``llama``, so training and loading share one implementation."""

import math
from dataclasses import asdict, dataclass
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models import llama

from splitinfer.errors import ConfigError

MAX_POSITIONS = 4096

Model = Any  # mlx-lm has no types


@dataclass(frozen=True)
class Shape:
    """The sizes of one model."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int

    def check(self) -> None:
        """Refuse sizes that make no model.

        Raises:
            ConfigError: one is below 1, or heads do not divide evenly.
        """
        if min(asdict(self).values()) < 1:
            raise ConfigError(f"every size of a model must be at least 1, not {asdict(self)}.")
        if self.hidden % (2 * self.heads):
            raise ConfigError(f"{self.hidden} hidden units do not make {self.heads} heads of an even size.")
        if self.heads % self.kv_heads:
            raise ConfigError(f"{self.heads} heads cannot share {self.kv_heads} key-value heads evenly.")

    def config(self, vocab: int) -> dict[str, Any]:
        """The config.json of such a model."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "intermediate_size": self.ffn,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": vocab,
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": MAX_POSITIONS,
            "tie_word_embeddings": True,
            "torch_dtype": "float16",
            "bos_token_id": 0,
            "eos_token_id": 0,
        }


def build(config: dict[str, Any], seed: int) -> Model:
    """An untrained model: small normal matrices, smaller ones where a layer adds to the residual stream."""
    mx.random.seed(seed)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    residual_std = 0.02 / math.sqrt(2 * config["num_hidden_layers"])

    def draw(path: str, weight: mx.array) -> mx.array:
        if weight.ndim < 2:
            return mx.ones_like(weight)
        std = residual_std if path.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
        return mx.random.normal(weight.shape, scale=std)

    model.update(tree_map_with_path(draw, model.parameters()))
    mx.eval(model.parameters())
    return model


def named(model: Model) -> dict[str, mx.array]:
    """Every weight by the name that it is saved under."""
    return dict(tree_flatten(model.parameters()))


def on_gpu() -> bool:
    return mx.default_device().type == mx.gpu


def number(scalar: mx.array) -> float:
    return cast(float, scalar.item())
