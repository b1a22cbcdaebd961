"""Reading MLX's graph: the right ancestors, however many names, and whatever the arrays share."""

from collections.abc import Mapping, Sequence

import mlx.core as mx

from splitinfer.models.graph import Graph, arrays_read


def names_read(outputs: Sequence[mx.array], named: Mapping[str, mx.array]) -> set[str]:
    (names,) = arrays_read(outputs, named)
    return names


def test_what_a_result_needs() -> None:
    a, b, c = (mx.ones((2, 2)) for _ in range(3))
    product = a @ b
    assert names_read([product + 1], {"a": a, "b": b, "c": c, "product": product}) == {"a", "b", "product"}
    assert names_read([c], {"a": a, "c": c}) == {"c"}
    assert names_read([], {"a": a}) == set()


def test_without_a_way_in() -> None:
    a, b, door = (mx.ones((2, 2)) for _ in range(3))
    beyond = a + b
    result = (beyond + door) * 2
    graph = Graph([result], {"a": a, "b": b, "door": door})
    assert graph.read_by([0]) == {"a", "b", "door"}
    assert graph.read_by([0], without=["door"]) == {"door"}
    assert graph.mixed_with("door") == {"a", "b"}
    assert graph.holds("a")


def test_arrays_of_one_operation_and_arrays_named_twice() -> None:
    whole = mx.arange(6.0)
    left, right = mx.split(whole, 2)
    same = {"left": left, "right": right, "whole": whole, "again": left, "other": mx.ones((1,))}
    assert names_read([left * 2], same) == {"left", "again", "whole"}


def test_evaluated_arrays_are_leaves() -> None:
    a, b = mx.ones((3,)), mx.ones((3,))
    held = a + b
    mx.eval(held)
    assert names_read([held * 2], {"a": a, "b": b, "held": held}) == {"held"}


def test_more_names_than_mlx_takes_at_once() -> None:
    """A checkpoint has tens of thousands of tensors."""
    parts = {f"part.{i}": mx.zeros((2,)) for i in range(3000)}
    joined = mx.stack(list(parts.values()))
    halves = dict(zip(("a", "b"), mx.split(joined, 2), strict=True))
    odd = mx.stack([array for i, array in enumerate(parts.values()) if i % 2])
    assert names_read([joined.sum()], parts | halves) == set(parts)
    assert names_read([odd.sum()], parts | halves) == {name for i, name in enumerate(parts) if i % 2}
    pieces = {f"piece.{i}": piece for i, piece in enumerate(mx.split(joined, 1500))}
    assert names_read([pieces["piece.7"].sum()], pieces) == {"piece.7"}


def test_names_of_two_mappings_are_kept_apart() -> None:
    a, b = mx.ones((2, 2)), mx.ones((2, 2))
    assert arrays_read([a + 1], {"a": a, "b": b}, {"a": b, "b": a, "c": a}) == ({"a"}, {"b", "c"})
