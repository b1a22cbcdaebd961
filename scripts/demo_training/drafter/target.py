"""The target in PyTorch: as mlx-lm's ``llama`` computes it, with the hidden states behind some of its layers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """The rotary embedding of [batch, heads, T, d] at positions [T] or [batch, T]: of halves, not of pairs."""
    half = x.shape[-1] // 2
    angles = positions[..., None].float() * theta ** (-torch.arange(half) / half)
    angles = angles[:, None] if angles.ndim == 3 else angles
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Target:
    """A llama of few layers, for so many sequences of at most ``length`` tokens at once."""

    def __init__(self, folder: Path, config: dict[str, Any], taps: Sequence[int]) -> None:
        self.weights = {name: w.bfloat16() for name, w in load_file(folder / "model.safetensors").items()}
        self.config, self.taps = config, list(taps)
        self.embedding = self.weights["model.embed_tokens.weight"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.width = config["hidden_size"] // self.heads

    def caches(self, batch: int, length: int) -> list[tuple[Tensor, Tensor]]:
        shape = (batch, self.kv_heads, length, self.width)
        empty = [torch.zeros(shape, dtype=torch.bfloat16) for _ in range(2 * self.config["num_hidden_layers"])]
        return list(zip(empty[::2], empty[1::2], strict=True))

    def __call__(self, tokens: Tensor, at: int, caches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """[batch, T, taps * d] of tokens [batch, T] that begin at position ``at``."""
        hidden, kept = self.embedding[tokens], []
        for layer, cache in enumerate(caches):
            name = f"model.layers.{layer}."
            hidden = hidden + self._attend(name + "self_attn.", self._norm(hidden, name + "input_layernorm"), at, cache)
            x = self._norm(hidden, name + "post_attention_layernorm")
            gate, up = (linear(x, self.weights[f"{name}mlp.{part}_proj.weight"]) for part in ("gate", "up"))
            hidden = hidden + linear(silu(gate) * up, self.weights[f"{name}mlp.down_proj.weight"])
            if layer in self.taps:
                kept.append(hidden)
        return torch.cat(kept, -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., vocabulary] from hidden states behind the last layer."""
        return linear(self._norm(hidden, "model.norm"), self.embedding)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.config["rms_norm_eps"])

    def _attend(self, name: str, x: Tensor, at: int, cache: tuple[Tensor, Tensor]) -> Tensor:
        batch, n, _ = x.shape
        q, k, v = (
            linear(x, self.weights[f"{name}{part}_proj.weight"]).view(batch, n, -1, self.width).transpose(1, 2)
            for part in "qkv"
        )
        positions, theta = torch.arange(at, at + n), self.config["rope_theta"]
        cache[0][:, :, at : at + n] = rotate(k, positions, theta)
        cache[1][:, :, at : at + n] = v
        keys, values = (part[:, :, : at + n] for part in cache)
        rows = rotate(q, positions, theta).reshape(batch, self.kv_heads, -1, self.width)  # heads that share keys
        visible = torch.ones(n, at + n, dtype=torch.bool).tril(at).repeat(self.heads // self.kv_heads, 1)
        scores = (rows @ keys.transpose(2, 3) * self.width**-0.5).masked_fill(~visible, -torch.inf)
        found = (scores.softmax(-1) @ values).view(batch, self.heads, n, self.width)
        return linear(found.transpose(1, 2).reshape(batch, n, -1), self.weights[f"{name}o_proj.weight"])
