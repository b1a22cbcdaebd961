"""`splitinfer bench` as a process, on a tiny model: a table, one JSON line, and nobody left behind."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from splitinfer.bench.shared.mlx_lm import MlxLmProcesses, PlainMlxLm
from splitinfer.bench.shared.random_model import Shape, make
from splitinfer.bench.shared.workload import Batch, Task
from splitinfer.errors import ModelError

SIZES = (
    "--trials", "1", "--prompt-tokens", "200", "--decode-tokens", "6", "--token-budget", "64",
    "--streams", "3", "--stream-prompt-tokens", "16", "--stream-tokens", "20",
)  # fmt: skip


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


@pytest.mark.nightly
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
    assert any("decode, tokens/s" in line for line in lines[:-1])
    assert {"pipeline", "baseline", "whole"} <= set(found["systems"])
    for name in ("pipeline", "baseline", "whole"):
        figures = found["systems"][name]
        assert figures["decode"]["tokens_per_second"]["low"] > 0
        assert figures["prefill"]["ttft_seconds"]["low"] > 0
    ours = found["systems"]["pipeline"]
    assert ours["decode"]["bytes_per_token"]["median"] == 64 * 4  # one float32 row crosses one link
    assert ours["prefill"]["bytes_per_token"]["median"] == 64 * 4
    assert {"pipeline/baseline", "pipeline/whole", "whole/baseline"} <= set(found["ratios"])
    widths = {"pipeline": 6, "mlx_lm_pipeline": 6, "baseline": 3, "whole": 3, "baseline_all_processors": 3}
    found["systems"].pop("baseline_best", None)  # reads prompts only, and only where that was faster once
    assert {n: each["throughput"]["3"]["sequences"] for n, each in found["systems"].items()} == widths
    together = ours["throughput"]["3"]
    assert together["tokens_per_second"]["low"] > 0
    assert 1 <= together["limit"]["ratio"]["low"] <= together["limit"]["ratio"]["high"] <= 2
    assert 0 < together["goodput_duty_percent"]["back"]["low"] <= together["duty_percent"]["back"]["high"] <= 100.001
    if sys.platform == "linux":
        peers = {"mlx_lm_pipeline 0", "mlx_lm_pipeline 1"}
        assert set(found["measured_on"]["pinned"]) == {"front", "back", "baseline"} | peers


def test_json_alone_without_baseline_over_slow_links_between_all_stages(layout_file: Path) -> None:
    thirds = layout_file.with_name("thirds.yaml")
    stages = [{"name": "a", "layers": 2}, *({"name": n, "layers": 1, "address": "local"} for n in "bc")]
    thirds.write_text(yaml.safe_dump({"model": str(layout_file.parent / "model"), "stages": stages}))
    running = start(thirds, *SIZES, "--streams", "0", "--no-baseline", "--json", "--link-preset", "wifi")
    out, err = running.communicate(timeout=60)
    assert running.returncode == 0, err
    found = json.loads(out)  # one document is all there is
    assert list(found["systems"]) == ["pipeline"]
    assert any("fewer than 3 trials" in note for note in found["notes"])
    latency = 1000 * found["measured_on"]["link"]["latency"]
    hops = found["systems"]["pipeline"]["decode"]["ms_per_token_by_cause"]["hops"]["low"]
    assert hops >= 3 * latency > 0  # to the second stage, to the third, the token back


@pytest.mark.nightly
def test_plain_mlx_lm_says_why_it_ended(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"plain mlx-lm cannot run this model here .*config"):
        PlainMlxLm(str(tmp_path), "float32")


@pytest.mark.nightly
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


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_mlx_lm_says_what_it_cannot_cut(tmp_path: Path) -> None:
    make(tmp_path / "model", Shape("llama", layers=2, hidden=64, heads=4, kv_heads=2, mlp=96, vocab=300))
    with pytest.raises(ModelError, match="its llama has no pipeline"):
        MlxLmProcesses(str(tmp_path / "model"), "float32", [1, 1])
