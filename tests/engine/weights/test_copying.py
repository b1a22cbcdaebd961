"""One copies from another over a link: all arrives, once, or it ends with a sentence and the next copy continues."""

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from stored import CONFIG, FILE, SIZES, TOTAL, bytes_in, described

from splitinfer.engine.links.connection import Connection
from splitinfer.engine.weights.answering import WeightAnswers
from splitinfer.engine.weights.copying import Remote, copy, copy_small, request_manifest
from splitinfer.engine.worker import weights
from splitinfer.engine.worker.weights import ControlChannel
from splitinfer.errors import PeerError, ProtocolError
from splitinfer.weights.manifest import Manifest, SmallFile, pack
from splitinfer.weights.models import ModelStore, StoredModel
from splitinfer.weights.ranges import PIECE, WINDOW, checksum
from splitinfer.weights.source import Source
from splitinfer.wire import headers
from splitinfer.wire.headers import Session
from splitinfer.wire.messages import AskRanges, Message, Range, TellRange, Unavailable
from transports import Frame, Link, LinkClosed, LinkTimeout, TransportError, connect, listen

_names = itertools.count()
Tamper = Callable[[Message, list[bytes]], tuple[Message, list[bytes]]]
ALL = (0, 1, 2, 3, 4)  # the tensors
NUM_PIECES = 6  # in which they come


class End:
    """The sender's end of a link. ``tamper``: what it sends in place of an answer."""

    def __init__(self, link: Link, tamper: Tamper) -> None:
        self.link, self._tamper = link, tamper
        self.sent = 0

    def receive(self, item: Frame) -> Message:
        return headers.decode(item.header)

    def send(self, message: Message, *parts: memoryview) -> None:
        message, data = self._tamper(message, [bytes(part) for part in parts])
        self.sent += sum(map(len, data))
        self.link.send(Frame(headers.encode(message), tuple(data)))


class Channel:
    """The asker's end. ``most``: how many messages it receives until its link is lost."""

    def __init__(self, link: Link, most: int) -> None:
        self.link, self._left, self.peer = link, most, "studio"
        self.asked: list[Range] = []
        self.most_under_way = self.under_way = 0

    def send(self, message: Message) -> None:
        if isinstance(message, AskRanges):
            self.asked += message.ranges
            self.under_way += sum(each.nbytes for each in message.ranges)
            self.most_under_way = max(self.under_way, self.most_under_way)
        self.link.send(Frame(headers.encode(message)))

    def receive(self) -> tuple[Message, Sequence[memoryview]]:
        self._left -= 1
        if self._left < 0:
            self.link.abort("the cable was pulled")
        frame = self.link.recv(timeout=20)
        message = headers.decode(frame.header)
        if isinstance(message, TellRange):
            self.under_way -= message.asked.nbytes
        return message, [memoryview(part) for part in frame.parts]


def as_it_is(message: Message, data: list[bytes]) -> tuple[Message, list[bytes]]:
    return message, data


@contextmanager
def connected(
    make: Callable[[], Source], tamper: Tamper = as_it_is, most: int = 10**9
) -> Iterator[tuple[Channel, End]]:
    def find(weights: str, _model: str) -> Source | None:
        source = make()
        return source if weights in ("", source.manifest.fingerprint.digest()) else None

    address = f"inproc://copying-{next(_names)}"
    with listen(address) as listener, connect(address, timeout=5) as link:
        end = End(listener.accept(timeout=5), tamper)
        answers = WeightAnswers(end, find)
        end.link.deliver_to(lambda item: answers.close() if isinstance(item, LinkClosed) else answers.put(item))
        yield Channel(link, most), end


def take(channel: Channel, stored: StoredModel, numbers: Sequence[int] = ALL) -> list[tuple[int, int]]:
    remote = request_manifest(channel, stored.digest)
    assert isinstance(remote, Remote)
    reports: list[tuple[int, int]] = []
    copy_small(remote, stored, ["config.json"])
    wanted = [stored.manifest.tensors[number] for number in numbers]
    copy(remote, ModelStore(stored.folder.parent), stored, wanted, lambda *at: reports.append(at))
    return reports


def assert_copied(stored: StoredModel, tmp_path: Path, numbers: Sequence[int] = ALL) -> None:
    here = stored.tensors()
    assert set(here) == {stored.manifest.tensors[number].name for number in {*numbers, 3}}  # an empty one always is
    for name, path in here.items():
        assert bytes_in(path, name) == bytes_in(tmp_path / "model" / FILE, name)
    assert (stored.folder / "config.json").read_bytes() == CONFIG


@pytest.mark.parametrize("numbers", [ALL, [2, 4], [3]])
def test_what_is_asked_for_arrives_and_nothing_else(make, stored: StoredModel, tmp_path: Path, numbers: Sequence[int]):
    with connected(make) as (channel, end):
        reports = take(channel, stored, numbers)
    assert_copied(stored, tmp_path, numbers)
    wanted = sum(SIZES[number] for number in numbers)
    assert end.sent == wanted + len(CONFIG) + len(pack(described()))
    assert reports[-1] == (wanted, wanted)


def test_no_more_is_under_way_than_the_window(tmp_path: Path):
    told = described((WINDOW + 5 * PIECE,))
    stored = ModelStore(tmp_path / "store").begin(told)
    (tmp_path / "model").mkdir()

    class Zeros(Source):
        def read(self, file: str, begin: int, end: int) -> bytes:
            return CONFIG[begin:end] if file == "config.json" else bytes(end - begin)

    with connected(lambda: Zeros(told, {})) as (channel, _):
        take(channel, stored, [0])
        assert WINDOW - 4 * PIECE < channel.most_under_way <= WINDOW
        assert len(channel.asked) == 1 + WINDOW // PIECE + 5


@pytest.mark.parametrize("most", [2, 5, 8])
def test_a_peer_that_goes(make, stored: StoredModel, tmp_path: Path, most: int):
    """What was received before it went is not sent again."""
    with connected(make, most=most) as (channel, _):
        if most < 2 + NUM_PIECES:
            with pytest.raises(TransportError):
                take(channel, stored)
        else:
            take(channel, stored)
    with connected(make) as (channel, _):
        take(channel, stored)
    assert_copied(stored, tmp_path)
    assert len(channel.asked) == NUM_PIECES - (most - 2)


def tampered(change: Tamper, after: int = 3) -> Tamper:
    """``change`` for one piece of a tensor, once."""
    count = itertools.count()

    def tamper(message: Message, data: list[bytes]) -> tuple[Message, list[bytes]]:
        if isinstance(message, TellRange) and message.asked.file == FILE and next(count) == after:
            return change(message, data)
        return message, data

    return tamper


def told_of(message: Message) -> TellRange:
    assert isinstance(message, TellRange)
    return message


def with_data(message: Message, data: bytes) -> tuple[Message, list[bytes]]:
    return TellRange(told_of(message).asked, checksum(data)), [data]


def another(message: Message, data: list[bytes]) -> tuple[Message, list[bytes]]:
    asked = told_of(message).asked
    return TellRange(Range(asked.file, asked.begin + 1, asked.end + 1), told_of(message).check), data


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda message, data: (message, [bytes([data[0][0] ^ 16]) + data[0][1:]]), "than its checksum says"),
        (lambda message, data: with_data(message, data[0] + b"x"), "than it was asked for"),
        (another, "than it was asked for"),
        (lambda message, data: (message, []), "sent something else"),
        (lambda message, data: (Unavailable("its disk fails"), []), "cannot send a/model: its disk fails"),
    ],
)
def test_a_lying_peer(make, stored: StoredModel, tmp_path: Path, change: Tamper, why: str):
    with connected(make, tampered(change)) as (channel, _), pytest.raises(PeerError, match=why) as raised:
        take(channel, stored)
    assert "\n" not in str(raised.value)
    with connected(make) as (channel, _):
        take(channel, stored)
    assert_copied(stored, tmp_path)
    assert len(channel.asked) == NUM_PIECES - 3, "it continued from what was right"


def test_a_file_that_changes_under_the_sender(make, stored: StoredModel, tmp_path: Path):
    def touch(message: Message, data: list[bytes]) -> tuple[Message, list[bytes]]:
        os.utime(tmp_path / "model" / FILE, (1, 1))
        return message, data

    with (
        connected(make, tampered(touch)) as (channel, _),
        pytest.raises(PeerError, match=r"studio cannot send a/model: model.safetensors has changed"),
    ):
        take(channel, stored)
    with connected(make) as (channel, _):
        take(channel, stored)
    assert_copied(stored, tmp_path)


def test_other_weights_are_not_to_be_had(make, tmp_path: Path):
    wanted = ModelStore(tmp_path / "store").begin(described(sample="another"))
    with connected(make) as (channel, _):
        answer = request_manifest(channel, wanted.digest)
    assert isinstance(answer, Unavailable)
    assert "is not here" in answer.reason


def test_a_peer_that_describes_other_weights_than_it_was_asked_for(make, told: Manifest):
    other = described(sample="another version")

    def lie(message: Message, data: list[bytes]) -> tuple[Message, list[bytes]]:
        return message, [pack(other)]

    with connected(make, lie) as (channel, _), pytest.raises(ProtocolError, match="other weights than it describes"):
        request_manifest(channel, told.fingerprint.digest())


@pytest.mark.parametrize("asked", [
    Range(FILE, TOTAL - 1, TOTAL + 1), Range(FILE, TOTAL, TOTAL + 9), Range("config.json", 0, 10**6), Range("", 0, 9),
    Range("../config.json", 0, 9), Range("/etc/passwd", 0, 9), Range("tokenizer.json", 0, 9),
])  # fmt: skip
def test_a_range_that_there_is_not_is_not_sent(make, stored: StoredModel, asked: Range):
    with connected(make) as (channel, end):
        assert isinstance(request_manifest(channel, stored.digest), Remote)
        channel.send(AskRanges((asked,)))
        answer, _ = channel.receive()
        assert isinstance(answer, Unavailable)
        assert "does not have bytes" in answer.reason
        assert end.sent == len(pack(described()))


def test_ranges_before_a_manifest_end_the_link(make):
    with connected(make) as (channel, end):
        channel.send(AskRanges((Range(FILE, 0, 9),)))
        with pytest.raises(LinkClosed, match="before what a model consists of"):
            channel.receive()
    assert end.sent == 0


def test_a_small_file_that_the_peer_lacks_or_has_otherwise(make, store: ModelStore, told: Manifest):
    with connected(make) as (channel, _):
        remote = request_manifest(channel, told.fingerprint.digest())
        assert isinstance(remote, Remote)
        with pytest.raises(ProtocolError, match=r"has no tokenizer\.json"):
            remote.read("tokenizer.json")
        other = Manifest(told.model, told.fingerprint, (SmallFile("config.json", 3),), told.tensors)
        with pytest.raises(ProtocolError, match=r"has another config\.json"):
            copy_small(remote, store.begin(other), ["config.json"])


@pytest.fixture
def connection() -> Connection:
    with listen("inproc://control-channel") as listener:
        link = connect(listener.address, timeout=5.0)
        return Connection(link, "coordinator", "studio", "1", Session(opened=False))


def test_a_coordinator_that_lives_and_does_not_answer_is_given_up(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(weights, "_ANSWER_SECONDS", 0.01)
    with pytest.raises(LinkTimeout, match=r"the coordinator studio .* did not answer"):
        ControlChannel(connection).receive()


def test_a_coordinator_that_is_gone(connection: Connection):
    channel = ControlChannel(connection)
    assert not channel.takes(connection, LinkClosed("the end")), "the loop has to know, too"
    with pytest.raises(LinkClosed, match="the end"):
        channel.receive()
