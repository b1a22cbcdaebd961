"""Items are cut into pieces without gap or overlap, and a window bounds what is under way."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from weights import described, shorten_pieces

from splitinfer.store.manifest import Item
from splitinfer.store.pace import Pace
from splitinfer.store.parts import parts_of
from splitinfer.store.paths import no_room
from splitinfer.store.pieces import MOST_ASKED, PIECE, Asked, Piece, num_pieces, piece_at, pieces_of


@given(st.integers(0, 9 * PIECE))
def test_pieces_fill_an_item(nbytes: int):
    cut = list(pieces_of(3, Item("a", nbytes)))
    assert len(cut) == num_pieces(nbytes)
    assert [piece.begin for piece in cut] == [sum(p.nbytes for p in cut[:at]) for at in range(len(cut))]
    assert sum(piece.nbytes for piece in cut) == nbytes
    assert all(piece_at([Item("", 0)] * 3 + [Item("a", nbytes)], 3, piece.at) == piece for piece in cut)


@pytest.mark.parametrize(("item", "at"), [(-1, 0), (2, 0), (0, -1), (0, 2), (1, 0)])
def test_there_is_no_such_piece(item: int, at: int):
    assert piece_at([Item("a", PIECE + 1), Item("empty", 0)], item, at) is None


@given(st.lists(st.integers(1, 100), max_size=40), st.integers(1, 300), st.booleans())
def test_the_window_is_kept_and_all_is_asked_for(sizes: list[int], window: int, at_once: bool):
    coming = [Piece(at, 0, size) for at, size in enumerate(sizes)]
    asked, came, under_way = Asked(iter(coming), window, at_once=at_once), list[Piece](), list[Piece]()
    while not asked.is_done or not came:
        under_way += asked.to_ask()
        if not under_way:
            break
        assert len(under_way) == 1 or sum(piece.nbytes for piece in under_way) <= window
        due = under_way.pop(0)
        assert asked.came(due.item, due.at, due.nbytes) == due
        came.append(due)
    assert came == coming
    assert asked.is_done


def test_asks_come_together_unless_at_once():
    """A quarter of the window is asked for at a time, or a piece."""
    for at_once, counts in ((True, [8, 1, 1, 1, 1, 1]), (False, [8, 0, 2, 0, 2, 0])):
        asked = Asked([Piece(at, 0, 10) for at in range(20)], 80, at_once=at_once)
        asks = [len(asked.to_ask())]
        for at in range(5):
            asked.came(at, 0, 10)
            asks.append(len(asked.to_ask()))
        assert asks == counts


def test_small_pieces_are_bounded_by_number():
    assert len(Asked(Piece(at, 0, 1) for at in range(10**6)).to_ask()) == MOST_ASKED


@pytest.mark.parametrize("wrong", [(1, 0, 5), (0, 1, 5), (0, 0, 4), (0, 0, 6)])
def test_only_the_piece_that_is_due(wrong: tuple[int, int, int]):
    asked = Asked([Piece(0, 0, 5), Piece(1, 0, 5)])
    asked.to_ask()
    assert asked.came(*wrong) is None
    assert asked.came(0, 0, 5) == Piece(0, 0, 5)


def test_nothing_was_asked_for():
    assert Asked([]).came(0, 0, 1) is None


# ----- parts -------------------------------------------------------------------------------------------


def test_a_part_is_bounded_and_holds_each_tensor_once():
    told = described((10, 25, 7, 0, 40, 3))
    parts = parts_of(told, range(1, 7), most=36)
    assert [part.numbers for part in parts] == [(1, 2), (3, 4), (5,), (6,)]
    assert [part.nbytes - len(part.header) for part in parts] == [35, 7, 40, 3]
    assert len({part.name for part in parts}) == 4


def test_what_is_complete_leaves_the_parts_after_it_as_they_were():
    told = described((10, 25, 7, 0, 40, 3))
    first, *others = parts_of(told, range(1, 7), most=36)
    assert parts_of(told, set(range(1, 7)) - set(first.numbers), most=36) == others


def test_slots_fill_a_part(monkeypatch: pytest.MonkeyPatch):
    shorten_pieces(monkeypatch, 8)
    (part,) = parts_of(described(), range(1, 6))
    placed = part.pieces()
    assert [slot.index for _, slot in placed] == list(range(part.num_pieces))
    ends = [slot.offset + piece.nbytes for piece, slot in placed]
    assert [slot.offset for _, slot in placed] == [len(part.header), *ends[:-1]]
    assert ends[-1] == part.nbytes


def test_mlx_reads_a_part(tmp_path):
    told = described((16, 24))
    (part,) = parts_of(told, (1, 2))
    (tmp_path / part.name).write_bytes(part.header + bytes(range(40)))
    read = mx.load(str(tmp_path / part.name))
    assert np.array(read["layers.1.weight"]).tolist() == list(range(16, 40))


# ----- room and pace -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "stored", "free", "cap", "fits"),
    [
        (10, 0, 10, None, True), (11, 0, 10, None, False), (10, 90, 10**6, 100, True), (11, 90, 10**6, 100, False),
        (0, 200, 10**6, 100, False), (-5, 0, 0, None, True),
    ],
)  # fmt: skip
def test_room(wanted: int, stored: int, free: int, cap: int | None, *, fits: bool):
    assert (no_room(wanted, stored, free, cap, reserve=0) is None) == fits


def test_a_rate_holds_on_average_and_is_not_made_up_for():
    pace, now = Pace(), 100.0
    for _ in range(50):
        now += pace.wait(now, 1000, 1e4)
    assert now == pytest.approx(100.0 + 49 * 0.1)
    assert pace.wait(now + 50, 1000, 1e4) == 0.0
    assert pace.wait(now + 50, 1000, 1e4) == pytest.approx(0.1)
    assert pace.wait(now + 50, 1000, None) == 0.0
