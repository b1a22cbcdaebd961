"""The models of a server as Ollama describes them. What is read of a checkpoint is its configuration and its tables."""

import hashlib
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any

from splitinfer.core.model_config import positive, text_part
from splitinfer.llm.prompts import tokenizer_of
from splitinfer.llm.seeing import may_see
from splitinfer.models.checkpoint import Checkpoint
from splitinfer.models.hub import open_model
from splitinfer.server.health import Offer
from splitinfer.server.ollama.writer import moment
from splitinfer.text.tokenizer import Tokenizer

_ALL_LAYERS = 1 << 20  # on one stage: what sees is there
_NEVER = 4102444800.0  # 2100-01-01, for what is never unloaded: clients want a time


@dataclass(frozen=True)
class Described:
    """What does not change of a model."""

    checkpoint: Checkpoint

    @cached_property
    def size(self) -> int:
        return sum(each.nbytes for each in self.checkpoint.tensors.values())

    @cached_property
    def num_parameters(self) -> int:
        """Of quantised weights, those that they stand for."""
        bits = positive(self.checkpoint.config.get("quantization") or {}, "bits") or 32
        found = self.checkpoint.tensors.values()
        numbers = [
            prod(each.shape) * 32 // bits if each.dtype == "U32" else prod(each.shape)
            for each in found
            if not each.name.endswith((".scales", ".biases"))
        ]
        return sum(numbers)

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.checkpoint.fingerprint().digest().encode()).hexdigest()

    @property
    def family(self) -> str:
        return str(text_part(self.checkpoint.config).get("model_type") or "unknown")

    @property
    def details(self) -> dict[str, Any]:
        config = self.checkpoint.config
        bits = positive(config.get("quantization") or {}, "bits")
        largest = max(self.checkpoint.tensors.values(), key=lambda each: each.nbytes)
        return {
            "parent_model": "",
            "format": "safetensors",
            "family": self.family,
            "families": [self.family],
            "parameter_size": in_words(self.num_parameters),
            "quantization_level": largest.dtype if bits is None else f"Q{bits}",
        }

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        return tokenizer_of(self.checkpoint)

    @cached_property
    def capabilities(self) -> list[str]:
        """What clients may ask of it, in Ollama's words."""
        tokenizer, found = self.tokenizer, ["completion"]
        if tokenizer is not None and tokenizer.writes_turns and tokenizer.no_tools is None:
            found.append("tools")
        if tokenizer is not None and tokenizer.thinking is not None:
            found.append("thinking")
        return [*found, "vision"] if may_see(self.checkpoint, None, _ALL_LAYERS) else found

    def info(self, offer: Offer) -> dict[str, Any]:
        config, family = self.checkpoint.config, self.family
        numbers = {
            "block_count": positive(config, "num_hidden_layers", "n_layers", "n_layer"),
            "embedding_length": positive(config, "hidden_size", "dim", "n_embd"),
            "attention.head_count": positive(config, "num_attention_heads", "n_heads", "n_head"),
            "context_length": offer.context,
        }
        return {
            "general.architecture": family,
            "general.basename": offer.name,
            "general.parameter_count": self.num_parameters,
            **{f"{family}.{name}": value for name, value in numbers.items() if value is not None},
        }


@lru_cache(maxsize=64)
def described(model: str) -> Described:
    """Raises ModelError: it is not there any more."""
    return Described(open_model(model))


def in_words(number: int) -> str:
    """A number of parameters.

    >>> in_words(7_615_616_512), in_words(5_100_000), in_words(900)
    ('7.6B', '5.1M', '0.9K')
    """
    for unit, name in ((1e9, "B"), (1e6, "M")):
        if number >= unit:
            return f"{number / unit:.1f}{name}"
    return f"{number / 1e3:.1f}K"


def listed(offer: Offer, started: float) -> dict[str, Any]:
    """The entry of `/api/tags`. ``started``: when the server did, in seconds since 1970."""
    one = described(offer.model)
    named = {"name": offer.name, "model": offer.name, "modified_at": moment(started)}
    return {**named, "size": one.size, "digest": one.digest, "details": one.details}


def running(offer: Offer) -> dict[str, Any]:
    """The entry of `/api/ps`."""
    one, until = described(offer.model), _NEVER if offer.rests_until is None else offer.rests_until
    named = {"name": offer.name, "model": offer.name, "size": one.size, "digest": one.digest, "details": one.details}
    return {**named, "expires_at": moment(until), "size_vram": one.size, "context_length": offer.context}


def shown(offer: Offer, started: float) -> dict[str, Any]:
    """The document of `/api/show`."""
    one = described(offer.model)
    template = None if one.tokenizer is None else one.tokenizer.info.get("chat_template")
    return {
        "modelfile": "",
        "parameters": "",
        "template": template or "",
        "details": one.details,
        "model_info": one.info(offer),
        "capabilities": one.capabilities,
        "modified_at": moment(started),
    }
