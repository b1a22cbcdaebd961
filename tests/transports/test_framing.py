"""Bytes in, packets or FrameError out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transports import FrameError, LinkOptions, framing
from transports.framing import PRELUDE_BYTES, VERSION, FrameKind, Liveness, Packet, check_order, decode, encode

OPTIONS = LinkOptions(max_header_bytes=1000, max_part_bytes=1000, max_parts=4)

headers = st.binary(max_size=64)
part_lists = st.lists(st.binary(max_size=64), max_size=4)
u64 = st.integers(0, 2**64 - 1)
kinds = st.sampled_from(FrameKind)


def encoded(kind: FrameKind, seq: int, progress: int, header: bytes, parts: list[bytes]) -> list[bytes]:
    views = [memoryview(part) for part in parts]
    pieces = encode(kind, seq=seq, progress=progress, header=header, parts=views)
    return [bytes(memoryview(piece)) for piece in pieces]


@given(kinds, u64, u64, headers, part_lists, st.sampled_from([0, 1 << 16]))
def test_round_trip(
    kind: FrameKind, seq: int, progress: int, header: bytes, parts: list[bytes], inline_bytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(framing, "INLINE_BYTES", inline_bytes)
        packet = decode(encoded(kind, seq, progress, header, parts), OPTIONS)
    assert packet == Packet(kind, seq, progress, header, tuple(memoryview(part) for part in parts))


@given(st.sampled_from([b"", b"SPLI" + bytes([VERSION])]), st.binary(max_size=100), st.lists(st.binary(max_size=100)))
def test_random_bytes(beginning: bytes, rest: bytes, parts: list[bytes]) -> None:
    for message in (parts, [beginning + rest, *parts]):
        with pytest.raises(FrameError):
            decode(message, OPTIONS)


def changed(message: list[bytes], num_checked: int) -> Iterator[list[bytes]]:
    """A packet with every accident: a bit of its first bytes, a cut, a piece too few or too many, pieces in another
    order, and a border between two parts that has moved, so that the parts joined stay the same."""
    first, *others = message
    for i in range(8 * num_checked):
        yield [first[: i // 8] + bytes([first[i // 8] ^ 1 << i % 8]) + first[i // 8 + 1 :], *others]
    for at, piece in enumerate(message):
        before, after = message[:at], message[at + 1 :]
        yield from ([*before, piece[:length], *after] for length in range(len(piece)))
        yield [*before, *after]
        yield from ([*before, piece, extra, *after] for extra in (b"", b"x", piece))
        yield [*before, piece + b"x", *after]
    header, *parts = message
    yield from ([header, *others] for others in permutations(parts) if list(others) != parts)
    if parts:
        yield [*parts, header]
        joined = parts[0] + parts[1]
        yield from ([header, joined[:i], joined[i:], *parts[2:]] for i in range(len(joined) + 1) if i != len(parts[0]))


@pytest.mark.parametrize("inline_bytes", [0, 1 << 16], ids=["apart", "inline"])
def test_a_changed_packet_is_refused(monkeypatch: pytest.MonkeyPatch, inline_bytes: int) -> None:
    monkeypatch.setattr(framing, "INLINE_BYTES", inline_bytes)
    for kind in FrameKind:
        message = encoded(kind, 2**63 + 5, 7, b"head", [b"one", b"others", b"\0"])
        for other in changed(message, PRELUDE_BYTES + 3 * 8 + len(b"head")):
            with pytest.raises(FrameError):
                decode(other, OPTIONS)


@given(headers, part_lists)
def test_small_parts_travel_with_the_header(header: bytes, parts: list[bytes]) -> None:
    (packet,) = encoded(FrameKind.DATA, 0, 0, header, parts)
    assert packet.endswith(b"".join(parts))


def test_bounds() -> None:
    for header, parts, words in (
        (b"h" * 1001, [], "header of 1001"),
        (b"", [b"x" * 1001], "part 0 has 1001"),
        (b"", [b""] * 5, "5 parts"),
    ):
        with pytest.raises(FrameError, match=words):
            decode(encoded(FrameKind.DATA, 0, 0, header, parts), OPTIONS)


def test_large_parts_are_not_copied() -> None:
    part = bytearray(framing.INLINE_BYTES)
    packet = decode([*encode(FrameKind.DATA, seq=0, parts=[memoryview(part)])], LinkOptions())
    part[0] = ord("z")
    assert bytes(packet.parts[0][:1]) == b"z"
    assert PRELUDE_BYTES == 36


def packet(kind: FrameKind, seq: int) -> Packet:
    return Packet(kind, seq, 0, b"", ())


def test_sequence() -> None:
    for kind in (FrameKind.DATA, FrameKind.BEAT, FrameKind.BYE):
        check_order(packet(kind, 3), 3)
    for kind, seq, word in (
        (FrameKind.DATA, 4, "missing"),
        (FrameKind.DATA, 2, "repeated"),
        (FrameKind.OPEN, 3, "open link"),
    ):
        with pytest.raises(FrameError, match=word):
            check_order(packet(kind, seq), 3)


def test_silence() -> None:
    peer = Liveness(LinkOptions(beat_every=0.5, dead_after=3.0), now=100.0)
    looks = [100.0 + 0.5 * step for step in range(1, 8)]
    assert [peer.is_dead(now) for now in looks] == [False] * 6 + [True]
    assert peer.silent_for(103.5) == 3.5


@pytest.mark.parametrize(
    ("answers", "lost_at", "is_busy"), [(False, 3.5, False), (True, 15.5, True), (None, 15.5, False)]
)
def test_silence_of_a_machine_that_answers(answers: bool | None, lost_at: float, is_busy: bool) -> None:
    peer, now = Liveness(LinkOptions(beat_every=0.5), now=0.0), 0.0
    while not peer.is_dead(now, lambda: answers):
        now += 0.5
    assert (now, peer.is_busy) == (lost_at, is_busy)
    peer.received(now)
    assert not peer.is_busy


def test_our_own_absence_is_not_the_peers_silence() -> None:
    peer = Liveness(LinkOptions(beat_every=0.5, dead_after=3.0), now=0.0)
    assert not peer.is_dead(60.0)  # we were away for a minute; that counts as one second
    assert not peer.is_dead(61.0)
    peer.received(61.5)
    assert peer.silent_for(62.0) == 0.5
    assert not peer.is_dead(64.0)
