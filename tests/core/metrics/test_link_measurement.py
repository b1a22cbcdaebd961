"""Figures from timings: what a link is like comes out, whatever the ends add, and the asking ends soon."""

import math
import random
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitinfer.core.metrics.link_measurement import MOST_BYTES, LinkMeasurement, figures, probe


class Exchange(NamedTuple):
    there: int
    back: int


Link = Callable[[Exchange], float]


def asked(link: Link) -> tuple[LinkMeasurement, list[Exchange], float]:
    """What is found of a link, what was exchanged for it, and the seconds that took."""
    made, times = list[Exchange](), list[float]()

    def ask(there: int, back: int) -> float:
        exchange = Exchange(there, back)
        made.append(exchange)
        times.append(link(exchange))
        return times[-1]

    return probe(ask), made, sum(times)


def wire(latency: float, down: float, up: float, noise: Callable[[], float] = lambda: 0.0) -> Link:
    return lambda e: 2 * latency + e.there / down + e.back / up + noise()


LINKS = {  # latency, down, up
    "thunderbolt": (0.0003, 2e9, 2e9),
    "gigabit": (0.0002, 117e6, 117e6),
    "wireless": (0.005, 40e6, 10e6),
    "lopsided": (0.001, 1e6, 100e6),
}


@pytest.mark.parametrize(("hiccups", "of_latency", "of_bytes"), [(0.0, 0.15, 0.01), (0.1, 0.3, 0.3)])
@pytest.mark.parametrize("name", LINKS)
def test_a_link_is_told_though_one_question_in_ten_hiccups(
    name: str, hiccups: float, of_latency: float, of_bytes: float
):
    (latency, down, up), chance = LINKS[name], random.Random(5)
    found, _, _ = asked(wire(latency, down, up, lambda: 0.03 if chance.random() < hiccups else 0.0))
    assert found.latency_p50 == pytest.approx(latency, rel=of_latency)  # 64 bytes each way take their time, too
    assert (found.down, found.up) == (pytest.approx(down, rel=of_bytes), pytest.approx(up, rel=of_bytes))


def test_one_long_hiccup_is_not_taken_for_a_slow_link():
    chance = iter([*[0.0] * 21, 0.3, *[0.0] * 1000])
    found, _, _ = asked(wire(0.0002, 117e6, 117e6, lambda: next(chance)))
    assert found.down == pytest.approx(117e6, rel=0.05)


def test_the_slowest_of_twenty_is_the_99th_of_100():
    times = iter([0.5, *[0.002] * 13, 0.008, *[0.002] * 1000])  # the first is not counted
    found, _, _ = asked(lambda _: next(times))
    assert (found.latency_p50, found.latency_p99) == (0.001, 0.004)


@pytest.mark.parametrize("name", LINKS)
def test_it_takes_a_third_of_a_second(name: str):
    _, made, took = asked(wire(*LINKS[name]))
    assert took < 0.36
    assert all(max(e.there, e.back) <= MOST_BYTES for e in made)


def test_a_slow_link_is_asked_the_least_that_tells_anything():
    """Every exchange longer than all that is meant for it: each is made once."""
    _, made, _ = asked(wire(0.3, 1e5, 1e5))
    assert made == [Exchange(64, 64), Exchange(64, 64), Exchange(65536, 64), Exchange(64, 65536)]


def test_what_cannot_be_told_is_infinite():
    assert figures([0.01], (1000, [0.01]), (1000, [0.002])) == LinkMeasurement(0.005, 0.005, math.inf, math.inf)


@given(st.data())
def test_no_timing_is_too_odd(data: st.DataObject):
    """Clocks stand still, machines sleep: figures come out all the same, after a bounded number of questions."""
    odd = st.floats(0, 1e4) | st.just(0.0)
    _, made, _ = asked(lambda _: data.draw(odd))
    assert len(made) <= 1 + 20 + 2 * (3 * 2 + 5)


def test_time_to_send():
    assert LinkMeasurement(0.001, 0.002, 1e6, 1.0).seconds(1e6) == 1.001
    assert LinkMeasurement(0.001, 0.002, math.inf, 1.0).seconds(1e6) == 0.001


@pytest.mark.parametrize(
    "wrong", [(-1, 1, 1, 1), (2, 1, 1, 1), (0, math.inf, 1, 1), (0, 0, 0, 1), (0, 0, 1, -1), (math.nan, 1, 1, 1)]
)
def test_figures_of_no_link_do_not_exist(wrong: tuple[float, float, float, float]):
    with pytest.raises(ValueError, match="no link"):
        LinkMeasurement(*wrong)
