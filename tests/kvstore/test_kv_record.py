"""A block comes back from its bytes as it was; whatever else comes is ``Damaged`` and nothing worse."""

import struct
import zlib
from math import prod
from typing import Any

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kv_samples import block, buffers

from splitinfer.core.kv.block_tree import KEY_BYTES
from splitinfer.core.plan import StoredPart, TensorSpec
from splitinfer.kvstore.record import MAGIC, Damaged, Record, header_bytes, pack, read_header, unpack

ITEM_BYTES = {"uint8": 1, "bfloat16": 2, "float16": 2, "float32": 4, "uint32": 4, "bool_": 1, "int64": 8}

numbers = st.integers(0, 2**62)
specs = st.builds(TensorSpec, st.sampled_from(sorted(ITEM_BYTES)), st.lists(st.integers(0, 4), max_size=4).map(tuple))
parts = st.builds(
    StoredPart,
    slot=st.lists(numbers, max_size=3).map(tuple),
    by_token=st.booleans(),
    start=numbers,
    end=numbers,
    arrays=st.lists(specs, max_size=3).map(tuple),
)
records = st.builds(
    Record,
    parent=st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES),
    tokens=st.lists(st.integers(0, 2**32), min_size=1, max_size=9).map(tuple),
    start=numbers,
    parts=st.lists(parts, max_size=3).map(tuple),
)


def packed(record: Record, arrays: list[Any]) -> bytes:
    return b"".join(bytes(piece) for piece in pack(record, arrays))


def sealed(header: bytes, arrays: bytes = b"") -> bytes:
    whole = MAGIC + struct.pack("<I", len(header)) + header + arrays
    return whole + struct.pack("<I", zlib.crc32(whole))


RECORD = block(size=40)
FILE = packed(RECORD, buffers(RECORD))
FIELDS: dict[str, Any] = msgpack.unpackb(FILE[len(MAGIC) + 4 : header_bytes(FILE)])


def refused(data: bytes, key: bytes = RECORD.key) -> str:
    with pytest.raises(Damaged) as raised:
        unpack(data, key)
    return str(raised.value)


@given(records, st.data())
def test_a_block_comes_back_as_it_was(record: Record, data: st.DataObject):
    sizes = [ITEM_BYTES[array.dtype] * prod(array.shape) for part in record.parts for array in part.arrays]
    arrays = [data.draw(st.binary(min_size=size, max_size=size)) for size in sizes]
    file = packed(record, arrays)
    read, found = unpack(file, record.key)
    assert read == record
    assert read_header(file, record.key) == record
    assert [bytes(one) for one in found] == arrays
    assert len(found) == sum(len(part.arrays) for part in record.parts)


def test_arrays_are_not_copied():
    data = bytearray(FILE)
    _, found = unpack(data, RECORD.key)
    found[0][0] ^= 1
    assert bytes(data) != FILE


def test_one_bit_that_has_changed_is_noticed_wherever_it_is():
    for at in range(len(FILE)):
        for bit in range(8):
            data = bytearray(FILE)
            data[at] ^= 1 << bit
            assert refused(bytes(data))


def test_a_file_that_is_cut_short_anywhere_is_noticed():
    for length in range(len(FILE)):
        assert refused(FILE[:length])


@given(st.binary(min_size=1, max_size=40))
@example(FILE[-4:])
@example(FILE)
def test_what_is_appended_is_noticed(more: bytes):
    assert refused(FILE + more)


def test_a_right_file_under_another_key_is_no_block():
    assert "a different block" in refused(FILE, block(7).key)
    with pytest.raises(Damaged):
        read_header(FILE, block(7).key)


def _with_array(dtype: Any, shape: Any) -> dict[str, Any]:
    part = FIELDS["parts"][0]
    return {"parts": [{**part, "arrays": [{"dtype": dtype, "shape": shape}]}]}


@pytest.mark.parametrize(
    "changes",
    [
        _with_array("uint8", [2**63]),
        _with_array("uint8", [2**63, 2**63]),
        _with_array("uint8", [2**63] * 400),  # more digits than Python writes
        _with_array("uint8", [2**63] * 200_000),  # a product that takes minutes
        _with_array("uint8", [-1]),
        _with_array("uint8", [-80, -1]),
        _with_array("float128", [5]),
        _with_array("\x1b[2J" * 1000, [5]),
        _with_array(None, [80]),
        _with_array("uint8", [80.5]),
        _with_array("uint8", 80),
        {"parts": None},
        {"parts": [[[[]]]]},
        {"start": -4},
        {"tokens": []},
        {"tokens": [1, 2, 3]},
        {"tokens": "0,1,2,3"},
        {"parent": b""},
        {"more": 1},
    ],
    ids=lambda changes: repr(changes)[-40:],
)
def test_impossible_headers_are_refused_at_once(changes: dict[str, Any]):
    reason = refused(sealed(msgpack.packb(FIELDS | changes), b"".join(buffers(RECORD))))
    assert reason.isprintable()
    assert len(reason) < 400


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xc1",  # what msgpack never uses
        b"\xdd\xff\xff\xff\xff",  # an array of four billion items
        b"\x91" * 100_000,  # deep nesting
        b"\x81\x80\x80",  # a map for a key
        b"\xd6\xff\xff\xff\xff\xff",  # a moment in time
        b"\xc7\x01\x05x",  # an extension
        msgpack.packb(FIELDS)[:-1],
        msgpack.packb(FIELDS) + b"\x00",
        msgpack.packb(list(FIELDS.values())),
    ],
    ids=lambda header: repr(header)[:30],
)
def test_what_is_no_header_is_refused(header: bytes):
    assert refused(sealed(header))


@pytest.mark.parametrize("length", [0, len(FILE), 2**22, 2**22 + 1, 2**32 - 1])
def test_a_header_of_any_length_is_refused_if_it_is_not_there(length: int):
    reason = refused(MAGIC + struct.pack("<I", length) + FILE[len(MAGIC) + 4 :])
    assert (reason == "its header is too long") == (length > 2**22)
