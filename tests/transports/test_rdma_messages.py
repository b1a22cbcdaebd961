"""The bytes of rdma://, its book-keeping and its looks at the machine, without a group."""

from __future__ import annotations

import os
import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transports import FrameError, LinkOptions
from transports.rdma.address import RdmaAddress, parse
from transports.rdma.messages import (
    CHUNK_BYTES,
    FIRST_BYTES,
    MAX_PIECES,
    Assembly,
    Kind,
    Stream,
    check_lengths,
    pack_head,
    unpack_head,
)
from transports.rdma.probe import parse_devices, parse_states, pick
from transports.rdma.segment import MAX_MESSAGES, Ring, Segment


def carried(pieces: list[bytes]) -> tuple[list[memoryview], int]:
    """Pieces sent and put together again, and in how many messages."""
    stream = Stream([pack_head(Kind.PACKET, nonce=7, seq=3, lengths=[len(piece) for piece in pieces]), *pieces])
    first = bytearray(FIRST_BYTES)
    stream.fill(memoryview(first))
    head = unpack_head(memoryview(first), nonce=7, seq=3)
    coming = Assembly(head, memoryview(first))
    for size in head.chunks:
        assert not coming.is_whole
        chunk = bytearray(size)
        assert stream.fill(memoryview(chunk)) == size
        coming.add(memoryview(chunk))
    assert coming.is_whole
    return coming.pieces, 1 + len(list(head.chunks))


@given(st.lists(st.binary(max_size=40_000), min_size=1, max_size=5))
def test_what_is_cut_comes_together(pieces: list[bytes]) -> None:
    assert [bytes(piece) for piece in carried(pieces)[0]] == pieces


@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_a_decode_step_is_one_message_as_long_as_it_fits(spare: int) -> None:
    room = FIRST_BYTES - len(pack_head(Kind.PACKET, nonce=0, seq=0, lengths=[1, 1]))
    pieces, num_messages = carried([b"h" * 300, random.Random(0).randbytes(room - 300 + spare)])
    assert num_messages == (2 if spare > 0 else 1)
    assert pieces[1].nbytes == room - 300 + spare


def test_chunks_are_bounded_and_cover_everything() -> None:
    data = random.Random(1).randbytes(2 * CHUNK_BYTES + 20_000)
    pieces, num_messages = carried([b"h", data, b""])
    assert [bytes(piece) for piece in pieces] == [b"h", data, b""]
    assert num_messages == 4


@given(st.binary(max_size=200).map(lambda noise: noise.ljust(FIRST_BYTES)))
def test_noise_is_never_a_head(noise: bytes) -> None:
    with pytest.raises(FrameError):
        unpack_head(memoryview(noise), nonce=0, seq=0)


@given(st.integers(0, 36 + 16 - 1), st.integers(1, 255))
def test_no_byte_of_a_head_may_change(at: int, change: int) -> None:
    head = bytearray(pack_head(Kind.PACKET, nonce=9, seq=4, lengths=[50, 1 << 40]).ljust(FIRST_BYTES, b"\0"))
    assert unpack_head(memoryview(head), nonce=9, seq=4).num_bytes == 50 + (1 << 40)
    head[at] ^= change
    with pytest.raises(FrameError):
        unpack_head(memoryview(head), nonce=9, seq=4)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"seq": 5}, "message 5 came, not 4"), ({"nonce": 1}, "another link"), ({"lengths": []}, "means nothing")],
)
def test_a_head_of_elsewhere(changes: dict[str, object], reason: str) -> None:
    told = {"nonce": 9, "seq": 4, "lengths": [50], **changes}
    head = pack_head(Kind.PACKET, **told).ljust(FIRST_BYTES, b"\0")  # type: ignore[arg-type]
    with pytest.raises(FrameError, match=reason):
        unpack_head(memoryview(head), nonce=9, seq=4)


def test_too_many_pieces() -> None:
    pack_head(Kind.PACKET, nonce=0, seq=0, lengths=[0] * MAX_PIECES)
    with pytest.raises(FrameError, match=f"at most {MAX_PIECES - 1}"):
        pack_head(Kind.PACKET, nonce=0, seq=0, lengths=[0] * (MAX_PIECES + 1))


@pytest.mark.parametrize("lengths", [[141], [40, 1001], [40, 1, 1, 1]], ids=["header", "part", "parts"])
def test_lengths_are_checked_before_memory_is_taken(lengths: list[int]) -> None:
    options = LinkOptions(max_header_bytes=100, max_part_bytes=1000, max_parts=2)
    check_lengths([140, 1000, 1000], options)
    with pytest.raises(FrameError):
        check_lengths(lengths, options)


def test_more_than_was_announced() -> None:
    first = memoryview(pack_head(Kind.PACKET, nonce=0, seq=0, lengths=[FIRST_BYTES]).ljust(FIRST_BYTES, b"\0"))
    coming = Assembly(unpack_head(first, nonce=0, seq=0), first)
    with pytest.raises(FrameError, match="more bytes than were announced"):
        coming.add(memoryview(bytes(FIRST_BYTES)))


@given(st.integers(0, 2**32))
def test_messages_in_a_segment_never_overlap(seed: int) -> None:
    chance = random.Random(seed)
    size = 1000
    ring, live = Ring(size), deque[tuple[int, int]]()
    for _ in range(200):
        wanted = chance.randint(1, size)
        offset = ring.place(wanted) if chance.random() < 0.6 else None
        if offset is not None:
            assert 0 <= offset <= offset + wanted <= size
            assert all(offset + wanted <= start or end <= offset for start, end in live)
            live.append((offset, offset + wanted))
        elif live:
            live.popleft()
            ring.consumed()
    while live:
        live.popleft()
        ring.consumed()
    assert ring.place(size) == 0, "all room is there again"


def test_a_segment_holds_few_messages_however_small() -> None:
    ring = Ring(1 << 20)
    assert all(ring.place(1) is not None for _ in range(MAX_MESSAGES))
    assert ring.place(1) is None


def test_a_segment_is_shared_by_its_descriptor_alone() -> None:
    here = Segment.make()
    there = Segment(os.dup(here.descriptor))
    here.view[100:105] = b"hello"
    assert bytes(there.view[100:105]) == b"hello"
    there.close()
    here.close()


@pytest.mark.parametrize(
    "address", ["rdma://mini.local:5577", "rdma://h:1?backend=ring", "rdma://h:1?device=rdma_en5:rdma_en3"]
)
def test_addresses_come_back(address: str) -> None:
    assert str(parse(address)) == address


def test_which_device_is_whose() -> None:
    assert RdmaAddress("h:1").devices == ("", "")
    assert RdmaAddress("h:1", device="rdma_en5").devices == ("rdma_en5", "rdma_en5")
    assert RdmaAddress("h:1", device="rdma_en5:rdma_en3").devices == ("rdma_en5", "rdma_en3")


DEVICES = """    device          	   node GUID
    ------          	----------------
    rdma_en5        	92f13c8e5f010405
    rdma_en3        	92f13c8e5f010404
"""
INFO = """hca_id:	rdma_en5
	transport:			Thunderbolt (5)
		port:	1
			state:			PORT_ACTIVE (4)
hca_id:	rdma_en3
	transport:			Thunderbolt (5)
		port:	1
			state:			PORT_DOWN (1)
"""


def test_what_the_tools_print() -> None:
    """In the form that rdma-core's tools have; not seen on a Mac by us."""
    assert parse_devices(DEVICES) == ("rdma_en5", "rdma_en3")
    assert parse_states(INFO) == {"rdma_en5": "PORT_ACTIVE", "rdma_en3": "PORT_DOWN"}
    assert parse_devices("") == ()
    assert parse_states("") == {}


@pytest.mark.parametrize(
    ("wanted", "listed", "active", "name", "problem"),
    [
        ("", "ab", "a", "a", ""),
        ("b", "ab", "ab", "b", ""),
        ("", "", "", "", "lists no RDMA device"),
        ("c", "ab", "a", "", "there is no RDMA device c"),
        ("b", "ab", "a", "", "the port of b is not active"),
        ("", "ab", "", "", "no port of a, b is active"),
        ("", "ab", "ab", "", "name the one that leads"),
    ],
)
def test_a_device_is_chosen_or_a_reason_given(wanted: str, listed: str, active: str, name: str, problem: str) -> None:
    choice = pick(wanted, list(listed), list(active))
    assert choice.name == name
    assert problem in choice.problem
