"""The picture of a real run: every step where it was, nothing above anything else, and readable at any time."""

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
from stages import layout, pipeline, prompt
from tiny import Folder

import splitinfer
from splitinfer.core.metrics.gaps import Visit
from splitinfer.core.metrics.records import Rows, StepRecord
from splitinfer.core.plan import StageFigures
from splitinfer.engine.figures import trace as module
from splitinfer.engine.figures.trace import Trace
from splitinfer.errors import ConfigError, ModelError
from splitinfer.llm import LLM, Settings

ROUNDED = 0.002  # microseconds


def read(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The events by track, in the order of the tracks; also of a file whose bracket is still open."""
    text = path.read_text()
    events = json.loads(text if text.endswith("]\n") else text + "]")
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    order = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    assert all(e["ph"] in "MX" for e in events)
    return {
        names[tid]: [e for e in events if e["ph"] == "X" and e["tid"] == tid] for tid in sorted(names, key=order.get)
    }


def end(event: dict[str, Any]) -> float:
    return float(event["ts"] + event["dur"])


@pytest.mark.parametrize("scheme", ["inproc", pytest.param("tcp", marks=pytest.mark.nightly)])
def test_a_run_on_two_stages(scheme: str, tiny_folder: Folder, tmp_path: Path):
    path = tmp_path / "steps.json"
    prompts = [prompt(70, seed=i) for i in range(3)]
    with pipeline(tiny_folder("llama"), [2, 2], scheme=scheme, token_budget=24, trace=path) as llm:
        params = [splitinfer.SamplingParams(max_tokens=n, ignore_eos=True) for n in (3, 9, 12)]
        llm.generate(prompts, params)
        num_steps = llm.stats()["stages"][0]["steps"]
        assert sum(map(len, read(path).values())) >= 4 * num_steps, "it can be read while it grows"
    assert path.read_text().endswith("\n]\n")
    tracks = read(path)
    assert list(tracks) == ["s0", "s0 to s1", "s1", "s1 to s0"]
    for events in tracks.values():
        steps = [e["args"]["step"] for e in events]
        assert steps == list(range(len(steps)))
        assert len(steps) >= num_steps
        assert all(end(a) <= b["ts"] + ROUNDED for a, b in itertools.pairwise(events)), "none overlap"
    for here, way, there, back in zip(*tracks.values(), strict=True):
        assert end(here) <= way["ts"] + ROUNDED
        assert end(way) <= there["ts"] + ROUNDED
        assert end(there) <= back["ts"] + ROUNDED
        assert way["args"]["way_ms"] >= 0
        same = ("step", "sequences", "tokens", "useful")
        assert [here["args"][key] for key in same] == [there["args"][key] for key in same]
        assert here["name"] == there["name"] == f"{here['cat']} {here['args']['step']}"
        assert here["args"]["bytes_sent"] == way["args"]["bytes"] == 64 * 4 * here["args"]["tokens"]
    kinds = {e["cat"] for e in tracks["s0"]}
    assert kinds >= {"prefill", "decode", "mixed"}
    assert sum(e["args"]["tokens"] for e in tracks["s0"]) == sum(map(len, prompts)) + 2 + 8 + 11


def some_step(number: int, start: float) -> StepRecord:
    visits = (Visit(0, 0, 0, start, start + 1), Visit(0, start + 1, start + 2, start + 2, start + 3))
    figures = (StageFigures(0, start, start + 1, bytes_sent=8), StageFigures(1, 0, 1))
    return StepRecord(number, 1, Rows(decode=1), 1, (), visits, figures, (), start + 3, start + 4)


def test_a_frame_that_waits_for_the_one_before_it_begins_when_that_has_arrived(tmp_path: Path):
    """Sent at 1 and 1.5, arrived at 2 and 2.5: drawn from 1 to 2 and from 2 to 2.5."""
    trace = Trace(tmp_path / "t.json")
    trace.begin(["a", "b"])
    zero = time.monotonic()
    for number in range(2):
        trace.step(some_step(number, zero + number / 2))
    trace.close()
    first, second = read(trace.path)["a to b"]
    at = [each - first["ts"] for each in (end(first), second["ts"], end(second))]
    assert at == pytest.approx([1e6, 1e6, 1.5e6], abs=1)
    assert second["args"]["way_ms"] == pytest.approx(1000)


def test_it_ends_before_it_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_BYTES", 5000)
    trace = Trace(tmp_path / "t.json")
    trace.begin(["a", "b"])
    for number in range(100):
        trace.step(some_step(number, time.monotonic() + 4 * number))
    assert trace.path.stat().st_size < 7000
    assert 3 < len(read(trace.path)["a"]) < 20
    trace.close()


def test_a_full_disk_ends_the_trace_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no full disk to write to")
    trace = Trace(full)
    trace.begin(["a", "b"])
    trace.step(some_step(0, 1.0))
    trace.close()
    assert len(caplog.messages) == 1
    assert "the trace ends here: /dev/full cannot be written" in caplog.messages[0]


@pytest.mark.parametrize("name", ["nowhere/t.json", "."])
def test_a_place_that_cannot_be_written_is_named_before_anything_is_loaded(name: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"the trace cannot be written to .*; name another file"):
        LLM(layout("no-such-model", [1], []), settings=Settings(trace=tmp_path / name))
    with pytest.raises(ModelError):
        LLM(layout(tmp_path / "no-such-model", [1], []), settings=Settings(trace=tmp_path / "t.json"))
