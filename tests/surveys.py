"""A stage is surveyed once in a process, however many pipelines the tests make of it.

What a survey finds depends on nothing but the checkpoint's tables, the layers, the numbers' formats and the tokens that
a kept block is counted with (some tests change those), and it takes a third of the time in which a tiny stage is
loaded. Surveys themselves are tested in ``tests/models`` and
``tests/matrix``, which call them directly.
"""

import json
from collections.abc import Hashable

import pytest

from splitinfer.core.kv.format import KVFormat
from splitinfer.engine.stage import loader as stage_loader
from splitinfer.models import kv_blocks
from splitinfer.models.checkpoint import Checkpoint
from splitinfer.models.loader import Survey


def look_up(patch: pytest.MonkeyPatch) -> None:
    """Let the loading of stages look up what an earlier survey of the same found."""
    found: dict[Hashable, Survey] = {}
    survey = stage_loader.survey

    def survey_once(
        checkpoint: Checkpoint, start: int, end: int, dtype: str | None, kv_format: KVFormat | None = None
    ) -> Survey:
        key = (_identity(checkpoint), start, end, dtype, kv_format, kv_blocks._ROOM)
        if key not in found:
            found[key] = survey(checkpoint, start, end, dtype, kv_format)
        return found[key]

    patch.setattr(stage_loader, "survey", survey_once)


def _identity(checkpoint: Checkpoint) -> Hashable:
    """All of a checkpoint that a survey reads: no weight is."""
    tables = tuple(sorted(checkpoint.tensors.items()))
    return checkpoint.folder, json.dumps(checkpoint.config, sort_keys=True), repr(tables)
