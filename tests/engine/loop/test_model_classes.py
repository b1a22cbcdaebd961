"""Which machines need mlx-vlm's classes for a model, and what a stage without them says."""

from pathlib import Path
from typing import Any

import pytest

from splitinfer.common.fingerprint import Fingerprint
from splitinfer.engine.stage.loader import load
from splitinfer.errors import ModelError
from splitinfer.models.folder.checkpoint import Checkpoint
from splitinfer.models.library import mlx_vlm
from splitinfer.models.load.building import mlx_vlm_of
from splitinfer.wire.messages import Load

COMMAND = Load("demo", "auto", 1, (0, 6, 12), Fingerprint("c"), 100, 10, b"", "exact", False, mlx_vlm="9.9.9")


@pytest.mark.parametrize(
    ("here", "says"),
    [("", "mini lacks mlx-vlm, and .* 9.9.9 of it"), ("0.7.9", "mini has mlx-vlm 0.7.9, and .* 'mlx-vlm==9")],
)
def test_a_stage_without_the_models_classes_says_what_to_do(
    here: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlx_vlm, "version", lambda: here)
    with pytest.raises(ModelError, match=says):
        load(COMMAND, "mini", lambda _progress: None)


@pytest.mark.parametrize(("config", "wanted"), [({"model_type": "llama"}, ""), ({"model_type": "klear"}, "0.7.9")])
def test_whose_classes_a_model_needs(config: dict[str, Any], wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration that lacks what its class needs is said to be wrong where the model is built."""
    monkeypatch.setattr(mlx_vlm, "version", lambda: "0.7.9")
    assert mlx_vlm_of(Checkpoint(Path(), config, {}), sees=False) == wanted
    assert mlx_vlm_of(Checkpoint(Path(), config, {}), sees=True) == "0.7.9"
