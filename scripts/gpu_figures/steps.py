"""Steps of sequences on a stage, and the errors of their rows."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from splitinfer.bench.parts import made_up
from splitinfer.core.costs.shape import Shape
from splitinfer.engine.device.device import Device, Ticket, Work
from splitinfer.models.caches.rows import SequenceRows
from splitinfer.models.rows.step import StepModel, arrays_to_evaluate


class Sequences:
    """Sequences on a stage, each of made-up tokens, or of made-up hidden states where the stage takes those."""

    def __init__(self, step: StepModel, vocab_size: int, lengths: Sequence[int], chunk: int = 64) -> None:
        self._step, self._vocab_size = step, vocab_size
        self.caches = [step.stage.make_caches() for _ in lengths]
        for i, length in enumerate(lengths):
            for start in range(0, length, chunk):
                mx.eval(*self.run([i], min(chunk, length - start)))

    def parts(self, which: Sequence[int], rows: int = 1) -> list[SequenceRows]:
        """The next rows of some sequences; the last of each wants logits."""
        return [SequenceRows(self.caches[i], self.caches[i].place.position, rows, 1) for i in which]

    def build(self, which: Sequence[int], parts: Sequence[SequenceRows]) -> list[mx.array]:
        """Build the graph of their next step. Tokens depend on the sequence and the position alone."""
        tokens = [t for i, part in zip(which, parts, strict=True) for t in self._tokens(i, part)]
        return self._step.run(parts, tokens, None)

    def run(self, which: Sequence[int], rows: int = 1) -> list[mx.array]:
        """Compute their next step; the rows of its output."""
        parts = self.parts(which, rows)
        outputs = self.build(which, parts)
        mx.eval(outputs, arrays_to_evaluate(parts))
        return outputs

    def _tokens(self, which: int, part: SequenceRows) -> tuple[int, ...]:
        return tuple(
            made_up(f"sequence {which} {at}", 1, self._vocab_size)[0]
            for at in range(part.start, part.start + part.count)
        )


class UnderWay(NamedTuple):
    """A step that was launched, and when: its graph began to be built, was built, and the launch returned."""

    ticket: Ticket
    began: float
    built: float
    launched: float


def start(device: Device, sequences: Sequences, which: Sequence[int], rows: int = 1) -> UnderWay:
    parts = sequences.parts(which, rows)
    began = time.monotonic()
    outputs = sequences.build(which, parts)
    built = time.monotonic()
    ticket = device.launch(outputs, arrays_to_evaluate(parts), Work(Shape(rows * len(which))), began)
    return UnderWay(ticket, began, built, time.monotonic())


def row_errors(rows: mx.array, wanted: mx.array) -> list[float]:
    """The distance of each of [n, d] rows from the wanted one, relative to that one's norm; infinite where it is not a
    number. Equal infinities, as of tokens that a model never chooses, do not differ and are not in the norm.

    >>> row_errors(mx.array([[3.0, 4.5, -mx.inf]]), mx.array([[3.0, 4.0, -mx.inf]]))
    [0.10000000149011612]
    """
    rows, wanted = rows.astype(mx.float32), wanted.astype(mx.float32)
    off = mx.linalg.norm(mx.where(rows == wanted, 0, rows - wanted), axis=-1)
    error = off / (mx.linalg.norm(mx.where(mx.isinf(wanted), 0, wanted), axis=-1) + 1e-9)
    found: list[float] = mx.where(mx.isnan(error), mx.inf, error).tolist()  # type: ignore[assignment]
    return found
