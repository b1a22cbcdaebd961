"""Numbers as a person reads them."""

import re
from typing import Any

import pytest
from rich.cells import cell_len

from splitinfer.chat import formatting as figures
from splitinfer.core.layout import Layout, lay_out
from splitinfer.engine.loop.requests import RequestOutput
from splitinfer.placement.comparison import Comparison

LAYOUT = Layout(lay_out([("front", 6, None), ("back", 1, "local"), ("last", 5, "tcp://a:1")]), model="m")


def stats(active: float, *stages: tuple[float, int], computed: int = 0) -> dict[str, Any]:
    return {
        "active_seconds": active, "computed_tokens": computed, "prompt_tokens": 1234, "cached_tokens": 1000,
        "generated_tokens": 66, "finished": {"stop": 2, "abort": 1}, "bytes_per_token": 8192.0, "stages": [
            {"name": name, "busy_seconds": busy, "busy_percent": 100 * busy / active, "steps": 7, "bytes_sent": sent}
            for name, (busy, sent) in zip("ab", stages, strict=True)
        ],
    }  # fmt: skip


def test_status_is_the_difference_of_two_counters():
    output = RequestOutput(100, 90, [1] * 11, "", "length", [0.25 + i / 10 for i in range(11)])
    phrases = figures.status(
        output, stats(10.0, (5.0, 1000), (1.0, 0)), stats(12.0, (6.0, 43_000), (1.2, 0), computed=21)
    )
    assert phrases == [
        "10.0 tok/s", "first token 250 ms", "busy a 50% b 10%", "2 kB/token", "prompt 100, cached 90",
        "answer 11, token limit reached",
    ]  # fmt: skip


def test_stats_table():
    layout = Layout(lay_out([("a", 6, None), ("b", 6, "local")]), model="m")
    assert figures.stats_table(layout, stats(2.0, (1.0, 4096), (0.5, 0))).splitlines() == [
        "stage  layers  busy  steps  sent",
        "a      0-5     50%   7      4.1 kB",
        "b      6-11    25%   7      0 B",
        "1,234 prompt tokens (1,000 cached), 66 generated, 8.19 kB per token, 2.0 s at work",
        "answers: 1 stopped, 2 complete",
    ]
    more = stats(2.0, (1.0, 4096), (0.5, 0))
    more["stages"][0] |= {"device": "M4 Max", "weight_bytes": 5_000_000, "codec": "fp16", "rows_unfit": 1200}
    lines = figures.stats_table(layout, more).splitlines()
    assert lines[:3] == [
        "stage  layers  device  weights  busy  steps  sent",
        "a      0-5     M4 Max  5 MB     50%   7      4.1 kB",
        "b      6-11                     25%   7      0 B",
    ]
    assert [line for line in lines if "prompts go from a to b as fp16" in line and "but for 1,200 rows" in line]


def loaded(active: float, *busy: float) -> dict[str, Any]:
    """What three stages say of themselves once they are loaded."""
    known = {"device": "M4 Max", "weight_bytes": 5_000_000, "kv_bytes_per_token": 2000, "free_bytes_when_loaded": 7e9}
    stages = [
        {"name": spec.name, "busy_seconds": seconds, "busy_percent": 100 * seconds / active if active else 0.0, **known}
        for spec, seconds in zip(LAYOUT.stages, busy, strict=True)
    ]
    return {"active_seconds": active, "stages": stages}


def test_layout_table():
    assert figures.layout_table(LAYOUT, loaded(2.0, 1.0, 0.5, 0.1), None, 1500).splitlines() == [
        "stage  layers    where                 weights    KV  free  busy",
        "front  0-5 (6)   here, M4 Max             5 MB  3 MB  7 GB   50%",
        "back   6 (1)     local worker, M4 Max     5 MB  3 MB  7 GB   25%",
        "last   7-11 (5)  tcp://a:1, M4 Max        5 MB  3 MB  7 GB    5%",
        "model m; 12 layers; KV of the conversation's 1,500 tokens",
        "free: as it was at the start; busy: share of the 2.0 s spent answering",
    ]


@pytest.mark.parametrize("name", ["書斎のとても古い計算機", "n" * 60])
def test_layout_table_fits_a_terminal(name: str):
    address = "tcp://a-machine-with-a-long-name.office.example.org:55777"
    stages = lay_out([(name, 40, None), ("back", 26, address)])
    figures_of = loaded(900.0, 412.0, 5.0, 0.0)
    now = figures_of | {"stages": figures_of["stages"][:2]}
    before = {"active_seconds": 1.0, "stages": now["stages"]}
    lines = figures.layout_table(Layout(stages, model="m"), now, before, 10**6).splitlines()
    assert max(map(cell_len, lines)) <= 80
    words = "".join(line.split("  ")[0] for line in lines if not line.startswith(" "))
    assert name in words, "all of it is there, on more lines"
    found = re.findall(r"\d+%|\d \wB", "\n".join(lines))
    assert found == ["5 MB", "2 GB", "7 GB", "46%", "0%", "5 MB", "2 GB", "7 GB", "1%", "0%"]
    narrow = figures.layout_table(LAYOUT, loaded(2.0, 1.0, 0.5, 0.1), None, 1500, width=40).splitlines()
    assert narrow[:3] == ["front", "  layers: 0-5 (6)", "  where: here, M4 Max"]


def test_ways_are_side_by_side_where_there_is_room():
    found = Comparison(("m0 alone", "m0 6, m1 6"), (("one chat", "5.0 tokens/s", "4.0 tokens/s"),), "")
    head, _, row = figures.comparison(found, 60).splitlines()
    assert head.split() == ["m0", "alone", "m0", "6,", "m1", "6"]
    assert row.split("   ")[0] == "one chat"
    assert figures.comparison(found, 30).splitlines() == [
        "m0 alone", "  one chat: 5.0 tokens/s", "m0 6, m1 6", "  one chat: 4.0 tokens/s"
    ]  # fmt: skip


def test_what_is_held_after_an_answer():
    output, found = RequestOutput(100, token_ids=[1] * 11), stats(2.0, (1.0, 4096), (0.5, 0))
    assert figures.held(output, found) == 110
    found["stages"][0]["codec"] = "int8"
    assert figures.held(output, found) == 100
