"""Loads models with mlx-vlm's classes if mlx-lm has none for them. mlx-vlm is optional (the extra ``vlm``)."""

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
    """Return whether mlx-vlm is installed, without importing it."""
    return _PACKAGE in sys.modules or importlib.util.find_spec(_PACKAGE) is not None


def version() -> str:
    """Return the version of mlx-vlm, or an empty string if it is not installed."""
    return importlib.metadata.version("mlx-vlm") if is_installed() else ""


def module(name: str) -> ModuleType:
    """Import and return a module of mlx-vlm by its name within the package (``light_imports``)."""
    return cast(ModuleType, light_imports.module(_PACKAGE, name))


def whole(folder: Path, origin: Path) -> nn.Module:
    """Return the model of a checkpoint, its weights not read yet. Its part ``language_model`` is the one to cut.

    Some classes would read tables from the files themselves; they are not told where these are.

    Args:
        folder: a folder with the configuration, used only during the call.
        origin: the folder of the model's files, used also afterwards.

    Raises:
        ValueError: it does not generate token by token, has no language model, or lacks a file for its n-grams.
    """
    utils = module("utils")
    architecture, name = utils.get_model_and_args(utils.load_config(folder), folder)
    if hasattr(architecture.ModelConfig, "model_path"):
        architecture.ModelConfig.model_path = property(lambda _self: None, lambda _self, _path: None)
    model: nn.Module = utils.load_model(folder, lazy=True)
    if not hasattr(model, "language_model"):
        raise ValueError(f"{name} has no language model")
    if _fills_in(model):
        raise ValueError(f"{name} fills in many masked tokens at a time, so it cannot generate token by token")
    without_detours(with_ngrams(model.language_model, origin))
    return model


def _fills_in(model: nn.Module) -> bool:
    """Return whether a model by default generates an answer by filling in masked tokens, not token by token."""
    config = model.config
    masked = any(getattr(config, each, None) is not None for each in ("mask_token_id", "canvas_length"))
    by_itself = masked and callable(getattr(model.language_model, "generate", None))
    return by_itself and getattr(config, "default_generation_mode", None) != "ar"


def without_detours(model: nn.Module) -> nn.Module:
    """Return a language model, changed so that it always calls its layers. Some models decode single rows without
    calling their layers, which a cut replaces; they ask a method of their own whether they may, and it now answers
    no."""
    if hasattr(model, "_supports_batch_invariant_decode"):
        model._supports_batch_invariant_decode = lambda: False
    return model


def with_ngrams(model: nn.Module, origin: Path) -> nn.Module:
    """Return a language model, changed so that it can look up its n-grams, if it has any. Otherwise it would leave them
    out silently.

    Raises:
        ValueError: ``origin`` lacks the files for n-grams.
    """
    if getattr(model, "layout", None) is not None and hasattr(model, "_ensure_engram_hash"):
        model._engram_source = origin
        model._ensure_engram_hash()
        if model.engram_hash is None:
            raise ValueError(f"{origin} has neither engram_token_map.json nor tokenizer.json")
    return model


def hash_on_host(model: nn.Module) -> None:
    """Compute a model's n-grams on the host from now on, if all rows that it looks up with them are in files. On the
    device they would wait for earlier work."""
    engrams = [layer.engram for layer in model.layers if getattr(layer, "engram", None) is not None]
    if getattr(model, "engram_hash", None) is not None and all(isinstance(e.embed, StandIn) for e in engrams):
        hashed = model.engram_hash

        def on_host(*args: Any, **kwargs: Any) -> np.ndarray:
            with mx.stream(mx.cpu):
                return np.array(hashed(*args, **kwargs))

        model.engram_hash = on_host
