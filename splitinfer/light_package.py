"""Lets code import modules of a package whose ``__init__`` imports much more than they need.

A stand-in takes the package's name, so that ``import package.module`` runs that module alone. The package itself is
imported, and takes the place of its stand-in, when code first reads another name of it.
"""

import importlib
import importlib.util
import sys
import threading
from collections.abc import Mapping
from types import ModuleType
from typing import Any

_READ = ("__all__", "__version__")  # other names with underscores are the import system's questions
_replacing = threading.Lock()


def register(name: str, places: Mapping[str, str] | None = None, version: str | None = None) -> None:
    """Let the modules of the package ``name`` be imported without its ``__init__``, unless that has run.

    ``places``: names of the package that its modules import, each with the module that has it. ``version``: the
    package's ``__version__``, if its modules import that.
    """
    if name in sys.modules or (spec := importlib.util.find_spec(name)) is None:
        return
    stand_in, known = importlib.util.module_from_spec(spec), dict(places or {})

    def read(attribute: str) -> Any:
        if attribute.startswith("__") and attribute not in _READ:
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        if sys.modules.get(name) is stand_in and attribute in known:
            return getattr(importlib.import_module(f"{name}.{known[attribute]}"), attribute)
        return getattr(_real(stand_in), attribute)

    vars(stand_in).update({"__getattr__": read} | ({} if version is None else {"__version__": version}))
    sys.modules.setdefault(name, stand_in)


def _real(stand_in: ModuleType) -> ModuleType:
    """Return the package of a stand-in. Import it if the stand-in still has its place."""
    name = stand_in.__name__
    with _replacing:
        if is_first := sys.modules.get(name) is stand_in:
            del sys.modules[name]
    real = importlib.import_module(name)
    for each, value in list(vars(stand_in).items()) if is_first else ():
        if isinstance(value, ModuleType) and each not in vars(real):
            setattr(real, each, value)  # the import system sets a module's name once
    return real
