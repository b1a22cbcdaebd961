"""A model of five tensors, and an empty copy of it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from weights import described, written

from splitinfer.store.manifest import Manifest
from splitinfer.store.models import ModelStore, StoredModel
from splitinfer.store.source import Source


@pytest.fixture
def told() -> Manifest:
    return described()


@pytest.fixture
def make(tmp_path: Path, told: Manifest) -> Callable[[], Source]:
    return lambda: written(tmp_path / "model", told)


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "store")


@pytest.fixture
def stored(store: ModelStore, told: Manifest) -> StoredModel:
    return store.begin(told)
