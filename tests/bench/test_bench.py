"""`splitinfer bench` as a process, on a tiny model: a table, one JSON line, and nobody left behind."""

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from splitinfer.bench.mlx_lm import alone
from splitinfer.errors import ModelError

SIZES = ("--trials", "2", "--prompt-tokens", "120", "--decode-tokens", "10", "--streams", "2")


def test_a_table_then_one_json_document(layout_file: Path) -> None:
    command = [sys.executable, "-m", "splitinfer", "bench", "--layout", str(layout_file), *SIZES]
    family, said = dict[int, psutil.Process](), list[str]()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as running:
        for line in running.stderr:
            said.append(line)
            if line.startswith("trial"):
                family |= {child.pid: child for child in psutil.Process(running.pid).children(recursive=True)}
        lines = running.stdout.read().splitlines()
    assert running.returncode == 0, "".join(said)
    assert len(family) == 2  # the worker and plain mlx-lm
    assert not any(child.is_running() for child in family.values())

    found = json.loads(lines[-1])
    assert any("one stream, tokens/s" in line for line in lines[:-1])
    ours, theirs = found["systems"]["splitinfer"], found["systems"]["mlx-lm on one machine"]
    parts = ["stream", "streams_2", "prompt_120", "turn"]
    assert list(ours) == list(theirs) == list(found["ratios"]) == parts
    for name in parts:
        assert len(ours[name]["values"]) == 2
        assert ours[name]["low"] > 0
        assert found["ratios"][name]["values"][1] == pytest.approx(ours[name]["values"][1] / theirs[name]["values"][1])
    for name in parts[:3]:
        assert ours[name]["limit"] > 0
    assert "tokens of KV were kept" in ours["turn"]["said"]
    assert found["same_tokens"]["stream"]["of"] == 2
    assert "the layout has no draft" in found["notes"]


@pytest.mark.nightly
def test_plain_mlx_lm_says_why_it_ended(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"plain mlx-lm cannot run this model here .*config"):
        alone(str(tmp_path), "float32")


@pytest.mark.nightly
def test_plain_mlx_lm_serves_task_after_task(layout_file: Path) -> None:
    folder, prompts = str(layout_file.parent / "model"), [list(range(i, i + 9)) for i in range(3)]
    with closing(alone(folder, "float32")) as plain:
        one, again = plain.run(range(40), 5), plain.run(range(40), 5)
        assert len(one.token_ids) == len(one.token_times) == 5
        assert one.token_ids == again.token_ids
        assert one.token_times == tuple(sorted(one.token_times))
        together = plain.run_batch(prompts, 6)
    assert [len(run.token_times) for run in together] == [6, 6, 6]
    assert not psutil.pid_exists(plain._child.pid)
