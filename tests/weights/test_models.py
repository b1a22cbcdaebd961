"""The store: what it holds, what it refuses, what it removes."""

import os
from pathlib import Path

import pytest
from stored import FILE, TOTAL, copied, described, spans_of, written
from test_copied_file import fill

from splitinfer.errors import ModelError
from splitinfer.weights.models import ModelStore


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path / "store", cap=2 * TOTAL)


def test_what_was_copied_is_found(store: ModelStore, tmp_path: Path):
    model = copied(store, tmp_path / "model", 1, 2)
    found = store.find(model.digest)
    assert found is not None
    assert set(found.tensors()) == {f"layers.{at}.weight" for at in (1, 2, 3)}  # the last is empty
    assert found.files() == ["config.json"]
    assert found.lacking(found.manifest.tensors) == TOTAL - sum(
        end - begin for begin, end in spans_of(described(), 1, 2)
    )
    assert store.named("a/model") == store.named(model.digest[:8]) == store.models() == [found]
    assert store.named("a/mode") == store.named(model.digest[:7]) == []
    assert 0 < store.nbytes == found.nbytes < TOTAL


def test_weights_that_differ_in_a_sample_have_folders_of_their_own(store: ModelStore, tmp_path: Path):
    one, other = (copied(store, tmp_path / "model", 1, sample=sample) for sample in "xy")
    assert one.folder != other.folder
    assert len(store.models()) == 2


def test_what_an_interrupted_copy_has_written_counts(store: ModelStore, tmp_path: Path):
    told = described()
    model, source = store.begin(told), written(tmp_path / "model", told)
    before = model.nbytes
    with model.open(FILE) as file:
        fill(file, source, most=3)
    assert model.nbytes - before == TOTAL - model.lacking(told.tensors) > 0


@pytest.mark.parametrize("what", ["file", "folder"])
def test_weights_that_are_a_link_are_not_read_or_written(store: ModelStore, tmp_path: Path, what: str):
    model = copied(store, tmp_path / "model")
    path = model.path_of(FILE) if what == "file" else model.path_of(FILE).parent
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    if what == "file":
        assert model.tensors().keys() <= {"layers.3.weight"}  # an empty one
    with pytest.raises(ModelError, match="is a symbolic link, which splitinfer does not follow here"):
        model.open(FILE)


@pytest.mark.parametrize("digest", ["", "..", "../store", "x" * 32, "a" * 31, "A" * 32])
def test_no_digest_is_a_path(store: ModelStore, tmp_path: Path, digest: str):
    copied(store, tmp_path / "model")
    assert store.find(digest) is None


def test_a_damaged_manifest_is_no_model(store: ModelStore, tmp_path: Path):
    model = copied(store, tmp_path / "model")
    (model.folder / ".manifest").write_bytes(b"damaged")
    assert store.models() == []
    assert store.begin(described()).tensors()  # what was copied is still good


def test_the_folder_must_not_be_a_link(store: ModelStore, tmp_path: Path):
    store.path.mkdir()
    (tmp_path / "victim").mkdir()
    (store.path / described().fingerprint.digest()).symlink_to(tmp_path / "victim")
    with pytest.raises(ModelError, match="is a symbolic link"):
        store.begin(described())
    assert list((tmp_path / "victim").iterdir()) == []


def test_the_cap_is_kept(store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _path: type("Usage", (), {"free": 10**12}))
    model = copied(store, tmp_path / "model")
    store.check_room(2 * TOTAL - model.nbytes)
    with pytest.raises(ModelError, match=r"no room in .*`splitinfer models rm`"):
        store.check_room(2 * TOTAL + 1 - model.nbytes)


def test_a_model_is_removed_with_all_that_is_its_own(store: ModelStore, tmp_path: Path):
    model, other = copied(store, tmp_path / "model"), copied(store, tmp_path / "model", 1, sample="other")
    nbytes = model.nbytes
    assert model.remove() == nbytes
    assert store.models() == [other]
    assert not model.folder.exists()
    assert copied(store, tmp_path / "model").tensors().keys() == {info.name for info in described().tensors}


def test_a_model_that_is_in_use_is_not_removed(store: ModelStore, tmp_path: Path):
    model = copied(store, tmp_path / "model")
    with model.hold(), model.hold():  # several may
        with pytest.raises(ModelError, match=r"a/model is in use by a splitinfer process of this machine"):
            model.remove()
        assert len(model.tensors()) == 5
    assert model.remove() > 0


def test_a_model_that_is_being_removed_cannot_be_used(
    store: ModelStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model, tried = copied(store, tmp_path / "model"), list[str]()
    real = os.unlink

    def unlink(path: Path, **fields: int) -> None:
        with pytest.raises(ModelError, match="is being removed by another process; try again") as raised:
            model.hold()
        tried.append(str(raised.value))
        real(path, **fields)

    monkeypatch.setattr(os, "unlink", unlink)
    model.remove()
    assert tried
    with pytest.raises(ModelError, match="is being removed"):
        model.hold()


def test_one_process_at_a_time_copies_a_model_and_the_others_wait(store: ModelStore):
    model, waited = store.begin(described()), list[int]()
    with model.copying(lambda: pytest.fail("nobody copies it")):
        with pytest.raises(InterruptedError), model.copying(lambda: _wait(waited)):
            pytest.fail("two copy it")
        with pytest.raises(ModelError, match="or being copied"):
            model.remove()
    assert len(waited) == 3
    with model.copying(lambda: pytest.fail("nobody copies it")):
        pass


def _wait(waited: list[int]) -> None:
    waited.append(1)
    if len(waited) == 3:
        raise InterruptedError
