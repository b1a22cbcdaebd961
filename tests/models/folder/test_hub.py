"""The word in a layout finds its model; from the hub only what a stage needs is downloaded."""

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from fake_hub import FakeHub, fake_hub
from tiny import Folder

from splitinfer.demo import DEMO_MODELS
from splitinfer.errors import ModelError
from splitinfer.models.folder.hub import fetch, open_model
from splitinfer.models.load.loader import load_stage, survey

REPO = "owner/name"
FILES = tuple(f"model-{i:05}-of-00002.safetensors" for i in (1, 2))  # half of the layers each


@pytest.fixture
def hub(tiny_folder: Folder, tmp_path: Path) -> Iterator[FakeHub]:
    with fake_hub(tmp_path) as hub:
        hub.repos[REPO] = tiny_folder("llama")
        yield hub


def quiet(_done: int, _total: int, _file: str) -> None: ...


def error_of(model: str) -> str:
    with pytest.raises(ModelError) as caught:
        open_model(model)
    return str(caught.value)


@pytest.mark.parametrize("repo", ["someone/Model-GGUF", "someone/gguf-that-is-there", "someone/model"])
def test_a_model_in_gguf_at_the_hub(repo: str, hub: FakeHub, tmp_path: Path):
    if repo != "someone/Model-GGUF":
        (tmp_path / "gguf").mkdir()
        (tmp_path / "gguf" / "model-q4.gguf").touch()
        hub.repos[repo] = tmp_path / "gguf"
    assert " has a model in GGUF, and MLX reads safetensors" in error_of(repo)


@pytest.mark.parametrize(
    "name",
    [
        "nothing", "a/b/c", "./gone", "~nobody-here/model", "x" * 5000, "a\0b",
    ],
)  # fmt: skip
def test_an_unknown_name_lists_what_there_is(name: str, hub: FakeHub):
    hub.answer = lambda request: pytest.fail("the hub was asked")
    known = ", ".join(sorted(DEMO_MODELS))
    assert error_of(name) == (
        f"there is no model {name!r:.100}: it is not a folder, a hub id (owner/name) or one of {known}"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("start", "end", "files"),
    [
        (0, 1, FILES[:1]),
        (1, 3, FILES),
        (2, 4, FILES[1:]),
    ],
)
def test_a_stage_downloads_the_files_it_reads(hub: FakeHub, start: int, end: int, files: tuple[str, ...]):
    checkpoint = open_model(REPO)
    found = survey(checkpoint, start, end, None)
    reports: list[tuple[int, int, str]] = []
    fetch(REPO, checkpoint, found.tensors, lambda *report: reports.append(report))
    assert tuple(hub.downloaded()) == files
    load_stage(checkpoint, found, start, end, None, lambda _done, _total: None)
    sizes = [sum(t.nbytes for t in checkpoint.tensors.values() if t.file == file) for file in files]
    expected = [(sum(sizes[:i]), sum(sizes), file) for i, file in enumerate(files)]
    assert reports == [*expected, (sum(sizes), sum(sizes), "")]


def test_really_offline(hub: FakeHub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert error_of(REPO) == f"{REPO} is not on this machine, and the hub cannot be reached (HF_HUB_OFFLINE is set)"


def test_a_disk_that_is_full_is_not_the_hubs_fault(hub: FakeHub, monkeypatch: pytest.MonkeyPatch):
    checkpoint = open_model(REPO)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", full)
    with pytest.raises(ModelError, match=r"its files cannot be stored on this machine \(.*No space left on device\)"):
        fetch(REPO, checkpoint, checkpoint.tensors, quiet)


def test_a_file_missing_from_a_local_folder_is_named(tiny_folder: Folder, tmp_path: Path):
    folder = Path(shutil.copytree(tiny_folder("llama"), tmp_path / "model"))
    checkpoint = open_model(str(folder))
    (folder / checkpoint.files[1]).unlink()
    with pytest.raises(ModelError) as caught:
        fetch(str(folder), checkpoint, checkpoint.tensors, quiet)
    assert str(caught.value) == f"{folder} lacks {checkpoint.files[1]}"
