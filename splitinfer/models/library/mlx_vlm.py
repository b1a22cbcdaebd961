"""Loads models with mlx-vlm's classes where mlx-lm has none. It is optional (the extra ``vlm``)."""

import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from splitinfer.models.library import light_imports
from splitinfer.models.library.layers import StandIn

_PACKAGE = "mlx_vlm"


def is_installed() -> bool:
    """Return whether mlx-vlm is there; imports nothing."""
    return _PACKAGE in sys.modules or importlib.util.find_spec(_PACKAGE) is not None


def version() -> str:
    """Return that of mlx-vlm; empty if it is not installed."""
    return importlib.metadata.version("mlx-vlm") if is_installed() else ""


def module(name: str) -> ModuleType:
    """Return one of mlx-vlm's modules, by its name within the package, imported without what a stage does not need."""
    return cast(ModuleType, light_imports.module(_PACKAGE, name))


def whole(folder: Path, origin: Path) -> nn.Module:
    """Return the model of a checkpoint, its weights not read yet; ``language_model`` is the part of it that is cut.

    Some classes read tables from the files by themselves, if they know where these are; they are not told.

    Args:
        origin: where its files are, also afterwards.

    Raises:
        ValueError: it is not asked for one token after another, or a file is missing from which it makes n-grams.
    """
    utils = module("utils")
    architecture, name = utils.get_model_and_args(utils.load_config(folder), folder)
    if hasattr(architecture.ModelConfig, "model_path"):
        architecture.ModelConfig.model_path = property(lambda _self: None, lambda _self, _path: None)
    model: nn.Module = utils.load_model(folder, lazy=True)
    if not hasattr(model, "language_model"):
        raise ValueError(f"{name} has no language model")
    if _fills_in(model):
        raise ValueError(f"{name} fills in many masked tokens at a time, and is not asked for the next one")
    without_detours(with_ngrams(model.language_model, origin))
    return model


def _fills_in(model: nn.Module) -> bool:
    """Return whether a model's answer begins as masked tokens, which it fills in, unless it is asked for one after
    another."""
    config = model.config
    masked = any(getattr(config, each, None) is not None for each in ("mask_token_id", "canvas_length"))
    by_itself = masked and callable(getattr(model.language_model, "generate", None))
    return by_itself and getattr(config, "default_generation_mode", None) != "ar"


def without_detours(model: nn.Module) -> nn.Module:
    """Return a language model that always calls its layers. Some decode single rows by another road than their layers'
    own calls, which a cut replaces; they have a question for whether they may, and the answer is no."""
    if hasattr(model, "_supports_batch_invariant_decode"):
        model._supports_batch_invariant_decode = lambda: False
    return model


def with_ngrams(model: nn.Module, origin: Path) -> nn.Module:
    """Return a language model that knows which n-grams its tokens are, if it has any: else it would leave them out
    silently.

    Raises:
        ValueError: the files for it are not in ``origin``.
    """
    if getattr(model, "layout", None) is not None and hasattr(model, "_ensure_engram_hash"):
        model._engram_source = origin
        model._ensure_engram_hash()
        if model.engram_hash is None:
            raise ValueError(f"{origin} has neither engram_token_map.json nor tokenizer.json")
    return model


def hash_on_host(model: nn.Module) -> None:
    """From now on tell a model's n-grams as numbers of the host, if all rows that it looks up by them are in files.
    They are computed at once and not on the device, behind whose work that would wait."""
    engrams = [layer.engram for layer in model.layers if getattr(layer, "engram", None) is not None]
    if getattr(model, "engram_hash", None) is not None and all(isinstance(e.embed, StandIn) for e in engrams):
        hashed = model.engram_hash

        def on_host(*args: Any, **kwargs: Any) -> np.ndarray:
            with mx.stream(mx.cpu):
                return np.array(hashed(*args, **kwargs))

        model.engram_hash = on_host
