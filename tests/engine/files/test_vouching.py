"""A machine that sends forged or damaged weights, with checksums of their own, is found by what others have."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from test_copying import ALL, Tamper, as_it_is, assert_copied, connected, copy
from weights import SIZES, described, shorten_pieces

from splitinfer.engine.files.asking import Remote, ask_digests, ask_manifest
from splitinfer.engine.files.vouching import Suspect, confirm_by, drop_what_differs, suspects
from splitinfer.errors import ModelError, PeerError, ProtocolError
from splitinfer.store import hearsay
from splitinfer.store.manifest import Manifest
from splitinfer.store.models import StoredModel
from splitinfer.store.parts import header_of
from splitinfer.store.pieces import check_of
from splitinfer.store.source import Place, Source
from splitinfer.wire.messages import AskDigests, Message, TellDigest, TellPiece, Unavailable
from transports import LinkClosed

WRONG = "layers.4.weight"  # what the liar forges


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch):
    shorten_pieces(monkeypatch, 8)


def forge(message: Message, data: list[bytes]) -> tuple[Message, list[bytes]]:
    """Other bytes of one tensor, with the checksum of those bytes."""
    if isinstance(message, TellPiece) and message.item == 5:
        forged = bytes(len(data[0]))
        return TellPiece(message.item, message.at, check_of(forged)), [forged]
    return message, data


def own(stored: StoredModel) -> Source:
    """What is in the store, to be read."""
    places = {}
    for path in set(stored.tensors().values()):
        infos = [info for info in stored.manifest.tensors if stored.tensors().get(info.name) == path]
        begin = len(header_of(infos))
        for info in infos:
            places[stored.manifest.number_of[info.name]] = Place(path, begin)
            begin += info.nbytes
    return Source(stored.manifest, places)


@contextmanager
def remote(make: Callable[[], Source], told: Manifest, sender: str, tamper: Tamper = as_it_is) -> Iterator[Remote]:
    with connected(make, tamper, sender=sender) as (channel, _):
        answer = ask_manifest(channel, told.fingerprint.digest())
        assert isinstance(answer, Remote)
        yield answer


def copied_from(make: Callable[[], Source], stored: StoredModel, tamper: Tamper, numbers: Sequence[int] = ALL) -> None:
    with connected(make, tamper, sender="worker b") as (channel, _):
        copy(channel, stored, numbers)


def noted(stored: StoredModel) -> set[str]:
    return {sender for senders in hearsay.noted(stored.folder).values() for sender in senders}


def test_what_the_coordinator_sends_rests_on_nobodys_word(make, stored: StoredModel):
    with connected(make) as (channel, _):
        copy(channel, stored)
    assert suspects(stored, ALL) == []


def test_a_lie_that_its_checksums_bear_out_is_found_by_what_the_coordinator_has(
    make, told: Manifest, stored: StoredModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    copied_from(make, stored, forge)
    found = suspects(stored, ALL)
    assert [(each.senders, each.numbers) for each in found] == [(frozenset({"worker b"}), tuple(ALL))]
    reports = list[tuple[int, int]]()
    with remote(make, told, "") as coordinator:
        dropped = drop_what_differs(coordinator, stored, own(stored), found, lambda *at: reports.append(at))
    assert dropped == found
    assert reports[0][0] == 0 < reports[0][1]
    assert f"{WRONG} of a/model, which worker b sent, is not what studio has; it is copied again" in caplog.text
    assert stored.tensors() == {}
    with connected(make) as (channel, _):
        copy(channel, stored)
    assert_copied(stored, tmp_path)
    assert suspects(stored, ALL) == []


def test_what_the_coordinator_has_too_rests_on_no_word_any_more(make, told: Manifest, stored: StoredModel):
    copied_from(make, stored, as_it_is)
    with remote(make, told, "") as coordinator:
        assert drop_what_differs(coordinator, stored, own(stored), suspects(stored, ALL)) == []
    assert suspects(stored, ALL) == []
    assert len(stored.tensors()) == len(SIZES)


def test_a_coordinator_that_has_only_some_of_it_confirms_nothing_and_drops_what_differs(
    make, told: Manifest, stored: StoredModel
):
    copied_from(make, stored, forge)

    def some(numbers: set[int]) -> list[Suspect]:
        with remote(make, told, "") as whole:
            partly = Remote(whole.channel, replace(whole.manifest, held=frozenset(numbers)))
            return drop_what_differs(partly, stored, own(stored), suspects(stored, ALL))

    assert some({1, 2}) == []
    assert noted(stored) == {"worker b"}
    assert len(some({5})) == 1
    assert stored.tensors() == {}


def test_a_copy_that_a_liar_began_and_the_coordinator_finished_is_compared_as_well(
    make, told: Manifest, stored: StoredModel
):
    def forge_the_first(message: Message, data: list[bytes]) -> tuple[Message, list[bytes]]:
        if isinstance(message, TellPiece) and message.item == 1:
            return TellPiece(message.item, message.at, check_of(bytes(len(data[0])))), [bytes(len(data[0]))]
        return message, data

    with (
        connected(make, forge_the_first, most=12, sender="worker b") as (channel, _),
        pytest.raises(LinkClosed),
    ):
        copy(channel, stored)
    with connected(make) as (channel, _):
        copy(channel, stored)
    found = suspects(stored, ALL)
    assert [each.senders for each in found] == [frozenset({"worker b"})]
    with remote(make, told, "") as coordinator:
        assert drop_what_differs(coordinator, stored, own(stored), found) == found


def test_two_workers_with_different_bytes_and_a_coordinator_with_none(make, told: Manifest, stored: StoredModel):
    copied_from(make, stored, forge)
    with (
        remote(make, told, "worker c") as witness,
        pytest.raises(
            PeerError, match=f"worker c has other bytes of {WRONG} than worker b sent.*remove it there"
        ) as said,
    ):
        confirm_by(witness, stored, own(stored), suspects(stored, ALL))
    assert "\n" not in str(said.value)
    assert stored.tensors() == {}


def test_two_workers_with_the_same_bytes(make, told: Manifest, stored: StoredModel):
    copied_from(make, stored, as_it_is)
    with remote(make, told, "worker c") as witness:
        assert confirm_by(witness, stored, own(stored), suspects(stored, ALL)) == []
    assert suspects(stored, ALL) == []


def test_nobody_is_a_witness_for_himself(make, told: Manifest, stored: StoredModel):
    copied_from(make, stored, forge)
    found = suspects(stored, ALL)
    with remote(make, told, "worker b") as witness:
        assert confirm_by(witness, stored, own(stored), found) == found
    assert noted(stored) == {"worker b"}


def test_a_witness_that_has_none_of_it(make, told: Manifest, stored: StoredModel):
    copied_from(make, stored, as_it_is)
    found = suspects(stored, ALL)
    with remote(make, told, "worker c") as witness:
        nothing = Remote(witness.channel, replace(witness.manifest, held=frozenset()))
        assert confirm_by(nothing, stored, own(stored), found) == found


def test_only_parts_that_are_wanted_are_compared(make, stored: StoredModel):
    copied_from(make, stored, as_it_is, [1, 2])
    copied_from(make, stored, as_it_is, [4, 5])
    assert [each.numbers for each in suspects(stored, [5])] == [(4, 5)]


def test_a_peer_that_describes_other_weights_than_it_was_asked_for(make, tmp_path: Path):
    """The same names and sizes, of another version of the model."""
    other = described(SIZES, sample="another version").fingerprint.digest()

    class Liar:
        def open(self, weights: str, model: str) -> Source:
            return make()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("test_copying.OneModel", lambda _make: Liar())
        with (
            connected(make) as (channel, _),
            pytest.raises(ProtocolError, match="asked for other weights than it describes"),
        ):
            ask_manifest(channel, other)


def test_answers_that_are_no_digests(make, told: Manifest, stored: StoredModel):
    answers: list[tuple[Message, str]] = [
        (TellDigest(3, bytes(32)), "sent something else"), (TellPiece(2, 0, 0), "sent something else"),
        (Unavailable("its disk fails"), "cannot read a/model: its disk fails"),
    ]  # fmt: skip
    for answer, why in answers:

        def tamper(message: Message, data: list[bytes], answer: Message = answer) -> tuple[Message, list[bytes]]:
            return (answer, []) if isinstance(message, TellDigest) else (message, data)

        with remote(make, told, "", tamper) as peer, pytest.raises(PeerError, match=why):
            list(ask_digests(peer, stored.manifest, [2]))


def test_a_digest_of_what_there_is_not_ends_the_link(make, told: Manifest):
    with remote(make, told, "") as peer:
        peer.channel.send(AskDigests((99,)))
        with pytest.raises(LinkClosed, match="digest of item 99 was asked for, and there is none"):
            peer.channel.receive()


def test_a_note_that_is_a_link_is_not_followed(make, stored: StoredModel, tmp_path: Path):
    (tmp_path / "victim").write_text("mine")
    (stored.folder / ("part-" + "0" * 20 + ".safetensors.from")).symlink_to(tmp_path / "victim")
    with pytest.raises(ModelError, match="is a link"):
        hearsay.note(stored.folder, "part-" + "0" * 20 + ".safetensors", "worker b")
    assert (tmp_path / "victim").read_text() == "mine"
