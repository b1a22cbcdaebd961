"""What a launch and a wait cost, and steps by rows."""

import statistics
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import mlx.core as mx

from splitinfer.bench.gpu.models import Sequences
from splitinfer.bench.shared import random_model
from splitinfer.bench.shared.fidelity import whole_model
from splitinfer.core.scheduler.cost_model import Shape
from splitinfer.engine.device.device import Work
from splitinfer.engine.device.selection import default_device
from splitinfer.jobs.process import Report
from splitinfer.models.cut import StageModel
from splitinfer.models.hub import open_model
from splitinfer.models.memory import on_gpu
from splitinfer.models.step import StepModel, arrays_to_evaluate
from splitinfer.models.structure import ModelStructure

ROWS = (1, 2, 4, 8, 16, 32)  # sequences of one row each
_CHUNKS = {"gpu": 512, "cpu": 128}  # rows of one sequence: a step of a prompt
_PROMPT, _WARM_UP, _MOST_STEPS = 4, 1, 16
_SECONDS = 0.3  # for each number of rows
_LAUNCHES = 200
_LARGER = {"layers": 8, "hidden": 2048, "heads": 16, "kv_heads": 8, "mlp": 5632, "vocab": 8192, "dtype": "bfloat16"}


def measure(_options: Mapping[str, Any], report: Report) -> None:
    """Report launches, and steps of the demo model; on a GPU of larger random models, too."""
    report.guarded("launch", _launch)
    _steps("demo", whole_model(open_model("demo"), "auto"), report)
    for name, bits in (("8 x 2048, bfloat16", 0), ("8 x 2048, 4-bit", 4)) if on_gpu() else ():
        shape = random_model.Shape(architecture="qwen3", bits=bits, **_LARGER)  # type: ignore[arg-type]
        structure = ModelStructure(random_model.build(shape))
        _steps(name, StageModel(structure.model, 0, shape.layers, structure), report)
        mx.clear_cache()


def _launch() -> dict[str, Any]:
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
    return {"launch_us": _microseconds(launches), "wait_us": _microseconds(waits), "count": _LAUNCHES}


def _microseconds(seconds: list[float]) -> list[float]:
    """The median, the 90th and the 99th of 100."""
    ordered = sorted(seconds)
    return [round(1e6 * ordered[int(share * (len(ordered) - 1))], 1) for share in (0.5, 0.9, 0.99)]


def _steps(name: str, stage: StageModel, report: Report) -> None:
    step, vocab_size = StepModel(stage), 2048
    for rows in ROWS:
        report.guarded(f"{name}, {rows}", partial(_of_rows, step, vocab_size, [_PROMPT] * rows, 1))
    chunk = _CHUNKS["gpu" if on_gpu() else "cpu"]
    report.guarded(f"{name}, {chunk}", partial(_of_rows, step, vocab_size, [0], chunk))


def _of_rows(step: StepModel, vocab_size: int, lengths: list[int], rows: int) -> dict[str, Any]:
    """Milliseconds of launching a step, and of the whole step: medians."""
    sequences, device = Sequences(step, vocab_size, lengths), default_device()
    which, launches, steps = range(len(lengths)), list[float](), list[float]()
    ends = time.monotonic() + _SECONDS
    while len(steps) < _WARM_UP + 2 or (time.monotonic() < ends and len(steps) < _MOST_STEPS):
        parts = sequences.parts(which, rows)
        began = time.monotonic()
        outputs = sequences.build(which, parts)
        ticket = device.launch(outputs, arrays_to_evaluate(parts), Work(Shape(rows * len(lengths))), began)
        launches.append(time.monotonic() - began)
        device.wait(ticket)
        steps.append(time.monotonic() - began)
    return {
        "rows": rows * len(lengths),
        "launch_ms": 1e3 * statistics.median(launches[_WARM_UP:]),
        "step_ms": 1e3 * statistics.median(steps[_WARM_UP:]),
    }
