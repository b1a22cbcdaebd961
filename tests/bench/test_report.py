"""The document holds every figure; the table shows its medians."""

import io
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from rich.console import Console

from splitinfer.bench.measure import Counters, Run
from splitinfer.bench.report import BASELINE, BASELINE_BEST, FIGURES, PIPELINE, WHOLE, Findings, document, table


def decode(step: float, *, stages: int = 0, away: float | None = None) -> Run:
    spent = Counters((0.4 * step * 3,) * stages, (3,) * stages, (300, 0, 0)[:stages], 3, away)
    return Run((1, 2, 3, 4, 5), tuple(1 + step * i for i in range(5)), spent if stages else None)


def prefill(ttft: float, *, stages: int = 0) -> Run:
    spent = Counters((ttft / 2,) * stages, (1,) * stages, (2000, 0, 0)[:stages], 1)
    return Run((7,), (ttft,), spent if stages else None)


def findings(**changes: Any) -> Findings:
    on = {
        "processor": "an abacus", "processors": 2, "device": "cpu", "platform": "wood", "is_pinned": True,
        "pinned": {"front": 0, "back": 1, "far": None, "baseline": 0}, "blas": {"coordinator": "beads"}, "link": None,
    }  # fmt: skip
    runs = {
        (PIPELINE, "decode"): [decode(0.2, stages=2), decode(0.1, stages=2), decode(0.4, stages=2)],
        (PIPELINE, "prefill"): [prefill(2.0, stages=2), prefill(2.0, stages=2), prefill(3.0, stages=2)],
        (BASELINE, "decode"): [decode(0.1), decode(0.1), decode(0.1)],
        (BASELINE, "prefill"): [prefill(4.0), prefill(4.0), prefill(4.0)],
    }
    known: dict[str, Any] = {
        "measured_on": on,
        "layout": {"stages": [{"layers": 2}, {"layers": 3}]},
        "model": {"name": "m", "dtype": "float32"},
        "workload": {"trials": 3, "prompt_tokens": 100, "decode_tokens": 5},
        "prompt_tokens": 100,
        "chunk": 30,
        "stages": {PIPELINE: ["front", "back"]},
        "runs": runs,
        "notes": ["this is made up"],
    }
    return Findings(**{**known, **changes})


def test_the_document_has_the_figures() -> None:
    found = document(findings())
    ours = found["contenders"][PIPELINE]
    assert ours["decode"]["ms_per_token"]["median"] == 200
    assert ours["decode"]["tokens_per_second"]["values"] == [5, 10, 2.5]
    assert ours["decode"]["bytes_per_token"]["median"] == 100
    assert ours["decode"]["ms_per_token_by_cause"]["compute"]["front"]["values"] == [80, 40, 160]
    assert ours["decode"]["ms_per_token_by_cause"]["hops_and_host"]["median"] == 40
    assert ours["decode"]["ms_per_token_by_cause"]["hops"] is None
    assert ours["prefill"]["bytes_per_token"]["median"] == 20
    assert ours["prefill"]["prompt_tokens_per_second"]["median"] == 50
    assert ours["prefill"]["busy_percent"]["back"]["median"] == 50
    assert "bytes_per_token" not in found["contenders"][BASELINE]["decode"]
    pair = found["ratios"][f"{PIPELINE}/{BASELINE}"]
    assert pair["decode_speed"]["values"] == [0.5, 1, 0.25]
    assert pair["ttft"]["median"] == 0.5
    assert list(found["ratios"]) == [f"{PIPELINE}/{BASELINE}"]
    assert found["same_tokens"] == {BASELINE: {"decode": {"same": 3, "of": 3}, "prefill": {"same": 3, "of": 3}}}
    assert len(found["trials"]) == 12
    assert found == json.loads(json.dumps(found))


def test_the_limits_stand_beside_the_figures() -> None:
    found = document(findings())
    ours = found["contenders"][PIPELINE]
    assert ours["decode"]["limit"]["tokens_per_second"]["values"] == [6.25, 12.5, 3.125]  # 160, 80 and 320 ms computing
    limit = ours["prefill"]["limit"]
    assert (limit["chunks"], limit["stages"], limit["share_of_one_stage"]) == (4, 2, 0.625)
    assert limit["ttft_seconds"]["values"] == [1.25, 1.25, 1.875]
    assert "limit" not in found["contenders"][BASELINE]["decode"]
    text = shown(found)
    assert [line.split("│")[2].split()[0] for line in text.splitlines() if "physical limit" in line] == ["6.25", "1.25"]
    assert "(4 + 2 - 1) / (4 x 2) = 0.625" in text


def test_the_document_says_what_each_figure_is() -> None:
    found = document(findings(runs={**findings().runs, (PIPELINE, "decode"): [decode(0.1, stages=2, away=0.2)] * 3}))
    assert found["figures"] == FIGURES
    paths = set(numbers({key: found[key] for key in ("contenders", "ratios", "same_tokens", "trials")}))
    explained = [pattern.split(".") for pattern in FIGURES if not pattern.startswith("*")]
    assert [path for path in paths if not any(matches(path, pattern) for pattern in explained)] == []
    assert [p for p in explained if not any(matches(path, p) for path in paths)] == [], "what is not there"


def numbers(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of all figures; one with several trials is one."""
    if isinstance(value, dict) and {"median", "values"} <= set(value):
        yield path
    elif isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from numbers(each, (*path, str(key)))
    elif isinstance(value, int | float):
        yield path


def matches(path: Sequence[str], pattern: Sequence[str]) -> bool:
    return len(path) == len(pattern) and all(b in ("*", a) for a, b in zip(path, pattern, strict=True))


def test_hops_and_host_are_told_apart_where_they_can_be() -> None:
    runs = {**findings().runs, (PIPELINE, "decode"): [decode(0.1, stages=2, away=3 * 0.055)] * 3}
    by_cause = document(findings(runs=runs))["contenders"][PIPELINE]["decode"]["ms_per_token_by_cause"]
    assert by_cause["hops"]["median"] == pytest.approx(15)
    assert by_cause["host"]["median"] == pytest.approx(5)
    assert by_cause["hops_and_host"]["median"] == pytest.approx(20)


def shown(found: dict[str, Any]) -> str:
    paper = io.StringIO()
    Console(file=paper, width=140).print(table(found))
    return paper.getvalue()


def test_the_table_shows_medians_and_where_they_come_from() -> None:
    text = shown(document(findings()))
    for words in ("m, float32, cut 2 + 3", "an abacus", "compute on front", "front on 0", "far on none", "beads"):
        assert words in text
    assert "note: this is made up" in text
    assert "0.5" in next(line for line in text.splitlines() if "decode, tokens/s" in line)


@pytest.mark.parametrize(("other_step", "ratio"), [(1.0, "2"), (8.0, "0.5")])
def test_the_table_compares_with_the_better_baseline(other_step: float, ratio: str) -> None:
    other = {(BASELINE_BEST, "prefill"): [prefill(other_step)] * 3, (WHOLE, "decode"): [decode(0.1, stages=1)] * 3}
    other |= {(WHOLE, "prefill"): [prefill(1.0, stages=1)] * 3}
    known = findings()
    found = document(findings(runs={**known.runs, **other}, stages={**known.stages, WHOLE: ["whole"]}))
    line = next(line for line in shown(found).splitlines() if "TTFT in s" in line)
    assert line.split("│")[-2].split()[0] == ratio
    assert found["ratios"][f"{PIPELINE}/{BASELINE_BEST}"]["decode_speed"] is None
    assert found["ratios"][f"{WHOLE}/{BASELINE_BEST}"]["ttft"]["median"] == 1 / other_step


def test_an_emulated_link_is_named() -> None:
    known = findings().measured_on
    assert "link:" not in shown(document(findings()))
    assert "link: emulated wifi" in shown(document(findings(measured_on={**known, "link": {"preset": "wifi"}})))


def test_a_pipeline_alone_is_reported_too() -> None:
    known = findings()
    runs = {key: value for key, value in known.runs.items() if key[0] == PIPELINE}
    found = document(findings(runs=runs))
    assert found["ratios"] == {}
    assert "pipeline /" not in shown(found)
