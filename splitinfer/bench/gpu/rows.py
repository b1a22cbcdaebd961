"""Errors of rows computed together against one by one, and what the trials at loading decide on this machine.

Kernels differ with the number of rows, so rows of many sequences round otherwise than each alone. How far that goes
after so many layers is what a trial has to allow for. Beside it stands the model's own noise: one sequence whose prompt
is read in other chunks, each computed alone.
"""

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import mlx.core as mx

from splitinfer.bench.gpu.models import Sequences, distribution, row_errors
from splitinfer.bench.shared.random_model import Shape, build
from splitinfer.jobs.process import Report
from splitinfer.models.cut import StageModel
from splitinfer.models.kv_trial import try_blocks
from splitinfer.models.rows import attend_by_rows
from splitinfer.models.step import StepModel, Way
from splitinfer.models.structure import ModelStructure

_LENGTHS = (24, 3)  # tokens of the first prompt, and by how many each other is longer
_LONG, _CHUNKS = 96, (96, 16)  # the prompt that is read in two ways


def measure(options: Mapping[str, Any], report: Report) -> None:
    """For the first half of the layers, whose output is a hidden state, and for the whole model, whose output is
    logits."""
    shape = Shape(**options["shape"])
    model = build(shape)
    structure = ModelStructure(model)
    half = max(1, shape.layers // 2)
    for name, end in (("hidden states of the first half", half), ("logits", shape.layers)):
        stage = StageModel(model, 0, end, structure)
        report.guarded(f"{name}: trials", partial(_trials, stage))
        for count in options["sequences"]:
            find = partial(_together, stage, shape.vocab, count, options["steps"])
            report.guarded(f"{name}: {count} rows together", find)
        report.guarded(f"{name}: prompt in other chunks", partial(_chunks, stage, shape.vocab, options["steps"]))


def _trials(stage: StageModel) -> dict[str, Any]:
    began = time.monotonic()
    way = StepModel(stage).way
    chosen = time.monotonic()
    why_not = try_blocks(stage).why_not
    return {
        "way": way.value,
        "way_seconds": chosen - began,
        "kept_kv": why_not is None,
        "why_not": why_not,
        "kept_seconds": time.monotonic() - chosen,
    }


def _together(stage: StageModel, vocab_size: int, count: int, num_steps: int) -> dict[str, Any]:
    """Whether the trials would allow it or not."""
    attend_by_rows(stage.whole)
    together = StepModel(stage)
    together.way = Way.ROWS
    lengths = [_LENGTHS[0] + _LENGTHS[1] * i for i in range(count)]
    both = [Sequences(step, vocab_size, lengths) for step in (together, StepModel(stage))]
    which = range(count)
    rows, wanted = list[mx.array](), list[mx.array]()
    for _ in range(num_steps):
        rows += both[0].run(which)
        wanted += [row for i in which for row in both[1].run([i])]
    return _compared(mx.concatenate(rows), mx.concatenate(wanted), stage)


def _chunks(stage: StageModel, vocab_size: int, num_steps: int) -> dict[str, Any]:
    step = StepModel(stage)
    both = [Sequences(step, vocab_size, [_LONG], chunk) for chunk in _CHUNKS]
    rows, wanted = ([row for _ in range(num_steps) for row in one.run([0])] for one in both)
    return _compared(mx.concatenate(rows), mx.concatenate(wanted), stage)


def _compared(rows: mx.array, wanted: mx.array, stage: StageModel) -> dict[str, Any]:
    """``other_token``: the share of rows whose largest logit is another one."""
    found: dict[str, Any] = distribution(row_errors(rows, wanted))
    if stage.is_last:
        others = mx.argmax(rows, axis=-1) != mx.argmax(wanted, axis=-1)
        found["other_token"] = others.astype(mx.float32).mean().item()
    return found
