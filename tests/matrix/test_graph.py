"""Reading MLX's graph: the right ancestors, however many names, and whatever the arrays share."""

import mlx.core as mx
import pytest

from splitinfer.models.library import graph as reading
from splitinfer.models.library.graph import Graph, arrays_read


def test_what_a_result_needs() -> None:
    """Also where arrays have several names or one operation makes several. What is evaluated is a leaf."""
    a, b, c = (mx.ones((2, 2)) for _ in range(3))
    product = a @ b
    assert arrays_read([product + 1], {"a": a, "b": b, "c": c, "product": product}) == ({"a", "b", "product"},)
    assert arrays_read([a + 1], {"a": a, "b": b}, {"a": b, "b": a, "c": a}) == ({"a"}, {"b", "c"})
    assert arrays_read([], {"a": a}) == (set(),)
    whole = mx.arange(6.0)
    left, right = mx.split(whole, 2)
    same = {"left": left, "right": right, "whole": whole, "again": left, "other": c}
    assert arrays_read([left * 2], same) == ({"left", "again", "whole"},)
    mx.eval(product)
    assert arrays_read([product * 2], {"a": a, "b": b, "product": product}) == ({"product"},)


def test_without_a_way_in() -> None:
    a, b, door = (mx.ones((2, 2)) for _ in range(3))
    graph = Graph([(a + b + door) * 2], {"a": a, "b": b, "door": door})
    assert graph.read_by([0]) == {"a", "b", "door"}
    assert graph.read_by([0], without=["door"]) == {"door"}
    assert graph.mixed_with("door") == {"a", "b"}
    assert graph.holds("a")


def test_an_operation_of_two_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a sum over machines, which one process cannot make."""
    printed, (a, b) = reading._print, (mx.ones((2, 2)), mx.ones((2, 2)))
    monkeypatch.setattr(reading, "_print", lambda *given: printed(*given).replace('"Add"', '"Sum AllReduce"'))
    assert arrays_read([(a + b) * 2], {"a": a, "b": b}) == ({"a", "b"},)


def test_more_names_than_mlx_takes_at_once() -> None:
    """A checkpoint has tens of thousands of tensors."""
    parts = {f"part.{i}": mx.zeros((2,)) for i in range(3000)}
    joined = mx.stack(list(parts.values()))
    halves = dict(zip(("a", "b"), mx.split(joined, 2), strict=True))
    odd = mx.stack([array for i, array in enumerate(parts.values()) if i % 2])
    assert arrays_read([joined.sum()], parts | halves) == (set(parts),)
    assert arrays_read([odd.sum()], parts | halves) == ({name for i, name in enumerate(parts) if i % 2},)
    pieces = {f"piece.{i}": piece for i, piece in enumerate(mx.split(joined, 1500))}
    assert arrays_read([pieces["piece.7"].sum()], pieces) == ({"piece.7"},)
