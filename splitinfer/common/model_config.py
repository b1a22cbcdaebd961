"""Reads values of a model's configuration wherever they may stand: at its top, or in the part of its language model.

A configuration comes from anywhere, so nothing in it is believed to have a type. A value of another type than is asked
for is as good as none.
"""

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")


def parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the configuration, and within it that of the language model, if it has one."""
    yield config
    for name in _NESTED:
        if isinstance(inner := config.get(name), Mapping):
            yield from parts(inner)


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's configuration."""
    return list(parts(config))[-1]


def mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a part of the configuration by its name; empty if there is none."""
    found = config.get(key)
    return found if isinstance(found, Mapping) else {}


def positive(config: Mapping[str, Any], *keys: str) -> int | None:
    """Return the first positive integer under one of the keys.

    >>> positive({"n_heads": "?", "text_config": {"n_heads": 8}}, "heads", "n_heads")
    8
    """
    found = (part.get(key) for part in parts(config) for key in keys)
    return next((value for value in found if is_integer(value) and value > 0), None)


def token_ids(config: Mapping[str, Any], key: str) -> int | list[int] | None:
    """Return the first token id, or list of such, under the key.

    >>> token_ids({"eos": [], "text_config": {"eos": [1, 7]}}, "eos")
    [1, 7]
    """
    return next((value for part in parts(config) if _are_ids(value := part.get(key))), None)


def is_integer(value: Any) -> TypeGuard[int]:
    """Return whether it is an integer; ``True`` is not."""
    return isinstance(value, int) and not isinstance(value, bool)


def _are_ids(value: Any) -> bool:
    ids = value if isinstance(value, list) else [value]
    return bool(ids) and all(is_integer(one) and 0 <= one < 2**31 for one in ids)


def strings(config: Mapping[str, Any], key: str) -> list[str]:
    """Return the texts in a list of the configuration."""
    found = config.get(key)
    return [one for one in found if isinstance(one, str)] if isinstance(found, list) else []
