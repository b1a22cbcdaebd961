"""Imports what stages use of mlx-lm without importing mlx-lm's package.

``mlx_lm/__init__`` imports transformers and the Hugging Face hub's client, which takes a second and more memory than
everything else a worker has before its weights. A stage needs neither. So the subpackage ``mlx_lm.models`` and the
module ``mlx_lm.sample_utils`` are put into ``sys.modules`` under their own names, made from their own files, while
``mlx_lm`` itself stays unimported; modules below ``mlx_lm.models`` are then imported as usual, for example
``import mlx_lm.models.llama``. Nothing exists twice: code that imports ``mlx_lm`` later, or did so before, has the same
modules and classes.

``mlx_lm.utils`` is the exception. It imports both at its top, so this module holds a second, private instance of it,
made of functions only, in which names imported from those two raise when they are called. Loading a model calls none
of them.

One architecture's file imports something else of mlx-lm (muse_spark: ``mlx_lm.kernels``) and with it the package, as
will any other that does so; that is slow, but correct.
"""

import builtins
import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

_PARTS = ("models", "sample_utils")
_NOT_FOR_STAGES = ("huggingface_hub", "tokenizer_utils")


class _PackageFinder(MetaPathFinder):
    """Has a later import of ``mlx_lm`` loaded by ``_PackageLoader``."""

    def __init__(self, spec: ModuleSpec) -> None:
        self._init, self._folders = str(spec.origin), spec.submodule_search_locations

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The package's spec; ``None`` for every other module."""
        if fullname != "mlx_lm":
            return None
        return importlib.util.spec_from_file_location(
            fullname,
            self._init,
            loader=_PackageLoader(fullname, self._init),
            submodule_search_locations=self._folders,
        )


class _PackageLoader(SourceFileLoader):
    """Loads the package as usual, with the parts imported before it as its attributes.

    The import system makes a module an attribute of its package only when it loads that module itself.
    """

    def exec_module(self, module: ModuleType) -> None:
        """Run the package's ``__init__``."""
        vars(module).update({part: sys.modules[f"mlx_lm.{part}"] for part in _PARTS})
        super().exec_module(module)


def _submodule(name: str) -> ModuleType:
    """``__getattr__`` of ``mlx_lm.models``: imports a submodule that is not imported yet.

    ``from . import llama`` looks for the attribute first; without it, it would import the outermost package, too.
    """
    full = f"mlx_lm.models.{name}"
    try:
        return importlib.import_module(full)
    except ModuleNotFoundError as error:
        if error.name != full:
            raise
        raise AttributeError(f"module 'mlx_lm.models' has no attribute {name!r}") from None


_VARIABLES = {"models": {"__getattr__": _submodule}}


def _register_parts() -> None:
    """Put the parts into ``sys.modules``, unless the package is imported and has them."""
    spec = importlib.util.find_spec("mlx_lm")
    if "mlx_lm" in sys.modules or spec is None or type(spec.loader) is not SourceFileLoader:
        return
    sys.meta_path.insert(0, _PackageFinder(spec))
    for part in _PARTS:
        # Other threads may import the part meanwhile, so it is registered only when it is complete.
        sys.modules.setdefault(f"mlx_lm.{part}", _made_from_file(spec, part, _VARIABLES.get(part)))


def _made_from_file(package: ModuleSpec, name: str, variables: Mapping[str, Any] | None = None) -> ModuleType:
    """A new module, made from a file or folder of the package, with ``variables`` set before its code runs."""
    folder = Path(str(package.origin)).parent
    is_package = (folder / name).is_dir()
    spec = importlib.util.spec_from_file_location(
        f"mlx_lm.{name}",
        folder / name / "__init__.py" if is_package else folder / f"{name}.py",
        submodule_search_locations=[str(folder / name)] if is_package else None,
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    vars(module).update(variables or {})
    spec.loader.exec_module(module)
    return module


def _made_utils() -> ModuleType:
    """A private ``mlx_lm.utils`` without tokenizers and the hub."""
    spec = importlib.util.find_spec("mlx_lm")
    assert spec is not None
    return _made_from_file(spec, "utils", {"__builtins__": {**vars(builtins), "__import__": _import}})


def _import(name: str, *args: Any, **kwargs: Any) -> Any:
    """``__import__`` for the private ``mlx_lm.utils``."""
    return _Unavailable(name) if name in _NOT_FOR_STAGES else builtins.__import__(name, *args, **kwargs)


class _Unavailable(SimpleNamespace):
    """Replaces a module: has every name, and each raises when it is called."""

    def __init__(self, name: str) -> None:
        super().__init__(__name__=name)

    def __getattr__(self, name: str) -> Any:
        def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
            raise NotImplementedError(f"{self.__name__}.{name} is not imported for stages; import mlx_lm.utils")

        return refuse


_register_parts()

# After the parts are registered: before, these would import the package.
from mlx_lm.models import base, cache, rope_utils, switch_layers  # noqa: E402
from mlx_lm.models.base import create_causal_mask  # noqa: E402
from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache  # noqa: E402
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, make_repetition_penalty  # noqa: E402

utils: Any = _made_utils()

__all__ = [
    "CacheList",
    "KVCache",
    "apply_min_p",
    "apply_top_k",
    "apply_top_p",
    "base",
    "cache",
    "create_causal_mask",
    "make_prompt_cache",
    "make_repetition_penalty",
    "rope_utils",
    "switch_layers",
    "utils",
]
