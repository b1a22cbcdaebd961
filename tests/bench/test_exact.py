"""bench --mode exact: it says "never" where arithmetic is exact, and finds the token where it is not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import tiny
from effort import long
from noisy_layers import RowNoise

from splitinfer.bench import exact, modes
from splitinfer.bench.exact import Answer, Taken, margins_summary, summary
from splitinfer.bench.shared.options import Options
from splitinfer.bench.shared.workload import made_up
from splitinfer.errors import ConfigError
from splitinfer.models.cut import StageModel

PROMPT, ANSWER = 20, 16


@pytest.fixture
def measure(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The document of two prompts on a tiny model, and what was printed before it."""
    monkeypatch.setattr(exact, "_TOGETHER", (2, 4))
    monkeypatch.setattr(exact, "_CHUNKS", (7,))

    def measured(name: str, *, as_json: bool = True) -> tuple[dict[str, Any], str]:
        folder = tiny.save(tmp_path / name, name)
        layout = tmp_path / "whole.yaml"
        layout.write_text("stages:\n  - {name: only, layers: 4}\n")
        options = Options(str(layout), str(folder), as_json, 2, PROMPT, ANSWER)
        assert modes.measure("exact", options) == 0
        *before, last = capsys.readouterr().out.splitlines()
        return json.loads(last), "\n".join(before)

    return measured


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", long("gemma3_text")])
def test_on_the_reference_blas_no_road_parts(name: str, measure: Callable[..., Any]):
    found, _ = measure(name)
    assert found["batch_invariant"]
    assert [road["road"] for road in found["roads"]] == [
        "2 rows together", "4 rows together", "beside 64 rows of a prompt", "prompt in chunks of 7",
        "drafts in blocks of 2", "drafts in blocks of 4", "drafts in blocks of 8",
        "replay in chunks of 64", "replay in chunks of 512",
    ]  # fmt: skip
    for road in found["roads"]:
        assert (road["parted"], road["first_token"], road["positions_that_differ"]) == (0, None, 0), road
        assert (road["positions"], road["largest_logit_difference"]) == (2 * ANSWER, 0)
    assert found["margins"]["median"] > 0


def free_running(model: exact.Model, prompt: tuple[int, ...], chunk: int) -> list[int]:
    caches = model.stage.make_caches()
    rows, tokens = model.read(caches, prompt, chunk), list[int]()
    while len(tokens) < ANSWER:
        tokens.append(int(mx.argmax(rows[-1]).item()))
        rows = model.read(caches, tokens[-1:], 1)
    return tokens


def test_planted_rounding_is_found_where_it_parts(measure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    """The token is the one at which two sequences that generate by themselves part."""
    RowNoise(0.005).install(monkeypatch)
    found, table = measure("llama", as_json=False)
    by_name = {road["road"]: road for road in found["roads"]}
    assert sum(road["parted"] for road in by_name.values()) >= 5
    assert found["way"] == "rows"
    assert all(road["largest_logit_difference"] > 0 for road in by_name.values()), "each computes in its own way"
    assert f"{max(road['parted'] for road in by_name.values())} of 2" in table
    model = exact.Model(StageModel(tiny.build("llama")[0], 0, 4), 160)
    for i, first in enumerate(by_name["prompt in chunks of 7"]["first_tokens"]):
        prompt = made_up(f"1 exact {i}", PROMPT, 160)
        ours, theirs = free_running(model, prompt, exact.CHUNK), free_running(model, prompt, 7)
        assert first == next((at for at, (a, b) in enumerate(zip(ours, theirs, strict=True), 1) if a != b), None)
    parted = next(road for road in by_name.values() if road["parted"])
    assert 0 <= parted["margin"] <= 2 * parted["largest_logit_difference"]
    assert 1 <= parted["first_token"] <= ANSWER


def test_arithmetic_of_partings():
    one = Answer((1,), (5, 6, 7, 8), (1.0, 0.0, 0.5, 2.0), mx.zeros((4, 9)))
    same, other = Taken((5, 6, 7, 8), 0.0), Taken((5, 6, 9, 1), 0.3)
    figures = summary([one, one], [same, other])
    assert (figures["parted"], figures["first_token"], figures["margin"]) == (1, 3, 0.5)
    assert (figures["positions_that_differ"], figures["positions"], figures["largest_logit_difference"]) == (2, 8, 0.3)
    assert summary([one], [same])["margin"] is None
    assert margins_summary([one]) == {"median": 0.75, "smallest": 0.0, "ties": 0.25}


def test_a_text_needs_a_tokenizer(tmp_path: Path):
    folder, text = tiny.save(tmp_path / "model", "llama"), tmp_path / "tale.txt"
    text.write_text("Once upon a time")
    with pytest.raises(ConfigError, match="leave --text out"):
        modes.measure("exact", Options("demo.yaml", str(folder), True, 1, 8, 4, text=text))
