"""The models of a server as Ollama describes them, from a checkpoint's configuration and table of tensors."""

import hashlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from math import prod
from typing import Any

from splitinfer.common.model_config import mapping, positive, text_part
from splitinfer.llm.prompts import tokenizer_of
from splitinfer.llm.seeing import may_see
from splitinfer.models.folder.checkpoint import Checkpoint
from splitinfer.models.folder.hub import open_model
from splitinfer.server.health import Offer
from splitinfer.server.ollama.writer import moment

_ALL_LAYERS = 1 << 20  # on one stage, so its vision part is there
_NEVER = 4102444800.0  # 2100-01-01, if it is never unloaded: clients expect a time

_opened = lru_cache(maxsize=64)(open_model)


def listed(offer: Offer, started: float) -> dict[str, Any]:
    """Return the entry of `/api/tags`. ``started``: when the server did, in seconds since 1970.

    Raises:
        ModelError: the model is not there any more.
    """
    return {"name": offer.name, "model": offer.name, "modified_at": moment(started), **_described(offer.model)}


def running(offer: Offer) -> dict[str, Any]:
    """Return the entry of `/api/ps`. Raises ModelError: as ``listed``."""
    described, until = _described(offer.model), _NEVER if offer.rests_until is None else offer.rests_until
    named = {"name": offer.name, "model": offer.name, **described, "size_vram": described["size"]}
    return {**named, "expires_at": moment(until), "context_length": offer.context}


def shown(offer: Offer, started: float) -> dict[str, Any]:
    """Return the document of `/api/show`. Raises ModelError: as ``listed``."""
    checkpoint, family = _opened(offer.model), _family(_opened(offer.model))
    template, capabilities = _template_and_capabilities(offer.model)
    numbers = {
        "block_count": positive(checkpoint.config, "num_hidden_layers", "n_layers", "n_layer"),
        "embedding_length": positive(checkpoint.config, "hidden_size", "dim", "n_embd"),
        "context_length": offer.context,
    }
    general = {"architecture": family, "basename": offer.name, "parameter_count": sum(_parameters(checkpoint))}
    return {
        "modelfile": "",
        "parameters": "",
        "template": template,
        "details": _described(offer.model)["details"],
        "model_info": {
            **{f"general.{name}": value for name, value in general.items()},
            **{f"{family}.{name}": value for name, value in numbers.items() if value is not None},
        },
        "capabilities": capabilities,
        "modified_at": moment(started),
    }


@lru_cache(maxsize=64)
def _described(model: str) -> Mapping[str, Any]:
    """Return the constant part that all documents share."""
    checkpoint = _opened(model)
    bits, tensors = positive(mapping(checkpoint.config, "quantization"), "bits"), checkpoint.tensors.values()
    family, number = _family(checkpoint), sum(_parameters(checkpoint))
    details = {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": f"{number / 1e9:.1f}B" if number >= 1e9 else f"{number / 1e6:.1f}M",
        "quantization_level": f"Q{bits}" if bits else max(tensors, key=lambda each: each.nbytes).dtype,
    }
    digest = hashlib.sha256(checkpoint.fingerprint().digest().encode()).hexdigest()
    return {"size": sum(each.nbytes for each in tensors), "digest": digest, "details": details}


@lru_cache(maxsize=64)
def _template_and_capabilities(model: str) -> tuple[str, list[str]]:
    """Return a model's chat template, and its capabilities in Ollama's words."""
    checkpoint, found = _opened(model), ["completion"]
    tokenizer = tokenizer_of(checkpoint)
    if tokenizer is not None and tokenizer.writes_turns:
        found.append("tools")
    if tokenizer is not None and tokenizer.thinking is not None:
        found.append("thinking")
    if may_see(checkpoint, None, _ALL_LAYERS):
        found.append("vision")
    return "" if tokenizer is None else tokenizer.info["chat_template"] or "", found


def _family(checkpoint: Checkpoint) -> str:
    return str(text_part(checkpoint.config).get("model_type") or "unknown")


def _parameters(checkpoint: Checkpoint) -> Iterator[int]:
    """Yield the number of parameters in each tensor. A quantised tensor counts the weights that it represents."""
    bits = positive(mapping(checkpoint.config, "quantization"), "bits") or 32
    for each in checkpoint.tensors.values():
        if not each.name.endswith((".scales", ".biases")):
            yield prod(each.shape) * (32 if each.dtype == "U32" else bits) // bits
