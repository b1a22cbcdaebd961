"""A valid request of every route."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

JSON = ("Content-Type", "application/json")
TALE = [{"role": "user", "content": "Once upon a time"}]
BODIES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
"""A valid request of every route that takes a body."""


@dataclass(frozen=True)
class Asked:
    method: str
    target: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to everything inside."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        yield (*path, key)
        yield from places(each, (*path, key))
