"""Graphs are counted as they stand, and whoever counts leaves no trace."""

import mlx.core as mx

from splitinfer.bench.shared.graph_size import CountedModel, GraphSize, count, counted, usual
from splitinfer.models.step import StepModel


def test_what_is_still_to_be_computed_counts() -> None:
    x = mx.ones((2, 3))
    mx.eval(x)
    assert count([x]) == GraphSize(0, 0)
    y = mx.exp(x).T
    assert count([y]) == GraphSize(2, 1)
    mx.eval(y)
    assert count([y * y, mx.exp(y)]) == GraphSize(2, 2)


def test_each_call_of_a_compiled_function_counts() -> None:
    x = mx.ones((2, 3))
    mx.eval(x)
    twice = mx.compile(lambda a: mx.exp(a) * a)
    assert count([twice(twice(x))]) == GraphSize(2, 2)


def test_what_most_steps_have_is_usual() -> None:
    assert usual([GraphSize(9, 5), GraphSize(4, 2), GraphSize(4, 2)]) == GraphSize(4, 2)
    assert usual([]) is None


def test_a_model_is_counted_where_each_sequence_has_one_row() -> None:
    def model(tokens: mx.array, cache: list[int]) -> mx.array:
        return mx.exp(tokens) + len(cache)

    counted_model = CountedModel(model, rows=2)
    for shape in ((2, 5), (1, 1), (2, 1)):
        tokens = mx.ones(shape)
        mx.eval(tokens)
        counted_model(tokens, cache=[])
    assert len(counted_model.found) == 1
    assert counted_model.found[0].kernels >= 2
    assert counted_model.__name__ == "model"


def test_steps_run_as_before_when_nobody_counts() -> None:
    before = StepModel.run
    with counted(3):
        assert StepModel.run is not before
    assert StepModel.run is before
