"""The drafter in PyTorch, as ``splitinfer.models.drafters.eagle3`` runs it, and many chains of its drafts at once."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu

from demo_training.drafter.target import Target, rotate


@dataclass(frozen=True)
class Shape:
    """The sizes of a drafter beside its target's; ``taps``: the layers behind which hidden states are taken."""

    taps: tuple[int, ...] = (2, 5, 8, 11)
    ffn: int = 1024
    heads: int = 6
    kv_heads: int = 2
    width: int = 64  # of a head


class Drafter(nn.Module):  # type: ignore[misc]
    """One decoder layer, with a head of its own that begins as the target's."""

    def __init__(self, shape: Shape, target: Target) -> None:
        super().__init__()
        size, self.shape, self.config = target.config["hidden_size"], shape, target.config
        self.embedding = target.embedding
        sizes = {
            "fc": (size, size * len(shape.taps)),
            "q_proj": (shape.heads * shape.width, 2 * size),
            "k_proj": (shape.kv_heads * shape.width, 2 * size),
            "v_proj": (shape.kv_heads * shape.width, 2 * size),
            "o_proj": (size, shape.heads * shape.width),
            "gate_proj": (shape.ffn, size),
            "up_proj": (shape.ffn, size),
            "down_proj": (size, shape.ffn),
        }
        for name, (rows, columns) in sizes.items():
            small = 0.1 if name in ("o_proj", "down_proj") else 1.0
            setattr(self, name, nn.Parameter(torch.randn(rows, columns) * small * columns**-0.5))
        with torch.no_grad():  # its hidden states begin as the target's last ones, for which the head was made
            self.fc *= 0.1
            self.fc[:, -size:] += torch.eye(size)
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            setattr(self, name, nn.Parameter(torch.ones(size)))
        self.norm = nn.Parameter(target.weights["model.norm.weight"].float())
        self.lm_head = nn.Parameter(target.embedding.float())

    def forward(self, tokens: Tensor, hidden: Tensor, bases: Tensor, depth: int) -> Tensor:
        """[depth, batch, chains, vocabulary] logits of chains of drafts, in bfloat16.

        The entry of token i is made of it and hidden state i - 1, and predicts token i + 1. A chain begins at an entry
        of the target's hidden states and sees those before it; further ones are made of its own hidden states.

        Args:
            tokens: [batch, T]; ``hidden``: [batch, T, taps * d].
            bases: [batch, chains], the entries where the chains begin.
        """
        known = self._linear("fc", hidden)
        known = torch.cat([torch.zeros_like(known[:, :1]), known[:, :-1]], 1)
        x = self._joined(tokens, known)
        places = torch.arange(tokens.shape[1])
        keys, values = self._turned("k_proj", x, places), self._heads("v_proj", x)
        blind = ((places > bases[..., None]) | (places == 0))[:, None]  # [batch, 1, chains, T]; none sees the first
        hidden, found = known.gather(1, bases[..., None].expand(-1, -1, known.shape[-1])), []
        own: list[tuple[Tensor, Tensor]] = []
        for step in range(depth):
            at = bases + step
            x = self._joined(tokens.gather(1, at), hidden)
            if step:
                own.append((self._turned("k_proj", x, at), self._heads("v_proj", x)))
            hidden = hidden + self._attend(self._turned("q_proj", x, at), keys, values, own, blind)
            x = self._norm("post_attention_layernorm", hidden)
            hidden = hidden + self._linear("down_proj", silu(self._linear("gate_proj", x)) * self._linear("up_proj", x))
            found.append(self._linear("lm_head", self._norm("norm", hidden)))
        return torch.stack(found)

    def _joined(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        return torch.cat([self._norm("input_layernorm", self.embedding[tokens]), self._norm("hidden_norm", hidden)], -1)

    def _attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, own: list[tuple[Tensor, Tensor]], blind: Tensor
    ) -> Tensor:
        """Attention over the entries before a chain, and the chain's own."""
        batch, heads, chains, width = queries.shape
        shared = keys.shape[1]
        rows = queries.view(batch, shared, -1, width) * width**-0.5
        scores = (rows @ keys.transpose(2, 3)).view(batch, heads, chains, -1).masked_fill(blind, -torch.inf)
        grouped = rows.view(batch, shared, -1, chains, width)
        mine = [(grouped * k[:, :, None]).sum(-1).view(batch, heads, chains, 1) for k, _ in own]
        shares = torch.cat([scores, *mine], -1).softmax(-1)
        before = shares[..., : keys.shape[2]].reshape(batch, shared, -1, keys.shape[2])
        found = (before @ values).view(batch, shared, -1, chains, width)
        for i, (_, v) in enumerate(own):
            share = shares[..., keys.shape[2] + i].view(batch, shared, -1, chains, 1)
            found = found + share * v[:, :, None]
        return self._linear("o_proj", found.view(batch, heads, chains, width).transpose(1, 2).flatten(2))

    def _heads(self, name: str, x: Tensor) -> Tensor:
        """[batch, heads, n, width]."""
        return self._linear(name, x).unflatten(-1, (-1, self.shape.width)).transpose(1, 2)

    def _turned(self, name: str, x: Tensor, positions: Tensor) -> Tensor:
        return rotate(self._heads(name, x), positions, self.config["rope_theta"])

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return linear(x, getattr(self, name).bfloat16())

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, x.shape[-1:], getattr(self, name).bfloat16(), self.config["rms_norm_eps"])

    def saved(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors in float16 by their usual names, and the config.json."""
        places = {name: f"midlayer.self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
        places |= {name: f"midlayer.mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")}
        places |= {n: f"midlayer.{n}.weight" for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
        tensors = {places.get(n, f"{n}.weight"): w.detach().half().contiguous() for n, w in self.named_parameters()}
        kept = ("hidden_size", "vocab_size", "rope_theta", "rms_norm_eps", "max_position_embeddings", "torch_dtype")
        return tensors, {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "intermediate_size": self.shape.ffn,
            "num_attention_heads": self.shape.heads,
            "num_key_value_heads": self.shape.kv_heads,
            "head_dim": self.shape.width,
            **{name: self.config[name] for name in kept},
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(self.shape.taps)},
        }
