"""Who may take weights from a worker, and what a reader may say: as for a coordinator, and nothing else."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from stages import keyed_worker
from stored import FILE, copied, described

from splitinfer.engine.weights.copying import Remote, WeightReader, request_manifest
from splitinfer.engine.worker.handshake import AccessControl
from splitinfer.errors import PeerError, Refused, WorkerUnreachable
from splitinfer.keyring import Keyring
from splitinfer.weights.models import ModelStore
from splitinfer.wire.messages import AskManifest, AskRanges, Range, Unavailable
from transports import KeyPair, LinkOptions, Security

ADMITTED, STRANGER = KeyPair.make(), KeyPair.make()


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    """A store with all of one model."""
    store = ModelStore(tmp_path / "store")
    copied(store, tmp_path / "model")
    return store


@pytest.fixture
def access() -> AccessControl:
    Keyring().admit(ADMITTED.public, "studio")
    return AccessControl(Keyring())


@pytest.fixture
def address(store: ModelStore, access: AccessControl, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    # The model's files are random bytes; that its tables have this fingerprint is for other tests.
    monkeypatch.setattr("splitinfer.common.fingerprint.Fingerprint.difference", lambda *_: None)
    with keyed_worker(Keyring(), access, store) as address:
        yield address


def options(own: KeyPair) -> LinkOptions:
    return LinkOptions(security=Security(own, Keyring().own().public))


@pytest.fixture
def wanted() -> str:
    return described().fingerprint.digest()


def test_a_model_is_found_by_name_or_its_digests_beginning(address: str, wanted: str):
    with WeightReader(address, options(ADMITTED), 5.0) as reader:
        assert all(isinstance(request_manifest(reader, "", name), Remote) for name in ("a/model", wanted[:10]))


def test_who_has_left_is_not_counted(address: str, wanted: str):
    for _ in range(9):  # more than may read at a time
        with WeightReader(address, options(ADMITTED), 5.0) as reader:
            assert isinstance(request_manifest(reader, wanted), Remote)


def test_a_stranger_gets_nothing(address: str):
    with pytest.raises((Refused, WorkerUnreachable), match="cannot be asked for weights"):
        WeightReader(address, options(STRANGER), 2.0)


def test_without_encryption_nothing(address: str):
    with pytest.raises(PeerError):
        WeightReader(address, LinkOptions(), 2.0)


def test_the_stage_before_may_bring_hidden_states_and_take_no_weights(address: str, access: AccessControl):
    access.begin(STRANGER.public)
    with pytest.raises(Refused, match="this key is not admitted here"):
        WeightReader(address, options(STRANGER), 5.0)


def test_a_worker_that_the_coordinator_named_may_take_weights_for_this_session(
    address: str, access: AccessControl, wanted: str
):
    access.begin()
    access.let_read([STRANGER.public])
    assert not access.allows("coordinator", STRANGER.public)
    assert not access.allows("upstream", STRANGER.public)
    with WeightReader(address, options(STRANGER), 5.0) as reader:
        assert isinstance(request_manifest(reader, wanted), Remote)
    access.begin()
    with pytest.raises(PeerError):
        WeightReader(address, options(STRANGER), 2.0)


@pytest.mark.parametrize("name", ["", "a/../a/model", "\0", "x" * 5000, "{folder}"])
def test_no_name_is_a_path(address: str, name: str, tmp_path: Path):
    with WeightReader(address, options(ADMITTED), 5.0) as reader:
        answer = request_manifest(reader, "", name.format(folder=tmp_path / "model"))
    assert isinstance(answer, Unavailable)
    assert "is not here" in answer.reason


def test_nothing_is_written_for_a_reader(address: str, store: ModelStore, wanted: str):
    before = sorted((path, path.stat().st_mtime_ns) for path in store.path.rglob("*"))
    with WeightReader(address, options(ADMITTED), 5.0) as reader:
        reader.send(AskManifest(wanted))
        reader.receive()
        reader.send(AskRanges((Range("config.json", 0, 9), Range(FILE, 0, 9))))
        reader.receive()
    assert sorted((path, path.stat().st_mtime_ns) for path in store.path.rglob("*")) == before
