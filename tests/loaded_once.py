"""A stage is surveyed, read and tried once in a process, however many pipelines the tests make of it.

What loading a stage finds out depends on nothing but the checkpoint, the layers, the numbers' formats and the tokens
that a kept block is counted with (some tests change those), and it takes four fifths of the time in which a pipeline of
tiny stages is opened. So the first of the same stages is loaded as ever, and the others get

- the survey that was made then (``loader.survey``);
- a copy of the model that was read then (``loader.load_stage``): its modules are new and its weights are shared;
- what the trials of that model found (``outcomes.try_stage``).

Models with other linear layers than MLX's own (``noisy_layers.py``), or too large to be kept, are loaded each time.
Loading itself is tested in ``tests/models`` and ``tests/matrix``, which call all of this directly, and in every process
that ``tests/cluster`` starts.
"""

import copy
import json
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from splitinfer.core.kv.format import KVFormat
from splitinfer.engine.drafts import draft_model
from splitinfer.engine.stage import loader as stage_loader
from splitinfer.engine.stage import outcomes
from splitinfer.engine.stage.outcomes import Outcome
from splitinfer.models import kv_blocks
from splitinfer.models.checkpoint import Checkpoint
from splitinfer.models.cut import StageModel
from splitinfer.models.layers import StandIn, find_layers
from splitinfer.models.loader import Survey

Report = Callable[[int, int], None]

_LARGEST = 32 * 2**20  # bytes of weights that are kept for the next pipeline
_KEY = "_loaded_once"  # a stage's attribute: its key
_OWN_LAYERS = (nn.Linear.__call__, nn.QuantizedLinear.__call__)


def look_up(patch: pytest.MonkeyPatch) -> None:
    """Let the loading of stages look up what an earlier loading of the same found."""
    survey, load_stage = _Surveys(stage_loader.survey), _Stages(stage_loader.load_stage)
    for module in (stage_loader, draft_model):
        patch.setattr(module, "survey", survey)
        patch.setattr(module, "load_stage", load_stage)
    patch.setattr(outcomes, "remembered", lambda _path: None)  # here, a stage's model may have been changed by a test
    patch.setattr(outcomes, "try_stage", _Outcomes(outcomes.try_stage))


class _Surveys:
    def __init__(self, survey: Callable[..., Survey]) -> None:
        self._survey, self._found = survey, dict[Hashable, Survey]()

    def __call__(
        self,
        checkpoint: Checkpoint,
        start: int,
        end: int,
        dtype: str | None,
        kv_format: KVFormat | None = None,
        *,
        drafter: Checkpoint | None = None,
        sees: bool = False,
    ) -> Survey:
        if drafter is not None or sees:
            return self._survey(checkpoint, start, end, dtype, kv_format, drafter=drafter, sees=sees)
        key = (_identity(checkpoint), start, end, dtype, kv_format, kv_blocks._ROOM)
        if key not in self._found:
            self._found[key] = self._survey(checkpoint, start, end, dtype, kv_format)
        return self._found[key]


@dataclass(frozen=True)
class _Read:
    """A stage that nobody uses, and what was reported while it was read."""

    stage: StageModel
    reports: list[tuple[int, int]]


class _Stages:
    def __init__(self, load_stage: Callable[..., StageModel]) -> None:
        self._load_stage, self._found = load_stage, dict[Hashable, _Read]()

    def __call__(
        self, checkpoint: Checkpoint, found: Survey, start: int, end: int, dtype: str | None, report: Report
    ) -> StageModel:
        files = tuple(path.stat() for path in checkpoint.paths_of(found.tensors))
        written = tuple((file.st_ino, file.st_size, file.st_mtime_ns) for file in files)
        key = (_identity(checkpoint), written, start, end, dtype)
        if key in self._found:
            read = self._found[key]
            for done, total in read.reports:
                report(done, total)
            return _copy(read.stage)
        reports: list[tuple[int, int]] = []

        def noted(done: int, total: int) -> None:
            reports.append((done, total))
            report(done, total)

        stage = self._load_stage(checkpoint, found, start, end, dtype, noted)
        if _has_own_layers() and found.need.weights <= _LARGEST:
            setattr(stage, _KEY, key)
            self._found[key] = _Read(_copy(stage), reports)
        return stage


class _Outcomes:
    def __init__(self, try_stage: Callable[..., tuple[Outcome, bool]]) -> None:
        self._try_stage, self._found = try_stage, dict[Hashable, tuple[Outcome, bool]]()

    def __call__(self, stage: StageModel, kv_format: str, say: Callable[[str], None]) -> tuple[Outcome, bool]:
        key = _key_of(stage)
        if key is None:
            return self._try_stage(stage, kv_format, say)
        key = (key, kv_format)
        if key not in self._found:
            self._found[key] = self._try_stage(stage, kv_format, say)
        return self._found[key]


def _key_of(stage: StageModel) -> Hashable:
    """What a trial's result depends on; ``None`` if it has to be tried."""
    key = getattr(stage, _KEY, None)
    if key is None or not _has_own_layers():
        return None
    return key, stage._relay.head_in_float32, kv_blocks._ROOM


def _has_own_layers() -> bool:
    return (nn.Linear.__call__, nn.QuantizedLinear.__call__) == _OWN_LAYERS


def _identity(checkpoint: Checkpoint) -> Hashable:
    """All of a checkpoint that a survey reads: no weight is."""
    tables = tuple(sorted(checkpoint.tensors.items()))
    return checkpoint.folder, json.dumps(checkpoint.config, sort_keys=True), repr(tables)


# -- copies ------------------------------------------------------------------------------------------------------------


def _copy(stage: StageModel) -> StageModel:
    """The same stage on modules of its own, as it is after it was read: no array is copied."""
    held = list(_arrays(stage.whole))
    parameters = {id(array) for _, array in tree_flatten(stage.whole.parameters())}
    mx.eval([array for array in held if id(array) not in parameters])  # by the thread whose stream they are made on
    memo: dict[int, Any] = {id(array): array for array in held}
    other: StageModel = object.__new__(StageModel)
    vars(other).update(vars(stage))
    other.whole = copy.deepcopy(stage.whole, memo)
    other._slots = find_layers(other.whole)
    other._relay = memo[id(stage._relay)] = copy.copy(stage._relay)
    other._stand_ins = {i: _stand_in(one, memo) for i, one in stage._stand_ins.items()}
    return other


def _stand_in(one: Any, memo: dict[int, Any]) -> Any:
    """The stand-in of a copied layer."""
    if not issubclass(type(one), StandIn):
        return memo[id(one)]
    other = object.__new__(type(one))
    for name, value in vars(one).items():
        vars(other)[name] = _stand_in(value, memo) if name == "_real" else _watch(value, memo)
    return other


def _watch(one: Any, memo: dict[int, Any]) -> Any:
    """A watch for the copied stage."""
    return partial(one.func, *(memo.get(id(each), each) for each in one.args)) if isinstance(one, partial) else one


def _arrays(tree: Any) -> Iterator[mx.array]:
    """Every array in modules, lists and dictionaries, parameter or not."""
    if isinstance(tree, mx.array):
        yield tree
        return
    inner = list(tree.values()) if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else []
    if isinstance(tree, nn.Module):
        inner = [*inner, *vars(tree).values()]
    for each in inner:
        yield from _arrays(each)
