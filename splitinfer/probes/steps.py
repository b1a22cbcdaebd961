"""Steps of sequences on a stage: their errors, and what a launch, a wait, and steps by rows take."""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from splitinfer.core.costs.shape import Shape
from splitinfer.engine.device.device import Device, Ticket, Work
from splitinfer.engine.device.selection import default_device
from splitinfer.models.cut import StageModel
from splitinfer.models.hub import open_model
from splitinfer.models.loader import whole_model
from splitinfer.models.memory import on_gpu
from splitinfer.models.rows import Part
from splitinfer.models.step import StepModel, arrays_to_evaluate
from splitinfer.models.structure import ModelStructure
from splitinfer.probes import random_model
from splitinfer.probes.child import Report
from splitinfer.probes.finding import Finding, passed
from splitinfer.probes.random_model import made_up

_ROWS = (1, 2, 4, 8, 16, 32)  # sequences of one row each
_PROMPT, _WARM_UP, _MOST_STEPS = 4, 1, 16
_SECONDS = 0.3  # for each number of rows
_LAUNCHES = 200
_LARGER = {"layers": 8, "hidden": 2048, "heads": 16, "kv_heads": 8, "mlp": 5632, "vocab": 8192, "dtype": "bfloat16"}


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


def distribution(values: Sequence[float]) -> dict[str, float]:
    """The median, two quantiles and the largest of some values, and their number."""
    ordered = sorted(values)
    return {
        "count": len(ordered),
        "p50": statistics.median(ordered),
        "p90": ordered[math.ceil(0.9 * len(ordered)) - 1],
        "p99": ordered[math.ceil(0.99 * len(ordered)) - 1],
        "max": ordered[-1],
    }


# -- times: figures, which no bound is known for -----------------------------------------------------------------------


def measure(_options: Mapping[str, Any], report: Report) -> None:
    report.guarded("launch", _launch)
    report.guarded("demo", lambda: _steps(whole_model(open_model("demo"))))


def measure_larger(_options: Mapping[str, Any], report: Report) -> None:
    for name, bits in (("8 x 2048, bfloat16", 0), ("8 x 2048, 4-bit", 4)):
        report.guarded(name, partial(_larger, bits))
        mx.clear_cache()


def _larger(bits: int) -> Finding:
    shape = random_model.Shape(architecture="qwen3", bits=bits, **_LARGER)  # type: ignore[arg-type]
    structure = ModelStructure(random_model.build(shape))
    return _steps(StageModel(structure.model, 0, shape.layers, structure))


def _launch() -> Finding:
    """Of one addition: microseconds of building and launching it, and of waiting for it."""
    device, number = default_device(), mx.zeros((8, 8))
    mx.eval(number)
    launches, waits = [], []
    for _ in range(_LAUNCHES):
        began = time.monotonic()
        ticket = device.launch([number + 1], (), Work(Shape(1)), began)
        launched = time.monotonic()
        device.wait(ticket)
        launches.append(launched - began)
        waits.append(time.monotonic() - launched)
    found = {"launch_us": _microseconds(launches), "wait_us": _microseconds(waits), "count": _LAUNCHES}
    sentence = f"a launch takes {found['launch_us'][0]:.3g} µs and a wait {found['wait_us'][0]:.3g} (median)"  # type: ignore[index]
    return passed("launch", sentence, found)


def _microseconds(seconds: list[float]) -> list[float]:
    """The median, the 90th and the 99th of 100."""
    ordered = sorted(seconds)
    return [round(1e6 * ordered[int(share * (len(ordered) - 1))], 1) for share in (0.5, 0.9, 0.99)]


def _steps(stage: StageModel) -> Finding:
    """Steps of many sequences with a row each, and of one with a prompt's chunk, as the device would have it."""
    step, chunk = StepModel(stage), 512 if on_gpu() else 128
    both = [_of_rows(step, 2048, [_PROMPT] * rows, 1) for rows in _ROWS]
    both.append(_of_rows(step, 2048, [0], chunk))
    rows, launches, steps = [*_ROWS, chunk], [one for one, _ in both], [one for _, one in both]
    sentence = "ms by rows: " + ", ".join(f"{count}: {one:.3g}" for count, one in zip(rows, steps, strict=True))
    return passed("", sentence, {"rows": rows, "launch_ms": launches, "step_ms": steps})


def _of_rows(step: StepModel, vocab_size: int, lengths: list[int], rows: int) -> tuple[float, float]:
    """Milliseconds of launching a step, and of the whole step: medians."""
    sequences, device = Sequences(step, vocab_size, lengths), default_device()
    which, launches, steps = range(len(lengths)), list[float](), list[float]()
    ends = time.monotonic() + _SECONDS
    while len(steps) < _WARM_UP + 2 or (time.monotonic() < ends and len(steps) < _MOST_STEPS):
        one = start(device, sequences, which, rows)
        device.wait(one.ticket)
        launches.append(one.launched - one.began)
        steps.append(time.monotonic() - one.began)
    return 1e3 * statistics.median(launches[_WARM_UP:]), 1e3 * statistics.median(steps[_WARM_UP:])
