"""A stage is surveyed and tried once in a process, however many pipelines the tests make of it.

What a survey and the trials find depends on nothing but the checkpoint, the layers, the numbers' formats and the tokens
that a kept block is counted with (some tests change those), and it takes two thirds of the time in which a pipeline of
tiny stages is opened. So of the same stages the first is surveyed and tried as ever, and the others get what was found:
the survey (``loader.survey``), and what the trials found (``outcomes.try_stage``). Each reads its own weights.

Where products are not MLX's own (``emulation/rounding.py``) models are tried each time. Loading itself is tested
in ``tests/models`` and ``tests/matrix``, which call all of this directly, and in the processes of ``tests/cluster``.
"""

import json
from collections.abc import Callable, Hashable
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
from splitinfer.models.load.loader import Survey

_KEY = "_loaded_once"  # a stage's attribute: what it was loaded from
_OWN_PRODUCTS = (mx.array.__matmul__, mx.quantized_matmul)


def look_up(patch: pytest.MonkeyPatch) -> None:
    """Let the loading of stages look up what an earlier loading of the same found."""
    survey = _surveyed_once(stage_loader.survey)
    for module in (stage_loader, draft_model):
        patch.setattr(module, "survey", survey)
    patch.setattr(stage_loader, "load_stage", _noted(stage_loader.load_stage))
    patch.setattr(outcomes, "remembered", lambda _path: None)  # here, a stage's model may have been changed by a test
    patch.setattr(outcomes, "try_stage", _tried_once(outcomes.try_stage))


def _surveyed_once(survey: Callable[..., Survey]) -> Callable[..., Survey]:
    known: dict[Hashable, Survey] = {}

    def looked_up(checkpoint: Checkpoint, *asked: Any, **more: Any) -> Survey:
        if any(more.values()):  # a drafter, or pictures
            return survey(checkpoint, *asked, **more)
        tables = repr(sorted(checkpoint.tensors.items()))  # all that a survey reads: no weight is
        key = (checkpoint.folder, json.dumps(checkpoint.config, sort_keys=True), tables, asked, kv_blocks._ROOM)
        if key not in known:
            known[key] = survey(checkpoint, *asked)
        return known[key]

    return looked_up


def _noted(load: Callable[..., StageModel]) -> Callable[..., StageModel]:
    """The same, and a stage without a drafter, pictures or a half has a note of what it was loaded from."""

    def noted(checkpoint: Checkpoint, found: Survey, *asked: Any, **more: Any) -> StageModel:
        loaded = load(checkpoint, found, *asked, **more)
        if asked[-1] is None and not any(more.values()):
            files = [path.stat() for path in checkpoint.paths_of(found.tensors)]
            written = tuple((file.st_ino, file.st_size, file.st_mtime_ns) for file in files)
            config = json.dumps(checkpoint.config, sort_keys=True)
            setattr(loaded, _KEY, (checkpoint.folder, config, written, asked[:3]))
        return loaded

    return noted


def _tried_once(try_stage: Callable[..., TrialOutcome]) -> Callable[..., TrialOutcome]:
    known: dict[Hashable, TrialOutcome] = {}

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
