"""The selftest: probes that are planted, and the probes themselves, here and small."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from made_up_probes import LINUX
from stages import worker

from splitinfer.core.plan import SampledToken
from splitinfer.engine.stage import runner
from splitinfer.errors import ConfigError
from splitinfer.probes import links, machine, tokens
from splitinfer.probes.child import Report, Result
from splitinfer.probes.finding import Fault, Finding, Outcome, exit_code, from_data, passed
from splitinfer.probes.registry import Probe, worker_elsewhere
from splitinfer.probes.selftest import run_selftest
from transports.emulation import emulator

SCRIPTS = Path(__file__).parents[2] / "scripts"

# -- probes that are planted -------------------------------------------------------------------------------------------


class Planted:
    """Runs no process: a sound machine's findings, but for one probe's. ``ran``: the names of those that were run."""

    def __init__(self, name: str = "", ending: Finding | None = None) -> None:
        self.name, self.ending, self.ran, self.folders = name, ending, list[str](), set[str]()

    def __call__(self, probe: Probe, limit: float, folder: str, **_more: Any) -> Result:
        self.ran.append(probe.name)
        self.folders.add(folder)
        sound = [passed("greedy", "32 tokens equal mlx-lm's")]
        found = machine.judge_about(LINUX) if probe.name == "about" else sound
        ending = probe.own(self.ending) if self.ending and probe.name == self.name else None
        return Result(tuple(map(probe.own, found)), ending, 0.1, limit)


def test_a_sound_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run, file = Planted(), tmp_path / "selftest.json"
    there = worker_elsewhere("mini.local", "ab" * 32)
    assert run_selftest(there, file=file, run=run) == 0
    page = capsys.readouterr().out
    assert "exit code 0\n" in page
    assert "✓ greedy: 32 tokens equal mlx-lm's\n" in page
    assert f"Send {file} in. It has versions" in page
    assert "\x1b" not in page
    assert json.loads(file.read_text())["exit_code"] == 0
    assert "mini" not in file.read_text()
    assert list(tmp_path.iterdir()) == [file]
    assert run.ran.index("worker, tcp") == 4
    assert len(run.folders) == 1


def test_a_planted_fault_is_on_the_page_and_in_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    crash = Finding("greedy", Outcome.FAILED, "its process ended with signal SIGSEGV", "send it")
    assert run_selftest(file=tmp_path / "out.json", run=Planted("ring", crash)) == 11
    page = capsys.readouterr().out
    assert "✗ greedy: its process ended with signal SIGSEGV\n  → send it\n" in page
    assert "First: rdma over MLX's ring, greedy: send it" in page


def test_a_file_that_cannot_be_written_is_refused_before_anything_runs():
    run = Planted()
    with pytest.raises(ConfigError, match="cannot be written"):
        run_selftest(file=Path("/dev/null/out.json"), run=run)
    assert run.ran == []


@pytest.mark.parametrize("module", ["splitinfer.probes.selftest", "gpu_figures.__main__"])
def test_the_process_that_makes_the_document_does_not_load_mlx(module: str):
    code = (
        f"import sys; sys.path.append({str(SCRIPTS)!r}); import {module}; raise SystemExit('mlx.core' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# -- the probes, in this process ---------------------------------------------------------------------------------------


def found_by(measure: Callable[[Mapping[str, Any], Report], None], **options: Any) -> list[Finding]:
    lines: list[dict[str, Any]] = []
    measure(options, Report(lines.append))
    return [from_data(line["found"]) for line in lines if "found" in line]


def faults(found: list[Finding]) -> list[tuple[str, Fault]]:
    return [(each.name, each.fault) for each in found if each.outcome is Outcome.FAILED]


@pytest.mark.own_device
def test_a_planted_worker_that_answers_a_wrong_token_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The way through two stages is sound first; then the last one answers another greedy token at one position."""
    options = {"way": "inproc", "tokens": 6, "folder": str(tmp_path)}
    found = found_by(tokens.measure, **options)
    assert faults(found) == []
    assert [each.name for each in found] == [
        "rounding", "greedy", "sampled", "greedy, drafts", "sampled, drafts"
    ]  # fmt: skip
    original, place = runner.read, len(tokens.plain_model().prompt) + 2

    def wrong(choices: Any, rows: Any) -> Any:
        greedy = [row.params.temperature == 0 and row.position == place for row in rows]
        return [SampledToken(one.token_id ^ is_it) for one, is_it in zip(original(choices, rows), greedy, strict=True)]

    monkeypatch.setattr(runner, "read", wrong)
    found = found_by(tokens.measure, **options)
    gaps = found[1].numbers["gaps"]
    assert [gap > 0 for gap in gaps] == [False, False, True, False, False, False]  # all behind it are right again
    assert faults(found) == [(name, Fault.TOKENS) for name in ("greedy", "greedy, drafts")]
    assert "token 3 of 6 is" in found[1].sentence


def test_the_model_of_a_stage_across_two_processes_does_not_repeat_itself(tmp_path: Path):
    plain = tokens.plain_model(tokens.even_model(tmp_path / "even"))
    choices = mx.argmax(plain.model(mx.array([plain.prompt]))[0], axis=-1).tolist()
    assert len(set(choices)) > 4, "a model that repeats itself shows little"


def test_a_slow_link_is_named():
    slow = emulator("links")
    with worker("tcp") as address, slow.installed(slow.LinkProfile(latency=3e-3)):
        found = found_by(links.measure, worker={"address": address})
    assert exit_code(found) == Fault.SPEED
    assert found[-1].numbers["figures"]["latency_p50"] > 2e-3


# -- from outside ------------------------------------------------------------------------------------------------------


def test_a_wrong_command_line_is_refused():
    command = [sys.executable, "-m", "splitinfer", "selftest", "--worker", "rdma://mini"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("splitinfer: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.nightly
def test_a_whole_run(tmp_path: Path):
    file = tmp_path / "selftest.json"
    command = [sys.executable, "-m", "splitinfer", "selftest", "--seconds", "230", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=239)
    found = json.loads(file.read_text())
    failed = [one for one in found["checks"] if one["fault"]]
    assert (done.returncode, failed) == (0, [])
    assert found["measured"]["ring"]["greedy"]["gaps"] == [0.0] * 32
