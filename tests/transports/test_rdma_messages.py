"""The bytes of rdma://, its book-keeping and its looks at the machine, without a group."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transports import FrameError, TransportUnavailable
from transports.framing import FrameKind
from transports.rdma.channel import NUM_SLOTS, SEGMENT_BYTES, SLOT_BYTES, Slots
from transports.rdma.messages import (
    CHUNK_MESSAGES,
    HEAD_BYTES,
    MAX_PIECES,
    MESSAGE_BYTES,
    ROOM_BYTES,
    Assembly,
    Head,
    pack_table,
    seal,
    unpack_table,
    unseal,
)
from transports.rdma.probe import parse_devices, parse_states, parse_version, pick, why_not_together

HEAD = Head(50, 3)


def message(head: Head = HEAD, *, nonce: int = 9, seq: int = 4) -> memoryview:
    view = memoryview(bytearray(random.Random(0).randbytes(MESSAGE_BYTES)))
    seal(view, head, nonce=nonce, seq=seq)
    return view


@given(st.integers(0, HEAD_BYTES + HEAD.num_used - 1), st.integers(1, 255))
def test_no_byte_of_a_message_may_change(at: int, change: int) -> None:
    view = message()
    assert unseal(view, nonce=9, seq=4) == HEAD
    view[at] ^= change
    with pytest.raises(FrameError):
        unseal(view, nonce=9, seq=4)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seq": 5}, "message 5 came, not 4: messages are missing"),
        ({"seq": 3}, "message 3 came, not 4: messages are repeated"),
        ({"nonce": 1}, "another link"),
        ({"head": Head(0)}, "not valid here"),
        ({"head": Head(0, 1, rests=True)}, "not valid here"),
        ({"head": Head(1, CHUNK_MESSAGES)}, "not valid here"),
    ],
)
def test_a_message_of_elsewhere(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(FrameError, match=reason):
        unseal(message(**changes), nonce=9, seq=4)


@pytest.mark.parametrize(
    "content", [b"", b"1234567", bytes(8), pack_table(FrameKind.DATA, [1, 2])[:-1], pack_table(FrameKind.BEAT, [1])]
)
def test_a_frame_that_does_not_begin_with_a_table(content: bytes) -> None:
    with pytest.raises(FrameError):
        unpack_table(memoryview(content))


def test_a_frame_that_is_too_much() -> None:
    table = pack_table(FrameKind.DATA, [0] * MAX_PIECES)
    assert len(table) <= ROOM_BYTES
    assert unpack_table(memoryview(table)) == (FrameKind.DATA, (0,) * MAX_PIECES)
    with pytest.raises(FrameError, match=f"at most {MAX_PIECES - 1}"):
        pack_table(FrameKind.BYE, [0] * (MAX_PIECES + 1))
    coming = Assembly(FrameKind.DATA, (100,), memoryview(pack_table(FrameKind.DATA, [100]) + bytes(50)))
    with pytest.raises(FrameError, match="more bytes than were announced"):
        coming.add(memoryview(bytes(51)))


@given(st.integers(0, 2**32))
def test_chunks_in_a_segment_never_overlap(seed: int) -> None:
    chance = random.Random(seed)
    slots, live = Slots(), deque[int]()
    for _ in range(200):
        offset = slots.take() if chance.random() < 0.6 else None
        if offset is not None:
            assert offset % SLOT_BYTES == 0
            assert 0 <= offset < SEGMENT_BYTES
            assert offset not in live
            live.append(offset)
        elif live:
            live.popleft()
            slots.consumed()
    for _ in live:
        slots.consumed()
    assert None not in [slots.take() for _ in range(NUM_SLOTS)], "all room is there again"
    assert slots.take() is None


DEVICES = """    device          	   node GUID
    ------          	----------------
    rdma_en2        	e0c5797d9c8fac05
    rdma_en3        	e1c5797d9c8fac05
"""
INFO = """hca_id:	rdma_en2
	transport:			Thunderbolt (100)
	phys_port_cnt:			1
		port:	1
			state:			PORT_ACTIVE (4)
hca_id:	rdma_en3
	transport:			Thunderbolt (100)
	phys_port_cnt:			1
		port:	1
			state:			PORT_DOWN (1)
"""


def test_what_the_tools_print() -> None:
    """As Apple's TN3205 shows it; not seen on a Mac by us."""
    assert parse_devices(DEVICES) == ("rdma_en2", "rdma_en3")
    assert parse_states(INFO) == {"rdma_en2": "PORT_ACTIVE", "rdma_en3": "PORT_DOWN"}
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
    if problem:
        with pytest.raises(TransportUnavailable, match=problem):
            pick(wanted, list(listed), list(active))
    else:
        assert pick(wanted, list(listed), list(active)) == name


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("26.2", (26, 2)),
        ("26.3.1", (26, 3)),
        ("16.3", (26, 3)),  # what a program of an older SDK is told
        ("15.7", (15, 7)),
        ("Linux", None),
        ("٢٦.٢", None),
        ("9" * 40, None),
    ],
)
def test_versions(text: str, version: tuple[int, int] | None) -> None:
    assert parse_version(text) == version


@pytest.mark.parametrize(
    ("one", "other", "reason"),
    [
        *((one, other, "") for one, other in (("26.2", "26.2.1"), ("26.3", "27.0"), ("16.4", "26.3"))),
        ("26.2", "26.3", "macOS 26.2 and 26.3, and RDMA's frames have other sizes from 26.3 on"),
        ("26.1", "26.3", "needs macOS 26.2 or later, and one end is 26.1"),
        ("", "26.3", "and one end is another system"),
    ],
)
def test_only_ends_that_frame_alike_may_join(one: str, other: str, reason: str) -> None:
    said, swapped = (why_not_together(*ends) or "" for ends in ((one, other), (other, one)))
    assert (bool(said), bool(swapped)) == (bool(reason), bool(reason))
    assert reason in said
    assert reason.replace("one end", "the other end") in swapped.replace("one end", "the other end")
