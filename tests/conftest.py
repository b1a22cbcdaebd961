"""Fixtures that several floors of the tests share."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

for folder in ("", "cluster", "transports"):
    sys.path.insert(0, str(Path(__file__).parent / folder))

import tiny  # noqa: E402


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that gives the folder of a tiny model, written once a session."""
    made: dict[tuple[Any, ...], Path] = {}

    def folder(name: str, **changes: Any) -> Path:
        key = (name, *sorted(changes.items()))
        if key not in made:
            made[key] = tiny.save(tmp_path_factory.mktemp(name), name, **changes)
        return made[key]

    return folder
