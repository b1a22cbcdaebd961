"""The run: parts that are planted, one after the other in their time; and the probes themselves, here and small."""

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from effort import long
from measured import EXACT, LINUX, answer, parting, road, sound
from stages import worker

from splitinfer.core.plan import SampledToken
from splitinfer.engine.stage import runner
from splitinfer.errors import ConfigError
from splitinfer.jobs.child import Outcome
from splitinfer.jobs.job import Job
from splitinfer.jobs.process import Report
from splitinfer.selftest import run
from splitinfer.selftest.address import WorkerAddress, worker_address
from splitinfer.selftest.checks import Check, Fault, Reason, State, exit_code
from splitinfer.selftest.judge import judge
from splitinfer.selftest.outcome import PartOutcome
from splitinfer.selftest.probes import about, branches, network, roads
from splitinfer.selftest.run import SelftestOptions, run_selftest

# ----- parts that are planted ----------------------------------------------------------------------


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Job, float]]:
    """The jobs that were run, with their limits; none has a process, and all find what a sound machine does."""
    jobs: list[tuple[Job, float]] = []
    outcomes = sound(LINUX)

    def run_one(job: Job, limit: float, _environment: Mapping[str, str], *, known: Any = None) -> Outcome:
        jobs.append((job, limit))
        known = outcomes.get(job.name, PartOutcome({"unavailable": {"why": "there is no JACCL here"}}))
        return Outcome(round(limit, 1), 0.1, 1, known.problem, dict(known.found))

    monkeypatch.setattr(run, "run_job", run_one)
    return jobs


def test_a_sound_machine(ran: list[tuple[Job, float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "selftest.json"
    there = worker_address("mini.local", "ab" * 32)
    assert run_selftest(SelftestOptions(there, file=file)) == 0
    page = capsys.readouterr().out
    assert "exit code 0\n" in page
    assert "✓  greedy           32 tokens are plain mlx-lm's, 90 a second\n" in page
    assert f"{file} is to be sent in. It has versions" in page
    assert "\x1b" not in page
    assert json.loads(file.read_text())["exit_code"] == 0
    assert "mini" not in file.read_text()
    assert list(tmp_path.iterdir()) == [file]
    assert [job.name for job, _ in ran].index("worker, tcp") == 4
    assert all(job.options["folder"] == ran[0][0].options["folder"] for job, _ in ran)


def test_a_planted_fault_is_on_the_page_and_in_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def run_one(job: Job, limit: float, _environment: Mapping[str, str], *, known: Any = None) -> Outcome:
        problem = "ended by itself with signal SIGSEGV (Fatal)" if job.name == "ring" else None
        return Outcome(limit, 0.1, 1, problem, {} if job.name == "ring" else dict(sound(LINUX)[job.name].found))

    monkeypatch.setattr(run, "run_job", run_one)
    assert run_selftest(SelftestOptions(file=tmp_path / "out.json")) == 11
    page = capsys.readouterr().out
    assert "its process was ended by SIGSEGV" in page
    assert "First: rdma over MLX's ring: send the file in" in page


def test_it_never_takes_longer_than_it_may(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Every part but the first hangs for all the time that it gets."""
    now = [100.0]
    monkeypatch.setattr(run.time, "monotonic", lambda: now[0])

    def run_one(job: Job, limit: float, _environment: Mapping[str, str], *, known: Any = None) -> Outcome:
        if job.name == "about":
            return Outcome(limit, 0.1, 1, None, {"about": LINUX})
        now[0] += limit
        return Outcome(limit, limit, 1, f"overran: ended after {limit:.1f} s", trying="greedy", silent_s=limit)

    monkeypatch.setattr(run, "run_job", run_one)
    assert run_selftest(SelftestOptions(seconds=180.0)) in {int(fault) for fault in Fault}
    assert now[0] <= 280.0
    assert "it did not come to an end" in capsys.readouterr().out


def test_a_part_that_overran_gets_what_the_others_left(monkeypatch: pytest.MonkeyPatch):
    limits, wrong = list[float](), answer(partings=[parting(3.1)])

    def run_one(job: Job, limit: float, _environment: Mapping[str, str], *, known: Any = None) -> Outcome:
        if job.name != "tcp":
            return Outcome(limit, 0.1, 1, None, dict(sound(LINUX)[job.name].found))
        limits.append(limit)
        if len(limits) == 1:
            return Outcome(limit, 0.1, 1, "overran: ended", {"greedy": wrong})
        assert known == {"greedy": wrong}
        return Outcome(limit, 0.1, 1, None, {**road(EXACT, gpu=False), **known})

    monkeypatch.setattr(run, "run_job", run_one)
    assert run_selftest(SelftestOptions()) == 10  # what was found first is not forgotten
    assert limits[1] > limits[0]


def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(ran: list[tuple[Job, float]], tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be written"):
        run_selftest(SelftestOptions(file=tmp_path / "nowhere" / "out.json"))
    assert ran == []


def test_the_process_that_judges_does_not_load_mlx():
    code = "import sys, splitinfer.selftest.run; raise SystemExit('mlx.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# ----- the probes, in this process -----------------------------------------------------------------


def found_by(measure: Callable[[Mapping[str, Any], Report], None], **options: Any) -> dict[str, Any]:
    lines: list[dict[str, Any]] = []
    measure(options, Report(lambda line: lines.append(json.loads(json.dumps(line)))))
    return {name: value for line in lines for name, value in line.get("found", {}).items()}


def faults(checks: list[Check]) -> list[Check]:
    return [check for check in checks if check.fault]


@pytest.mark.own_device
def test_a_planted_worker_that_answers_a_wrong_token_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The road through two stages is sound first; then the last one answers another greedy token at one position."""
    machine = PartOutcome(found_by(about.measure))
    options = {"road": "inproc", "tokens": 6, "restarts": False, "folder": str(tmp_path)}
    found = found_by(roads.measure, **options)
    assert faults(judge({"about": machine, "inproc": PartOutcome(found)})) == []
    assert found["greedy"]["tokens"] == 6

    original, place = runner.read, len(roads.PlainModel().prompt) + 2

    def wrong(choices: Any, rows: Any) -> Any:
        greedy = [row.params.temperature == 0 and row.position == place for row in rows]
        return [SampledToken(one.token_id ^ is_it) for one, is_it in zip(original(choices, rows), greedy, strict=True)]

    monkeypatch.setattr(runner, "read", wrong)
    found = found_by(roads.measure, **options)
    assert (len(found["greedy"]["partings"]), found["greedy"]["compared"]) == (1, 6)  # all behind it are right again
    wrongly = faults(judge({"about": machine, "inproc": PartOutcome(found)}))
    assert [(check.name, check.fault, check.reason) for check in wrongly] == [
        (name, Fault.TOKENS, Reason.WRONG_TOKEN) for name in ("greedy", "greedy, drafts")
    ]
    assert "token 3 of 6 is" in wrongly[0].sentence


@pytest.mark.parametrize(("link", "fault"), [("wifi", Fault.SPEED), long("10gbe", 0)])
def test_a_slow_link_is_named(link: str, fault: int):
    with worker("tcp") as address:
        found = found_by(network.measure, worker=_given(worker_address(f"emulated+{address}?link={link}", None)))
    assert exit_code(judge({"network": PartOutcome(found)})) == fault
    assert found["link"]["welcome"]["versions"] == found["link"]["own_versions"]


def test_a_port_where_nothing_listens_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    found = found_by(network.measure, worker=_given(worker_address(f"127.0.0.1:{port}", None)))
    named = faults(judge({"network": PartOutcome(found)}))
    assert [(check.fault, check.reason) for check in named] == [(Fault.WORKER, Reason.NOTHING_LISTENS)]


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (socket.gaierror(8, "nodename nor servname provided"), "name"),
        (TimeoutError(), "timeout"),
        (ConnectionRefusedError(111, "Connection refused"), "ECONNREFUSED"),
        (OSError(113, "No route to host"), "EHOSTUNREACH"),
        (OSError("odd"), "other"),
    ],
)
def test_what_the_system_says_is_told_apart(error: OSError, problem: str):
    def connect(_address: Any, timeout: float) -> socket.socket:
        raise error

    if isinstance(error.errno, int) and problem == "EHOSTUNREACH":
        error.errno = __import__("errno").EHOSTUNREACH
    assert network.knock("mini", 5577, connect)["problem"] == problem


@pytest.mark.own_device
def test_on_this_device_all_branches_are_right():
    found = found_by(branches.measure)
    machine = PartOutcome(found_by(about.measure))
    assert faults(judge({"about": machine, "branches": PartOutcome(found)})) == []
    as_if = {"about": {**machine.found["about"], "gpu": True, "device": "Apple M4 Max", "computes_at_launch": False}}
    named = faults(judge({"about": PartOutcome(as_if), "branches": PartOutcome(found)}))
    by_name = {check.name: check.reason for check in named}
    assert by_name.pop("free memory", None) is None
    assert set(by_name.values()) == {Reason.NOT_TAKEN}
    assert set(by_name) == {
        "sampler", "quantised attention", "kept dtype", "launching ahead", "cohort", "large steps", "quantised cohort",
        "device name",
    }  # fmt: skip


def _given(worker_at: WorkerAddress) -> dict[str, Any]:
    return {name: getattr(worker_at, name) for name in ("address", "host", "port", "key", "link")}


# ----- from outside --------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--worker", "emulated+tcp://mini?link=x"], long(["--key", "ab" * 32])])
def test_a_wrong_command_line_is_refused(arguments: list[str]):
    command = [sys.executable, "-m", "splitinfer", "selftest", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("splitinfer: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.long
def test_a_whole_run(tmp_path: Path):
    file = tmp_path / "selftest.json"
    command = [sys.executable, "-m", "splitinfer", "selftest", "--seconds", "230", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=239)
    found = json.loads(file.read_text())
    failed = [one for one in found["checks"] if one["fault"]]
    assert (done.returncode, failed) == (0, [])
    assert {one["state"] for one in found["checks"]} == {State.PASSED, State.NOT_APPLICABLE}
    assert found["measured"]["ring"]["greedy"]["compared"] == 32
