"""Which tensors a folder holds, and where: the same by path, at the hub, offline, after a download, and on a worker.

A tensor's value says which file it was read from.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import httpx2
import huggingface_hub
import mlx.core as mx
import pytest
from fake_hub import FakeHub, fake_hub

from splitinfer.common.fingerprint import Fingerprint
from splitinfer.engine.weights.weight_source import FromPeers
from splitinfer.errors import ModelError
from splitinfer.models.folder.checkpoint import Checkpoint, open_folder
from splitinfer.models.folder.hub import fetch, kept, open_local, open_model
from splitinfer.models.folder.weight_files import INDEX
from splitinfer.weights.models import ModelStore
from splitinfer.wire.messages import Load

REPO = "owner/name"
A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
ONE, MTP = "model.safetensors", "model-mtp.safetensors"
OF_FIVE = {"a": "model-00001-of-00005.safetensors", "b": "model-00005-of-00005.safetensors"}
SHARDS, WHOLE = {A: {"a": 1, "a2": 1}, B: {"b": 2}}, {"a": 1, "a2": 1, "b": 2}
OF_SHARDS = {"a": A, "a2": A, "b": B}
EXTRA = "consolidated.safetensors"
README, ZFIX, FIX, FRONT = "README.md", "model-zfix.safetensors", "fix.safetensors", "model-00000-fix.safetensors"


@dataclass(frozen=True)
class Case:
    """``files``: values of tensors by file; ``right``: those of the model, or the words of the refusal."""

    files: dict[str, dict[str, int]]
    right: dict[str, int] | tuple[str, ...]
    index: dict[str, str] | None = None
    unread: tuple[str, ...] = field(default=())  # files that are not downloaded


CASES = {
    "one file": Case({ONE: WHOLE}, WHOLE),
    "shards": Case(SHARDS, WHOLE),
    "shards and index": Case(SHARDS, WHOLE, OF_SHARDS),
    "the source's index, one file": Case({ONE: WHOLE}, WHOLE, OF_FIVE),
    "the source's index, two files": Case(SHARDS, WHOLE, {**OF_FIVE, "dropped": OF_FIVE["a"]}),
    "the source's index, in its order": Case(SHARDS, WHOLE, {"a": B, "b": A, "dropped": A}),
    "an index of files that others have": Case({A: {"a": 1}, MTP: {"b": 3}}, {"a": 1, "b": 3}, {"a": A, "b": B}),
    "heads beside, no index": Case({ONE: {"a": 1}, "x-MTP.safetensors": {"b": 3}}, {"a": 1, "b": 3}),
    "heads beside, no word of them": Case({**SHARDS, "mtp.safetensors": {"c": 3}}, {**WHOLE, "c": 3}, OF_SHARDS),
    "a stray whole model": Case({**SHARDS, ONE: dict.fromkeys(WHOLE, 9)}, WHOLE, OF_SHARDS, (ONE,)),
    "a stray quantised model": Case({**SHARDS, ONE: {"a": 9, "a.scales": 9}}, WHOLE, OF_SHARDS, (ONE,)),
    "a stray shard of another number": Case(
        {**SHARDS, OF_FIVE["a"]: {"a": 9, "c": 9}}, WHOLE, OF_SHARDS, (OF_FIVE["a"],)
    ),
    "a whole model and shards, no index": Case({**SHARDS, ONE: WHOLE}, (ONE, A)),
    "two files, an index of neither": Case({A: {"a": 1}, ONE: {"a": 9}}, (ONE, A), OF_FIVE),
    "two files, an index of another tensor": Case({A: {"a": 1}, B: {"a": 2}}, (A, B), {"gone": A, "x": B}),
    "two extra files with one tensor": Case(
        {**SHARDS, MTP: {"m": 3}, ZFIX: {"m": 4}}, (MTP, ZFIX), OF_SHARDS
    ),
    **{
        f"overlay {name}": Case({**SHARDS, name: {"b": 7}}, {**WHOLE, "b": 7}, {**OF_SHARDS, "b": name})
        for name in (FRONT, ZFIX, FIX)
    },
    "an overlay of a whole file": Case({A: {"a": 1}, B: {"b": 2}, FIX: {"b": 7}}, {"a": 1, "b": 7}, {"a": A, "b": FIX}),
    "heads that the index does not name": Case({**SHARDS, MTP: {"m": 3}}, {**WHOLE, "m": 3}, OF_SHARDS),
    "heads in model.safetensors": Case({**SHARDS, ONE: {"m": 3}}, {**WHOLE, "m": 3}, OF_SHARDS),
    "other files of tensors": Case({**SHARDS, EXTRA: {"x": 9}}, WHOLE, unread=(EXTRA,)),
    "a shard is nowhere": Case({A: {"a": 1}}, ("1 of 2 files", B), OF_SHARDS),
    "nothing but an index": Case({}, ("0 of 2 files",), OF_SHARDS),
    "a shard is nowhere, no index": Case({A: {"a": 1}}, ("1 of 2 files", B)),
    "a shard is nowhere, a stray model": Case({A: {"a": 1}, ONE: {"a": 9, "b": 9}}, ("1 of 2 files", B), OF_SHARDS),
}  # fmt: skip


def write(folder: Path, case: Case) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "x"}')
    (folder / README).touch()
    (folder / ".gitattributes").touch()
    for file, tensors in case.files.items():
        mx.save_safetensors(str(folder / file), {name: mx.array([value]) for name, value in tensors.items()})
    if case.index is not None:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": case.index}))
    return folder


def read(checkpoint: Checkpoint) -> dict[str, int]:
    """The tensors' values, as loading reads them."""
    found = dict[str, int]()
    for path, names in checkpoint.paths_of(checkpoint.tensors).items():
        there: dict[str, mx.array] = mx.load(str(path))  # type: ignore[assignment]
        found |= {name: there[name].item() for name in names}  # type: ignore[misc]
    return found


def load(fingerprint: Fingerprint) -> Load:
    return Load(REPO, "auto", 0, (0, 1), fingerprint, 9, 0, b"", "exact", float32_head=False)


class NoPeer:
    """A coordinator that has no weights."""

    peer = "nobody"

    def ask(self, *_: object) -> object:
        raise AssertionError("the coordinator was asked for weights")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    with fake_hub(tmp_path / "hub with blänk") as hub:
        yield hub


def quiet(*_: object) -> None: ...


def offline(_request: httpx2.Request) -> httpx2.Response:
    raise httpx2.ConnectError("no route to host")


def everywhere(hub: FakeHub, source: Path, on_worker: Callable[[Fingerprint], Checkpoint]) -> list[Checkpoint]:
    """The model by path, at the hub, after the download, offline, and on a worker that has the client's files."""
    hub.repos[REPO] = source
    by_path, first = open_model(str(source)), open_model(REPO)
    assert hub.downloaded() == []
    fetch(REPO, first, first.tensors, quiet)
    after = open_model(REPO)
    hub.answer = offline
    return [by_path, first, after, open_model(REPO), on_worker(first.fingerprint())]


@pytest.mark.parametrize("name", CASES)
def test_what_a_folder_holds(name: str, hub: FakeHub, tmp_path: Path):
    case = CASES[name]
    source = write(tmp_path / "model", case)

    def on_worker(fingerprint: Fingerprint) -> Checkpoint:
        return FromPeers(NoPeer(), ModelStore(tmp_path / "store"), quiet).open(load(fingerprint))  # type: ignore[arg-type]

    if isinstance(case.right, tuple):
        hub.repos[REPO] = source
        for model in (str(source), REPO):
            with pytest.raises(ModelError) as caught:
                open_model(model)
            assert all(word in str(caught.value) for word in case.right), str(caught.value)
        assert open_local(REPO) is None
        return
    found = everywhere(hub, source, on_worker)
    assert [read(one) for one in found] == [case.right] * 5
    assert len({one.fingerprint().digest() for one in found[1:]}) == 1
    assert hub.downloaded() == sorted(case.files.keys() - set(case.unread)) or case.unread == ()


def test_an_overlay_that_the_index_does_not_name(hub: FakeHub, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    hub.repos[REPO] = write(tmp_path / "model", Case({**SHARDS, ZFIX: {"b": 7}}, WHOLE, OF_SHARDS))
    assert read(open_model(str(tmp_path / "model"))) == WHOLE
    assert set(open_model(REPO).files) == {A, B}
    assert f"{ZFIX} is not read: {INDEX} has its tensors in other files" in caplog.text


# -- what is half here -----------------------------------------------------------------------------


@pytest.fixture
def half(hub: FakeHub, tmp_path: Path) -> Path:
    """The client's folder of a model in two files, with its index, of which the first is here."""
    hub.repos[REPO] = write(tmp_path / "model", CASES["shards and index"])
    fetch(REPO, open_model(REPO), SHARDS[A], quiet)
    return hub.snapshot(REPO)


def dangling(folder: Path) -> None:
    (folder / B).symlink_to("../../blobs/" + "0" * 40)


@pytest.mark.parametrize("damage", [lambda _: None, dangling], ids=["absent", "dangling"])
def test_half_a_download_is_completed_online_and_named_offline(
    damage: Callable[[Path], None], half: Path, hub: FakeHub
):
    damage(half)
    hub.downloaded()
    online, hub.answer = hub.answer, offline
    with pytest.raises(ModelError, match=f"has 1 of 2 files of weights: {B} is missing, and the hub cannot be reached"):
        open_model(REPO)
    assert open_local(REPO) is None
    assert [(name, count) for name, count, _ in kept()] == [(REPO, "1 of 2 files")]
    hub.answer = online
    found = open_model(REPO)
    fetch(REPO, found, found.tensors, quiet)
    assert hub.downloaded() == [B]
    assert read(found) == WHOLE
    assert open_local(REPO) is not None


def test_a_damaged_file_of_the_client_is_not_the_model(half: Path, hub: FakeHub):
    """A worker takes it from elsewhere; the coordinator says which file to delete."""
    fetch(REPO, open_model(REPO), SHARDS[B], quiet)
    (half / B).resolve().write_bytes(b"x")
    assert open_local(REPO) is None
    with pytest.raises(ModelError, match=f"{B} is damaged"):
        open_model(REPO)


def test_half_a_folder_of_a_worker_is_none(tmp_path: Path):
    """It copies what it needs from the coordinator."""
    folder = write(tmp_path / "model", CASES["a shard is nowhere"])
    assert open_local(str(folder)) is None


def test_a_client_that_keeps_no_lists(half: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(huggingface_hub, "get_cached_repo_tree", None)
    assert open_local(REPO) is None
    assert set(open_model(REPO).tensors) == set(WHOLE)
    fetch(REPO, open_model(REPO), SHARDS[B], quiet)
    found = open_local(REPO)
    assert found is not None
    assert read(found) == WHOLE


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": null}']
)
def test_a_damaged_index(text: str, tmp_path: Path):
    folder = write(tmp_path / "model", CASES["shards"])
    (folder / INDEX).write_text(text)
    with pytest.raises(ModelError, match=r"index.json is damaged; delete it and download it again"):
        open_folder(folder)


def test_an_index_that_leads_out_of_the_folder(tmp_path: Path):
    folder = write(tmp_path / "model", Case({ONE: {"a": 1}}, {}, {"a": ONE, "b": "../secret.safetensors"}))
    mx.save_safetensors(str(tmp_path / "secret.safetensors"), {"b": mx.array([1])})
    with pytest.raises(ModelError, match=r"1 of 2 files"):
        open_folder(folder)


def code(status: int, name: str = "") -> Callable[[httpx2.Request], httpx2.Response]:
    return lambda _request: httpx2.Response(status, headers={"X-Error-Code": name} if name else {})


def page(_request: httpx2.Request) -> httpx2.Response:
    return httpx2.Response(200, text="<html>Welcome to our hotel</html>")


def other_json(_request: httpx2.Request) -> httpx2.Response:
    return httpx2.Response(200, json=["no", "hub"])


KINDS = {
    "wrong name": (code(401, "RepoNotFound"), "has no such model, or it is private: check the name, or log in"),
    "wrong name, logged in": (code(404, "RepoNotFound"), "has no such model, or it is private"),
    "gated": (code(401, "GatedRepo"), "gated: accept its terms at https://huggingface.co/owner/name, then log in"),
    "gated, logged in": (code(403, "GatedRepo"), "gated: accept its terms at https://huggingface.co/owner/name"),
    "rate": (code(429), r"too many requests from you \(429\): wait a few minutes"),
    "fails": (code(500), r"the hub fails \(500\)"),
    "away": (code(503), r"the hub fails \(503\)"),
    "nobody": (offline, r"the hub cannot be reached \(no route to host\)"),
    "portal": (page, "what answers at https://huggingface.co is not the hub .*log in to this network in a browser"),
    "another form": (other_json, "what answers at https://huggingface.co is not the hub"),
}


@pytest.mark.parametrize(
    ("when", "kind"),
    [
        *(("nothing is here", kind) for kind in KINDS),
        *product(("half is here", "all is here", "a file is downloaded"), ("nobody", "gated", "portal")),
    ],
)
def test_errors_of_the_hub(kind: str, when: str, hub: FakeHub, request: pytest.FixtureRequest, tmp_path: Path):
    hub.answer, (answer, words) = hub.answer, KINDS[kind]
    hub.repos[REPO] = write(tmp_path / "source", CASES["shards and index"])
    if when == "nothing is here":
        hub.answer = answer
        with pytest.raises(ModelError, match=f"^{REPO} is not on this machine, and .*{words}"):
            open_model(REPO)
        return
    checkpoint = open_model(REPO)
    fetch(REPO, checkpoint, WHOLE if when == "all is here" else SHARDS[A], quiet)
    hub.answer = answer
    if when == "all is here":
        assert read(open_model(REPO)) == WHOLE
    elif when == "half is here":
        with pytest.raises(ModelError, match=f"has 1 of 2 files of weights: {B} is missing, and .*{words}"):
            open_model(REPO)
    else:
        with pytest.raises(ModelError, match=f"^{B} of {REPO} could not be downloaded: .*"):
            fetch(REPO, checkpoint, SHARDS[B], quiet)
