"""The selftest: probes that are planted, and the probes themselves, here and small."""

import json
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from made_up_probes import LINUX, ROUNDS, other
from stages import worker

from splitinfer.core.plan import SampledToken
from splitinfer.engine.stage import runner
from splitinfer.errors import ConfigError
from splitinfer.probes import kernels, links, machine, tokens
from splitinfer.probes.child import ProbeReport, ProbeResult, run_probe
from splitinfer.probes.finding import Blame, Finding, Outcome, exit_code, from_data, passed
from splitinfer.probes.registry import ProbeEntry, selftest_probes, worker_elsewhere
from splitinfer.probes.selftest import read_report, run_selftest
from splitinfer.probes.tokens import judge_answer
from tests.planted import Tree
from tests.planted_faults import FAULTS
from transports.emulation import emulator

SCRIPTS = Path(__file__).parents[2] / "scripts"

# -- probes that are planted -------------------------------------------------------------------------------------------


class Planted:
    """Runs no process: a sound machine's findings, but for one probe's. ``ran``: the names of those that were run."""

    def __init__(self, name: str = "", ending: Finding | None = None) -> None:
        self.name, self.ending, self.ran, self.folders = name, ending, list[str](), set[str]()

    def __call__(self, probe: ProbeEntry, limit: float, folder: str, **_more: Any) -> ProbeResult:
        self.ran.append(probe.name)
        self.folders.add(folder)
        sound = [passed("greedy", "32 tokens equal mlx-lm's")]
        found = machine.judge_about(LINUX) if probe.name == "about" else sound
        ending = probe.own(self.ending) if self.ending and probe.name == self.name else None
        return ProbeResult(tuple(map(probe.own, found)), ending, 0.1, limit)


def test_a_sound_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run, file = Planted(), tmp_path / "selftest.json"
    there = worker_elsewhere("mini.local", "ab" * 32)
    assert run_selftest(there, file=file, run=run) == 0
    page = capsys.readouterr().out
    assert "exit code 0\n" in page
    assert "Works\n" in page
    assert "✓ a model cut in two: 2 checks\n" in page  # by tcp and inproc
    assert "Differs" not in page
    assert f"Send {file} in. It has versions" in page
    assert "Next: splitinfer coord" in page
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
    assert "✗ rdma, over MLX's ring, greedy: its process ended with signal SIGSEGV\n  → send it\n" in page
    assert page.index("Works") < page.index("✓ a model cut in two") < page.index("Differs") < page.index("SIGSEGV")
    assert "First: rdma, over MLX's ring, greedy: send it" in page


def test_what_differs_and_what_is_slow_is_said_though_all_passed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Another kernel from two rows on, a near tie, and other programs: none of them is lost among what works."""
    rows = kernels.judge_kernel("4 bits", {"off": 1e-3, "changes": [2, 15], "seconds": [1e-4, 2e-3]})
    tie = judge_answer("sampled", other(0.12), ROUNDS)
    (*_, busy) = machine.judge_about({**LINUX, "load_average": 40.0})
    for probe, found, said, told in (
        ("kernels", rows, "4 bits: 0.1 ms for a row, 2 for 32; a row's result changes at 2, 15 rows", "changes 2, 15"),
        ("tcp", tie, "1 of 32 tokens are others than mlx-lm's", "sampled: tokens 32; gaps 5: 0.12"),
        ("about", busy, "busy (load 40, 16 processors)", "load: load_average 40; processors 16"),
    ):
        file = tmp_path / "out.json"
        assert run_selftest(file=file, run=Planted(probe, found)) == 0
        assert said in capsys.readouterr().out
        assert read_report(file) == 0
        page = capsys.readouterr().out
        below = page[page.index("Slow, or in the way" if probe == "about" else "Differs") :]
        assert told in below


def test_a_file_that_was_sent_is_read_as_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "sent.json"
    gap = Finding("greedy, drafts", Outcome.FAILED, "private", "", "", Blame.TOKENS, {"gaps": [0.0, 3.125, 0.0]})
    assert run_selftest(file=file, run=Planted("tcp", gap)) == 10
    capsys.readouterr()
    assert read_report(file) == 10
    page = capsys.readouterr().out
    assert "chip: AMD\n" in page
    assert "version_mlx: 0, 32, 4\n" in page
    assert "✗ drafts in flight, greedy, drafts: gaps 2: 3.12\n" in page
    assert "exit code 10: wrong tokens" in page
    assert "✓ encrypted links" in page
    assert "✓ curve, greedy" in page[page.index("Every check") :]
    assert "private" not in page
    assert "Next" not in page
    assert "Send" not in page


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kind": "splitinfer selftest", "format": 5}', "\xff"])
def test_a_file_that_is_none_of_ours_is_refused(text: str, tmp_path: Path):
    (tmp_path / "sent.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"sent\.json cannot be read as a file of selftest"):
        read_report(tmp_path / "sent.json")


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


def found_by(measure: Callable[[Mapping[str, Any], ProbeReport], None], **options: Any) -> list[Finding]:
    lines: list[dict[str, Any]] = []
    measure(options, ProbeReport(lines.append))
    return [from_data(line["found"]) for line in lines if "found" in line]


def faults(found: list[Finding]) -> list[tuple[str, Blame]]:
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
    assert faults(found) == [(name, Blame.TOKENS) for name in ("greedy", "greedy, drafts")]
    assert "token 3 of 6 is" in found[1].sentence


def test_the_model_of_a_stage_across_two_processes_does_not_repeat_itself(tmp_path: Path):
    plain = tokens.plain_model(tokens.even_model(tmp_path / "even"))
    choices = mx.argmax(plain.model(mx.array([plain.prompt]))[0], axis=-1).tolist()
    assert len(set(choices)) > 4, "a model that repeats itself shows little"


def test_every_kernel_is_tried_and_a_wrong_one_is_named():
    found = found_by(kernels.measure)
    assert faults(found) == []
    assert [each.name for each in found] == ["dense", "4 bits", "8 bits", "mxfp4", "experts in 4 bits", "attention"]
    assert all(len(each.numbers["seconds"]) == 2 for each in found)

    def right(x: mx.array) -> mx.array:
        return x * 2

    def other(x: mx.array) -> mx.array:  # rounds in another way from 13 rows on, as a kernel for many rows does
        return x * (2 if x.shape[0] < 13 else 2.001)

    def wrong(x: mx.array) -> mx.array:
        return x * (2 if x.shape[0] < 33 else float("nan"))

    x = mx.ones((65, 8))
    assert kernels.tried(other, right, x)["changes"] == [13]
    assert kernels.judge_kernel("", kernels.tried(other, right, x)).fault is Blame.NONE
    assert kernels.judge_kernel("", kernels.tried(wrong, right, x)).fault is Blame.DEVICE


def test_a_slow_link_is_named():
    slow = emulator("links")
    with worker("tcp") as address, slow.installed(slow.LinkProfile(latency=3e-3)):
        found = found_by(links.measure, worker={"address": address})
    assert exit_code(found) == Blame.SPEED
    assert found[-1].numbers["figures"]["latency_p50"] > 2e-3


# -- from outside ------------------------------------------------------------------------------------------------------


def test_a_wrong_command_line_is_refused():
    command = [sys.executable, "-m", "splitinfer", "selftest", "--worker", "rdma://mini"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("splitinfer: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fault", "probe", "finding"),
    [
        ("blocks on disk are looked for outside their group", "one process", "kept KV"),
        ("a draft model takes rolled back tokens for computed ones", "one process", "greedy, drafts"),
        ("of several tokens that wait for their readers one is told", "one process", "several at once"),
        ("a sink is called for the first frames only", "tcp", ""),
        ("a row gets the mask of another", "tcp", "a form"),
        ("messages that were consumed keep their room", "ring", "greedy"),
    ],
)
def test_a_fault_planted_in_the_program_is_seen(
    fault: str, probe: str, finding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tree, (planted,) = Tree.copied(tmp_path / "tree"), (each for each in FAULTS if each.name == fault)
    (entry,) = (each for each in selftest_probes(None) if each.name == probe)
    monkeypatch.chdir(tree.folder)
    with tree.planted(planted):
        found = run_probe(entry, 120, str(tmp_path), {"PYTHONPATH": str(tree.folder)}).findings
    assert finding in {each.name for each in found if each.fault}


@pytest.mark.nightly
def test_a_whole_run(tmp_path: Path):
    command = [sys.executable, "-m", "splitinfer", "selftest", "--seconds", "230"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=239)
    (file,) = tmp_path.iterdir()
    found, own = json.loads(file.read_text()), (platform.node(), str(Path.home()), str(tmp_path), sys.prefix)
    assert (done.returncode, [one for one in found["checks"] if one.get("fault")]) == (0, [])
    (greedy,) = (one for one in found["checks"] if (one["probe"], one["name"]) == ("ring", "greedy"))
    assert (greedy["numbers"]["tokens"], greedy["numbers"]["gaps"]) == (32, {})
    assert file.stat().st_size <= 20_000
    assert [text for text in own if text in file.read_text()] == []
