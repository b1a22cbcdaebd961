"""mlx-lm in several processes of its own, on a tiny model."""

from contextlib import closing
from pathlib import Path

import psutil
import pytest
from random_model import Shape, make

from scripts.comparing.peers import processes
from splitinfer.bench.mlx_lm import alone
from splitinfer.errors import ModelError


@pytest.mark.nightly
def test_a_model_that_mlx_lm_cannot_cut_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "model", Shape("llama", layers=2, hidden=64, heads=4, kv_heads=2, mlp=96, vocab=300))
    with pytest.raises(ModelError, match="its llama has no pipeline"):
        processes(str(tmp_path / "model"), "float32", [1, 1])


@pytest.mark.nightly
def test_mlx_lms_own_pipeline_has_the_tokens_of_one_process(layout_file: Path) -> None:
    folder, prompts = str(layout_file.parent / "model"), [list(range(i, i + 9)) for i in range(3)]
    with closing(alone(folder, "float32")) as plain:
        together = plain.run_batch(prompts, 6)
    with processes(folder, "float32", [1, 3]) as peers:
        split = peers.run_batch(prompts, 6)
        pids = peers.pids
    assert [run.token_ids for run in split] == [run.token_ids for run in together]
    assert [len(run.token_times) for run in split] == [6, 6, 6]
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
    with processes(str(layout_file.parent / "model"), "float32", [1, 3], True, [None, "localhost"]) as peers:
        there = peers.run_batch([[i % 300 for i in range(1500)]], 3)
    assert (tmp_path / "ssh.host").read_text() == "localhost\n"
    assert len(there[0].token_ids) == 3
    assert not list(tmp_path.glob("tmp.*"))  # the list of hosts is gone
