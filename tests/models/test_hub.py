"""The word in a layout finds its model; from the hub only what a stage needs is downloaded."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import huggingface_hub.errors
import mlx.core as mx
import pytest
import tiny

from splitinfer.demo import DEMO_MODELS
from splitinfer.errors import ModelError
from splitinfer.models.checkpoint import open_folder
from splitinfer.models.hub import fetch, open_model
from splitinfer.models.loader import load_stage, survey

REPO = "owner/name"
REVISION = "abc123"
FILES = tuple(f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3))
HTTPError = huggingface_hub.errors.HTTPError  # what every failure of the connection derives from


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.save(tmp_path_factory.mktemp("hub") / REVISION, "llama", tie_word_embeddings=False)
    weights: dict[str, mx.array] = {}
    for path in folder.glob("*.safetensors"):
        weights.update(mx.load(str(path)))
        path.unlink()
    parts: dict[str, dict[str, mx.array]] = {file: {} for file in FILES}
    for name, array in weights.items():
        # Layers 0 and 1, 2 and 3, and everything else.
        layer = next((int(p) for p in name.split(".") if p.isdigit()), 4)
        parts[FILES[layer // 2]][name] = array
    for file, part in parts.items():
        mx.save_safetensors(str(folder / file), part)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(str(index).replace("'", '"'))
    (folder / "tokenizer.json").write_text("{}")
    return folder


class FakeHub:
    """huggingface_hub's functions over a folder, counting what is asked of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, source: Path, cache: Path) -> None:
        self.source, self.folder = source, cache / REVISION
        self.downloaded: list[str] = []
        self.num_metadata = 0
        self.error: Exception | None = None
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot_download)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", self.hf_hub_download)
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: SimpleNamespace(get_safetensors_metadata=self.metadata))

    def snapshot_download(self, repo: str, allow_patterns: list[str]) -> str:
        if self.error is not None and not self.folder.exists():
            raise self.error
        assert repo == REPO
        self.folder.mkdir(exist_ok=True)
        for path in self.source.iterdir():
            if any(path.match(pattern) for pattern in allow_patterns):
                assert path.suffix != ".safetensors"
                shutil.copy(path, self.folder)
        return str(self.folder)

    def metadata(self, repo: str, revision: str) -> Any:
        if self.error is not None:
            raise self.error
        assert (repo, revision) == (REPO, REVISION)
        self.num_metadata += 1
        tables: dict[str, dict[str, Any]] = {file: {} for file in FILES}
        for info in open_folder(self.source).tensors.values():
            offsets = (info.begin, info.end)
            tables[info.file][info.name] = SimpleNamespace(
                dtype=info.dtype, shape=list(info.shape), data_offsets=offsets
            )
        return SimpleNamespace(files_metadata={f: SimpleNamespace(tensors=table) for f, table in tables.items()})

    def hf_hub_download(self, repo: str, file: str, revision: str) -> str:
        if self.error is not None:
            raise self.error
        assert (repo, revision) == (REPO, REVISION)
        self.downloaded.append(file)
        return str(shutil.copy(self.source / file, self.folder))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path) -> FakeHub:
    return FakeHub(monkeypatch, source, tmp_path)


def quiet(_done: int, _total: int, _file: str) -> None: ...


def error_of(model: str) -> str:
    with pytest.raises(ModelError) as caught:
        open_model(model)
    return str(caught.value)


# -- names -----------------------------------------------------------------------------------------


def test_a_folder_is_a_model(tiny_folder: Callable[..., Path]):
    folder = tiny_folder("llama")
    assert open_model(str(folder)) == open_folder(folder)


def test_a_model_in_gguf_at_the_hub(fake: FakeHub):
    fake.error = huggingface_hub.errors.NotASafetensorsRepoError("no such file")
    assert error_of("someone/Model-GGUF").startswith(
        "someone/Model-GGUF has a model in GGUF, and MLX reads safetensors"
    )


@pytest.mark.parametrize(
    "name",
    [
        "nothing", "a/b/c", "./gone", "~nobody-here/model", "x" * 5000, "a\0b",
    ],
)  # fmt: skip
def test_an_unknown_name_lists_what_there_is(name: str, fake: FakeHub):
    fake.error = AssertionError("the hub was asked")
    known = ", ".join(sorted(DEMO_MODELS))
    assert error_of(name) == (
        f"there is no model {name!r:.100}: it is not a folder, a hub id (owner/name) or one of {known}"
    )  # fmt: skip


# -- from the hub ----------------------------------------------------------------------------------


def test_opening_downloads_no_weights(fake: FakeHub, source: Path):
    checkpoint = open_model(REPO)
    assert checkpoint.tensors == open_folder(source).tensors
    assert (checkpoint.revision, checkpoint.folder, checkpoint.files) == (REVISION, fake.folder, list(FILES))
    assert sorted(p.suffix for p in fake.folder.iterdir()) == [".json"] * 3
    assert fake.downloaded == []


@pytest.mark.parametrize(
    ("start", "end", "files"),
    [
        (0, 1, (FILES[0], FILES[2])),  # the embedding lies in the third
        (1, 2, (FILES[0],)),
        (2, 4, (FILES[1], FILES[2])),
        (0, 4, FILES),
    ],
)
def test_a_stage_downloads_the_files_it_reads(fake: FakeHub, start: int, end: int, files: tuple[str, ...]):
    checkpoint = open_model(REPO)
    found = survey(checkpoint, start, end, None)
    assert found.files == files
    reports: list[tuple[int, int, str]] = []
    fetch(REPO, checkpoint, found.files, lambda *report: reports.append(report))
    assert tuple(fake.downloaded) == files
    load_stage(checkpoint, found, start, end, None, lambda _done, _total: None)
    sizes = [sum(t.nbytes for t in checkpoint.tensors.values() if t.file == file) for file in files]
    expected = [(sum(sizes[:i]), sum(sizes), file) for i, file in enumerate(files)]
    assert reports == [*expected, (sum(sizes), sum(sizes), "")]


def test_what_is_here_is_not_downloaded_again(fake: FakeHub):
    checkpoint = open_model(REPO)
    fetch(REPO, checkpoint, FILES[:2], quiet)
    reports: list[str] = []
    fetch(REPO, checkpoint, FILES, lambda _done, _total, file: reports.append(file))
    assert fake.downloaded == list(FILES)
    assert reports == [FILES[2], ""]
    fetch(REPO, checkpoint, FILES, lambda *_: pytest.fail("there is nothing to report"))


def test_a_whole_copy_needs_no_hub(fake: FakeHub, source: Path):
    fetch(REPO, open_model(REPO), FILES, quiet)
    assert fake.num_metadata == 1
    fake.error = HTTPError("no route to host")
    assert open_model(REPO).tensors == open_folder(source).tensors
    assert fake.num_metadata == 1


def test_a_part_of_the_files_is_not_taken_for_the_whole(fake: FakeHub, source: Path):
    fetch(REPO, open_model(REPO), FILES[:1], quiet)
    assert open_model(REPO).tensors == open_folder(source).tensors
    assert fake.num_metadata == 2


# -- what goes wrong -------------------------------------------------------------------------------


def test_the_hub_cannot_be_reached_and_nothing_is_here(fake: FakeHub):
    fake.error = huggingface_hub.errors.LocalEntryNotFoundError("no cache")
    assert error_of(REPO) == f"{REPO} is not on this machine and the hub cannot be reached"


@pytest.mark.parametrize(
    "error",
    [
        HTTPError("no route to host\nand much more"),  # what httpx raises when nobody answers
        ConnectionError("no route to host"),  # offline mode
        huggingface_hub.errors.SafetensorsParsingError("no route to host"),
    ],
)
@pytest.mark.parametrize("small_files_here", [False, True])
def test_an_error_of_the_hub_becomes_one_sentence(fake: FakeHub, error: Exception, small_files_here: bool):
    if small_files_here:
        open_model(REPO)
    fake.error = error
    assert error_of(REPO) == f"{REPO} cannot be opened at the hub (no route to host)"


def test_really_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """huggingface_hub as it is, forbidden to connect."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert error_of(REPO) == f"{REPO} is not on this machine and the hub cannot be reached"


@pytest.mark.parametrize("error", [HTTPError("connection lost"), OSError("connection lost")])
def test_a_download_that_fails_names_the_file(fake: FakeHub, error: Exception):
    checkpoint = open_model(REPO)
    fake.error = error
    with pytest.raises(ModelError) as caught:
        fetch(REPO, checkpoint, FILES[1:], quiet)
    assert str(caught.value) == f"{FILES[1]} of {REPO} could not be downloaded (connection lost)"


def test_a_file_missing_from_a_local_folder_is_named(tiny_folder: Callable[..., Path], tmp_path: Path):
    folder = Path(shutil.copytree(tiny_folder("llama"), tmp_path / "model"))
    checkpoint = open_model(str(folder))
    (folder / checkpoint.files[1]).unlink()
    with pytest.raises(ModelError) as caught:
        fetch(str(folder), checkpoint, checkpoint.files, quiet)
    assert str(caught.value) == f"{folder} lacks {checkpoint.files[1]}"
