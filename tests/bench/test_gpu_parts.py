"""What a GPU could show: parts that cannot hurt each other, in their time; each of them, tiny, on the CPU backend."""

import doctest
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitinfer.bench.gpu import commands, demo, models, rows, run
from splitinfer.bench.gpu.parts import HERE, PARTS, chosen
from splitinfer.bench.gpu.run import GpuOptions, measure_on_gpu
from splitinfer.bench.gpu.sizes import SIZES
from splitinfer.bench.shared.random_model import Shape
from splitinfer.engine.device import selection
from splitinfer.engine.device.launch_ahead import VARIABLE as LAUNCH_AHEAD
from splitinfer.errors import ConfigError, ModelError
from splitinfer.jobs import process
from splitinfer.jobs.child import Outcome, problems, run_job
from splitinfer.jobs.job import Job, allotted, tails
from splitinfer.machine.selection import VARIABLE as ACCELERATOR

TINY = SIZES["tiny"]
ON_CPU = {"device": "cpu", "gpu": False}


# ----- time and choice -----------------------------------------------------------------------------


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=8), st.floats(-10, 1000), st.sampled_from([0.0, 0.3, 1.0]))
def test_parts_never_get_more_than_there_is(weights: list[float], left: float, used: float):
    total, taken = max(0.0, left), 0.0
    for mine in tails(weights):
        share = allotted(left - taken, mine)
        assert 0 <= share <= total - taken + 1e-9
        taken += share * used
    assert taken == pytest.approx(total) if used == 1 else taken <= total


def test_what_a_part_leaves_goes_to_those_behind_it():
    assert allotted(100.0, [50.0, 25.0, 25.0]) == 50
    assert allotted(99.0, [25.0, 25.0]) == 49.5  # the first took a second


def test_parts_come_in_their_order_whatever_the_list_says():
    assert [part.name for part in chosen("send,support")] == ["support", "send"]
    assert chosen(None) == PARTS
    with pytest.raises(ConfigError, match="'pigeon' is none of the parts support, launch"):
        chosen("send,pigeon")


def test_every_size_is_of_models_that_can_be():
    for size in SIZES.values():
        for sizes in (size.launch, size.folder, size.exact_folder, size.send, *size.rows.values()):
            Shape(**sizes)
        assert max(size.launch_layers) <= size.launch["layers"]
        for part in PARTS:
            assert json.loads(json.dumps([asdict(one) for one in part.jobs(size)]))


def test_launching_ahead_is_switched_off_for_one_of_two():
    jobs = {one.name: one.environment for one in chosen("launch")[0].jobs(TINY)}
    assert jobs["two groups on two stages, launching ahead"] == {}
    assert jobs["two groups on two stages, not launching ahead"] == {LAUNCH_AHEAD: "0"}


# ----- a job in a process of its own ---------------------------------------------------------------

_TOLD = "import json, os, signal, subprocess, sys, time\njob = json.loads(sys.argv[1])\n"
_TELL = "def tell(**line): print(json.dumps(line), flush=True)\n"


def ran(code: str, limit: float = 20.0, **environment: str) -> Outcome:
    """The outcome of a job whose process runs ``code``."""
    one = Job("a job", "none", {"n": 7}, {"OWN": "mine"})
    return run_job(one, limit, environment, (sys.executable, "-S", "-c", _TOLD + _TELL + code))


def ended(pid: int, within: float = 10.0) -> bool:
    """Whether a killed process ends: the kernel ends it when it next runs, and nobody may be there to collect it."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


def test_a_job_knows_its_options_its_limit_and_its_environment():
    code = "tell(found={'seen': [job['options'], job['limit_s'] <= 20, os.environ['OWN'], os.environ['ALL']]})"
    outcome = ran(code, ALL="ours")
    assert outcome.found == {"seen": [{"n": 7}, True, "mine", "ours"]}
    assert (outcome.problem, outcome.processes, problems(outcome)) == (None, 1, [])


def test_a_job_that_fails_says_why_and_keeps_what_it_found():
    outcome = ran("tell(found={'first': 1}); tell(problem='failed: on purpose'); sys.exit(1)")
    assert (outcome.found, outcome.problem, outcome.processes) == ({"first": 1}, "failed: on purpose", 1)


def test_a_job_that_overruns_is_ended_with_what_it_started_and_keeps_what_it_found():
    code = (
        "started = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'])\n"
        "tell(found={'pid': started.pid}); tell(trying='for ever'); time.sleep(60)"
    )
    began = time.monotonic()
    outcome = ran(code, limit=1.1)
    assert time.monotonic() - began < 10
    assert outcome.problem == "overran: ended after 1.1 s, which was its share of the time"
    assert outcome.trying == "for ever"
    assert ended(outcome.found["pid"])


def test_a_job_goes_on_behind_what_is_known():
    one, command = Job("a job", "none"), (sys.executable, "-S", "-c", _TOLD + _TELL + "tell(found={'b': job['skip']})")
    assert run_job(one, 20.0, {}, command, known={"a": 1}).found == {"a": 1, "b": ["a"]}


def test_how_long_a_job_had_been_silent_is_known():
    outcome = ran("for n in range(5): tell(found={str(n): n}); time.sleep(0.2)\ntime.sleep(60)", limit=2.0)
    assert 0.2 <= outcome.silent_s < 1.9


def test_another_process_goes_on_behind_what_ended_the_first():
    code = (
        "for name in ('a', 'b', 'c'):\n"
        "    if name in job['skip']: continue\n"
        "    tell(trying=name)\n"
        "    if name == 'b': os.kill(os.getpid(), signal.SIGSEGV)\n"
        "    tell(found={name: os.getpid()})"
    )
    outcome = ran(code)
    assert outcome.found["b"] == {"problem": "ended its process, with signal SIGSEGV"}
    assert outcome.found["a"] != outcome.found["c"]
    assert (outcome.problem, outcome.processes) == (None, 2)
    assert problems(outcome) == ["1 of 3 findings failed, the first, b, by: ended its process, with signal SIGSEGV"]


def test_a_job_that_ends_before_it_tries_anything_is_not_tried_again():
    outcome = ran("sys.stderr.write('first\\nno such library\\n'); os._exit(9)")
    assert (outcome.problem, outcome.processes) == ("ended by itself with exit code 9 (no such library)", 1)


def test_no_process_is_started_without_time():
    assert ran("raise SystemExit", limit=0.5).problem == "no time was left for it"


# ----- in the process ------------------------------------------------------------------------------


def test_a_finding_that_fails_leaves_the_others():
    lines: list[dict[str, Any]] = []
    report = process.Report(lines.append, skip=["known"])
    report.guarded("known", lambda: 1 / 0)
    report.guarded("wrong", lambda: 1 / 0)
    report.guarded("right", lambda: 3)
    assert lines == [
        {"trying": "wrong"},
        {"found": {"wrong": {"problem": "ZeroDivisionError: division by zero", "at": ""}}},
        {"trying": "right"},
        {"found": {"right": 3}},
    ]


@pytest.mark.parametrize(
    ("text", "is_lost"),
    [
        ("cudaStreamSynchronize(stream) failed: an illegal memory access was encountered", True),
        ("[METAL] Command buffer execution failed: Caused GPU Hang Error", True),
        ("GatherMM has no CUDA implementation.", False),
        ("[GatherMM::eval] Currently only supports float32.", False),
    ],
)
def test_a_device_that_failed_ends_the_process(
    text: str, is_lost: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def measure(_options: Mapping[str, Any], report: process.Report) -> None:
        def fail() -> None:
            raise RuntimeError(text)

        report.guarded("first", fail)
        report.guarded("second", lambda: 2)

    monkeypatch.setattr(rows, "measure", measure)
    code, found = in_process("rows", {})
    assert code == (process.DEVICE_FAILED if is_lost else 0)
    assert found["first"] == {"problem": f"RuntimeError: {text}", "at": ""}
    assert ("second" in found) is not is_lost


def in_process(module: str, options: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """The exit code of a job and what it found, run here."""
    lines: list[dict[str, Any]] = []
    text = json.dumps({"module": f"{HERE}.{module}", "options": options, "limit_s": 60.0, "skip": []})
    code = process.run(text, lambda line: lines.append(json.loads(json.dumps(line))))
    assert [line["problem"] for line in lines if "problem" in line] == []
    return code, {name: value for line in lines for name, value in line.get("found", {}).items()}


def found_by(part: str) -> dict[str, dict[str, Any]]:
    """What a part's first job finds, tiny."""
    one = chosen(part)[0].jobs(TINY)[0]
    code, found = in_process(one.module.removeprefix(f"{HERE}."), one.options)
    assert code == 0
    assert found
    assert all("problem" not in value for value in found.values())
    return found


def test_support_on_the_cpu_is_equal_to_the_last_bit():
    found = found_by("support")
    assert found["llama, float32"] == {
        "is_number": True, "to_mlx_lm": 0.0, "to_mlx_lm_without_cache": pytest.approx(0.0, abs=1e-5), "way": "rows",
        "kept_kv": True, "split_to_whole": 0.0, "equal": True,
    }  # fmt: skip
    assert (found["summary, float32"]["configurations"], found["summary, float32"]["equal"]) == (2, 2)


def test_launch_on_the_cpu_takes_most_of_a_step():
    found = found_by("launch")
    assert list(found) == [f"{kind}, {n} layers" for kind in ("bfloat16", "4-bit") for n in (1, 2)]
    for one in found.values():
        assert 0 < one["share"]["p50"] <= 1
        assert one["launch_ms"]["count"] == TINY.steps


def test_a_launch_on_an_emulated_device_returns_when_few_command_buffers_are_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    machine = tmp_path / "machine.yaml"
    machine.write_text(
        "each_layer: {rows_ms: {1: 40}, buffers: 10}\nstages: [{layers: 1}]\nlaunches_ahead: true\nmax_buffers: 10\n"
    )
    monkeypatch.setenv(ACCELERATOR, str(machine))
    options = {**chosen("launch")[0].jobs(TINY)[0].options, "bits": [0], "layers": [2]}
    code, found = in_process("launch", options)
    one = found["bfloat16, 2 layers"]
    assert code == 0
    if not one["late_steps"]:  # another process had the processor
        assert one["step_ms"] > 79
        assert one["share"]["p50"] == pytest.approx(0.5, abs=0.2)  # 10 of 20 buffers are left


def test_rows_on_the_cpu_have_no_errors():
    found = found_by("rows")
    for name in ("hidden states of the first half", "logits"):
        assert found[f"{name}: trials"]["way"] == "rows"
        assert found[f"{name}: trials"]["kept_kv"] is True
        assert found[f"{name}: 3 rows together"]["count"] == 3 * TINY.row_steps
        assert found[f"{name}: 3 rows together"]["max"] < 0.05


def test_errors_of_rows_are_those_of_a_device_that_rounds_otherwise_for_many(monkeypatch: pytest.MonkeyPatch):
    original = models.StepModel.run

    def rounded(self: Any, parts: Sequence[Any], tokens: Any, hidden: Any) -> list[mx.array]:
        outputs = original(self, parts, tokens, hidden)
        return [1.01 * rows for rows in outputs] if len(parts) > 1 else outputs

    monkeypatch.setattr(models.StepModel, "run", rounded)
    shape = replace(Shape(**TINY.rows["dense, bfloat16"]), dtype="float32")
    _, found = in_process("rows", {"shape": asdict(shape), "sequences": [3], "steps": 2})
    assert found["logits: 3 rows together"]["p50"] == pytest.approx(0.01, rel=1e-3)
    assert found["logits: 3 rows together"]["other_token"] == 0
    assert found["logits: prompt in other chunks"]["max"] < 1e-4


def test_send_has_every_kind_of_result():
    found = found_by("send")
    assert set(found) == {
        "hidden states", "drafts, every other slice void", "prompts as int8",
        "prompts as int8, one of which does not fit", "tokens", "log-probabilities",
    }  # fmt: skip
    for name, one in found.items():
        assert one["until_sent_ms"]["count"] == TINY.steps
        assert 0 <= one["until_sent_ms"]["p50"] < 1000
        assert bool(one["unfit_rows"]) is ("does not fit" in name)


def test_two_groups_on_two_stages(tmp_path: Path):
    options = next(one.options for one in chosen("launch")[0].jobs(TINY) if one.module.endswith(".groups"))
    code, found = in_process("groups", {**options, "folder": str(tmp_path)})
    assert code == 0
    assert found["one stream"]["token_ms"]["count"] == TINY.stream_tokens - 2
    groups = found["2 x 1"]
    assert len(groups["step_ms"]) == 2
    assert 0 < groups["share_of_ideal"] <= 2
    assert "note" not in found  # on a CPU each stage has a processor


def test_an_error_is_relative_to_a_row_and_infinite_where_it_is_no_number():
    wanted = mx.array([[3.0, 4.0], [3.0, -mx.inf], [3.0, 4.0], [3.0, 4.0]])
    rows_ = mx.array([[3.0, 4.5], [3.0, -mx.inf], [3.0, mx.nan], [3.0, mx.inf]])
    assert models.row_errors(rows_, wanted) == [pytest.approx(0.1), 0.0, float("inf"), float("inf")]


# ----- other commands ------------------------------------------------------------------------------


def answer(monkeypatch: pytest.MonkeyPatch, code: int, out: str = "", err: str = "") -> list[list[str]]:
    """Have every command answer so; the words of each."""
    called: list[list[str]] = []

    def start(words: list[str], **_options: Any) -> subprocess.CompletedProcess[str]:
        called.append(words)
        return subprocess.CompletedProcess(words, code, out, err)

    for module in (commands, demo):
        monkeypatch.setattr(module, "subprocess", SimpleNamespace(run=start, DEVNULL=None))
    return called


def test_another_mode_is_called_on_the_halves_of_a_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    called = answer(monkeypatch, 0, 'a table\n{"formats": {}}\n')
    options = {**chosen("kv")[0].jobs(TINY)[0].options, "folder": str(tmp_path)}
    assert in_process("commands", options) == (0, {"kv": {"formats": {}}})
    assert called[0][2:6] == ["splitinfer", "bench", "--mode", "kv"]
    layout = json.loads(Path(called[0][called[0].index("--layout") + 1]).read_text())
    assert [stage["layers"] for stage in layout["stages"]] == [1, 1]
    assert (Path(layout["model"]) / "config.json").exists()


@pytest.mark.parametrize(
    ("code", "err", "words"),
    [
        (2, "Invalid value:\n'exact' is not one\nof speed, prefix", "splitinfer bench has no --mode exact here"),
        (1, "loading\nthe device has no memory left", "splitinfer bench --mode exact: the device has no memory left"),
    ],
)
def test_a_mode_that_is_missing_or_fails_says_so(
    code: int, err: str, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    answer(monkeypatch, code, err=err)
    with pytest.raises(ModelError) as failed:
        commands.measure({"mode": "exact", "words": [], "folder": str(tmp_path)}, process.Report(lambda _line: None))
    assert str(failed.value) == words


def test_the_demo_is_trained_for_a_part_of_its_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    called = answer(monkeypatch, 0, '{"draft_agreement": 0.7}\n')
    options = {"corpus": "tales", "pair": None, "folder": str(tmp_path), "words": ["--layers", "16"]}
    assert in_process("demo", options) == (0, {"trained": {"draft_agreement": 0.7}})
    assert called[0][3:] == [
        "tales", str(tmp_path / "pair"), "--minutes", "0.550", "--draft-minutes", "0.150", "--layers", "16",
    ]  # fmt: skip


def test_without_text_there_is_nothing_to_learn_from():
    with pytest.raises(ConfigError, match="--corpus FOLDER"):
        demo.measure({"corpus": None}, process.Report(lambda _line: None))


# ----- the document --------------------------------------------------------------------------------


def outcomes(monkeypatch: pytest.MonkeyPatch, about: Mapping[str, Any] = ON_CPU) -> list[tuple[Job, dict[str, str]]]:
    """Have jobs of ``rows`` fail and all others succeed without a process; the jobs and environments so far."""
    seen: list[tuple[Job, dict[str, str]]] = []

    def run_one(one: Job, limit: float, environment: Mapping[str, str]) -> Outcome:
        seen.append((one, dict(environment)))
        found = {"about": about} if one.module.endswith(".about") else {"a": {"ms": 1.0}}
        return Outcome(limit, 0.1, 1, "failed: on purpose" if one.module.endswith(".rows") else None, found)

    monkeypatch.setattr(run, "run_job", run_one)
    return seen


def test_the_document_has_every_part_and_what_went_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    seen = outcomes(monkeypatch)
    out = tmp_path / "document.json"
    found = measure_on_gpu(GpuOptions(PARTS, size="tiny", out=out))
    assert list(found["parts"]) == [part.name for part in PARTS]
    assert found["parts"]["send"]["problem"] is None
    assert found["parts"]["rows"]["problem"] == "dense, bfloat16: failed: on purpose"
    assert found["parts"]["demo"] == {
        "limit_s": 90.0, "seconds": 0.0, "problem": "left out: it needs a GPU", "jobs": {},
    }  # fmt: skip
    assert len(found["problems"]) == len(TINY.rows) + 1
    assert found["problems"][-1] == "demo: left out: it needs a GPU"
    assert json.loads(out.read_text()) == found
    assert len(seen) == 1 + sum(len(part.jobs(TINY)) for part in PARTS if not part.needs_gpu)
    assert list(tmp_path.iterdir()) == [out]


def test_a_gpu_is_measured_in_full_with_the_demo(monkeypatch: pytest.MonkeyPatch):
    seen = outcomes(monkeypatch, {"device": "a card", "gpu": True})
    found = measure_on_gpu(GpuOptions(chosen("demo"), corpus=Path("/tales")))
    assert (found["size"], found["problems"]) == ("full", [])
    assert seen[-1][0].options["corpus"] == "/tales"
    assert seen[-1][1] == {}


def test_cpu_and_accelerator_keep_the_jobs_from_a_gpu(monkeypatch: pytest.MonkeyPatch):
    seen = outcomes(monkeypatch)
    measure_on_gpu(GpuOptions(chosen("send"), on="cpu"))
    measure_on_gpu(GpuOptions(chosen("send"), accelerator="two-large"))
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    assert [environment for _, environment in seen[1::2]] == [hidden, {**hidden, ACCELERATOR: "two-large"}]


@pytest.mark.parametrize(("on", "is_gpu", "words"), [("gpu", False, "finds no GPU"), ("cpu", True, "cannot be kept")])
def test_what_should_compute_has_to_be_there(on: str, is_gpu: bool, words: str, monkeypatch: pytest.MonkeyPatch):
    outcomes(monkeypatch, {"device": "something", "gpu": is_gpu})
    with pytest.raises(ConfigError, match=words):
        measure_on_gpu(GpuOptions(chosen("send"), on=on))


def test_the_command_line_writes_one_document(tmp_path: Path):
    command = [sys.executable, "-m", "splitinfer.bench.gpu", "--size", "tiny", "--on", "cpu", "--parts", "send,demo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["on"]["device"] == "cpu"
    assert found["parts"]["send"]["jobs"]["a random model"]["found"]["tokens"]["until_sent_ms"]["count"] == TINY.steps
    assert found["problems"] == ["demo: left out: it needs a GPU"]


def test_the_process_that_writes_the_document_does_not_load_mlx():
    code = "import sys, splitinfer.bench.gpu.__main__; raise SystemExit('mlx.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_module_of_every_job_is_there():
    modules = {one.module for part in PARTS for one in part.jobs(TINY)}
    for module in modules:
        assert hasattr(importlib.import_module(module), "measure")


@pytest.mark.parametrize("name", ["bench.gpu.models", "bench.gpu.support", "jobs.child", "jobs.job", "jobs.process"])
def test_the_examples_are_true(name: str):
    found = doctest.testmod(importlib.import_module(f"splitinfer.{name}"))
    assert (found.failed, found.attempted > 0) == (0, True)


# ----- launching ahead -----------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "computes_at_launch"), [(None, False), ("", False), ("1", False), ("0", True)])
def test_launching_ahead_can_be_switched_off(
    value: str | None, computes_at_launch: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv(LAUNCH_AHEAD, raising=False)
    if value is not None:
        monkeypatch.setenv(LAUNCH_AHEAD, value)
    monkeypatch.setattr(selection, "_share_the_interpreter", lambda: None)
    monkeypatch.setattr(selection, "on_gpu", lambda: True)
    assert selection.default_device.__wrapped__().computes_at_launch is computes_at_launch
    monkeypatch.setenv(ACCELERATOR, "each-layer")
    assert selection.open_device(0, (0, 2)).computes_at_launch is computes_at_launch


def test_a_cpu_computes_at_launch_whatever_is_asked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(LAUNCH_AHEAD, "1")
    assert selection.default_device.__wrapped__().computes_at_launch
