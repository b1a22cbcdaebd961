"""What the tests of the benchmark share."""

from pathlib import Path

import pytest
import yaml
from random_model import Shape, make


@pytest.fixture(scope="session")
def layout_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A layout of two stages here, and a tiny random model in ``model`` beside it."""
    folder = tmp_path_factory.mktemp("bench")
    make(folder / "model", Shape(layers=4, hidden=64, heads=4, kv_heads=2, mlp=96, vocab=300))
    stages = [{"name": "anna's-mac", "layers": 2}, {"name": "back", "layers": 2, "address": "local"}]
    path = folder / "halves.yaml"
    path.write_text(yaml.safe_dump({"model": str(folder / "model"), "stages": stages}))
    return path
