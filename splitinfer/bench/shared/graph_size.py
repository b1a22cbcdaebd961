"""Counts the nodes of a step's graph, each of which MLX gives to the device, most of them as one kernel.

Real steps are counted as they are built: MLX exports the graph of arrays that are not yet evaluated, which is that of
one step. On a GPU each kernel costs some microseconds to launch, however few numbers it computes; with few rows that
is a good part of a step.
"""

import io
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from splitinfer.models.rows import Part
from splitinfer.models.step import StepModel, arrays_to_evaluate

_OPERATION = re.compile(r'^\{ \d+ \[label ="(\w+)"', re.MULTILINE)
_VIEWS = frozenset({
    "AsStrided", "Broadcast", "BroadcastAxes", "Depends", "ExpandDims", "Flatten", "Reshape", "Slice", "Split",
    "Squeeze", "StopGradient", "Transpose", "Unflatten",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class GraphSize:
    """The nodes of a graph. ``kernels``: those of them that compute; the others are views of an array."""

    nodes: int
    kernels: int


def count(arrays: Sequence[mx.array]) -> GraphSize:
    """The size of the graph of some arrays, as far as it is not yet evaluated."""
    text = io.StringIO()
    mx.export_to_dot(text, *arrays)
    operations: list[str] = _OPERATION.findall(text.getvalue())
    return GraphSize(len(operations), sum(operation not in _VIEWS for operation in operations))


def usual(counts: Sequence[GraphSize]) -> GraphSize | None:
    """The most frequent size: the first steps also concatenate caches."""
    return statistics.mode(counts) if counts else None


@contextmanager
def counted(rows: int) -> Iterator[list[GraphSize]]:
    """Collects the graph size of every step that a stage in this process runs meanwhile for ``rows`` sequences of one
    token each."""
    found: list[GraphSize] = []
    original: Callable[..., list[mx.array]] = StepModel.run

    def run(
        self: StepModel, parts: Sequence[Part], tokens: Sequence[int] | mx.array, hidden: mx.array | None
    ) -> list[mx.array]:
        outputs = original(self, parts, tokens, hidden)
        if len(parts) == rows == len(tokens):
            found.append(count([*outputs, *arrays_to_evaluate(parts)]))
        return outputs

    StepModel.run = run  # type: ignore[method-assign]
    try:
        yield found
    finally:
        StepModel.run = original  # type: ignore[method-assign]


class CountedModel:
    """An mlx-lm model that collects the graph size of each call on one token of ``rows`` sequences."""

    def __init__(self, model: Any, rows: int) -> None:
        self._model, self._rows = model, rows
        self.found: list[GraphSize] = []

    def __call__(self, inputs: mx.array, *args: Any, **options: Mapping[str, Any]) -> Any:
        logits = self._model(inputs, *args, **options)
        if inputs.shape == (self._rows, 1):
            self.found.append(count([logits]))
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
