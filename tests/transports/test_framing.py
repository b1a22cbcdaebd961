"""Bytes in, packets or FrameError out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transports import FrameError, LinkOptions
from transports.framing import PRELUDE_BYTES, VERSION, Kind, Liveness, Packet, check_order, decode, encode

OPTIONS = LinkOptions(max_header_bytes=1000, max_part_bytes=1000, max_parts=4)

headers = st.binary(max_size=64)
part_lists = st.lists(st.binary(max_size=64), max_size=4)
u64 = st.integers(0, 2**64 - 1)
kinds = st.sampled_from(Kind)


def encoded(
    kind: Kind, seq: int, progress: int, header: bytes, parts: list[bytes], *, checksum: bool = True
) -> list[bytes]:
    views = [memoryview(part) for part in parts]
    return [
        bytes(memoryview(piece))
        for piece in encode(kind, seq=seq, progress=progress, header=header, parts=views, checksum=checksum)
    ]


@given(kinds, u64, u64, headers, part_lists, st.booleans())
def test_round_trip(kind: Kind, seq: int, progress: int, header: bytes, parts: list[bytes], checksum: bool) -> None:
    packet = decode(encoded(kind, seq, progress, header, parts, checksum=checksum), OPTIONS)
    assert packet == Packet(kind, seq, progress, header, tuple(memoryview(part) for part in parts))


@given(st.lists(st.binary(max_size=100), max_size=6))
def test_random_bytes(message: list[bytes]) -> None:
    with pytest.raises(FrameError):
        decode(message, OPTIONS)


@given(st.binary(max_size=100), part_lists)
def test_random_bytes_behind_a_right_beginning(rest: bytes, parts: list[bytes]) -> None:
    with pytest.raises(FrameError):
        decode([b"SPLI" + bytes([VERSION]) + rest, *parts], OPTIONS)


@given(st.data())
def test_a_changed_packet_is_refused(data: st.DataObject) -> None:
    message = encoded(data.draw(kinds), data.draw(u64), data.draw(u64), data.draw(headers), data.draw(part_lists))
    changed = data.draw(st.sampled_from(MUTATIONS))(data, list(message))
    if changed != message:
        with pytest.raises(FrameError):
            decode(changed, OPTIONS)


def _flip(data: st.DataObject, message: list[bytes]) -> list[bytes]:
    where = data.draw(st.integers(0, len(message) - 1))
    piece = bytearray(message[where])
    if piece:
        piece[data.draw(st.integers(0, len(piece) - 1))] ^= data.draw(st.integers(1, 255))
    message[where] = bytes(piece)
    return message


def _cut(data: st.DataObject, message: list[bytes]) -> list[bytes]:
    where = data.draw(st.integers(0, len(message) - 1))
    message[where] = message[where][: data.draw(st.integers(0, len(message[where])))]
    return message


def _drop_piece(data: st.DataObject, message: list[bytes]) -> list[bytes]:
    del message[data.draw(st.integers(0, len(message) - 1))]
    return message


def _swap_pieces(data: st.DataObject, message: list[bytes]) -> list[bytes]:
    one, other = (data.draw(st.integers(0, len(message) - 1)) for _ in range(2))
    message[one], message[other] = message[other], message[one]
    return message


def _append_piece(data: st.DataObject, message: list[bytes]) -> list[bytes]:
    return [*message, data.draw(st.binary(max_size=8))]


def _shift_border(data: st.DataObject, message: list[bytes]) -> list[bytes]:
    """Move bytes from one part to the next: the parts joined stay the same."""
    if len(message) < 3:
        return message
    where = data.draw(st.integers(1, len(message) - 2))
    joined = message[where] + message[where + 1]
    border = data.draw(st.integers(0, len(joined)))
    message[where : where + 2] = [joined[:border], joined[border:]]
    return message


MUTATIONS = [_flip, _cut, _drop_piece, _swap_pieces, _append_piece, _shift_border]


def test_without_payload_checksum_lengths_and_header_are_still_covered() -> None:
    header, part = encoded(Kind.DATA, 0, 0, b"head", [b"payload"], checksum=False)
    assert bytes(decode([header, b"PAYLOAD"], OPTIONS).parts[0]) == b"PAYLOAD"
    for wrong in ([header, b"payloa"], [header[:-1] + b"D", part]):
        with pytest.raises(FrameError):
            decode(wrong, OPTIONS)


def test_bounds() -> None:
    for header, parts, words in (
        (b"h" * 1001, [], "header of 1001"),
        (b"", [b"x" * 1001], "part 0 has 1001"),
        (b"", [b""] * 5, "5 parts"),
    ):
        with pytest.raises(FrameError, match=words):
            decode(encoded(Kind.DATA, 0, 0, header, parts), OPTIONS)


def test_parts_are_not_copied() -> None:
    part = bytearray(b"abc")
    packet = decode([*encode(Kind.DATA, seq=0, parts=[memoryview(part)])], OPTIONS)
    part[0] = ord("z")
    assert bytes(packet.parts[0]) == b"zbc"
    assert PRELUDE_BYTES == 40


def packet(kind: Kind, seq: int) -> Packet:
    return Packet(kind, seq, 0, b"", ())


def test_sequence() -> None:
    for kind in (Kind.DATA, Kind.BEAT, Kind.BYE):
        check_order(packet(kind, 3), 3)
    for kind, seq, word in ((Kind.DATA, 4, "missing"), (Kind.DATA, 2, "repeated"), (Kind.OPEN, 3, "open link")):
        with pytest.raises(FrameError, match=word):
            check_order(packet(kind, seq), 3)


def test_silence() -> None:
    peer = Liveness(LinkOptions(beat_every=0.5, dead_after=3.0), now=100.0)
    looks = [100.0 + 0.5 * step for step in range(1, 8)]
    assert [peer.is_dead(now) for now in looks] == [False] * 6 + [True]
    assert peer.silent_for(103.5) == 3.5


def test_our_own_absence_is_not_the_peers_silence() -> None:
    peer = Liveness(LinkOptions(beat_every=0.5, dead_after=3.0), now=0.0)
    assert not peer.is_dead(60.0)  # we were away for a minute; that counts as one second
    assert not peer.is_dead(61.0)
    peer.received(61.5)
    assert peer.silent_for(62.0) == 0.5
    assert not peer.is_dead(64.0)
