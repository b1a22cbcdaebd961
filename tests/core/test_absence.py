"""When workers that are away are left out and taken in again, in numbers."""

import pytest

from splitinfer.core.absence import LossTimes, Rest, pays, tokens_to_come, told
from splitinfer.core.layout import Layout, lay_out


def test_three_losses_in_ten_minutes_flap():
    times = LossTimes()
    for at in (0.0, 300.0, 601.0):
        times.add("mini", at)
    times.add("air", 602.0)
    assert not times.flaps(["mini", "air"], 601.0), "the first was longer ago"
    times.add("mini", 700.0)
    assert times.flaps(["air", "mini"], 700.0)
    assert not times.flaps(["mini"], 901.0)
    assert not times.flaps(["air", "other"], 700.0)


@pytest.mark.parametrize(
    ("now", "then", "tokens", "pause", "expected"),
    [
        (0.10, 0.05, 1000, 10.0, True),
        (0.10, 0.05, 200, 10.0, False),
        (0.05, 0.05, 10**6, 0.0, False),
        (None, 0.05, 1000, 1.0, False),
        (0.10, None, 1000, 1.0, False),
        (0.10, 0.05, 1000, None, False),
    ],
)
def test_a_layout_pays_if_answers_end_sooner(
    now: float | None, then: float | None, tokens: int, pause: float | None, expected: bool
):
    assert pays(now, then, tokens, pause) is expected


def test_an_answer_goes_on_for_about_as_long_as_it_did():
    assert [tokens_to_come(n, 100) for n in (0, 40, 90, 100)] == [0, 40, 10, 0]


def test_what_is_told():
    rest = Rest(Layout(lay_out([("studio", 40, None), ("air", 26, "air:1")])), drafts=False)
    assert told(["mini", "pro"], rest, flaps=True) == (
        "mini and pro are gone, for the third time in ten minutes. studio and air go on with 40 and 26 of 66 layers, "
        "without its drafter; mini and pro take part again when no request is open."
    )
