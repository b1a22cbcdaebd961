"""Numbers as a person reads them."""

import doctest
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from splitinfer.chat import figures
from splitinfer.core.layout import Layout, lay_out
from splitinfer.engine.requests import RequestOutput

LAYOUT = Layout(lay_out([("front", 6, None), ("back", 1, "local"), ("last", 5, "tcp://a:1")]), model="m")


def stats(active: float, *stages: tuple[float, int], computed: int = 0) -> dict[str, Any]:
    return {
        "active_seconds": active,
        "computed_tokens": computed,
        "prompt_tokens": 1234,
        "cached_tokens": 1000,
        "generated_tokens": 66,
        "finished": {"stop": 2, "abort": 1},
        "bytes_per_token": 8192.0,
        "stages": [
            {"name": name, "busy_seconds": busy, "busy_percent": 100 * busy / active, "steps": 7, "bytes_sent": sent}
            for name, (busy, sent) in zip("ab", stages, strict=True)
        ],
    }


def test_status_is_the_difference_of_two_counters():
    output = RequestOutput(100, 90, [1] * 11, "", "length", [0.25 + i / 10 for i in range(11)])
    phrases = figures.status(
        output, stats(10.0, (5.0, 1000), (1.0, 0)), stats(12.0, (6.0, 43_000), (1.2, 0), computed=21)
    )
    assert phrases == [
        "10.0 tok/s", "first token 250 ms", "busy a 50% b 10%", "2 kB/token", "prompt 100, cached 90",
        "answer 11 (length)",
    ]  # fmt: skip


def test_status_of_next_to_nothing():
    same = stats(1.0, (0.5, 10), (0.5, 0))
    phrases = figures.status(RequestOutput(1, finish_reason="abort"), same, same)
    assert phrases == ["busy a 0% b 0%", "prompt 1, cached 0", "answer 0 (abort)"]
    under_way = figures.status(RequestOutput(1, token_ids=[5], token_times=[0.5]), same, same)
    assert under_way[0] == "first token 500 ms"
    assert under_way[-1] == "answer 1"


def test_stats_table():
    layout = Layout(lay_out([("a", 6, None), ("b", 6, "local")]), model="m")
    assert figures.stats_table(layout, stats(2.0, (1.0, 4096), (0.5, 0))).splitlines() == [
        "stage  layers  busy  steps  sent",
        "a      0-5     50%   7      4.1 kB",
        "b      6-11    25%   7      0 B",
        "1,234 prompt tokens (1,000 cached), 66 generated, 8.19 kB per token, 2.0 s at work",
        "requests ended: 1 by abort, 2 by stop",
    ]
    more = stats(2.0, (1.0, 4096), (0.5, 0))
    more["stages"][0] |= {"device": "M4 Max", "weight_bytes": 5_000_000}
    assert figures.stats_table(layout, more).splitlines()[:3] == [
        "stage  layers  device  weights  busy  steps  sent",
        "a      0-5     M4 Max  5 MB     50%   7      4.1 kB",
        "b      6-11                     25%   7      0 B",
    ]


def test_layout_table():
    assert figures.layout_table(LAYOUT).splitlines() == [
        "stage  layers          where",
        "front  0-5 (6 of 12)   here",
        "back   6 (1 of 12)     a worker on this machine",
        "last   7-11 (5 of 12)  tcp://a:1",
        "model m",
    ]


@given(
    st.lists(st.text(st.characters(min_codepoint=32, max_codepoint=126, exclude_characters="|"), min_size=1)),
    st.integers(1, 80),
)
def test_wrap_keeps_phrases_whole_and_in_order(phrases: list[str], width: int):
    lines = figures.wrap(phrases, width, joint="|").split("\n")
    assert [p for line in lines for p in line.split("|")] == (phrases or [""])
    assert all(len(line) <= width or "|" not in line for line in lines)


def test_examples_in_the_text():
    assert doctest.testmod(figures).failed == 0
