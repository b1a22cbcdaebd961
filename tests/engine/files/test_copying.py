"""One copies from another over a link: all arrives, once, or it ends with a sentence and the next copy goes on."""

import errno
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from weights import CONFIG, SIZES, bytes_in, described, shorten_pieces

from splitinfer.engine.files.asking import Remote, ask_manifest, copy_small, copy_tensors
from splitinfer.engine.files.outlet import Outlet
from splitinfer.errors import ModelError, PeerError, ProtocolError
from splitinfer.store import pieces
from splitinfer.store.manifest import Manifest, pack
from splitinfer.store.models import ModelStore, StoredModel
from splitinfer.store.part import PartWriter
from splitinfer.store.parts import parts_of
from splitinfer.store.source import Source
from splitinfer.wire import codec
from splitinfer.wire.messages import AskPieces, Message, TellManifest, TellPiece, Unavailable
from transports import Frame, Link, LinkClosed, TransportError, connect, listen

_names = itertools.count()
Tamper = Callable[[Message, list[bytes]], tuple[Message, list[bytes]]]
ALL = range(1, 6)  # the numbers of the tensors


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch):
    shorten_pieces(monkeypatch, 8)


class OneModel:
    """A shelf with one model, made anew for each that asks."""

    def __init__(self, make: Callable[[], Source]) -> None:
        self._make = make

    def open(self, weights: str, model: str) -> Source:
        source = self._make()
        if (weights or source.manifest.fingerprint.digest()) != source.manifest.fingerprint.digest():
            raise ModelError(f"{model or 'a model with these weights'} is not here")
        return source


class End:
    """The sender's end of a link. ``tamper``: what it sends in place of an answer."""

    def __init__(self, link: Link, tamper: Tamper) -> None:
        self.link, self._tamper = link, tamper
        self.sent = 0

    def receive(self, item: Frame) -> Message:
        return codec.decode(item.header)

    def send(self, message: Message, *parts: memoryview) -> None:
        message, data = self._tamper(message, [bytes(part) for part in parts])
        self.sent += sum(map(len, data))
        self.link.send(Frame(codec.encode(message), tuple(data)))


class Channel:
    """The asker's end. ``most``: how many messages it receives until its link is lost. ``sender``: see ``asking``."""

    def __init__(self, link: Link, most: int, sender: str) -> None:
        self.link, self._left, self.sender = link, most, sender
        self.peer = sender or "studio"
        self.asked: list[Message] = []

    def send(self, message: Message) -> None:
        self.asked.append(message)
        self.link.send(Frame(codec.encode(message)))

    def receive(self) -> tuple[Message, Sequence[memoryview]]:
        self._left -= 1
        if self._left < 0:
            self.link.abort("the cable was pulled")
        frame = self.link.recv(timeout=20)
        return codec.decode(frame.header), [memoryview(part) for part in frame.parts]


def as_it_is(message: Message, data: list[bytes]) -> tuple[Message, list[bytes]]:
    return message, data


@contextmanager
def connected(
    make: Callable[[], Source], tamper: Tamper = as_it_is, most: int = 10**9, sender: str = ""
) -> Iterator[tuple[Channel, End]]:
    address = f"inproc://copying-{next(_names)}"
    with listen(address) as listener, connect(address, timeout=5) as link:
        end = End(listener.accept(timeout=5), tamper)
        outlet = Outlet(end, OneModel(make), lambda: None)
        end.link.deliver_to(lambda item: outlet.close() if isinstance(item, LinkClosed) else outlet.put(item))
        yield Channel(link, most, sender), end


def copy(channel: Channel, stored: StoredModel, numbers: Sequence[int] = ALL) -> list[tuple[int, int]]:
    remote = ask_manifest(channel, stored.digest)
    assert isinstance(remote, Remote)
    reports: list[tuple[int, int]] = []
    copy_small(remote, stored, [0])
    copy_tensors(remote, stored, numbers, lambda *at: reports.append(at))
    return reports


def assert_copied(stored: StoredModel, tmp_path: Path, numbers: Sequence[int] = ALL) -> None:
    here = stored.tensors()
    assert set(here) == {stored.manifest.items[number].name for number in numbers}
    for name, path in here.items():
        assert bytes_in(path, name) == bytes_in(tmp_path / "model" / "model.safetensors", name)
    assert (stored.folder / "config.json").read_bytes() == CONFIG


@pytest.mark.parametrize("numbers", [ALL, [2], [3, 5], [4], [1, 2, 3]])
def test_what_is_asked_for_arrives_and_nothing_else(make, stored: StoredModel, tmp_path: Path, numbers: Sequence[int]):
    with connected(make) as (channel, end):
        reports = copy(channel, stored, numbers)
    assert_copied(stored, tmp_path, numbers)
    wanted = sum(stored.manifest.items[number].nbytes for number in numbers)
    assert end.sent == wanted + len(CONFIG) + len(pack(stored.manifest))
    assert reports[-1] == (wanted, wanted)


def test_progress_is_reported_now_and_then(make, stored: StoredModel, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("splitinfer.engine.files.asking._REPORTED", 20)
    with connected(make) as (channel, _):
        reports = copy(channel, stored)
    steps = [later - done for (done, _), (later, _) in itertools.pairwise([(0, 82), *reports])]
    assert min(steps[:-1]) >= 20
    assert len(steps) >= 3
    assert reports[-1] == (82, 82)


def test_no_more_is_under_way_than_the_window(make, stored: StoredModel, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "splitinfer.engine.files.asking.Asked", lambda coming, **how: pieces.Asked(coming, window=24, **how)
    )
    with connected(make) as (channel, _):
        copy(channel, stored)
    asks = [len(ask.pieces) for ask in channel.asked if isinstance(ask, AskPieces)]
    assert max(asks) <= 3


@pytest.mark.parametrize("most", range(1, 18, 2))
def test_a_peer_that_goes(make, stored: StoredModel, tmp_path: Path, most: int):
    """What was received before it went is not sent again."""
    with connected(make, most=most) as (channel, _), pytest.raises(TransportError):
        copy(channel, stored)
    kept = sum(path.stat().st_size for path in stored.folder.glob(".part*.checks")) // 8
    with connected(make) as (channel, _):
        copy(channel, stored)
    assert_copied(stored, tmp_path)
    asked = [piece for ask in channel.asked if isinstance(ask, AskPieces) for piece in ask.pieces]
    tensors = [(item, at) for item, at in asked if item > 0]
    total = sum(pieces.num_pieces(size) for size in SIZES)
    small = len(range(0, len(CONFIG), 8))
    assert len(tensors) == total - max(0, min(most - 1 - small, total)) == total - kept


def tampered(change: Tamper, after: int = 9) -> Tamper:
    """``change`` for one piece of a tensor, once."""
    count = itertools.count()

    def tamper(message: Message, data: list[bytes]) -> tuple[Message, list[bytes]]:
        if isinstance(message, TellPiece) and message.item > 0 and next(count) == after:
            return change(message, data)
        return message, data

    return tamper


def flip(message: Message, data: list[bytes]) -> tuple[Message, list[bytes]]:
    return message, [bytes([data[0][0] ^ 16]) + data[0][1:]]


def lie(message: Message, data: list[bytes]) -> tuple[Message, list[bytes]]:
    assert isinstance(message, TellPiece)
    return TellPiece(message.item, message.at, 0), data


def enlarge(message: Message, data: list[bytes]) -> tuple[Message, list[bytes]]:
    assert isinstance(message, TellPiece)
    more = data[0] + b"x"
    return TellPiece(message.item, message.at, pieces.check_of(more)), [more]


def shorten(message: Message, data: list[bytes]) -> tuple[Message, list[bytes]]:
    assert isinstance(message, TellPiece)
    return TellPiece(message.item, message.at, pieces.check_of(data[0][:-1])), [data[0][:-1]]


def another(message: Message, data: list[bytes]) -> tuple[Message, list[bytes]]:
    assert isinstance(message, TellPiece)
    return TellPiece(message.item, message.at + 1, message.check), data


def nothing(message: Message, data: list[bytes]) -> tuple[Message, list[bytes]]:
    return message, []


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (flip, "other bytes of layers.4.weight than its checksum says"), (lie, "than its checksum says"),
        (enlarge, "not what it was asked for"), (shorten, "not what it was asked for"),
        (another, "not what it was asked for"), (nothing, "sent something else"),
    ],
)  # fmt: skip
def test_a_lying_peer(make, stored: StoredModel, tmp_path: Path, change: Tamper, why: str):
    with connected(make, tampered(change)) as (channel, _), pytest.raises(PeerError, match=why) as raised:
        copy(channel, stored)
    assert "\n" not in str(raised.value)
    assert stored.tensors() == {}
    with connected(make) as (channel, end):
        copy(channel, stored)
    assert_copied(stored, tmp_path)
    assert end.sent < sum(SIZES) + len(pack(stored.manifest))  # it went on from what was right


def test_a_file_that_changes_under_the_sender(make, stored: StoredModel, tmp_path: Path):
    model = tmp_path / "model" / "model.safetensors"

    def touch(message: Message, data: list[bytes]) -> tuple[Message, list[bytes]]:
        os.utime(model, (1, 1))
        return message, data

    with (
        connected(make, tampered(touch, after=4)) as (channel, _),
        pytest.raises(PeerError, match=r"studio cannot send a/model: model.safetensors has changed"),
    ):
        copy(channel, stored)
    assert stored.tensors() == {}
    with connected(make) as (channel, _):
        copy(channel, stored)
    assert_copied(stored, tmp_path)


def test_two_copies_of_the_same_layers_at_once(make, stored: StoredModel, tmp_path: Path):
    """The second ends with a sentence, and the try after it goes on; other layers are copied meanwhile."""
    (part,) = parts_of(stored.manifest, [4, 5])
    with PartWriter(stored.folder, part), connected(make) as (channel, _):
        copy(channel, stored, [1, 2])
        assert_copied(stored, tmp_path, [1, 2])
        with pytest.raises(
            ModelError, match=r"another process of this machine is copying the same weights .* try again"
        ):
            copy(channel, stored, [4, 5])
    with connected(make) as (channel, _):
        copy(channel, stored, [4, 5])
    assert_copied(stored, tmp_path, [1, 2, 4, 5])


def test_a_disk_that_is_full_when_a_part_is_finished(make, stored: StoredModel, tmp_path: Path):
    def full(_file: int, _nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch, connected(make) as (channel, _):
        patch.setattr("splitinfer.store.part.os.ftruncate", full)
        with pytest.raises(ModelError, match="is full; what was copied stays there, and the next try goes on from it"):
            copy(channel, stored)
    assert stored.tensors() == {}
    with connected(make) as (channel, end):
        copy(channel, stored)
    assert_copied(stored, tmp_path)
    assert end.sent == len(pack(stored.manifest))  # all pieces were there


def test_other_weights_are_not_to_be_had(make, tmp_path: Path):
    wanted = ModelStore(tmp_path / "store").begin(described(SIZES, sample="another"))
    with connected(make) as (channel, _):
        answer = ask_manifest(channel, wanted.digest)
    assert isinstance(answer, Unavailable)
    assert "is not here" in answer.reason


def test_a_manifest_with_a_path_is_refused(make, stored: StoredModel, monkeypatch: pytest.MonkeyPatch):
    def with_path(message: Message, data: list[bytes]) -> tuple[Message, list[bytes]]:
        if isinstance(message, TellManifest):
            with monkeypatch.context() as patch:
                patch.setattr("splitinfer.store.manifest._mistake", lambda _made: None)
                files = (type(stored.manifest.files[0])("../config.json", 3),)
                hostile = Manifest("m", stored.manifest.fingerprint, files, stored.manifest.tensors)
                return message, [pack(hostile)]
        return message, data

    with (
        connected(make, with_path) as (channel, _),
        pytest.raises(ModelError, match=r"'\.\./config.json' is not allowed"),
    ):
        ask_manifest(channel, stored.digest)


def test_a_tensor_of_another_size_is_not_asked_for(make, tmp_path: Path, told: Manifest):
    """The store has the table of another model, with the same names."""
    larger = ModelStore(tmp_path / "store").begin(described((10, 26, 7, 0, 40), sample="larger"))
    with connected(make) as (channel, _):
        remote = ask_manifest(channel, told.fingerprint.digest())
        assert isinstance(remote, Remote)
        assert remote.holds(larger.manifest, ALL) == [1]  # those behind it begin elsewhere, too


@pytest.mark.parametrize("asks", [[AskPieces(((9, 0),))], [AskPieces(((1, 5),))]])
def test_a_piece_that_there_is_not_ends_the_link(make, stored: StoredModel, asks: list[AskPieces]):
    with connected(make) as (channel, end):
        assert isinstance(ask_manifest(channel, stored.digest), Remote)
        for ask in asks:
            channel.send(ask)
        with pytest.raises(LinkClosed, match="there is none"):
            channel.receive()
        assert end.sent == len(pack(stored.manifest))


def test_pieces_before_a_manifest_end_the_link(make):
    with connected(make) as (channel, end):
        channel.send(AskPieces(((1, 0),)))
        with pytest.raises(LinkClosed, match="before what a model consists of"):
            channel.receive()
    assert end.sent == 0


def test_an_answer_that_is_none(make, stored: StoredModel):
    def odd(message: Message, data: list[bytes]) -> tuple[Message, list[bytes]]:
        return TellPiece(0, 0, 0), data

    with connected(make, odd) as (channel, _), pytest.raises(ProtocolError, match="sent something else"):
        ask_manifest(channel, stored.digest)
