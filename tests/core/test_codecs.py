"""Names, sizes and runs of packed rows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitinfer.core.codecs import (
    CODECS,
    FP8,
    FP16,
    INT8,
    NONE,
    Packing,
    bytes_per_row,
    columns,
    is_faster,
    packs,
    runs_of,
)

rows = st.lists(st.integers(0, 200), unique=True).map(sorted)


def test_eight_bits_take_little_more_than_half_of_sixteen():
    assert bytes_per_row(NONE, 4096, "float16") == bytes_per_row(FP16, 4096, "float32") == 8192
    assert bytes_per_row(FP8, 4096, "bfloat16") == 4096 + 4 * 32
    assert bytes_per_row(INT8, 4096, "bfloat16") == 4096 + 4 * 32 + 8 * 6
    assert all(bytes_per_row(codec, 4096, "bfloat16") <= 0.53 * 8192 for codec in (FP8, INT8))


def test_the_last_group_may_be_short():
    assert [column.width for column in columns(FP8, 2880)] == [2880, 23]


@pytest.mark.parametrize("width", [0, -1, (1 << 16) + 1])
@pytest.mark.parametrize("codec", CODECS)
def test_rows_whose_places_cannot_be_written(codec: str, width: int):
    with pytest.raises(ValueError, match="cannot be packed"):
        columns(codec, width)


@pytest.mark.parametrize("codec", [NONE, "auto", "zip"])
def test_what_does_not_pack_has_no_columns(codec: str):
    with pytest.raises(ValueError, match=f"unknown; known: {', '.join(CODECS)}"):
        columns(codec, 64)
    with pytest.raises(ValueError, match="unknown; known"):
        Packing(codec, ((0, 1),))


def test_sixteen_bits_in_sixteen_bits_are_of_no_use():
    assert packs(FP16, 4096, "float32")
    assert not packs(FP16, 4096, "bfloat16")
    assert packs(INT8, 4096, "bfloat16")
    assert not packs(NONE, 4096, "float32")


def test_faster_means_clearly_faster():
    assert is_faster(1000, 250, 1000.0, 0.5)
    assert not is_faster(1000, 250, 1000.0, 0.7), "0.95 of a second is no gain worth having"
    assert not is_faster(1000, 250, float("inf"), 1e-9)


@pytest.mark.parametrize(
    "runs", [(), ((3, 3),), ((4, 2),), ((-1, 2),), ((0, 2), (1, 4)), ((0, 2), (2, 4)), ((5, 6), (0, 1))]
)
def test_runs_that_contradict_themselves(runs: tuple[tuple[int, int], ...]):
    with pytest.raises(ValueError, match="runs"):
        Packing(INT8, runs)


@given(rows.filter(bool), st.integers(0, 9))
def test_runs_and_pieces_are_the_rows(numbers: list[int], more: int):
    packing, num_rows = Packing(INT8, runs_of(numbers)), numbers[-1] + 1 + more
    said = [is_packed for is_packed, count in packing.pieces(num_rows) for _ in range(count)]
    assert said == [row in set(numbers) for row in range(num_rows)]
    assert packing.num_rows == len(numbers)
    assert packing.end == numbers[-1] + 1
