"""Fixtures that several floors of the tests share."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

for folder in ("", "cluster", "core", "transports"):
    sys.path.insert(0, str(Path(__file__).parent / folder))
sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import tiny  # noqa: E402

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("splitinfer", deadline=None)
hypothesis.settings.load_profile("splitinfer")


@pytest.fixture(scope="session", autouse=True)
def no_test_writes_to_the_users_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Processes keep KV in the user's cache folder unless they are told otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("caches")))
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture(autouse=True)
def no_test_finds_the_kv_of_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each test has folders of caches and of keys of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


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
