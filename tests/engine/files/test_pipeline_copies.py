"""A worker that has nothing of a model takes its layers' tensors from the coordinator, or from another worker."""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tiny
from stages import layout, plain_greedy, prompt, tokens_of
from trained import noted_proposals, save_dflash, save_eagle3

from splitinfer import SamplingParams
from splitinfer.config import Layout
from splitinfer.engine.coordinator import pipeline as coordinator
from splitinfer.engine.files import answering
from splitinfer.engine.files.copying import Remote, ask_manifest, pull
from splitinfer.engine.files.reader import Reader
from splitinfer.engine.links.connection import Connection
from splitinfer.engine.stage.loader import LoadedStage
from splitinfer.engine.worker import control_channel
from splitinfer.engine.worker.access import AccessControl
from splitinfer.engine.worker.weights import Weights
from splitinfer.engine.worker.worker import Worker
from splitinfer.errors import ModelError, PeerError, Refused, SplitinferError
from splitinfer.keyring import Keyring
from splitinfer.llm import LLM, Settings
from splitinfer.models.checkpoint import open_folder
from splitinfer.models.copied import open_stored, source_of
from splitinfer.models.hub import open_local
from splitinfer.models.loader import survey
from splitinfer.store.manifest import Manifest, pack
from splitinfer.store.models import ModelStore, StoredModel
from splitinfer.store.pace import BESIDE_SERVING
from splitinfer.store.ranges import missing
from splitinfer.store.source import Source
from splitinfer.wire.messages import AskManifest, AskRanges, Load, Range, TellRange
from transports import KeyPair, LinkOptions, listen

_names = itertools.count()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("models"), "llama")


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No internet, and nothing of the hub's on this machine."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("splitinfer.engine.files.supply.open_local", lambda _model, _revision: None)
    monkeypatch.setattr("splitinfer.engine.files.supply.local_snapshot", lambda _model, _revision: None)
    monkeypatch.setattr("splitinfer.models.hub._open_hub", lambda repo: pytest.fail(f"the hub was asked for {repo}"))


@contextmanager
def worker(store: ModelStore) -> Iterator[str]:
    """A worker with a store, and no model; its address."""
    listener = listen(f"inproc://copies-{next(_names)}")
    running = Worker(listener, store=store)
    try:
        yield listener.address
    finally:
        assert running.stop(timeout=10)


@contextmanager
def pipeline(model: Path, stores: list[ModelStore], **settings: Any) -> Iterator[LLM]:
    cuts = {1: [2, 2], 2: [1, 1, 2]}[len(stores)]
    with ExitStack() as stack:
        addresses = [stack.enter_context(worker(store)) for store in stores]
        yield stack.enter_context(LLM(layout(model, cuts, addresses), settings=Settings(**settings)))


def only(store: ModelStore) -> StoredModel:
    (found,) = store.models()
    return found


def test_a_worker_takes_its_layers_and_no_others(model: Path, tmp_path: Path):
    store, tokens = ModelStore(tmp_path / "store"), prompt(20)
    with pipeline(model, [store]) as llm:
        assert tokens_of(llm, tokens, max_tokens=8) == plain_greedy(model, tokens, 8)
    stored = only(store)
    assert set(stored.tensors()) == survey(open_folder(model), 2, 4, "float32").tensors
    assert stored.files() == ["config.json"]
    assert not any(path.name.endswith((".py", "tokenizer.json")) for path in stored.folder.iterdir())


def test_weights_that_a_worker_holds_are_not_removed(model: Path, tmp_path: Path):
    store = ModelStore(tmp_path / "store")
    with pipeline(model, [store]), pytest.raises(ModelError, match="is in use by a splitinfer of this machine"):
        only(store).remove()
    assert set(only(store).tensors()) == survey(open_folder(model), 2, 4, "float32").tensors


def test_what_was_copied_is_not_copied_again(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    store, tokens = ModelStore(tmp_path / "store"), prompt(20)
    with pipeline(model, [store]) as llm:
        first = tokens_of(llm, tokens, max_tokens=4)
    monkeypatch.setattr(
        "splitinfer.engine.files.answering.Answers._tell_ranges", lambda *_: pytest.fail("it was asked")
    )
    with pipeline(model, [store]) as llm:
        assert tokens_of(llm, tokens, max_tokens=4) == first


def test_other_layers_come_in_addition(model: Path, tmp_path: Path):
    store = ModelStore(tmp_path / "store")
    with pipeline(model, [store]):
        pass
    before = set(only(store).tensors().values())
    with pipeline(model, [store, ModelStore(tmp_path / "third")]):  # this one holds layer 1 now
        pass
    after = only(store).tensors()
    assert set(after) == survey(open_folder(model), 1, 4, "float32").tensors
    assert before < set(after.values())


def test_a_worker_that_has_what_the_coordinator_lacks(model: Path, tmp_path: Path):
    """The coordinator's files of the last layers are gone; another worker has them in its store."""
    whole, lacking = ModelStore(tmp_path / "whole"), ModelStore(tmp_path / "lacking")
    with pipeline(model, [whole]):
        pass
    held = survey(open_folder(model), 2, 4, "float32").tensors

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(answering, "source_of", lambda checkpoint, model: _without(source_of(checkpoint, model), held))
        with pipeline(model, [whole, lacking]) as llm:
            assert tokens_of(llm, prompt(20), max_tokens=4) == plain_greedy(model, prompt(20), 4)
    assert set(only(lacking).tensors()) == held


def test_the_coordinator_answers_while_it_still_reads_its_own_layers(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store, read = ModelStore(tmp_path / "store"), coordinator.load

    def late(*command: Any) -> LoadedStage:
        deadline = time.monotonic() + 20
        while not (store.models() and only(store).tensors()):
            assert time.monotonic() < deadline, "nothing was copied meanwhile"
            time.sleep(0.01)
        return read(*command)

    monkeypatch.setattr(coordinator, "load", late)
    with pipeline(model, [store]) as llm:
        assert tokens_of(llm, prompt(9), max_tokens=4) == plain_greedy(model, prompt(9), 4)


@pytest.mark.parametrize("hidden", [[], [".DS_Store"]])
def test_an_empty_folder_at_the_models_path_is_as_good_as_none(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: list[str]
):
    """On another machine, whose path of the model leads to an empty folder."""
    empty, store = tmp_path / "empty", ModelStore(tmp_path / "store")
    empty.mkdir()
    for name in hidden:
        (empty / name).touch()
    monkeypatch.setattr(
        "splitinfer.engine.files.supply.open_local", lambda _model, revision: open_local(str(empty), revision)
    )
    with pipeline(model, [store]) as llm:
        assert tokens_of(llm, prompt(9), max_tokens=4) == plain_greedy(model, prompt(9), 4)
    assert only(store).tensors()


def test_a_folder_at_the_models_path_that_holds_something_else_is_refused(tmp_path: Path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ModelError, match=r"contains no config.json"):
        open_local(str(tmp_path))


def test_a_coordinator_that_beats_and_never_answers_does_not_hold_a_worker(model: Path, tmp_path: Path):
    with worker(ModelStore(tmp_path / "store")) as address:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(answering.Answers, "put", lambda *_: None)
            patch.setattr(control_channel, "_ANSWER_SECONDS", 0.01)
            with pytest.raises(PeerError, match="did not answer a request for weights"):
                LLM(layout(model, [2, 2], [address]), settings=Settings())
        with LLM(layout(model, [2, 2], [address]), settings=Settings()) as llm:
            assert tokens_of(llm, prompt(9), max_tokens=4) == plain_greedy(model, prompt(9), 4)


def test_a_worker_that_copies_nothing_says_why(tmp_path: Path):
    weights = Weights(None, lambda: None, KeyPair.make, copies=True)
    command = cast(Load, SimpleNamespace(model=str(tmp_path / "nothing")))
    with weights.supply(cast(Connection, None)) as supply:
        assert supply is not None
        with pytest.raises(ModelError, match=r"there is no .*; it was started with --models-dir none"):
            supply.open(command)


def test_another_cut_whose_layers_have_to_be_copied(model: Path, tmp_path: Path):
    """While requests wait, the worker takes what its new layers lack, and its progress is shown; a copy that fails
    leaves the cut as it was."""
    store, shown = ModelStore(tmp_path / "store"), list[str]()
    tokens, params = prompt(20), SamplingParams(max_tokens=40, ignore_eos=True)
    with (
        worker(store) as address,
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


def test_a_link_that_ends_in_the_middle_of_what_another_cut_copies(model: Path, tmp_path: Path):
    store, tokens = ModelStore(tmp_path / "store"), prompt(20)
    with worker(store) as address, LLM(layout(model, [3, 1], [address]), settings=Settings()) as llm:
        request = llm.submit(tokens, SamplingParams(max_tokens=40, ignore_eos=True))
        events = iter(request)
        next(events)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                answering.Answers, "_tell_ranges", lambda self, _ask: self._end.link.abort("the cable is out")
            )
            with pytest.raises(PeerError):
                llm.recut([1, 3])
        next(events)
        assert llm.layout.cut == "3-1"
        llm.recut([1, 3])
        list(events)
        assert request.result().token_ids == plain_greedy(model, tokens, 40)


def test_a_pipeline_of_one_machine_takes_a_worker_with_a_key(model: Path, tmp_path: Path):
    own, access = Keyring(tmp_path / "there"), AccessControl(Keyring(tmp_path / "there"))
    own.admit(Keyring().own().public, "studio")
    listener = listen("tcp://127.0.0.1:0", options=access.options)
    running = Worker(listener, store=ModelStore(tmp_path / "store"), keys=own, access=access)
    second = {"name": "b", "layers": 2, "address": listener.address, "key": own.own().public}
    try:
        with LLM({"model": str(model), "stages": [{"name": "a", "layers": 4}]}, settings=Settings()) as llm:
            llm.recut(Layout.from_dict({"model": str(model), "stages": [{"name": "a", "layers": 2}, second]}, "two"))
            assert tokens_of(llm, prompt(9), max_tokens=4) == plain_greedy(model, prompt(9), 4)
    finally:
        assert running.stop(timeout=10)


def _without(source: Source, lost: frozenset[str]) -> Source:
    """The same, but for tensors of the folder that are gone."""
    told = source.manifest
    if not source._places["config.json"].path.parent.joinpath("weights").exists():
        gone = [told.by_name[name] for name in lost]
        held = {
            file: missing(spans, [(info.begin, info.end) for info in gone if info.file == file])
            for file, spans in told.held.items()
        }
        told = replace(told, held=held)
    return Source(told, source._places)


def test_a_model_that_is_pulled_is_not_removed_meanwhile(model: Path, tmp_path: Path):
    store, mine = ModelStore(tmp_path / "store"), ModelStore(tmp_path / "mine")
    with pipeline(model, [store]):
        pass
    said = list[str]()

    def remove(_done: int, _total: int) -> None:
        with pytest.raises(ModelError, match="is in use") as raised:
            only(mine).remove()
        said.append(str(raised.value))

    with worker(store) as address, Reader(address, LinkOptions(), 5.0) as reader:
        done = pull(reader, mine, only(store).digest, None, remove)
    assert said
    assert done.stored.tensors().keys() == only(store).tensors().keys()


def test_layers_that_a_model_has_not(model: Path, tmp_path: Path):
    store = ModelStore(tmp_path / "store")
    with pipeline(model, [store]):
        pass
    with (
        worker(store) as address,
        Reader(address, LinkOptions(), 5.0) as reader,
        pytest.raises(ModelError, match="has layers 0 to 3, not all of 2 to 39"),
    ):
        pull(reader, ModelStore(tmp_path / "mine"), only(store).digest, (2, 40), lambda *_: None)


def test_a_store_without_room_says_so(model: Path, tmp_path: Path):
    store = ModelStore(tmp_path / "store", cap=100_000)
    with pytest.raises(PeerError, match=r"there is no room in .*models rm"), pipeline(model, [store]):
        pass
    store.cap = None
    with pipeline(model, [store]) as llm:
        assert len(tokens_of(llm, prompt(9), max_tokens=2)) == 2


def test_another_fingerprint_than_described(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The coordinator's list of tensors is not that of the model which it wants to be loaded."""

    def lie(told: Manifest) -> bytes:
        return pack(replace(told, tensors=told.tensors[:-1], held={}))

    monkeypatch.setattr(answering, "pack", lie)
    store = ModelStore(tmp_path / "store")
    with pytest.raises((PeerError, ModelError)) as raised, pipeline(model, [store]):
        pass
    assert "describes other weights than it wants to be loaded" in str(raised.value)
    assert store.models() == []


def test_a_reader_at_the_door_of_a_worker_that_serves(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Weights are taken beside serving, at a bounded rate then."""
    rates = list[float | None]()
    monkeypatch.setattr("splitinfer.store.pace.Pace.wait", lambda _self, _now, _nbytes, rate: rates.append(rate) or 0.0)
    store = ModelStore(tmp_path / "store")
    with worker(store) as address, LLM(layout(model, [2, 2], [address]), settings=Settings()) as llm:
        with Reader(address, LinkOptions(), 5.0) as reader:
            answer = ask_manifest(reader, only(store).digest)
            assert isinstance(answer, Remote)
            file, spans = next(iter(answer.manifest.held.items()))
            ask_range(reader, file, spans[0][0])
            assert rates.pop() is None
            request = llm.submit(prompt(12), SamplingParams(max_tokens=40, ignore_eos=True))
            events = iter(request)
            next(events)
            ask_range(reader, file, spans[0][0])
            assert rates.pop() == BESIDE_SERVING
            held = {info.name for info in answer.manifest.tensors if answer.holds(info)}
            assert held == set(only(store).tensors())
            assert [each.name for each in answer.manifest.files] == ["config.json"]
        assert len(list(events)) == 39
        assert request.result().token_ids == plain_greedy(model, prompt(12), 40)


def ask_range(reader: Reader, file: str, begin: int) -> None:
    reader.send(AskRanges((Range(file, begin, begin + 9),)))
    assert isinstance(reader.receive()[0], TellRange)


def test_only_so_many_readers(model: Path, tmp_path: Path):
    with worker(ModelStore(tmp_path / "store")) as address, ExitStack() as stack:
        readers = [stack.enter_context(Reader(address, LinkOptions(), 5.0)) for _ in range(4)]
        for reader in readers:
            reader.send(AskManifest("0" * 32))
            reader.receive()
        with pytest.raises(Refused, match="4 others copy"):
            Reader(address, LinkOptions(), 5.0)


def test_a_damaged_configuration_in_the_store(model: Path, tmp_path: Path):
    store = ModelStore(tmp_path / "store")
    with pipeline(model, [store]):
        pass
    stored = only(store)
    config = stored.folder / "config.json"
    config.write_text(config.read_text().replace("0", "1", 1))
    with pytest.raises(ModelError, match=r"is damaged \(config.json differs\); remove it with: splitinfer models rm"):
        open_stored(stored)


@pytest.mark.parametrize("save", [save_eagle3, save_dflash])
def test_a_drafter_is_copied_as_far_as_a_stage_reads_it(
    save: Callable[..., Path], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, stores = save(tmp_path / "drafter"), [ModelStore(tmp_path / f"store{i}") for i in range(2)]
    proposed = noted_proposals(monkeypatch)
    with pipeline(model, stores, draft=str(drafter)) as llm:
        assert tokens_of(llm, prompt(20), max_tokens=8) == plain_greedy(model, prompt(20), 8)
    assert proposed
    held = [{one.manifest.model: set(one.tensors()) for one in store.models()} for store in stores]
    assert held[0][str(drafter)] == {"fc.weight"}
    assert held[1][str(drafter)] == set(open_folder(drafter).tensors)
    assert held[0][str(model)] == survey(open_folder(model), 1, 2, "float32").tensors
