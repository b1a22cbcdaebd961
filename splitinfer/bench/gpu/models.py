"""What the parts share: models, the layouts that cut them in two, sequences, and the figures of many values."""

import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from splitinfer.bench.shared.random_model import Shape, make
from splitinfer.bench.shared.throughput import quantile
from splitinfer.bench.shared.workload import made_up
from splitinfer.models.rows import Part
from splitinfer.models.step import StepModel, arrays_to_evaluate


class Sequences:
    """Sequences on a stage, each of made-up tokens, or of made-up hidden states where the stage takes those."""

    def __init__(self, step: StepModel, vocab_size: int, lengths: Sequence[int], chunk: int = 64) -> None:
        self._step, self._vocab_size = step, vocab_size
        self.caches = [step.stage.make_caches() for _ in lengths]
        for i, length in enumerate(lengths):
            for start in range(0, length, chunk):
                mx.eval(*self.run([i], min(chunk, length - start)))

    def parts(self, which: Sequence[int], rows: int = 1) -> list[Part]:
        """The next rows of some sequences; the last of each wants logits."""
        return [Part(self.caches[i], self.caches[i].place.position, rows, 1) for i in which]

    def build(self, which: Sequence[int], parts: Sequence[Part]) -> list[mx.array]:
        """Build the graph of their next step. Tokens depend on the sequence and the position alone."""
        tokens = [t for i, part in zip(which, parts, strict=True) for t in self._tokens(i, part)]
        return self._step.run(parts, tokens, None)

    def run(self, which: Sequence[int], rows: int = 1) -> list[mx.array]:
        """Compute their next step; the rows of its output."""
        parts = self.parts(which, rows)
        outputs = self.build(which, parts)
        mx.eval(outputs, arrays_to_evaluate(parts))
        return outputs

    def _tokens(self, which: int, part: Part) -> tuple[int, ...]:
        return tuple(
            made_up(f"sequence {which} {at}", 1, self._vocab_size)[0]
            for at in range(part.start, part.start + part.count)
        )


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


def distribution(values: Sequence[float]) -> dict[str, float]:
    """The median, two quantiles and the largest of some values, and their number."""
    ordered = sorted(values)
    return {
        "count": len(ordered),
        "p50": statistics.median(ordered),
        "p90": quantile(ordered, 0.9),
        "p99": quantile(ordered, 0.99),
        "max": ordered[-1],
    }


def model_folder(folder: str, sizes: Mapping[str, Any]) -> Path:
    """A random model's folder below ``folder``. Jobs that name the same sizes share it."""
    name = "-".join(str(value) for value in sizes.values())
    found = Path(folder) / name
    if not found.exists():
        partial = Path(folder) / f".{name}.{os.getpid()}"  # whoever makes it may be ended meanwhile
        make(partial, Shape(**sizes))
        partial.rename(found)
    return found


def halves(model: str | Path, layers: int) -> dict[str, Any]:
    """A layout of two stages on this machine."""
    first = layers - layers // 2
    stages = [{"name": "front", "layers": first}, {"name": "back", "layers": layers - first, "address": "local"}]
    return {"model": str(model), "stages": stages}
