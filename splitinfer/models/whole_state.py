"""Caches of a form that is not known: everything that one holds is a state, which can be saved and put back.

A class that can put back what it tells as its ``state`` is believed; of any other, the state is its attributes.
"""

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

_classes: dict[type, type] = {}


class WholeState:
    """Goes before a cache's own class among its bases."""

    def empty(self) -> bool:
        """Whether nothing was ever stored."""
        return not any(isinstance(leaf, mx.array) and leaf.size for _, leaf in tree_flatten(vars(self)))

    @property
    def state(self) -> Any:
        """Everything that it holds."""
        base: Any = super()
        return (base.state, base.meta_state) if _puts_back(type(self)) else dict(vars(self))

    @state.setter
    def state(self, found: Any) -> None:
        if not _puts_back(type(self)):
            vars(self).update(found)
            return
        for name, value in zip(("state", "meta_state"), found, strict=True):
            _own(type(self), name).fset(self, value)


def with_state(cache: Any) -> Any:
    """A cache that can be saved and put back as a state, if it cannot be told how else it is."""
    cls = type(cache)
    if hasattr(cache, "empty") and _own(cls, "state").fset is not None:
        return cache
    if cls not in _classes:
        _classes[cls] = type(f"Whole{cls.__name__}", (WholeState, cls), {"cache_kind": cls})
    cache.__class__ = _classes[cls]
    return cache


def _puts_back(cls: type) -> bool:
    return all(_own(cls, name).fset is not None for name in ("state", "meta_state"))


def _own(cls: type, name: str) -> Any:
    """A property of the cache's own class; a read-only one if it has no such property."""
    bases = (base for base in cls.__mro__ if base is not WholeState and name in vars(base))
    found = vars(next(bases, object)).get(name)
    return found if isinstance(found, property) else property()
