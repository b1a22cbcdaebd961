"""Who comes, what it was worth to them, and how much a machine serves: from files to tables."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from splitinfer.cli import app
from splitinfer.core.costs.stage import StageCosts
from splitinfer.core.serving_options import ServingOptions
from splitinfer.errors import ConfigError
from splitinfer.machine.machine import Hop, Machine
from splitinfer.sim.capacity import cuts, decode_gap, find_capacity
from splitinfer.sim.outcome import outcome_of, quantile
from splitinfer.sim.search import Search, search
from splitinfer.sim.simulator import Served
from splitinfer.sim.workload import Lengths, fitted, made_up_lengths, poisson, read_lengths, recorded

# A machine as GPUs are: weights weigh as much as 128 rows do.
GPU = Machine(
    (StageCosts.through({1: 0.047, 128: 0.048, 512: 0.106, 2048: 0.366}, 8e-8, 1e-8),) * 2, (Hop(0.0005),) * 2, (30, 30)
)

# -- who comes ---------------------------------------------------------------------------------------


def test_a_trace_is_read(tmp_path: Path):
    path = tmp_path / "a.csv"
    path.write_text("num_prompt_tokens,num_output_tokens,arrived_at\n10,5,2.5\n7,3,1\n")
    lengths = read_lengths(path)
    assert lengths == (Lengths(10, 5, 2.5), Lengths(7, 3, 1.0))
    assert [(one.at, one.num_prompt_tokens) for one in recorded(lengths, 9)] == [(0.0, 7), (1.5, 10)]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a,b\n1,2\n", "its first line must name num_prompt_tokens and num_output_tokens"),
        ("num_prompt_tokens,num_output_tokens\n", "has no requests"),
        ("num_prompt_tokens,num_output_tokens\n5,0\n", "line 2 of trace .* at least one token"),
        ("num_prompt_tokens,num_output_tokens\n5\n", "line 2 of trace"),
        ("num_prompt_tokens,num_output_tokens\n5,x\n", "line 2 of trace"),
    ],
)
def test_what_is_no_trace_is_refused(text: str, sentence: str, tmp_path: Path):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        read_lengths(tmp_path / "a.csv")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_lengths(tmp_path / "none.csv")


def test_arrivals_that_were_not_recorded_need_a_rate():
    with pytest.raises(ConfigError, match="give a rate"):
        recorded([Lengths(1, 1)], 5)


def test_the_same_seed_is_the_same_requests_at_any_rate():
    lengths = made_up_lengths(50)
    slow, fast = poisson(lengths, 400, 1.0, seed=3), poisson(lengths, 400, 8.0, seed=3)
    assert [one.num_prompt_tokens for one in slow] == [one.num_prompt_tokens for one in fast]
    assert all(a.at == pytest.approx(8 * b.at) for a, b in zip(slow, fast, strict=True))
    assert slow[-1].at == pytest.approx(400, rel=0.15)


@given(scale=st.floats(0.001, 3.0), most=st.integers(2, 5000))
def test_fitted_requests_fit(scale: float, most: int):
    for one in fitted(made_up_lengths(20), scale, most):
        assert one.num_prompt_tokens >= 1
        assert one.num_output_tokens >= 1
        assert one.num_prompt_tokens + one.num_output_tokens <= most


# -- what it was worth ---------------------------------------------------------------------------------


def test_the_figures_of_an_outcome():
    served = [Served(1.0, [2.0, 2.5, 3.0], 0.25), Served(2.0, [6.0, 9.0], 1.0), Served(3.0, [])]
    found = outcome_of(served, objective=0.5)
    assert (found.num_requests, found.num_tokens, found.seconds) == (2, 5, 8.0)
    assert (found.ttft.p50, found.ttft.max) == (1.0, 4.0)
    assert (found.itl.p50, found.itl.max, found.stalled) == (0.5, 3.0, pytest.approx(1 / 3))
    assert found.delay.p50 == 0.25
    assert outcome_of([]).tokens_per_second == 0.0


@given(st.lists(st.floats(0, 100), min_size=1), st.floats(0, 1))
def test_a_quantile_is_not_exceeded_by_its_share(values: list[float], share: float):
    ordered = sorted(values)
    found = quantile(ordered, share)
    assert sum(value <= found for value in ordered) >= share * len(ordered) - 1e-6
    assert sum(value < found for value in ordered) <= share * len(ordered) + 1e-6


# -- capacity --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [0.003, 0.7, 1.0, 40.0])
def test_bisection_finds_the_border(most: float):
    assert most / 1.02 <= find_capacity(lambda rate: rate <= most) <= most
    assert find_capacity(lambda rate: rate <= 0) == 0.0


@pytest.mark.nightly
def test_stall_free_serves_more_than_prefill_first_where_answers_must_flow():
    lengths, policies = fitted(made_up_lengths(), 0.3, 4000), ("stall_free", "prefill_first")
    asked = Search(GPU, lengths, ServingOptions(max_running=16), policies, (512,), 60, 1, objectives=(5.0,))
    free, first = (case["capacity"][0]["rate"] for case in search(asked)["cases"])
    assert free > 1.3 * first


@pytest.mark.parametrize(("second", "gap"), [(0.02, 0.056), (0.03, 0.066), (0.05, 0.1)])
def test_the_gap_worked_out_by_hand(second: float, gap: float):
    """Two rows a step: 22 ms, the second stage and two hops of 7 ms; or twice the slower stage, if that is more."""
    stages = (StageCosts.line(0.02, 0.0), StageCosts.line(second, 0.0))
    machine = Machine(stages, (Hop(0.005, 0.001),) * 2, (1, 1), host=0.002)
    assert decode_gap(machine, num_decoding=4, context=100) == pytest.approx(gap)


def test_every_cut_of_the_layers():
    assert [one.cut for one in cuts(Machine((StageCosts(),) * 3, (Hop(),) * 3, (4, 1, 1)))] == [
        "1-2-3", "2-2-2", "3-2-1", "4-1-1"
    ]  # fmt: skip
    assert len(list(cuts(GPU))) == 59


# -- the command ----------------------------------------------------------------------------------


DESCRIPTION = """
stages:
  - {layers: 2, rows_ms: {1: 10, 101: 20}, decode_per_1k_ms: 1}
  - {layers: 2, rows_ms: {1: 10}}
hop_ms: 0.5
launches_ahead: true
"""


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "m.yaml").write_text(DESCRIPTION)
    found: list[dict[str, object]] = []
    monkeypatch.setattr("splitinfer.cli.simulation.finish", lambda run, _verbose: found.append({"code": run()}))
    given = ["simulate", "--machine", str(tmp_path / "m.yaml"), "--requests", "4", "--scale", "0.05", "--cuts"]
    result = CliRunner().invoke(app, [*given, "--rate", "2,4", "--policies", "stall_free,watermark", "--budgets", "64"])
    assert found == [{"code": 0}]
    document = json.loads(result.stdout.strip().splitlines()[-1])
    assert len(document["cases"]) == 3 * 2
    assert {case["cut"] for case in document["cases"]} == {"1-3", "2-2", "3-1"}
    assert all(each["num_requests"] == 4 for case in document["cases"] for each in case["rates"])
    for wrong in (["--policies", "fair"], ["--rate", "0"], ["--budgets", "x"]):
        assert CliRunner().invoke(app, [*given, *wrong]).exit_code == 2
