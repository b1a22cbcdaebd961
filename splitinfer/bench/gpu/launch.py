"""The share of a step that a launch takes: after which ``mx.async_eval`` returns.

While a launch is under way its thread can launch nothing else and send nothing. Where a device takes in a few command
buffers only, a launch returns when nearly all of its step is computed. Measured twice: on an idle device
(``launch_ms``, ``share``), and while another sequence's step is under way (``second_ms``, ``second_share``), which is
what launching ahead does.
"""

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import mlx.core as mx

from splitinfer.bench.gpu.models import Sequences, distribution
from splitinfer.bench.shared import random_model
from splitinfer.core.scheduler.cost_model import Shape
from splitinfer.engine.device.device import Device, Ticket, Work
from splitinfer.engine.device.late_steps import LATE
from splitinfer.engine.device.selection import open_device
from splitinfer.jobs.process import Report
from splitinfer.models.cut import StageModel
from splitinfer.models.step import StepModel, arrays_to_evaluate
from splitinfer.models.structure import ModelStructure

_PROMPT = 32  # tokens
_WARM_UP = 3  # steps, in which kernels are loaded or compiled


def measure(options: Mapping[str, Any], report: Report) -> None:
    """For each number of bits (0: the dtype's own) and of layers."""
    for bits in options["bits"]:
        shape = replace(random_model.Shape(**options["shape"]), bits=bits)
        name = f"{bits}-bit" if bits else shape.dtype
        made = _Made(shape)
        for layers in options["layers"]:
            find = partial(_of_layers, made, layers, options["steps"])
            report.guarded(f"{name}, {layers} layers", find)
        del made, find
        mx.clear_cache()


class _Made:
    """A random model, made when it is first asked for, so that what prevents that is a finding's problem."""

    def __init__(self, shape: random_model.Shape) -> None:
        self.shape = shape

    @cached_property
    def structure(self) -> ModelStructure:
        """Its structure, which has the model."""
        return ModelStructure(random_model.build(self.shape))


def _of_layers(made: _Made, layers: int, num_steps: int) -> dict[str, Any]:
    step = StepModel(StageModel(made.structure.model, 0, layers, made.structure))
    device = open_device(0, (0, layers))
    sequences = Sequences(step, made.shape.vocab, [_PROMPT, _PROMPT])
    for _ in range(_WARM_UP):
        _pair(device, sequences)
    alone = [_one(device, sequences) for _ in range(num_steps)]
    pairs = [_pair(device, sequences) for _ in range(num_steps)]
    step_ms = statistics.median(one.step for one in alone) * 1e3
    return {
        "step_ms": step_ms,
        "build_ms": statistics.median(one.build for one in alone) * 1e3,
        "launch_ms": distribution([one.launch * 1e3 for one in alone]),
        "share": distribution([one.launch / one.step for one in alone]),
        "second_ms": distribution([second.launch * 1e3 for _, second in pairs]),
        "second_share": statistics.median(second.launch for _, second in pairs) * 1e3 / step_ms,
        "late_steps": sum(step.is_late for step in (*alone, *(step for pair in pairs for step in pair))),
    }


@dataclass(slots=True)
class _Step:
    """Seconds: of building its graph, of the launch, and from the beginning of the launch to the end of the step.
    ``is_late``: an emulated device needed longer than the one that it emulates."""

    build: float
    launch: float
    step: float = 0.0
    is_late: bool = False


def _one(device: Device, sequences: Sequences) -> _Step:
    """One step on an idle device."""
    ticket, launched_at, step = _launch(device, sequences, 0)
    step.is_late = LATE in device.wait(ticket).notes
    step.step = time.monotonic() - launched_at
    return step


def _pair(device: Device, sequences: Sequences) -> tuple[_Step, _Step]:
    """Two steps of different sequences, the second launched while the first is under way."""
    (first, _, one), (second, _, other) = (_launch(device, sequences, which) for which in (0, 1))
    one.is_late, other.is_late = LATE in device.wait(first).notes, LATE in device.wait(second).notes
    return one, other


def _launch(device: Device, sequences: Sequences, which: int) -> tuple[Ticket, float, _Step]:
    began = time.monotonic()
    parts = sequences.parts([which])
    outputs = sequences.build([which], parts)
    built = time.monotonic()
    ticket = device.launch(outputs, arrays_to_evaluate(parts), Work(Shape(1)), began)
    returned = time.monotonic()
    return ticket, built, _Step(built - began, returned - built)
