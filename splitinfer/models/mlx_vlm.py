"""Loads models with mlx-vlm's classes where mlx-lm has none, and imports them as lightly as mlx-lm's.

mlx-vlm is optional (the extra ``vlm``). Its package imports OpenCV, audio, transformers, servers and trainers, which
takes seconds and hundreds of megabytes. A stage needs only the classes of models. So ``mlx_vlm`` is put into
``sys.modules`` without its ``__init__`` having run, which runs when code first reads a name of it; and while one of its
modules is imported, everything that is neither MLX, NumPy nor the standard library is replaced by a promise
(``_Later``), which imports it when it is first used. No class of a language model uses any of it.

Models that evaluate arrays while they are called cut their graph into pieces. They do it to start the GPU early; an
engine evaluates a step when its graph is complete. So in mlx-vlm's modules ``eval`` and ``async_eval`` do nothing.

MLX checks no index. Qwen4's indexer has -1 for each block that it does not choose, and writes into a mask at all of
that block's tokens, which for a prompt shorter than a block lie before the mask's memory. What was there was the
allocator's, so MLX counted petabytes as held, and launched nothing ahead from then on. (mlx-vlm,
``qwen4_exp.build_mask``)
"""

import builtins
import importlib
import importlib.metadata
import importlib.util
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from splitinfer.models.layers import StandIn

_PACKAGE = "mlx_vlm"
_AT_ONCE = {*sys.stdlib_module_names, "mlx", "numpy"}
_NOT_FOR_STAGES = ("process", "image_process", "tokenizer_utils", "trainer", "generate")  # how its modules' names begin
_loading = threading.Lock()


class _Later:
    """A name that is imported when it is first used: called, read from, or derived from."""

    def __init__(self, module: str, name: str = "") -> None:
        self._module, self._name = module, name

    def _real(self) -> Any:
        found: Any = importlib.import_module(self._module)
        for part in filter(None, self._name.split(".")):
            if not hasattr(found, part):
                importlib.import_module(f"{found.__name__}.{part}")
            found = getattr(found, part)
        return found

    def __getattr__(self, name: str) -> "_Later":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Later(self._module, f"{self._name}.{name}".lstrip("."))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._real()(*args, **kwargs)

    def __mro_entries__(self, _bases: Any) -> tuple[Any, ...]:
        return (self._real(),)

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self._real())

    def __or__(self, _other: Any) -> Any:  # in annotations
        return Any

    __ror__ = __or__


def _is_later(name: str) -> bool:
    """Whether a module, by its full name, is imported only when it is used."""
    top, _, rest = name.partition(".")
    if top != _PACKAGE:
        return top not in _AT_ONCE
    return any(part.startswith(_NOT_FOR_STAGES) for part in rest.split("."))


def _import(
    name: str,
    variables: Mapping[str, Any] | None = None,
    _local: Any = None,
    wanted: Sequence[str] | None = None,
    level: int = 0,
) -> Any:
    """``__import__`` for mlx-vlm's modules."""
    package = (variables or {}).get("__package__") or ""
    full = importlib.util.resolve_name("." * level + name, package) if level else name
    if _is_later(full):
        return _Later(full if wanted else full.partition(".")[0])
    later = [one for one in wanted or () if full.startswith(_PACKAGE) and _is_later(f"{full}.{one}")]
    now = [one for one in wanted or () if one not in later]
    found = builtins.__import__(name, variables, _local, now or (wanted and ("__name__",)), level)
    for one in later:
        vars(found).setdefault(one, _Later(f"{full}.{one}"))
    return found


def _nothing(*_arrays: Any) -> None:
    """``eval`` and ``async_eval`` of mlx-vlm's modules."""


def _put_along_axis(array: mx.array, indices: mx.array, values: mx.array, axis: int | None = None) -> mx.array:
    """``put_along_axis`` that writes nowhere before the array: what would be there goes to its first entry."""
    if mx.issubdtype(indices.dtype, mx.signedinteger):
        indices = mx.maximum(indices, -(array.size if axis is None else array.shape[axis]))
    return mx.put_along_axis(array, indices, values, axis)


_BUILTINS = {**vars(builtins), "__import__": _import}
_mx = SimpleNamespace(**{**vars(mx), "eval": _nothing, "async_eval": _nothing, "put_along_axis": _put_along_axis})


class _Loader(SourceFileLoader):
    """Runs one module's code with ``_import`` and ``_mx``."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code."""
        vars(module)["__builtins__"] = _BUILTINS
        super().exec_module(module)
        if getattr(module, "mx", None) is mx:
            vars(module)["mx"] = _mx


class _Finder(MetaPathFinder):
    """Has the modules below ``mlx_vlm`` that a stage imports loaded by ``_Loader``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's spec; ``None`` for every other module."""
        if not fullname.startswith(f"{_PACKAGE}.") or _is_later(fullname):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def is_installed() -> bool:
    """Whether mlx-vlm is there; imports nothing."""
    return _PACKAGE in sys.modules or importlib.util.find_spec(_PACKAGE) is not None


def version() -> str:
    """That of mlx-vlm; empty if it is not installed."""
    return importlib.metadata.version("mlx-vlm") if is_installed() else ""


def module(name: str) -> ModuleType:
    """One of mlx-vlm's modules, by its name within the package, imported without what a stage does not need."""
    with _loading:
        if _PACKAGE not in sys.modules:
            _register()
    return importlib.import_module(f"{_PACKAGE}.{name}")


def whole(folder: Path, origin: Path) -> nn.Module:
    """The model of a checkpoint, its weights not read yet; ``language_model`` is the part of it that is cut.

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
    """Whether a model's answer begins as masked tokens, which it fills in, unless it is asked for one after another."""
    config = model.config
    masked = any(getattr(config, each, None) is not None for each in ("mask_token_id", "canvas_length"))
    by_itself = masked and callable(getattr(model.language_model, "generate", None))
    return by_itself and getattr(config, "default_generation_mode", None) != "ar"


def without_detours(model: nn.Module) -> nn.Module:
    """A language model that always calls its layers. Some decode single rows by another road than their layers' own
    calls, which a cut replaces; they have a question for whether they may, and the answer is no."""
    if hasattr(model, "_supports_batch_invariant_decode"):
        model._supports_batch_invariant_decode = lambda: False
    return model


def with_ngrams(model: nn.Module, origin: Path) -> nn.Module:
    """A language model that knows which n-grams its tokens are, if it has any: else it would leave them out silently.

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


def _register() -> None:
    spec = importlib.util.find_spec(_PACKAGE)
    assert spec is not None
    assert spec.loader is not None
    package, loader = importlib.util.module_from_spec(spec), spec.loader
    waiting = [True]

    def complete(name: str) -> Any:
        if name.startswith("__") or not waiting:
            raise AttributeError(f"module {_PACKAGE!r} has no attribute {name!r}")
        waiting.clear()
        loader.exec_module(package)
        return getattr(package, name)

    vars(package)["__getattr__"] = complete
    sys.meta_path.insert(0, _Finder())
    sys.modules[_PACKAGE] = package
