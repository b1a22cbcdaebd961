"""How large the graph of a step is: every node of it is handed to the device, most of them as one kernel.

Counted on real steps, as they are built: MLX prints the graph that an array still has to be computed by. What was
computed before has none, so that is one step's. On a GPU each kernel costs some microseconds to launch, however
few numbers it works on; with few rows that is a good part of a step.
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
    """``kernels``: those of the ``nodes`` that compute, and not only look at an array in another way."""

    nodes: int
    kernels: int


def count(arrays: Sequence[mx.array]) -> GraphSize:
    """The graph of some arrays, as far as it has not been computed."""
    text = io.StringIO()
    mx.export_to_dot(text, *arrays)
    operations: list[str] = _OPERATION.findall(text.getvalue())
    return GraphSize(len(operations), sum(operation not in _VIEWS for operation in operations))


def usual(counts: Sequence[GraphSize]) -> GraphSize | None:
    """What most steps have: the first ones put caches side by side."""
    return statistics.mode(counts) if counts else None


@contextmanager
def counted(rows: int) -> Iterator[list[GraphSize]]:
    """Counts every step of so many sequences, with one token each, that a stage in this process runs meanwhile."""
    found: list[GraphSize] = []
    original: Callable[..., list[mx.array]] = StepModel.run

    def run(self: StepModel, parts: Sequence[Part], tokens: Sequence[int], hidden: mx.array | None) -> list[mx.array]:
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
    """An mlx-lm model that counts the graph of each of its calls on one token of ``rows`` sequences."""

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
