"""A worker that has nothing of a model takes its layers' tensors from the coordinator, or from another worker."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from stages import keyed_worker, layout, plain_greedy, prompt, tokens_of, worker
from trained import save_dflash, save_eagle3

from splitinfer import SamplingParams
from splitinfer.config import Layout
from splitinfer.engine.weights import answering
from splitinfer.engine.weights.copying import WeightReader, pull
from splitinfer.engine.worker.handshake import AccessControl
from splitinfer.errors import ModelError, Refused, SplitinferError
from splitinfer.keyring import Keyring
from splitinfer.llm import LLM, Settings
from splitinfer.models.folder.checkpoint import Checkpoint, open_folder, open_stored, source_of
from splitinfer.models.folder.hub import open_local
from splitinfer.models.load.loader import survey
from splitinfer.weights.manifest import Manifest
from splitinfer.weights.models import ModelStore, StoredModel
from splitinfer.weights.ranges import missing
from splitinfer.weights.source import Source
from splitinfer.wire.messages import AskManifest
from transports import LinkOptions


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("models"), "llama")


@pytest.fixture(autouse=True)
def workers_have_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on another machine, although theirs is this one."""
    for name in ("open_local", "local_snapshot"):
        monkeypatch.setattr(f"splitinfer.engine.weights.weight_source.{name}", lambda _model, _revision: None)


@contextmanager
def pipeline(model: Path, stores: list[ModelStore], **settings: Any) -> Iterator[LLM]:
    cuts = {1: [2, 2], 2: [1, 1, 2]}[len(stores)]
    with ExitStack() as stack:
        addresses = [stack.enter_context(worker("inproc", store=store)) for store in stores]
        yield stack.enter_context(LLM(layout(model, cuts, addresses), settings=Settings(**settings)))


def only(store: ModelStore) -> StoredModel:
    (found,) = store.models()
    return found


def test_a_worker_takes_its_layers_once_and_no_others(model: Path, tmp_path: Path):
    """Other layers come in addition; nothing that was copied is written again, or removed while it is held."""
    store, tokens = ModelStore(tmp_path / "store"), prompt(20)
    with pipeline(model, [store]) as llm:
        assert tokens_of(llm, tokens, max_tokens=8) == plain_greedy(model, tokens, 8)
        with pytest.raises(ModelError, match="is in use by a splitinfer process of this machine"):
            only(store).remove()
    first = only(store).tensors()
    assert set(first) == survey(open_folder(model), 2, 4, "float32").tensors
    assert only(store).files() == ["config.json"]
    written = {path: path.stat().st_mtime_ns for path in first.values()}
    with pipeline(model, [store, ModelStore(tmp_path / "third")]):  # this one holds layer 1 now
        pass
    assert set(only(store).tensors()) == survey(open_folder(model), 1, 4, "float32").tensors
    assert {path: path.stat().st_mtime_ns for path in written} == written


@pytest.mark.parametrize("hidden", [[], [".DS_Store"]])
def test_an_empty_folder_at_the_models_path_is_as_good_as_none(tmp_path: Path, hidden: list[str]):
    """On another machine, whose path of the model leads to an empty folder; one with something else is refused."""
    for name in hidden:
        (tmp_path / name).touch()
    assert open_local(str(tmp_path), None) is None
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ModelError, match=r"contains no config.json"):
        open_local(str(tmp_path))


def test_a_worker_that_has_what_the_coordinator_lacks(model: Path, tmp_path: Path):
    """The coordinator's files of the last layers are gone; another worker has them in its store."""
    whole, other = ModelStore(tmp_path / "whole"), ModelStore(tmp_path / "other")
    with pipeline(model, [whole]):
        pass
    held = survey(open_folder(model), 2, 4, "float32").tensors

    def lacking(checkpoint: Checkpoint, name: str) -> Source:
        source = source_of(checkpoint, name)
        if checkpoint.folder == model:
            source.manifest = _without(source.manifest, held)
        return source

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answering, "source_of", lacking)
        with pipeline(model, [whole, other]) as llm:
            assert tokens_of(llm, prompt(20), max_tokens=4) == plain_greedy(model, prompt(20), 4)
    assert set(only(other).tensors()) == held


def test_another_cut_whose_layers_have_to_be_copied(model: Path, tmp_path: Path):
    """While requests wait, the worker takes what its new layers lack, and its progress is shown; a copy that fails
    leaves the cut as it was."""
    store, shown = ModelStore(tmp_path / "store"), list[str]()
    tokens, params = prompt(20), SamplingParams(max_tokens=40, ignore_eos=True)
    with (
        worker("inproc", store=store) as address,
        LLM(
            layout(model, [3, 1], [address]),
            settings=Settings(),
            notice=lambda name, progress: shown.append(f"{name} {progress.phase}"),
        ) as llm,
    ):
        request = llm.submit(tokens, params)
        events = iter(request)
        next(events)
        before = set(only(store).tensors())
        shown.clear()
        store.cap = 1
        with pytest.raises(SplitinferError, match="there is no room"):
            llm.recut([1, 3])
        assert llm.layout.cut == "3-1"
        next(events)
        store.cap = None
        llm.recut([1, 3])
        assert "s1 copy" in shown
        assert before < set(only(store).tensors())
        assert [event.token_ids for event in events]
        assert request.result().token_ids == plain_greedy(model, tokens, 40)


def test_a_pipeline_of_one_machine_takes_a_worker_with_a_key(model: Path, tmp_path: Path):
    own = Keyring(tmp_path / "there")
    own.admit(Keyring().own().public, "studio")
    with keyed_worker(own, AccessControl(own), ModelStore(tmp_path / "store")) as address:
        second = {"name": "b", "layers": 2, "address": address, "key": own.own().public}
        with LLM({"model": str(model), "stages": [{"name": "a", "layers": 4}]}, settings=Settings()) as llm:
            llm.recut(Layout.from_dict({"model": str(model), "stages": [{"name": "a", "layers": 2}, second]}, "two"))
            assert tokens_of(llm, prompt(9), max_tokens=4) == plain_greedy(model, prompt(9), 4)


def _without(told: Manifest, lost: frozenset[str]) -> Manifest:
    """The same, but for tensors that are gone."""
    gone = [told.by_name[name] for name in lost]
    held = {file: missing(spans, [(info.begin, info.end) for info in gone if info.file == file])
            for file, spans in told.held.items()}  # fmt: skip
    return replace(told, held=held)


def test_layers_that_a_model_has_not(model: Path, tmp_path: Path):
    store = ModelStore(tmp_path / "store")
    with pipeline(model, [store]):
        pass
    with (
        worker("inproc", store=store) as address,
        WeightReader(address, LinkOptions(), 5.0) as reader,
        pytest.raises(ModelError, match="has layers 0 to 3, not all of 2 to 39"),
    ):
        pull(reader, ModelStore(tmp_path / "mine"), only(store).digest, (2, 40), lambda *_: None)


def test_only_so_many_readers(model: Path, tmp_path: Path):
    with worker("inproc", store=ModelStore(tmp_path / "store")) as address, ExitStack() as stack:
        readers = [stack.enter_context(WeightReader(address, LinkOptions(), 5.0)) for _ in range(4)]
        for reader in readers:
            reader.send(AskManifest("0" * 32))
            reader.receive()
        with pytest.raises(Refused, match="4 others copy"):
            WeightReader(address, LinkOptions(), 5.0)


def test_a_damaged_configuration_in_the_store(model: Path, tmp_path: Path):
    store = ModelStore(tmp_path / "store")
    with pipeline(model, [store]):
        pass
    stored = only(store)
    config = stored.folder / "config.json"
    config.write_text(config.read_text().replace("0", "1", 1))
    with pytest.raises(ModelError, match=r"is damaged \(config.json differs\); remove it with: splitinfer models rm"):
        open_stored(stored)


@pytest.mark.parametrize("save", [save_eagle3, pytest.param(save_dflash, marks=pytest.mark.nightly)])
def test_a_drafter_is_copied_as_far_as_a_stage_reads_it(save: Callable[..., Path], model: Path, tmp_path: Path) -> None:
    drafter, stores = save(tmp_path / "drafter"), [ModelStore(tmp_path / f"store{i}") for i in range(2)]
    with pipeline(model, stores, draft=str(drafter)) as llm:
        assert tokens_of(llm, prompt(20), max_tokens=8) == plain_greedy(model, prompt(20), 8)
        assert llm.stats()["speculation"]["drafted"] > 0
    held = [{one.manifest.model: set(one.tensors()) for one in store.models()} for store in stores]
    assert held[0][str(drafter)] == {"fc.weight"}
    assert held[1][str(drafter)] == set(open_folder(drafter).tensors)
    assert held[0][str(model)] == survey(open_folder(model), 1, 2, "float32").tensors
