"""The document holds every figure; the table shows its medians."""

import io
import json
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from splitinfer.bench.shared.measure import Counters, Run
from splitinfer.bench.shared.throughput import BatchRun
from splitinfer.bench.speed.report import (
    BASELINE,
    BASELINE_ALL,
    BASELINE_BEST,
    PEERS,
    PIPELINE,
    WHOLE,
    Findings,
    document,
)
from splitinfer.bench.speed.tables import gap_tables, table


def decode(step: float, *, stages: int = 0, away: float | None = None) -> Run:
    spent = Counters((0.4 * step * 3,) * stages, (3,) * stages, (300, 0, 0)[:stages], 3, away)
    return Run((1, 2, 3, 4, 5), tuple(1 + step * i for i in range(5)), spent if stages else None)


def prefill(ttft: float, *, stages: int = 0) -> Run:
    spent = Counters((ttft / 2,) * stages, (1,) * stages, (2000, 0, 0)[:stages], 1)
    return Run((7,), (ttft,), spent if stages else None)


def batch(step: float, sequences: int, *, busy: Sequence[float] = ()) -> BatchRun:
    """A token of each sequence every ``step`` seconds; stages that compute ``busy`` seconds in each of 10 steps."""
    times = tuple(tuple(1 + i / 100 + step * token for token in range(8)) for i in range(sequences))
    gaps, shares = {"link": 0.25, "host": 0.75, "nothing_to_do": 0.0}, {"duty_percent": 80, "goodput_duty_percent": 60}
    stages = [{"busy_seconds": 10 * each, "gaps": gaps, **shares} for each in busy]
    return BatchRun(((1, 2),) * sequences, times, {"steps": 10, "stages": stages} if busy else None)


def together() -> dict[str, Any]:
    batches = {
        (PIPELINE, 2): [batch(0.25, 4, busy=(0.1, 0.3)), batch(0.5, 4, busy=(0.2, 0.2))],
        (BASELINE, 2): [batch(0.25, 2), batch(0.25, 2)],
        (BASELINE_ALL, 2): [batch(0.125, 2), batch(0.125, 2)],
        (PEERS, 2): [batch(1.0, 4), batch(1.0, 4)],
    }
    return {"batches": batches}


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
    workload = {
        "trials": 3, "prompt_tokens": 100, "decode_tokens": 5, "stream_prompt_tokens": 7, "stream_tokens": 8,
    }  # fmt: skip
    known: dict[str, Any] = {
        "measured_on": on, "layout": {"stages": [{"layers": 2}, {"layers": 3}]}, "workload": workload,
        "model": {"name": "m", "dtype": "float32"}, "prompt_tokens": 100, "chunk": 30, "runs": runs,
        "stages": {PIPELINE: ["front", "back"]}, "notes": ["this is made up"],
    }  # fmt: skip
    return Findings(**{**known, **changes})


def test_the_document_has_the_figures() -> None:
    found = document(findings())
    ours = found["systems"][PIPELINE]
    assert ours["decode"]["ms_per_token"]["median"] == 200
    assert ours["decode"]["tokens_per_second"]["values"] == [5, 10, 2.5]
    assert ours["decode"]["bytes_per_token"]["median"] == 100
    assert ours["decode"]["ms_per_token_by_cause"]["compute"]["front"]["values"] == [80, 40, 160]
    assert ours["decode"]["ms_per_token_by_cause"]["hops_and_host"]["median"] == 40
    assert ours["decode"]["ms_per_token_by_cause"]["hops"] is None
    assert ours["prefill"]["bytes_per_token"]["median"] == 20
    assert ours["prefill"]["prompt_tokens_per_second"]["median"] == 50
    assert ours["prefill"]["busy_percent"]["back"]["median"] == 50
    assert "bytes_per_token" not in found["systems"][BASELINE]["decode"]
    pair = found["ratios"][f"{PIPELINE}/{BASELINE}"]
    assert pair["decode_speed"]["values"] == [0.5, 1, 0.25]
    assert pair["ttft"]["median"] == 0.5
    assert list(found["ratios"]) == [f"{PIPELINE}/{BASELINE}"]
    assert found["same_tokens"] == {BASELINE: {"decode": {"same": 3, "of": 3}, "prefill": {"same": 3, "of": 3}}}
    assert len(found["trials"]) == 12
    assert found == json.loads(json.dumps(found))


def test_throughputs_have_their_figures() -> None:
    found = document(findings(**together()))
    ours = found["systems"][PIPELINE]["throughput"]["2"]
    assert ours["sequences"] == 4
    assert ours["tokens_per_second"]["values"] == [16, 8]
    assert ours["itl_ms"]["p50"]["values"] == [250, 500]
    assert ours["last_ttft_seconds"]["median"] == 1.03
    assert ours["step_ms"]["front"]["values"] == [100, 200]
    assert ours["limit"]["ratio"]["values"] == pytest.approx([4 / 3, 2])
    assert ours["limit"]["tokens_per_second"]["values"] == pytest.approx([2 / 0.3, 10])
    assert ours["goodput_duty_percent"]["back"]["median"] == 60
    assert ours["gaps"]["front"]["link"]["percent"]["values"] == pytest.approx([12.5, 100 / 12])
    assert "limit" not in found["systems"][PEERS]["throughput"]["2"]
    assert found["systems"][PEERS]["decode"] is None
    pair = found["ratios"][f"{PIPELINE}/{BASELINE}"]["throughput"]["2"]
    assert pair["tokens_per_second"]["values"] == [2, 1]
    assert pair["itl"]["values"] == [1, 2]
    assert found["ratios"][f"{PIPELINE}/{PEERS}"]["throughput"]["2"]["tokens_per_second"]["values"] == [4, 2]
    assert found["same_tokens"][BASELINE]["throughput_2"] == {"same": 4, "of": 4}
    assert found == json.loads(json.dumps(found))


def shown(found: dict[str, Any]) -> str:
    return drawn(table(found))


def drawn(picture: Table) -> str:
    paper = io.StringIO()
    Console(file=paper, width=140).print(picture)
    return paper.getvalue()


def test_the_tables_show_medians_and_where_they_come_from() -> None:
    found = document(findings(**together()))
    text = shown(found)
    for words in ("m, float32, cut 2 + 3", "an abacus", "compute on front", "front on 0", "far on none", "beads"):
        assert words in text
    for words in ("note: this is made up", "(150 + 250) / 250 ms", "on all 2 processors, throughput at 2: 16"):
        assert words in text
    rows = {cells[1].strip(): cells for line in text.splitlines() if len(cells := line.split("│")) > 3}
    assert rows["throughput at 2, tokens/s"][-2].split()[0] == "1.5"
    assert rows["pipeline / mlx-lm's pipeline"][-2].split()[0] == "3"
    assert [cell.strip() for cell in rows["sequences"][2:-2]] == ["4", "2", "4"]
    assert "baseline_all" not in text
    assert "link:" not in text
    on = {**findings().measured_on, "link": {"preset": "wifi"}}
    assert "link: emulated wifi" in shown(document(findings(measured_on=on)))
    (gaps,) = gap_tables(found)
    assert drawn(gaps).count("link") == 2
    assert "nothing to do" not in drawn(gaps)  # there was none


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
