"""Imports modules of mlx-lm and mlx-vlm without the dependencies that a stage does not need.

Their packages import transformers, the hub's client, OpenCV and servers. That takes seconds, and more memory than all
else that a worker has before its weights. So their modules are imported without them (``light_package``). All that
modules import at their top, except MLX, NumPy and the standard library, becomes a promise (``_Later``), which is
imported at its first use. Nothing exists twice.

In mlx-vlm's modules ``eval`` and ``async_eval`` do nothing, because they would cut the graph into pieces. And MLX does
not check indices: Qwen4's indexer uses -1 for blocks that it does not choose, and would write before a mask's memory
(``qwen4_exp.build_mask``).
"""

import builtins
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx

from splitinfer.light_package import register

_VLM = "mlx_vlm."
_WITH_PROMISES = (_VLM, "mlx_lm.utils")  # prefixes of the modules that get promises
_AT_ONCE = {*sys.stdlib_module_names, "mlx", "numpy"}
_NOT_FOR_STAGES = ("process", "image_process", "tokenizer_utils", "trainer", "generate")  # prefixes of module names


class _Later:
    """A name that is imported at its first use: when it is called, or a base class, or in ``isinstance``."""

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


def _is_later(name: str, package: str) -> bool:
    """Return whether ``name``, which a module of ``package`` imports, is imported only when it is used."""
    top, _, rest = name.partition(".")
    if top != package:
        return top not in _AT_ONCE
    return any(part.startswith(_NOT_FOR_STAGES) for part in rest.split("."))


def _import(
    name: str,
    variables: Mapping[str, Any] | None = None,
    _local: Any = None,
    wanted: Sequence[str] | None = None,
    level: int = 0,
) -> Any:
    """Act as ``__import__`` for modules that get promises."""
    package = (variables or {}).get("__package__") or ""
    full, own = importlib.util.resolve_name("." * level + name, package) if level else name, package.partition(".")[0]
    if _is_later(full, own):
        return _Later(full if wanted else full.partition(".")[0])
    later = [one for one in wanted or () if full.startswith(own) and _is_later(f"{full}.{one}", own)]
    now = [one for one in wanted or () if one not in later]
    found = builtins.__import__(name, variables, _local, now or (wanted and ("__name__",)), level)
    for one in later:
        vars(found).setdefault(one, _Later(f"{full}.{one}"))
    return found


def _nothing(*_arrays: Any) -> None:
    """Act as ``eval`` and ``async_eval`` of mlx-vlm's modules: do nothing."""


def _put_along_axis(array: mx.array, indices: mx.array, values: mx.array, axis: int | None = None) -> mx.array:
    """Act as ``mx.put_along_axis``, but write values with an index before the array to its first entry."""
    if mx.issubdtype(indices.dtype, mx.signedinteger):
        indices = mx.maximum(indices, -(array.size if axis is None else array.shape[axis]))
    return mx.put_along_axis(array, indices, values, axis)


_BUILTINS = {**vars(builtins), "__import__": _import}
_mx = SimpleNamespace(**{**vars(mx), "eval": _nothing, "async_eval": _nothing, "put_along_axis": _put_along_axis})


@contextmanager
def experiments() -> Iterator[None]:
    """Let modules be tried with gradients and with wrong counts, during the ``with`` block: no gradient goes through a
    choice of numbers, for which MLX has none, and attention with heads that do not divide, on which MLX divides by
    zero, raises ValueError."""
    names = ("argpartition", "argsort", "argmax", "argmin")
    attend = mx.fast.scaled_dot_product_attention
    before = [(place, name, getattr(place, name)) for place in (mx, _mx) for name in names]
    try:
        for place, name, choose in before:
            setattr(place, name, partial(_stopped, choose))
        mx.fast.scaled_dot_product_attention = partial(_checked, attend)
        yield
    finally:
        mx.fast.scaled_dot_product_attention = attend
        for place, name, choose in before:
            setattr(place, name, choose)


def _checked(attend: Any, queries: mx.array, keys: mx.array, values: mx.array, **more: Any) -> mx.array:
    if queries.shape[1] % keys.shape[1] or queries.shape[1] < keys.shape[1]:
        raise ValueError(f"{queries.shape[1]} heads of queries and {keys.shape[1]} of keys")
    result: mx.array = attend(queries, keys, values, **more)
    return result


def _stopped(choose: Any, *args: Any, **kwargs: Any) -> mx.array:
    return mx.stop_gradient(choose(*args, **kwargs))


class _Loader(SourceFileLoader):
    """Runs a module's code with ``_import``, and mlx-vlm's modules also with ``_mx``."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the module's code."""
        vars(module)["__builtins__"] = _BUILTINS
        super().exec_module(module)
        if module.__name__.startswith(_VLM) and getattr(module, "mx", None) is mx:
            vars(module)["mx"] = _mx


class _Finder(MetaPathFinder):
    """Makes ``_Loader`` load the modules that get promises."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module that gets promises, and ``None`` for every other module."""
        if not fullname.startswith(_WITH_PROMISES) or _is_later(fullname, fullname.partition(".")[0]):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def module(package: str, name: str) -> Any:
    """Import and return the module ``name`` of a package."""
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"  # as mlx-lm's own __init__ does
    register(package)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    return importlib.import_module(f"{package}.{name}")
