"""Reads values of a config.json, which may stand at its top level or in the language model's part.

A config.json may come from anyone, so no value's type is trusted. A value of the wrong type counts as missing.
"""

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")


def parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the configuration, then the nested configuration of its language model, if it has one."""
    yield config
    for name in _NESTED:
        if isinstance(inner := config.get(name), Mapping):
            yield from parts(inner)


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's configuration."""
    return list(parts(config))[-1]


def mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the part of the configuration under ``key``, or an empty mapping."""
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
    """Return the first token id, or list of token ids, under ``key``.

    >>> token_ids({"eos": [], "text_config": {"eos": [1, 7]}}, "eos")
    [1, 7]
    """
    return next((value for part in parts(config) if _are_ids(value := part.get(key))), None)


def is_integer(value: Any) -> TypeGuard[int]:
    """Return whether ``value`` is an integer. ``True`` is not."""
    return isinstance(value, int) and not isinstance(value, bool)


def _are_ids(value: Any) -> bool:
    ids = value if isinstance(value, list) else [value]
    return bool(ids) and all(is_integer(one) and 0 <= one < 2**31 for one in ids)


def strings(config: Mapping[str, Any], key: str) -> list[str]:
    """Return the texts in a list of the configuration."""
    found = config.get(key)
    return [one for one in found if isinstance(one, str)] if isinstance(found, list) else []
