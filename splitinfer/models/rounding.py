"""Tells rounding from error, where two ways of computing the same rows do not agree to the last bit.

A GPU chooses another kernel for another number of rows, so honest results differ. A fixed tolerance for what a stage
returns fails: rounding grows over layers, and where a router chooses another expert, the whole row is another one. So:

*Each layer is compared alone* (``layer_trace``), given what the reference's layer was given: nothing compounds.

*What may be rounding is measured*: the reference's rows are computed once more, one at a time. A layer's limit is a few
times the median error of that, and never less than a tolerance. The median does not see the few rows that chose another
expert.

*What rounding does moves, what a mistake does stays.* A wrong mask or position is at its place whatever the tokens are;
a router's near-tie is elsewhere with other tokens. The trial is repeated with other tokens until no place has been off
every time, which is rounding, or until it is less likely than one in a thousand that rounding alone was: an error.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_TIMES_NOISE = 4.0  # a layer's limit, in medians of its own noise
_MAX_LIMIT = 0.25  # relative; a layer whose noise is larger cannot be compared with anything
_MAX_SHARE = 0.1  # of places off in one trial beyond what noise explains: more is an error at once
_SHARES_OF_NOISE = 3.0  # how much oftener than the measured noise rounding may be off
_CHANCE = 1e-3  # that rounding passes for an error
_MAX_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of rows. ``layers``: which layer computed each (any numbers, the same in each trial);
    ``tolerances``: what each may be without any measured noise. Not a number counts as infinite."""

    layers: NDArray[np.int64]
    tolerances: Floats
    values: Floats


def reason_to_refuse(trial: Callable[[int], Errors], noise: Callable[[int], Errors]) -> str | None:
    """Why a trial's errors cannot be rounding; ``None`` if they can.

    Args:
        trial: errors of the trial with the tokens of a round, at the same places in each round.
        noise: errors of the reference against itself, computed in another way, with the same tokens. Measured only if
            the first trial is not within its tolerances.
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
    """Whether the trials so far show what it is, and what speaks against rounding."""
    limits, share = _limits(trials[0], noise), _share_of_noise(noise)
    off = np.stack([~(one.values <= limits) for one in trials])
    always = off.all(axis=0)
    if off[-1].mean() > _MAX_SHARE + _SHARES_OF_NOISE * share:
        return True, f"{off[-1].sum()} of {off[-1].size} rows differ, over all layers"
    if np.isinf(limits.max()):
        return True, "a layer's rows alone are no numbers"
    if limits.max() > _MAX_LIMIT:
        return False, f"a layer's own rounding is {limits.max() / _TIMES_NOISE:.2g} of what it computes"
    if not always.any():
        return True, None
    reason = f"the same {always.sum()} of {always.size} rows, over all layers, differ in {len(trials)} trials"
    chance = always.size * min(1.0, _SHARES_OF_NOISE * share) ** len(trials)
    return chance < _CHANCE, reason


def _limits(trial: Errors, noise: list[Errors]) -> Floats:
    """What each row's error may be: at least its tolerance, else by the noise of its layer."""
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
    """The share of rows that the reference's own rounding moves beyond their limits; never 0, as few were seen."""
    moved = [~(one.values <= _limits(one, noise)) for one in noise]
    return float((sum(each.sum() for each in moved) + 1) / (sum(each.size for each in moved) + 1))
