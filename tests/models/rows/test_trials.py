"""The trials at loading, on deep models whose rounding depends on the number of rows: honest rounding passes, however
deep the model is, and a mistake beside it does not."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny
from mlx.utils import tree_map

from splitinfer.models.caches import kv_blocks, rows
from splitinfer.models.caches.caches import Cache
from splitinfer.models.caches.cohort import Cohort, SequenceCaches
from splitinfer.models.caches.rows import RowCache, attend_by_rows
from splitinfer.models.cut.cut import StageModel
from splitinfer.models.load.layer_kinds import with_each_kind
from splitinfer.models.rows import kv_trial
from splitinfer.models.rows.kv_trial import why_no_blocks
from splitinfer.models.rows.rounding import RowErrors
from splitinfer.models.rows.step import StepModel, Way
from splitinfer.models.rows.step_trial import ALL_STEPS, RunSteps, trial_of
from tests.emulation.metal import CHIPS
from tests.emulation.rounding import RowNoise

DEEP, SHALLOW = 40, 10  # layers: rounding needs many of them to grow, a mistake does not
ODD = 7  # the only layer with a mistake, where only one has it

SMALL = {"hidden_size": 32, "intermediate_size": 32}
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
# MLX's CPU backend multiplies experts in float32 only, so these have larger errors in float32.
KINDS: dict[str, tuple[str, mx.Dtype, float, dict[str, Any]]] = {
    "dense": ("qwen3", mx.bfloat16, 1e-5, SMALL),
    "experts": ("qwen3_moe", mx.float32, 1e-3, {**SMALL, "num_experts": 16, "moe_intermediate_size": 16}),
    **dict.fromkeys(CHIPS, ("qwen3", mx.bfloat16, 1e-05, WIDE)),  # in 4 bits
}
Fault = Callable[[pytest.MonkeyPatch], None]


@dataclass
class Tried:
    """A stage, and the references of its trial, which serve every test."""

    stage: StageModel
    why_wrong: Callable[[RunSteps], str | None]
    step: StepModel

    def refuses_rows(self, *, cohorts: bool = True) -> str | None:
        step = self.step
        return step._try(lambda: self.why_wrong(step._by_rows), Way.ROWS, step._plain_places if cohorts else [])


def noisy_stage(kind: str, num_layers: int) -> Iterator[Tried]:
    name, dtype, noise, changes = KINDS[kind]
    model, _ = tiny.build(name, num_hidden_layers=num_layers, **changes)
    model.update(tree_map(lambda array: array.astype(dtype), model.parameters()))
    if kind in CHIPS:
        nn.quantize(model, 64, 4)
    mx.eval(model.parameters())
    with pytest.MonkeyPatch.context() as patch:
        RowNoise(noise, chip=CHIPS.get(kind)).install(patch.setattr)
        stage = StageModel(model, 0, num_layers)
        attend_by_rows(model)
        step = StepModel(stage, exact=False)
        parts = lambda: tuple(step._caches[0].step.parts)  # noqa: E731
        yield Tried(stage, trial_of(stage, step._one_by_one, parts, ALL_STEPS), step)


@pytest.fixture(scope="module", params=list(KINDS))
def deep(request: pytest.FixtureRequest) -> Iterator[Tried]:
    yield from noisy_stage(request.param, DEEP)


@pytest.fixture(scope="module", params=["dense", pytest.param("experts", marks=pytest.mark.nightly)])
def shallow(request: pytest.FixtureRequest) -> Iterator[Tried]:
    yield from noisy_stage(request.param, SHALLOW)


@pytest.mark.nightly
def test_rounding_is_no_reason_to_refuse(deep: Tried):
    step = StepModel(deep.stage, exact=False)
    assert step.way is Way.ROWS
    assert step._places, "members of a cohort attend together"
    assert why_no_blocks(deep.stage) is None


def sees_what_comes(patch: pytest.MonkeyPatch) -> None:
    """The rows of a chunk see the rows after them."""
    attend = rows._attend

    def wrong(
        part: rows.SequenceRows, q: mx.array, k: mx.array, v: mx.array, scale: float, mask: Any, sinks: Any
    ) -> mx.array:
        everything = mx.ones((part.count, k.shape[2]), mx.bool_)
        return attend(part, q, k, v, scale, everything, sinks)

    patch.setattr(rows, "_attend", wrong)


def neighbours_keys(patch: pytest.MonkeyPatch) -> None:
    """One layer has two sequences' keys and values in each other's place."""
    of = RowCache.of

    def wrong(cache: RowCache, part: rows.SequenceRows) -> Cache:
        parts = list(cache.step.parts)
        if cache._index != ODD or len(parts) < 2:
            return of(cache, part)
        at = next(i for i, one in enumerate(parts) if one is part)
        return of(cache, parts[(1, 0, 2)[at]])

    patch.setattr(RowCache, "of", wrong)
    patch.setattr(rows, "_attend", _with_fitting_mask(rows._attend))


def _with_fitting_mask(attend: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Attention whose mask is causal, of whatever length the keys happen to have."""

    def fitting(part: rows.SequenceRows, q: mx.array, k: mx.array, v: mx.array, *rest: Any) -> mx.array:
        scale, mask, sinks = rest
        return attend(part, q, k, v, scale, "causal" if mask is not None else None, sinks)

    return fitting


@pytest.mark.parametrize(
    ("shallow", "fault"),
    [
        ("dense", neighbours_keys), ("experts", sees_what_comes),
        *(pytest.param(*one, marks=pytest.mark.nightly) for one in
          [("dense", sees_what_comes), ("experts", neighbours_keys)]),
    ],
    indirect=["shallow"],
)  # fmt: skip
def test_mistakes_in_rows_are_refused(shallow: Tried, fault: Fault, monkeypatch: pytest.MonkeyPatch):
    fault(monkeypatch)
    reason = shallow.refuses_rows()
    assert reason is not None
    assert "differ" in reason, "found by what was computed, not by an exception"


def test_a_mistake_in_one_layer_is_found_where_others_of_its_kind_were_tried(
    shallow: Tried, monkeypatch: pytest.MonkeyPatch
):
    few = with_each_kind(shallow.stage)
    assert (few.start, few.end) == (0, 4)
    step = StepModel(shallow.stage, exact=False)
    assert step.why_not_all(Way.ROWS, shares_calls=True) is None
    neighbours_keys(monkeypatch)
    assert StepModel(few, exact=False).way is Way.ROWS
    assert "differ" in (step.why_not_all(Way.ROWS, shares_calls=True) or "")


def test_padding_that_is_not_masked_is_refused(shallow: Tried, monkeypatch: pytest.MonkeyPatch):
    """The smallest mistake: two rows of one step, and what they see too much is zeros."""
    monkeypatch.setattr(Cohort, "_mask", lambda _cohort, _rows: None)
    assert "the same" in (shallow.refuses_rows() or "")
    assert shallow.refuses_rows(cohorts=False) is None, "each sequence attends by itself"


def test_mistakes_in_blocks_are_refused(shallow: Tried, monkeypatch: pytest.MonkeyPatch):
    """A sequence that begins with blocks has the keys of one layer a token off."""

    def wrong(caches: SequenceCaches, *given: Any) -> list[mx.array]:
        arrays = kv_blocks.join(caches, *given)
        cache = caches.full[ODD]
        cache.keys = mx.roll(cache.keys, 1, axis=2)
        return arrays

    monkeypatch.setattr(kv_trial, "join", wrong)
    assert "differ" in (why_no_blocks(shallow.stage) or ""), "found by what was computed, not by an exception"


def test_blocks_are_kept_where_no_two_calls_agree(shallow: Tried):
    """Not even the same rows computed again, as with sums in no fixed order."""
    with pytest.MonkeyPatch.context() as patch:
        RowNoise(1e-4, each_call=True).install(patch.setattr)
        assert why_no_blocks(shallow.stage) is None


def test_a_layer_that_adds_little_hides_nothing():
    """Errors are relative to what the layer added, as far as the dtype can hold that."""
    given = mx.full((2, 8), 10.0)
    errors = RowErrors()
    errors.add(0, given + mx.array([[0.2], [0.1]]), given + 0.1, given)
    first, second = errors.evaluated().values
    assert first == pytest.approx(1, rel=0.02)
    assert second < 1e-3
