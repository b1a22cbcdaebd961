"""The store: what it holds, what it refuses, what it removes."""

import fcntl
import os
from pathlib import Path

import pytest
from test_part import fill
from weights import CONFIG, described, shorten_pieces, written

from splitinfer.errors import ModelError
from splitinfer.store.holding import unused
from splitinfer.store.manifest import SmallFile, with_files
from splitinfer.store.models import ModelStore, StoredModel
from splitinfer.store.part import PartWriter, write_whole
from splitinfer.store.parts import parts_of


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelStore:
    shorten_pieces(monkeypatch, 8)
    return ModelStore(tmp_path / "store", cap=10_000)


def copied(store: ModelStore, tmp_path: Path, numbers: range, **fields: str) -> StoredModel:
    told = described(**fields)
    source = written(tmp_path / "model", told)
    model = store.begin(told)
    write_whole(model.folder, "config.json", CONFIG)
    for part in parts_of(told, numbers):
        with PartWriter(model.folder, part) as writer:
            fill(writer, source)
            writer.finish()
    return model


def test_what_was_copied_is_found(store: ModelStore, tmp_path: Path):
    model = copied(store, tmp_path, range(2, 4))
    found = store.find(model.digest)
    assert found is not None
    assert set(found.tensors()) == {"layers.1.weight", "layers.2.weight"}
    assert found.files() == ["config.json"]
    assert found.has_files([0])
    assert store.named("a/model") == store.named(model.digest[:8]) == store.models() == [found]
    assert store.named("a/mode") == store.named(model.digest[:7]) == []
    assert store.nbytes == found.nbytes == sum(path.stat().st_size for path in model.folder.iterdir())


def test_weights_that_differ_in_a_sample_have_folders_of_their_own(store: ModelStore, tmp_path: Path):
    one, other = (copied(store, tmp_path, range(1, 3), sample=sample) for sample in "xy")
    assert one.folder != other.folder
    assert len(store.models()) == 2


def test_a_part_that_was_cut_short_is_not_there(store: ModelStore, tmp_path: Path):
    model = copied(store, tmp_path, range(1, 4))
    (path,) = set(model.tensors().values())
    os.truncate(path, path.stat().st_size - 1)
    assert model.tensors() == {}


def test_an_unfinished_part_is_not_there_but_counts(store: ModelStore, tmp_path: Path):
    told = described()
    model, source = store.begin(told), written(tmp_path / "model", told)
    (part,) = parts_of(told, range(1, 6))
    with PartWriter(model.folder, part) as writer:
        fill(writer, source, 3)
    assert model.tensors() == {}
    assert len(part.header) < model.begun([part]) <= part.nbytes


def test_a_part_that_is_a_link_is_not_read(store: ModelStore, tmp_path: Path):
    model = copied(store, tmp_path, range(1, 4))
    (path,) = set(model.tensors().values())
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert model.tensors() == {}


def test_a_folder_with_another_models_manifest_is_none(store: ModelStore, tmp_path: Path):
    model = copied(store, tmp_path, range(1, 2))
    model.folder.rename(store.path / ("0" * 32))
    assert store.find("0" * 32) is None
    assert store.models() == []


@pytest.mark.parametrize("digest", ["", "..", "../store", "x" * 32, "a" * 31, "A" * 32])
def test_no_digest_is_a_path(store: ModelStore, tmp_path: Path, digest: str):
    copied(store, tmp_path, range(1, 2))
    assert store.find(digest) is None


def test_a_damaged_manifest_is_no_model(store: ModelStore, tmp_path: Path):
    model = copied(store, tmp_path, range(1, 2))
    (model.folder / ".manifest").write_bytes(b"damaged")
    assert store.models() == []
    assert store.begin(described()).tensors()  # what was copied is still good


def test_another_machine_may_name_more_files(store: ModelStore):
    store.begin(described())
    told = with_files(described(), [SmallFile("tokenizer.json", 5)])
    assert [file.name for file in store.begin(told).manifest.files] == ["config.json", "tokenizer.json"]
    assert [file.name for file in store.begin(described()).manifest.files] == ["config.json", "tokenizer.json"]


def test_the_folder_must_not_be_a_link(store: ModelStore, tmp_path: Path):
    store.path.mkdir()
    (tmp_path / "victim").mkdir()
    (store.path / described().fingerprint.digest()).symlink_to(tmp_path / "victim")
    with pytest.raises(ModelError, match="is a link"):
        store.begin(described())
    assert list((tmp_path / "victim").iterdir()) == []


def test_the_cap_is_kept(store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _path: type("Usage", (), {"free": 10**12}))
    model = copied(store, tmp_path, range(1, 6))
    store.check_room(10_000 - model.nbytes)
    with pytest.raises(ModelError, match=r"no room in .*`splitinfer models rm`"):
        store.check_room(10_001 - model.nbytes)


def test_a_model_is_removed_with_all_that_is_its_own(store: ModelStore, tmp_path: Path):
    model, other = copied(store, tmp_path, range(1, 6)), copied(store, tmp_path, range(1, 2), sample="other")
    nbytes = model.nbytes
    assert store.remove(model) == nbytes
    assert store.models() == [other]
    assert not model.folder.exists()


def test_a_model_that_is_in_use_is_not_removed(store: ModelStore, tmp_path: Path):
    model = copied(store, tmp_path, range(1, 6))
    with model.hold(), model.hold():  # several may
        with pytest.raises(ModelError, match=r"a/model is in use by a splitinfer of this machine; end that first"):
            store.remove(model)
        assert len(model.tensors()) == 5
    assert store.remove(model) > 0


def test_who_forgets_a_model_uses_it_no_more(store: ModelStore, tmp_path: Path):
    model = copied(store, tmp_path, range(1, 6))
    held = [model.hold()]
    held.clear()
    assert store.remove(model) > 0


def test_a_model_that_is_being_removed_cannot_be_used(store: ModelStore, tmp_path: Path):
    model = copied(store, tmp_path, range(1, 6))
    with unused(model.folder) as is_unused:
        assert is_unused
        with pytest.raises(ModelError, match="is being removed by another process; try again"):
            model.hold()
    store.remove(model)
    with pytest.raises(ModelError, match="is being removed"):
        model.hold()


def test_a_model_removed_while_another_process_was_about_to_use_it(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The other has opened the lock, and takes it when the model is gone."""
    model, flock = copied(store, tmp_path, range(1, 6)), fcntl.flock

    def remove_before(file: int, how: int) -> None:
        monkeypatch.setattr("splitinfer.store.holding.fcntl.flock", flock)
        store.remove(model)
        flock(file, how)

    monkeypatch.setattr("splitinfer.store.holding.fcntl.flock", remove_before)
    with pytest.raises(ModelError, match="is being removed"):
        model.hold()


def test_one_process_at_a_time_begins_a_model(store: ModelStore, monkeypatch: pytest.MonkeyPatch):
    """So that neither forgets what the other has named."""
    store.begin(described())
    with_lock = list[bool]()

    def merging(*told: object) -> object:
        with (store.path / ".lock").open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        with_lock.append(True)
        return with_files(*told)

    monkeypatch.setattr("splitinfer.store.models.with_files", merging)
    store.begin(with_files(described(), [SmallFile("tokenizer.json", 5)]))
    assert with_lock == [True]


def test_two_processes_write_the_same_small_file(store: ModelStore, monkeypatch: pytest.MonkeyPatch):
    folder, replace, other = store.begin(described()).folder, Path.replace, [b"other"]

    def in_between(self: Path, target: Path) -> Path:
        """The other begins and ends before this one gives its file its name."""
        if other:
            write_whole(folder, "config.json", other.pop())
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", in_between)
    write_whole(folder, "config.json", CONFIG)
    assert (folder / "config.json").read_bytes() == CONFIG
    assert not list(folder.glob("*.partial"))


def test_a_model_that_is_being_copied_is_not_removed(store: ModelStore):
    model = store.begin(described())
    with (
        PartWriter(model.folder, parts_of(model.manifest, range(1, 6))[0]),
        pytest.raises(ModelError, match="is being copied"),
    ):
        store.remove(model)
    assert store.find(model.digest) is not None
