"""A stage is surveyed and tried once in a process, however many pipelines the tests make of it.

What a survey and the trials find depends on nothing but the checkpoint, a drafter's, the layers, the numbers' formats
and the tokens that a kept block is counted with (some tests change those), and it takes two thirds of the time in which
a pipeline of tiny stages is opened. So of the same stages the first is surveyed and tried as ever, and the others get
what was found: the survey (``loader.survey``), and what the trials found (``outcomes.try_stage``). Each reads its own
weights. Checkpoints are the same if their files hold the same, wherever they lie.

Where products are not MLX's own (``emulation/rounding.py``), models are tried each time, and so are halves of layers.
Loading itself is tested in ``tests/models`` and ``tests/matrix``, which call all of this directly, and in the processes
of ``tests/cluster``. A test of what loading leaves behind asks for ``each_time``.
"""

import hashlib
import inspect
import json
from collections.abc import Callable, Hashable
from functools import cache, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from splitinfer.engine.drafts import draft_model
from splitinfer.engine.stage import loader as stage_loader
from splitinfer.engine.stage import outcomes
from splitinfer.engine.stage.outcomes import TrialOutcome
from splitinfer.models.caches import kv_blocks
from splitinfer.models.cut.cut import StageModel
from splitinfer.models.folder.checkpoint import Checkpoint
from splitinfer.models.library.mlx_lm import base
from splitinfer.models.load.loader import Survey
from splitinfer.weights.manifest import CONFIGS

_KEY = "_loaded_once"  # a stage's attribute: what it was loaded from
_OWN_PRODUCTS = (mx.array.__matmul__, mx.quantized_matmul)


def look_up(patch: pytest.MonkeyPatch) -> None:
    """Let the loading of stages look up what an earlier loading of the same found."""
    patch.setattr(base, "inspect", SimpleNamespace(signature=cache(inspect.signature)))  # asked for every key
    survey = _surveyed_once(stage_loader.survey)
    for module in (stage_loader, draft_model):
        patch.setattr(module, "survey", survey)
    patch.setattr(stage_loader, "load_stage", _noted(stage_loader.load_stage))
    patch.setattr(outcomes, "remembered", lambda _path: None)  # here, a stage's model may have been changed by a test
    patch.setattr(outcomes, "try_stage", _tried_once(outcomes.try_stage))


def each_time(patch: pytest.MonkeyPatch) -> None:
    """Let every loading of a stage survey and try it."""
    patch.setattr(stage_loader, "survey", stage_loader.survey.__wrapped__)  # type: ignore[attr-defined]
    patch.setattr(outcomes, "try_stage", outcomes.try_stage.__wrapped__)  # type: ignore[attr-defined]


def _surveyed_once(survey: Callable[..., Survey]) -> Callable[..., Survey]:
    known: dict[Hashable, Survey] = {}

    @wraps(survey)
    def looked_up(checkpoint: Checkpoint, *asked: Any, **more: Any) -> Survey:
        if more.get("group"):
            return survey(checkpoint, *asked, **more)
        drafter, others = more.get("drafter"), [more.get(name) for name in ("drafter_dtype", "sees")]
        key = (_described(checkpoint), drafter and _described(drafter), *asked, *others, kv_blocks._ROOM)
        if key not in known:
            known[key] = survey(checkpoint, *asked, **more)
        return known[key]

    return looked_up


def _described(checkpoint: Checkpoint) -> Hashable:
    """All that a survey reads: no weight is."""
    files = [checkpoint.folder / name for name in CONFIGS]
    contents = tuple(file.read_bytes() if file.exists() else b"" for file in files)
    tables = repr(sorted(checkpoint.tensors.items()))
    return json.dumps(checkpoint.config, sort_keys=True), tables, contents


def _noted(load: Callable[..., StageModel]) -> Callable[..., StageModel]:
    """The same, and a stage that is not a half of layers has a note of what it was loaded from."""

    def noted(checkpoint: Checkpoint, found: Survey, *asked: Any, **more: Any) -> StageModel:
        loaded = load(checkpoint, found, *asked, **more)
        if more.get("group") is None:
            start, end, dtype, _, drafter = asked
            read = [(_described(one), _weights(one)) for one in (checkpoint, drafter) if one is not None]
            others = [more.get(name) for name in ("drafter_dtype", "sees")]
            setattr(loaded, _KEY, (tuple(read), found.experts_bytes, start, end, dtype, *others))
        return loaded

    return noted


def _weights(checkpoint: Checkpoint) -> Hashable:
    """What the files hold."""
    written = [(file, file.stat()) for file in checkpoint.paths_of(checkpoint.tensors) if file.exists()]
    return tuple(_digest(file, one.st_ino, one.st_size, one.st_mtime_ns) for file, one in written)


@cache
def _digest(file: Path, *_written: int) -> bytes:
    return hashlib.sha256(file.read_bytes()).digest()


def _tried_once(try_stage: Callable[..., TrialOutcome]) -> Callable[..., TrialOutcome]:
    known: dict[Hashable, TrialOutcome] = {}

    @wraps(try_stage)
    def looked_up(stage: StageModel, kv_format: str, say: Callable[[str], None]) -> TrialOutcome:
        key = _key_of(stage, kv_format)
        if key in known:
            return known[key]
        outcome = try_stage(stage, kv_format, say)
        if key is not None and outcome.is_sure:
            known[key] = outcome
        return outcome

    return looked_up


def _key_of(stage: StageModel, kv_format: str) -> Hashable:
    """What a trial's result depends on; ``None`` if it has to be tried."""
    key = getattr(stage, _KEY, None)
    if key is None or (mx.array.__matmul__, mx.quantized_matmul) != _OWN_PRODUCTS:
        return None
    return key, kv_format, stage._relay.head_in_float32, kv_blocks._ROOM
