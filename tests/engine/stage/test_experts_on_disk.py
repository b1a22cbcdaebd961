"""With a part of the experts on disk every request gets the tokens that it gets with all in memory."""

import os
import time
from pathlib import Path
from typing import Any

import constrained
import loaded_once
import pytest
import stages
from engine import door
from engine.door import SEVERAL, Fault, Open, ask
from tiny import Folder

from splitinfer.errors import DeviceFailed
from splitinfer.models import memory
from splitinfer.models.folder.checkpoint import open_folder
from splitinfer.models.load import expert_files
from splitinfer.models.load.loader import survey
from splitinfer.wire.messages import Load

MANY: dict[str, Any] = {"num_experts": 16, "n_routed_experts": 16, "n_group": 1, "num_local_experts": 16}
SOME = 0.0004  # GB, of 0.8 MB or more for each layer


def _folder(tiny_folder: Folder, name: str = "qwen3_moe") -> Path:
    return tiny_folder(name, **MANY)


@pytest.mark.parametrize(
    ("name", "cuts", "options"),
    [
        ("qwen3_moe", [4], {"token_budget": 16}),
        ("deepseek_v3", [2, 2], {}),
        ("gpt_oss", [1, 3], {"fault": door.link_cut()}),
        ("qwen3_moe", [2, 2], {"fault": door.launches_ahead(), "draft": "ngram"}),
        ("qwen3_moe", [2, 2], {"fault": door.device_fails(0, 7, "computes at launch"), "token_budget": 16}),
    ],
    ids=["chunks", "mla", "link cut", "drafts", "device fails"],
)
def test_the_same_tokens(
    name: str, cuts: list[int], options: dict[str, Any], tiny_folder: Folder, pipeline: Open
) -> None:
    with pipeline(_folder(tiny_folder, name), cuts, experts_gb=SOME, **options) as there:
        there.answers(*SEVERAL, ask(70, temperature=0.5))
        for stage in there.stats["stages"]:
            assert 0 < stage["experts_found"] < stage["experts_wanted"]
            assert stage["experts_read"] > 0


def test_where_all_fit_nothing_is_read(tiny_folder: Folder, pipeline: Open) -> None:
    with pipeline(_folder(tiny_folder), [2, 2], experts_gb=1.0) as there:
        there.answers()
        assert [stage["experts_wanted"] for stage in there.stats["stages"]] == [0, 0]


def test_answers_of_a_form(tmp_path: Path, pipeline: Open) -> None:
    folder = constrained.save(tmp_path, "qwen3_moe", **MANY)
    form: dict[str, Any] = {"grammar": constrained.SCHEMA, "temperature": 1.0, "max_tokens": 40}
    with pipeline(folder, [2, 2], experts_gb=SOME, draft="ngram") as there:
        there.answers(ask(12, **form), ask(9, prompt=3, **form), ask(9))
        assert there.stats["stages"][0]["experts_read"] > 0


def test_a_steps_seconds_are_those_of_reading_too(
    tiny_folder: Folder, pipeline: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the live choice of drafts knows what more rows cost. What trials read before the first step is not counted."""
    read = expert_files.Source.read

    def slowly(*args: Any) -> Any:
        time.sleep(0.005)
        return read(*args)

    monkeypatch.setattr(expert_files.Source, "read", slowly)
    with pipeline(_folder(tiny_folder), [4], experts_gb=SOME) as there:
        there.answers(ask(9))
        stage = there.stats["stages"][0]
        assert 0 < stage["experts_waiting"] < stage["busy_seconds"]


def test_a_file_that_changes(tiny_folder: Folder, tmp_path: Path, pipeline: Open) -> None:
    """The error names the file; what it read before goes on."""
    for file in _folder(tiny_folder).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())

    def touch(_there: object) -> None:
        for file in tmp_path.glob("*.safetensors"):
            os.utime(file, ns=(1, 1))

    with pipeline(tmp_path, [4], experts_gb=SOME, fault=Fault(act=touch), are_checked=False) as there:
        outputs = there.outputs(ask(9, max_tokens=64))
        assert "safetensors was changed while the model is in use" in str(outputs[0].error)
        with pytest.raises(DeviceFailed, match="was changed"):
            there.llm.generate(stages.prompt(5))


def test_as_many_as_fit_beside_the_kv(tiny_folder: Folder, pipeline: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a setting; and the start says so."""
    folder, said = _folder(tiny_folder), list[str]()
    found = survey(open_folder(folder), 0, 4, "float32")
    kv = found.need.total(64) - found.need.weights
    free = found.need.weights - found.all_experts // 2 + 2 * kv
    monkeypatch.setattr(memory, "free_bytes", lambda _patience=None: free)
    monkeypatch.setattr(memory, "STAGE_MARGIN", 0)
    with pipeline(folder, [4], context=64, notice=lambda _, it: said.append(it.text)) as there:
        there.answers(ask(9))
        assert 0 < there.stats["stages"][0]["experts_found"] < there.stats["stages"][0]["experts_wanted"]
    assert any(note.startswith("experts: ") and "read from disk" in note for note in said)


def test_a_stage_that_is_unloaded_leaves_no_memory_behind(tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded_once.each_time(monkeypatch)
    folder = _folder(tiny_folder)
    command = Load(
        model=str(folder), dtype="float32", stage=0, bounds=(0, 4), fingerprint=open_folder(folder).fingerprint(),
        vocab_size=160, kv_tokens=64, kv_root=b"", kv_format="exact", float32_head=False, experts_bytes=400_000,
    )  # fmt: skip
    assert door.leaves_nothing(command)
