"""`splitinfer bench` as a process, on a tiny model: a table, one JSON line, and nobody left behind."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer
import yaml

from splitinfer.bench.modes import measure
from splitinfer.bench.shared.mlx_lm import MlxLmProcesses, PlainMlxLm
from splitinfer.bench.shared.options import Options
from splitinfer.bench.shared.random_model import Shape, make
from splitinfer.bench.shared.workload import Batch, Task
from splitinfer.cli.bench import _counts
from splitinfer.errors import ConfigError, ModelError

SIZES = (
    "--trials", "1", "--prompt-tokens", "200", "--decode-tokens", "6", "--token-budget", "64",
    "--streams", "3", "--stream-prompt-tokens", "16", "--stream-tokens", "20",
)  # fmt: skip
TOP = {
    "tool", "format", "figures", "measured_on", "layout", "model", "workload", "systems",
    "ratios", "same_tokens", "notes", "trials",
}  # fmt: skip


@pytest.fixture(scope="module")
def layout_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    make(folder / "model", Shape(layers=4, hidden=64, heads=4, kv_heads=2, mlp=96, vocab=300))
    stages = [{"name": "front", "layers": 2}, {"name": "back", "layers": 2, "address": "local"}]
    path = folder / "halves.yaml"
    path.write_text(yaml.safe_dump({"model": str(folder / "model"), "stages": stages}))
    return path


_started: list["subprocess.Popen[str]"] = []


def start(layout_file: Path, *options: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "splitinfer", "bench", "--layout", str(layout_file), *options]
    _started.append(
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    )
    return _started[-1]


@pytest.fixture(autouse=True)
def nobody_stays() -> Iterator[None]:
    """A test that fails must not leave children to the tests that count theirs."""
    yield
    while _started:
        process = _started.pop()
        if process.poll() is None:
            process.kill()
            process.communicate()


def offspring(of: int) -> list[psutil.Process]:
    return psutil.Process(of).children(recursive=True)


def test_a_table_then_one_json_document(layout_file: Path) -> None:
    running = start(layout_file, *SIZES, "--whole", "--peers")
    family: dict[int, psutil.Process] = {}
    assert running.stderr is not None
    for line in running.stderr:
        if line.startswith("trial"):
            family |= {child.pid: child for child in offspring(running.pid)}
    assert running.stdout is not None
    lines = running.stdout.read().splitlines()
    assert running.wait(timeout=20) == 0
    running.stdout.close()
    running.stderr.close()
    assert len(family) == 5  # the worker, plain mlx-lm twice, and two of mlx-lm's pipeline
    assert not any(child.is_running() for child in family.values())

    found = json.loads(lines[-1])
    assert set(found) == TOP
    assert any("decode, tokens/s" in line for line in lines[:-1])
    assert {"pipeline", "baseline", "whole"} <= set(found["systems"])
    for name in ("pipeline", "baseline", "whole"):
        figures = found["systems"][name]
        assert len(figures["decode"]["tokens_per_second"]["values"]) == 1
        assert figures["decode"]["tokens_per_second"]["low"] > 0
        assert figures["prefill"]["ttft_seconds"]["low"] > 0
    ours = found["systems"]["pipeline"]
    assert ours["decode"]["bytes_per_token"]["median"] == 64 * 4  # one float32 row crosses one link
    assert ours["prefill"]["bytes_per_token"]["median"] == 64 * 4
    by_cause = ours["decode"]["ms_per_token_by_cause"]
    assert set(by_cause["compute"]) == {"front", "back"}
    assert by_cause["hops_and_host"]["median"] > 0
    assert {"pipeline/baseline", "pipeline/whole", "whole/baseline"} <= set(found["ratios"])
    assert found["model"]["hidden_size"] == 64
    assert found["measured_on"]["versions"]["mlx_lm"]
    widths = {"pipeline": 6, "mlx_lm_pipeline": 6, "baseline": 3, "whole": 3, "baseline_all_processors": 3}
    found["systems"].pop("baseline_best", None)  # reads prompts only, and only where that was faster once
    assert {n: each["throughput"]["3"]["sequences"] for n, each in found["systems"].items()} == widths
    check_throughput(ours["throughput"]["3"])
    if sys.platform == "linux":
        peers = {"mlx_lm_pipeline 0", "mlx_lm_pipeline 1"}
        assert set(found["measured_on"]["pinned"]) == {"front", "back", "baseline"} | peers
        assert set(found["measured_on"]["blas"]) == {"coordinator", "back", "baseline"}


def check_throughput(ours: dict[str, Any]) -> None:
    assert ours["tokens_per_second"]["low"] > 0
    assert 1 <= ours["limit"]["ratio"]["low"] <= ours["limit"]["ratio"]["high"] <= 2
    assert ours["itl_ms"]["p50"]["low"] <= ours["itl_ms"]["p99"]["low"]
    assert 0 < ours["goodput_duty_percent"]["back"]["low"] <= ours["duty_percent"]["back"]["high"] <= 100.001
    shares = [sum(cause["percent"]["median"] for cause in causes.values()) for causes in ours["gaps"].values()]
    assert all(0 < share < 100 for share in shares)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_demo_model_without_what_mlx_lm_cannot_do() -> None:
    sizes = ["--prompt-tokens", "40", "--decode-tokens", "12", "--streams", "1,2", "--stream-prompt-tokens", "12"]
    running = start(Path("demo.yaml"), "--trials", "1", "--json", "--peers", *sizes, "--stream-tokens", "12")
    out, err = running.communicate(timeout=250)
    assert running.returncode == 0, err
    found = json.loads(out)
    decode = found["systems"]["pipeline"]["decode"]
    assert decode["steps_per_token"]["median"] == pytest.approx(1, abs=0.2), "the layout's draft model is left out"
    assert all(decode["ms_per_token_by_cause"][cause]["low"] > 0 for cause in ("hops", "host"))
    assert "mlx-lm's own pipeline was not measured: its llama has no pipeline" in found["notes"]
    assert set(found["systems"]["pipeline"]["throughput"]) == {"1", "2"}
    ratios = found["ratios"]["pipeline/baseline"]["throughput"]["2"]
    assert ratios["tokens_per_second"]["median"] > 0


def test_json_alone_without_baseline_over_a_slow_link(layout_file: Path) -> None:
    running = start(layout_file, *SIZES, "--trials", "1", "--no-baseline", "--json", "--link-preset", "wifi")
    out, err = running.communicate(timeout=60)
    assert running.returncode == 0, err
    found = json.loads(out)  # one document is all there is
    assert list(found["systems"]) == ["pipeline"]
    assert any("fewer than 3 trials" in note for note in found["notes"])
    there_and_back = 2000 * found["measured_on"]["link"]["latency"]
    by_cause = found["systems"]["pipeline"]["decode"]["ms_per_token_by_cause"]
    assert by_cause["hops_and_host"]["low"] >= there_and_back > 0


@pytest.mark.long
def test_the_links_between_workers_are_emulated_too(layout_file: Path, tmp_path: Path) -> None:
    thirds = tmp_path / "thirds.yaml"
    stages = [{"name": "a", "layers": 2}, *({"name": n, "layers": 1, "address": "local"} for n in "bc")]
    thirds.write_text(yaml.safe_dump({"model": str(layout_file.parent / "model"), "stages": stages}))
    program = f"""
from splitinfer.bench.modes import measure
from splitinfer.bench.shared.options import Options
from transports.emulated import PRESETS, LinkProfile
PRESETS["pigeon"] = LinkProfile(latency=0.05)
measure("speed", Options({str(thirds)!r}, None, True, 1, 20, 4, baseline=False, link_preset="pigeon", streams=()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    decode = json.loads(done.stdout)["systems"]["pipeline"]["decode"]
    assert decode["ms_per_token_by_cause"]["hops"]["low"] >= 150  # to the second stage, to the third, the token back


def test_ctrl_c_leaves_nobody_behind(layout_file: Path) -> None:
    running = start(layout_file, *SIZES, "--trials", "10000")
    assert running.stderr is not None
    next(line for line in running.stderr if line.startswith("trial"))
    family = offspring(running.pid)
    assert len(family) == 2
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=20)
    assert running.returncode == 130
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive


def test_what_cannot_be_measured_is_refused_before_anything_is_loaded(layout_file: Path) -> None:
    before = offspring(os.getpid())
    with pytest.raises(ConfigError, match="the tasks need 40,001 tokens, but the model's context is 32,768"):
        measure("speed", Options(str(layout_file), prompt_tokens=40_000))
    assert offspring(os.getpid()) == before


def test_plain_mlx_lm_says_why_it_ended(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"plain mlx-lm cannot run this model here .*config"):
        PlainMlxLm(str(tmp_path), "float32")


def test_plain_mlx_lm_serves_task_after_task(layout_file: Path) -> None:
    """And in a pipeline of its own it has the same tokens as alone."""
    folder, batch = str(layout_file.parent / "model"), Batch(3, 0, tuple(tuple(range(i, i + 9)) for i in range(3)), 6)
    plain = PlainMlxLm(folder, "float32")
    try:
        task = Task("decode", 0, tuple(range(40)), 5)
        one, again, in_chunks = plain.run(task, 2048), plain.run(task, 2048), plain.run(task, 16)
        assert len(one.token_ids) == len(one.token_times) == 5
        assert one.token_ids == again.token_ids == in_chunks.token_ids
        assert one.token_times == tuple(sorted(one.token_times))
        alone = plain.run_batch(batch)
    finally:
        plain.close()
    assert not psutil.pid_exists(plain.pid)
    with MlxLmProcesses(folder, "float32", [1, 3]) as peers:
        split = peers.run_batch(batch)
        pids = peers.pids
    assert split.token_ids == alone.token_ids
    assert [len(times) for times in split.token_times] == [6, 6, 6]
    assert not any(map(psutil.pid_exists, pids))


def test_a_ring_over_machines_is_started_by_ssh(
    layout_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An `ssh` that runs the words here, in the place of one that would take them elsewhere. The prompt is longer than
    a terminal's line."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\necho "$2" >"$0.host"\nexec /bin/sh -c "$3"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with MlxLmProcesses(str(layout_file.parent / "model"), "float32", [1, 3], True, [None, "localhost"]) as peers:
        there = peers.run_batch(Batch(1, 0, (tuple(i % 300 for i in range(1500)),), 3))
    assert (tmp_path / "ssh.host").read_text() == "localhost\n"
    assert len(there.token_ids[0]) == 3
    assert not list(tmp_path.glob("tmp.*"))  # the list of hosts is gone


def test_mlx_lm_says_what_it_cannot_cut(tmp_path: Path) -> None:
    make(tmp_path / "model", Shape("llama", layers=2, hidden=64, heads=4, kv_heads=2, mlp=96, vocab=300))
    with pytest.raises(ModelError, match="its llama has no pipeline"):
        MlxLmProcesses(str(tmp_path / "model"), "float32", [1, 1])


def test_streams_are_a_list() -> None:
    assert _counts("8,16,8") == (8, 16)
    assert _counts("0") == ()
    for wrong in ("", "8,", "-1", "many"):
        with pytest.raises(typer.BadParameter, match="--streams takes numbers"):
            _counts(wrong)


def test_answers_too_short_to_be_measured_are_refused(layout_file: Path) -> None:
    short = ["--streams", "8", "--stream-prompt-tokens", "100", "--stream-tokens", "5", "--no-baseline", "--json"]
    running = start(layout_file, *SIZES, *short)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 1
    assert "give more with --stream-tokens" in err
