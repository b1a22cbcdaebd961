"""A model of five tensors, and an empty copy of it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from stored import described, written

from splitinfer.weights.manifest import Manifest
from splitinfer.weights.models import ModelStore, StoredModel
from splitinfer.weights.source import Source


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
