"""A stage is tried once: the second load of the same looks its outcome up, and computes the same. Without the classes
that its model needs it says so."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import Folder

from splitinfer.common.fingerprint import Fingerprint
from splitinfer.engine.stage import loader, outcomes
from splitinfer.engine.stage.loader import load
from splitinfer.engine.stage.outcomes import TrialOutcome, path_of, remember, remembered, try_stage
from splitinfer.errors import ModelError
from splitinfer.models.caches.rollback import Rollback
from splitinfer.models.folder.checkpoint import Checkpoint, open_folder
from splitinfer.models.library import mlx_vlm
from splitinfer.models.load.building import mlx_vlm_of
from splitinfer.models.rows import kv_trial
from splitinfer.models.rows.step import Way
from splitinfer.wire.messages import Load, Progress

BEST = TrialOutcome(0.0, None, Way.ROWS, True, Rollback.MODULES)
REMEMBERED, TRY = remembered, try_stage  # before the tests' own memory takes their place


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(outcomes, "remembered", REMEMBERED)
    monkeypatch.setattr(outcomes, "try_stage", TRY)


def command(folder: Path, kv_format: str = "exact") -> Load:
    fingerprint = open_folder(folder).fingerprint()
    return Load(str(folder), "float32", 1, (0, 2, 4), fingerprint, 100, 64, b"", kv_format, float32_head=False)


@pytest.mark.parametrize(("name", "kv_format"), [("llama", "k8v8"), ("qwen3_next", "exact")])
def test_the_second_load_tries_nothing(name: str, kv_format: str, tiny_folder: Folder):
    folder, told = tiny_folder(name, head_dim=64), list[Progress]()
    first = load(command(folder, kv_format), "b", told.append)
    assert [one.text for one in told if one.phase == "try"] == [
        "how KV is kept",
        "how many sequences run together",
        "how drafts are rolled back",
    ]
    told.clear()
    second = load(command(folder, kv_format), "b", told.append)
    assert not [one for one in told if one.phase == "try"]
    assert replace(first.ready, free_bytes=0) == replace(second.ready, free_bytes=0)
    assert (first.runner.rolls_back, first.arrays_per_block) == (second.runner.rolls_back, second.arrays_per_block)


@pytest.mark.parametrize("name", [pytest.param("gpt_oss", marks=pytest.mark.nightly), "qwen3_next"])
def test_a_few_layers_stand_for_all(name: str, tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch):
    told, folder = list[Progress](), tiny_folder(name, num_hidden_layers=12)
    given = replace(command(folder), stage=0, bounds=(0, 12))
    few = load(given, "a", told.append)
    assert "all layers together" in [one.text for one in told]
    monkeypatch.setattr(outcomes, "remembered", lambda _path: None)
    monkeypatch.setattr(outcomes, "with_each_kind", lambda stage: stage)
    whole = load(given, "a", lambda _: None)
    assert replace(few.ready, free_bytes=0) == replace(whole.ready, free_bytes=0)
    assert few.runner._step.way is whole.runner._step.way
    assert few.runner.rolls_back == whole.runner.rolls_back


def test_all_layers_are_tried_where_a_few_are_not_enough(tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(outcomes.StepModel, "why_not_all", lambda *_, **__: "the same row differs")
    told, given = (
        list[Progress](),
        replace(command(tiny_folder("llama", num_hidden_layers=12)), stage=0, bounds=(0, 12)),
    )
    load(given, "a", told.append)
    said = [one.text for one in told if one.phase == "try"]
    assert said[said.index("all layers together") + 1 :] == [
        "how many sequences run together",
        "how drafts are rolled back",
    ]


def test_what_an_outcome_depends_on(tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch):
    folder = tiny_folder("llama")
    given, checkpoint = command(folder), open_folder(folder)
    others = [
        replace(given, stage=0),
        replace(given, bounds=(0, 2, 3, 4)),
        replace(given, kv_format="k8v8"),
        replace(given, float32_head=True),
        replace(given, drafter="mtp"),
        replace(given, drafter="eagle", drafter_fingerprint=Fingerprint("c")),
        replace(given, sees=True),
    ]
    paths = {path_of(one, checkpoint, "float32") for one in (given, *others)}
    paths |= {path_of(given, checkpoint, "float16"), path_of(given, open_folder(tiny_folder("qwen3")), "float32")}
    monkeypatch.setattr(outcomes, "device_name", lambda: "another device")
    assert len(paths | {path_of(given, checkpoint, "float32")}) == len(others) + 4
    assert path_of(replace(given, kv_tokens=9, kv_root=b"r"), checkpoint, None) == path_of(given, checkpoint, None), (
        "what no trial looks at"
    )


@pytest.mark.parametrize(("error", "times"), [(RuntimeError("[METAL] timeout"), 3), (ValueError("[reshape]"), 1)])
def test_where_a_device_may_have_failed_a_stage_is_tried_again(
    error: Exception, times: int, tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_args: object) -> None:
        raise error

    monkeypatch.setattr(kv_trial, "cut", fail)
    monkeypatch.setattr(loader, "sample_blocks", fail)  # called only where KV can be stored
    for number in range(3):
        told = list[Progress]()
        stage = load(command(tiny_folder("llama")), "b", told.append)
        assert not stage.ready.keeps_blocks
        assert any(one.phase == "try" for one in told) == (number < times)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"way": "sideways", "is_sure": true}', "[" * 100_000])
def test_a_damaged_file_is_as_good_as_none(text: str, tmp_path: Path):
    path = tmp_path / "one.json"
    path.write_text(text)
    assert REMEMBERED(path) is None
    remember(path, BEST)
    assert REMEMBERED(path) == BEST


def test_a_place_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").touch()
    remember(tmp_path / "file" / "one.json", BEST)
    assert REMEMBERED(tmp_path / "file" / "one.json") is None


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
