"""What rounding does and what a mistake does, as errors drawn by hand: no model is run."""

from collections.abc import Callable

import numpy as np
import pytest

from splitinfer.models.rows.rounding import Errors, reason_to_refuse

LAYERS, ROWS = 40, 24
PLACES = LAYERS * ROWS
LAYER_OF = np.repeat(np.arange(LAYERS), ROWS)


def errors_of(values: np.ndarray, layers: np.ndarray = LAYER_OF) -> Errors:
    return Errors(layers, np.full(len(values), 0.02), values)


def rounding(seed: int, share: float, size: float = 1e-3) -> Callable[[int], Errors]:
    """Errors of ``size``; a ``share`` of the rows has chosen another expert."""

    def drawn(number: int) -> Errors:
        rng = np.random.default_rng([seed, number])
        values = size * rng.chisquare(4, PLACES) / 4
        values[rng.random(PLACES) < share] = 0.7
        return errors_of(values)

    return drawn


def planted(clean: Callable[[int], Errors], *places: int, often: float = 1.0) -> Callable[[int], Errors]:
    def with_mistakes(number: int) -> Errors:
        values = clean(number).values.copy()
        for place in places:
            if np.random.default_rng([number, place]).random() < often:
                values[place] = 0.3
        return errors_of(values)

    return with_mistakes


@pytest.mark.parametrize(("share", "size"), [(0.0, 1e-6), (0.05, 0.02), (0.15, 1e-3)])
def test_rounding_passes(share: float, size: float):
    for seed in range(8):
        assert reason_to_refuse(rounding(seed, share, size), rounding(100 + seed, share, size)) is None


@pytest.mark.parametrize("share", [0.0, 0.05, pytest.param(0.15, marks=pytest.mark.nightly)])
def test_one_row_of_one_layer_that_is_always_wrong_is_seen(share: float):
    for seed in range(8):
        assert reason_to_refuse(planted(rounding(seed, share), 500), rounding(100 + seed, share)) is not None


def test_a_mistake_that_comes_and_goes_is_seen_by_how_often_it_does():
    often_wrong = planted(rounding(1, 0.01), *range(0, PLACES, 4), often=0.8)
    assert "differ" in (reason_to_refuse(often_wrong, rounding(2, 0.01)) or "")


def test_what_is_not_a_number_is_wrong():
    clean = rounding(1, 0.0)

    def spoilt(number: int) -> Errors:
        values = clean(number).values.copy()
        values[3] = np.inf
        return errors_of(values)

    assert reason_to_refuse(spoilt, clean) is not None


def test_where_rounding_is_as_large_as_mistakes_nothing_can_be_told():
    loud = rounding(1, 0.0, size=0.5)
    assert "own rounding" in (reason_to_refuse(loud, rounding(2, 0.0, size=0.5)) or "")


def test_a_layer_that_gives_no_numbers_is_refused_at_once():
    asked: list[int] = []

    def nothing(number: int) -> Errors:
        asked.append(number)
        return errors_of(np.where(LAYER_OF == 7, np.inf, 1e-4))

    assert "not numbers" in (reason_to_refuse(planted(rounding(1, 0.0), 3), nothing) or "")
    assert asked == [0]


def test_a_layer_is_judged_by_its_own_noise():
    """A loud layer excuses no other one."""
    loud = np.where(LAYER_OF == 3, 0.05, 1e-4)
    moved = loud.copy()
    moved[5 * ROWS : 5 * ROWS + 2] = 0.05
    assert reason_to_refuse(lambda _: errors_of(loud), lambda _: errors_of(loud)) is None
    assert "the same 2" in (reason_to_refuse(lambda _: errors_of(moved), lambda _: errors_of(loud)) or "")
