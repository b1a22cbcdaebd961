"""Figures that only a GPU can show, for ``scripts/on_gpu``: the share of a step that a launch takes, errors of rows.

*Launch.* While a launch (``mx.async_eval``) is under way its thread can launch nothing else and send nothing. Where a
device takes in a few command buffers only, a launch returns when nearly all of its step is computed. Measured twice: on
an idle device (``launch_ms``, ``share``), and while another sequence's step is under way (``second_ms``,
``second_share``), which is what launching ahead does.

*Rows.* Kernels differ with the number of rows, so rows of many sequences round otherwise than each alone. How far that
goes after so many layers is what a trial at loading has to allow for. Beside it stands the model's own noise: one
sequence whose prompt is read in other chunks, each computed alone.
"""

import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import mlx.core as mx

from splitinfer.bench.shared.random_model import Shape, build
from splitinfer.core.scheduler import cost_model
from splitinfer.engine.device.device import Device, Ticket, Work
from splitinfer.engine.device.late_steps import LATE
from splitinfer.engine.device.selection import open_device
from splitinfer.models.cut import StageModel
from splitinfer.models.kv_trial import try_blocks
from splitinfer.models.rows import attend_by_rows
from splitinfer.models.step import StepModel, Way, arrays_to_evaluate
from splitinfer.models.structure import ModelStructure
from splitinfer.probes.child import Report
from splitinfer.probes.steps import Sequences, distribution, row_errors

_PROMPT = 32  # tokens
_WARM_UP = 3  # steps, in which kernels are loaded or compiled
_LENGTHS = (24, 3)  # tokens of the first prompt, and by how many each other is longer
_LONG, _CHUNKS = 96, (96, 16)  # the prompt that is read in two ways


# -- launches ----------------------------------------------------------------------------------------------------------


def launch(options: Mapping[str, Any], report: Report) -> None:
    """For each number of bits (0: the dtype's own) and of layers."""
    for bits in options["bits"]:
        shape = replace(Shape(**options["shape"]), bits=bits)
        structure = cache(lambda shape=shape: ModelStructure(build(shape)))  # what prevents it is a finding's problem
        for layers in options["layers"]:
            find = partial(_launches, structure, layers, options["steps"], shape.vocab)
            report.guarded(f"{f'{bits}-bit' if bits else shape.dtype}, {layers} layers", find)
        del structure, find
        mx.clear_cache()


def _launches(structure: Any, layers: int, num_steps: int, vocab_size: int) -> dict[str, Any]:
    found: ModelStructure = structure()
    step = StepModel(StageModel(found.model, 0, layers, found))
    device, sequences = open_device(0, (0, layers)), Sequences(step, vocab_size, [_PROMPT, _PROMPT])
    for _ in range(_WARM_UP):
        _pair(device, sequences)
    alone = [_one(device, sequences) for _ in range(num_steps)]
    pairs = [_pair(device, sequences) for _ in range(num_steps)]
    step_ms = 1e3 * statistics.median(one.step for one in alone)
    second_ms = [1e3 * one.launch for one in pairs]
    return {
        "step_ms": step_ms,
        "build_ms": 1e3 * statistics.median(one.build for one in alone),
        "launch_ms": distribution([1e3 * one.launch for one in alone]),
        "share": distribution([one.launch / one.step for one in alone]),
        "second_ms": distribution(second_ms),
        "second_share": statistics.median(second_ms) / step_ms,
        "late_steps": sum(one.late for one in (*alone, *pairs)),
    }


class _Times(NamedTuple):
    """Seconds: of building a step's graph, of its launch, and from the beginning of the launch to the end of the step.
    ``late``: steps for which an emulated device needed longer than the one that it emulates."""

    build: float
    launch: float
    step: float
    late: int


def _one(device: Device, sequences: Sequences) -> _Times:
    """One step on an idle device."""
    ticket, build, began, launched = _launch(device, sequences, 0)
    late = LATE in device.wait(ticket).notes
    return _Times(build, launched, time.monotonic() - began, int(late))


def _pair(device: Device, sequences: Sequences) -> _Times:
    """The second of two steps of different sequences, launched while the first is under way."""
    first, *_ = _launch(device, sequences, 0)
    second, build, began, launched = _launch(device, sequences, 1)
    late = sum(LATE in device.wait(one).notes for one in (first, second))
    return _Times(build, launched, time.monotonic() - began, late)


def _launch(device: Device, sequences: Sequences, which: int) -> tuple[Ticket, float, float, float]:
    """A step under way, the seconds of building it, when its launch began, and the seconds of that."""
    began = time.monotonic()
    parts = sequences.parts([which])
    outputs = sequences.build([which], parts)
    built = time.monotonic()
    ticket = device.launch(outputs, arrays_to_evaluate(parts), Work(cost_model.Shape(1)), began)
    return ticket, built - began, built, time.monotonic() - built


# -- rows --------------------------------------------------------------------------------------------------------------


def rows(options: Mapping[str, Any], report: Report) -> None:
    """For the first half of the layers, whose output is a hidden state, and for the whole model, whose output is
    logits."""
    shape = Shape(**options["shape"])
    model = build(shape)
    structure, half = ModelStructure(model), max(1, shape.layers // 2)
    for name, end in (("hidden states of the first half", half), ("logits", shape.layers)):
        stage = StageModel(model, 0, end, structure)
        report.guarded(f"{name}: trials", partial(_trials, stage))
        for count in options["sequences"]:
            find = partial(_together, stage, shape.vocab, count, options["steps"])
            report.guarded(f"{name}: {count} rows together", find)
        report.guarded(f"{name}: prompt in other chunks", partial(_chunks, stage, shape.vocab, options["steps"]))


def _trials(stage: StageModel) -> dict[str, Any]:
    """What loading decides, and the seconds that it takes."""
    began = time.monotonic()
    way, chosen = StepModel(stage).way, time.monotonic()
    why_not = try_blocks(stage).why_not
    seconds = {"way_seconds": chosen - began, "kept_seconds": time.monotonic() - chosen}
    return {"way": way.value, "kept_kv": why_not is None, "why_not": why_not, **seconds}


def _together(stage: StageModel, vocab_size: int, count: int, num_steps: int) -> dict[str, Any]:
    """Whether the trials would allow it or not."""
    attend_by_rows(stage.whole)
    together = StepModel(stage)
    together.way = Way.ROWS
    lengths, which = [_LENGTHS[0] + _LENGTHS[1] * i for i in range(count)], range(count)
    ours, alone = (Sequences(step, vocab_size, lengths) for step in (together, StepModel(stage)))
    found, wanted = list[mx.array](), list[mx.array]()
    for _ in range(num_steps):
        found += ours.run(which)
        wanted += [row for i in which for row in alone.run([i])]
    return _compared(found, wanted, stage)


def _chunks(stage: StageModel, vocab_size: int, num_steps: int) -> dict[str, Any]:
    both = [Sequences(StepModel(stage), vocab_size, [_LONG], chunk) for chunk in _CHUNKS]
    found, wanted = ([row for _ in range(num_steps) for row in one.run([0])] for one in both)
    return _compared(found, wanted, stage)


def _compared(found: list[mx.array], wanted: list[mx.array], stage: StageModel) -> dict[str, Any]:
    """``other_token``: the share of rows whose largest logit is another one."""
    ours, theirs = mx.concatenate(found), mx.concatenate(wanted)
    errors: dict[str, Any] = distribution(row_errors(ours, theirs))
    if stage.is_last:
        others = mx.argmax(ours, axis=-1) != mx.argmax(theirs, axis=-1)
        errors["other_token"] = others.astype(mx.float32).mean().item()
    return errors
