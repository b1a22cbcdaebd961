"""Tells rounding from errors if two ways to compute the same rows do not agree to the last bit.

A GPU chooses another kernel for another number of rows, so correct results differ. A tolerance for a stage's output
does not work: rounding grows over layers, and if a router chooses another expert, the whole row changes. So each layer
is compared alone, with the reference's inputs. The size of rounding is measured: the reference's rows are computed once
more, one at a time. A layer's limit is a few times the median error of that, which ignores the few rows that chose
another expert. And rounding moves while a mistake stays: with other tokens a router's near-tie is elsewhere. So the
trial is repeated until no place has been off every time, or until the chance that rounding alone did this is below one
in a thousand.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from splitinfer.models.cut.cut import StageModel
from splitinfer.models.library.layers import Path, floating_arrays, get_at, put_at

Floats = NDArray[np.float64]

_TOLERANCE = {mx.float32: 1e-3}  # relative error of a row of one layer that may be rounding
_TOLERANCE_HALF = 0.02  # the same in half precision
_BEHIND = -1  # stands for the code after the last layer, among the layers' numbers
_QUANTUM = 0.5  # the share of a row's last bit that counts as added to it
_TIMES_NOISE = 4.0  # a layer's limit, in medians of its own noise
_MAX_LIMIT = 0.25  # relative; a layer whose noise is larger cannot be compared with anything
_MAX_SHARE = 0.1  # share of places off in one trial, beyond noise, that is an error at once
_SHARES_OF_NOISE = 3.0  # how many times as often as the measured noise rounding may be off
_CHANCE = 1e-3  # the accepted probability that rounding is taken for an error
_MAX_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of rows, one entry per row. ``layers``: the layer of each (any numbers, the same in each trial).
    ``tolerances``: the error that is accepted without measured noise. ``values``: the errors; NaN counts as
    infinite."""

    layers: NDArray[np.int64]
    tolerances: Floats
    values: Floats


def reason_to_refuse(trial: Callable[[int], Errors], noise: Callable[[int], Errors]) -> str | None:
    """Return why a trial's errors cannot be rounding. Return None if they can be.

    Args:
        trial: returns the trial's errors with the tokens of a round, at the same places in each round.
        noise: returns the errors of the reference, computed in another way with the same tokens, against itself. Called
            only if the first trial is not within its tolerances.
    """
    trials, own = list[Errors](), list[Errors]()
    for number in range(_MAX_ROUNDS):
        trials.append(trial(number))
        if number == 0 and np.all(trials[0].values <= trials[0].tolerances):
            return None
        own.append(noise(number))
        is_decided, reason = _judge(trials, own)
        if is_decided:
            return reason
    return f"after {_MAX_ROUNDS} trials still {reason}"


def _judge(trials: list[Errors], noise: list[Errors]) -> tuple[bool, str | None]:
    """Return whether the trials so far decide, and the reason why the errors are not rounding (``None``: they are)."""
    limits, share = _limits(trials[0], noise), _share_of_noise(noise)
    off = np.stack([~(one.values <= limits) for one in trials])
    always = off.all(axis=0)
    if off[-1].mean() > _MAX_SHARE + _SHARES_OF_NOISE * share:
        return True, f"{off[-1].sum()} of {off[-1].size} rows differ, over all layers"
    if np.isinf(limits.max()):
        return True, "a layer's rows, computed one at a time, are not numbers"
    if limits.max() > _MAX_LIMIT:
        return False, f"a layer's own rounding is {limits.max() / _TIMES_NOISE:.2g} of its result"
    if not always.any():
        return True, None
    reason = f"the same {always.sum()} of {always.size} rows, over all layers, differ in {len(trials)} trials"
    chance = always.size * min(1.0, _SHARES_OF_NOISE * share) ** len(trials)
    return chance < _CHANCE, reason


def _limits(trial: Errors, noise: list[Errors]) -> Floats:
    """Return the largest accepted error of each row: its tolerance, or more if the noise of its layer is larger."""
    layers = np.concatenate([one.layers for one in noise])
    values = np.concatenate([one.values for one in noise])
    limits = trial.tolerances.copy()
    for layer in np.unique(trial.layers):
        own = values[layers == layer]
        here = trial.layers == layer
        if own.size:
            limits[here] = np.maximum(limits[here], _TIMES_NOISE * np.median(own))
    return limits


def _share_of_noise(noise: list[Errors]) -> float:
    """Return the share of rows that the reference's own rounding moves beyond their limits; never 0 (a small
    sample)."""
    moved = [~(one.values <= _limits(one, noise)) for one in noise]
    return float((sum(each.sum() for each in moved) + 1) / (sum(each.size for each in moved) + 1))


# -- layer by layer --------------------------------------------------------------------------------
#
#    reference   layer 0 ---------> layer 1 ---------> layer 2      each layer's rows are recorded
#                      | rows             | rows
#    trial       layer 0 -> error   layer 1 -> error   layer 2      each layer gets the reference's rows
#
# The layers themselves write caches in both runs. A row's error is relative to what its layer adds to it: otherwise a
# layer that changes its input little would hide any mistake.


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One call of one layer for n rows: arrays [n, ...]. ``given``: its input rows, if shaped like its result."""

    given: mx.array | None
    returned: dict[Path, mx.array]


@dataclass(slots=True)
class RowErrors:
    """Errors found so far, not evaluated: a layer, numbered in the order of the calls, its tolerance, errors [n]."""

    found: list[tuple[int, float, mx.array]] = field(default_factory=list)

    def add(self, layer: int, got: mx.array, wanted: mx.array, given: mx.array | None = None) -> None:
        """Record the errors of rows [n, ...] of a layer."""
        tolerance = _TOLERANCE.get(got.dtype, _TOLERANCE_HALF)
        self.found.append((layer, tolerance, _relative_errors(got, wanted, given, tolerance)))

    def add_outputs(self, got: mx.array, wanted: mx.array) -> None:
        """Record the errors of a stage's own output rows.

        Integers cross as bits, and the bits of -1, a choice that was not made, are NaN as a float. NaN counts as right
        if both rows have it; a layer that returns NaN has been noticed before.
        """
        same = mx.isnan(got) & mx.isnan(wanted)
        self.add(_BEHIND, mx.where(same, 0, got), mx.where(same, 0, wanted))

    def evaluated(self) -> Errors:
        """Evaluate and return all errors."""
        layers, tolerances, values = zip(*self.found, strict=True)
        sizes = [array.shape[0] for array in values]
        flat = np.array(mx.concatenate(list(values))).astype(np.float64)
        return Errors(np.repeat(np.array(layers, dtype=np.int64), sizes), np.repeat(np.array(tolerances), sizes), flat)


def joined(runs: Sequence[Sequence[LayerCall]]) -> list[LayerCall]:
    """Return, call by call, the concatenated rows of several runs of the same layers."""
    found = list[LayerCall]()
    for calls in zip(*runs, strict=True):
        given = [call.given for call in calls if call.given is not None]
        # An array with as many heads as a run has rows seems to have rows in that run, but not in the others.
        alike = [
            path
            for path in calls[0].returned
            if len({call.returned[path].shape[1:] if path in call.returned else None for call in calls}) == 1
        ]
        returned = {path: mx.concatenate([call.returned[path] for call in calls]) for path in alike}
        found.append(LayerCall(mx.concatenate(given) if len(given) == len(calls) else None, returned))
    return found


def rows_of(calls: Sequence[LayerCall], start: int, end: int) -> list[LayerCall]:
    """Return rows [start, end) of each call."""
    return [
        LayerCall(
            None if call.given is None else call.given[start:end],
            {path: array[start:end] for path, array in call.returned.items()},
        )
        for call in calls
    ]


@contextmanager
def recording(stage: StageModel, num_rows: int) -> Iterator[list[LayerCall]]:
    """Record each call of the stage's layers, for one run of ``num_rows`` rows in the ``with`` block."""
    calls: list[LayerCall] = []

    def watch(layer: Any, args: Any, kwargs: Any) -> Any:
        before = _rows((args, kwargs), num_rows)
        result = layer(*args, **kwargs)
        returned = _rows(result, num_rows)
        shapes = {array.shape for array in returned.values()}
        calls.append(LayerCall(next((a for a in before.values() if a.shape in shapes), None), returned))
        return result

    with stage.watched(watch):
        yield calls


@contextmanager
def following(
    stage: StageModel, num_rows: int, reference: Callable[[], Sequence[LayerCall]], errors: RowErrors
) -> Iterator[None]:
    """Give every layer the reference's inputs and record the errors, for one run in the ``with`` block.

    ``reference``: returns the calls to follow; it is called once, after the first layer has returned.
    """
    calls: list[LayerCall] = []
    at = 0

    def watch(layer: Any, args: Any, kwargs: Any) -> Any:
        nonlocal at
        result = layer(*args, **kwargs)
        if not calls:
            calls.extend(reference())
        call, number, at = calls[at], at, at + 1
        for path, array in _rows(result, num_rows).items():
            wanted = call.returned.get(path)
            if wanted is not None and wanted.shape == array.shape:
                errors.add(number, array, wanted, call.given)
                result = put_at(result, path, wanted.reshape(get_at(result, path).shape))
        return result

    with stage.watched(watch):
        yield


def _rows(value: Any, num_rows: int) -> dict[Path, mx.array]:
    """Return the arrays [1, n, ...] or [n, 1, ...] in a tree, as [n, ...]."""
    shapes = ((1, num_rows), (num_rows, 1))
    return {
        path: array.reshape(num_rows, *array.shape[2:])
        for path, array in floating_arrays(value)
        if array.ndim > 2 and array.shape[:2] in shapes
    }


def _relative_errors(got: mx.array, wanted: mx.array, given: mx.array | None, tolerance: float) -> mx.array:
    """Return [n]: each row's distance, relative to what its layer added to it plus a part of the row's last bit."""
    quantum = _QUANTUM * mx.finfo(got.dtype).eps / tolerance
    a, b = got.astype(mx.float32), wanted.astype(mx.float32)
    added = b if given is None or given.shape != b.shape else b - given.astype(mx.float32)
    error = _norms(a - b) / (_norms(added) + quantum * _norms(b) + 1e-9)
    return mx.where(mx.isnan(error), mx.inf, error)


def _norms(rows: mx.array) -> mx.array:
    return mx.linalg.norm(rows.reshape(rows.shape[0], -1), axis=-1)
