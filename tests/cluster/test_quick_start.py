"""The README's quick start, in a clone whose environment is set up: its commands, as a person types and ends them."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from processes import ROOT, are_gone, until
from terminals import Terminal

COORD = ".venv/bin/splitinfer coord --layout demo.yaml"
ONE_ANSWER = f'{COORD} --prompt "The wolf"'


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its environment is this one, and the script that would install another has nothing to do."""
    folder = tmp_path_factory.mktemp("clone")
    (folder / "scripts").mkdir()
    (folder / ".venv" / "bin").mkdir(parents=True)
    for name in ("scripts/demo", "scripts/_setup", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    stamp = subprocess.run(["cksum", folder / "pyproject.toml"], capture_output=True, text=True, check=True)
    (folder / ".venv" / ".made-for-base").write_text(stamp.stdout.split()[0])
    command = folder / ".venv" / "bin" / "splitinfer"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m splitinfer "$@"\n')
    command.chmod(0o755)
    return folder


def in_readme(command: str) -> str:
    assert any(line.partition(" #")[0].strip() == command for line in (ROOT / "README.md").read_text().splitlines())
    return command


def run(line: str, clone: Path) -> str:
    """What a line of a shell prints."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "SPLITINFER_CUDA": "0"}
    words = ["bash", "-o", "pipefail", "-c", line]
    done = subprocess.run(words, cwd=clone, env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def test_the_demo_tells_a_tale(clone: Path):
    assert len(run(in_readme("scripts/demo"), clone)) > 100


def test_one_answer_whose_reader_has_read_enough(clone: Path):
    """As it stands there it tells a long tale; a pipe that is closed ends it without a word."""
    assert len(run(f"{in_readme(ONE_ANSWER)} | head -c 60", clone)) == 60


@pytest.mark.nightly
def test_one_answer_with_token_ids_times_and_statistics(clone: Path):
    said = json.loads(run(f"{in_readme(f'{ONE_ANSWER} --json')} --max-tokens 40 --temp 0", clone))
    assert len(said["text"]) > 50
    assert len(said["token_ids"]) == 40
    assert {"ttft_seconds", "stats"} <= said.keys()


def test_a_chat_that_two_signals_end_within_an_answer(clone: Path, monkeypatch: pytest.MonkeyPatch):
    """The first one lets the answer go on for a while, and the second one does not; the terminal is as it was."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = str(clone / in_readme(COORD).partition(" ")[0])
    terminal = Terminal(command, *COORD.split()[1:], home=clone)
    try:
        terminal.until("/help lists the commands.\n")
        terminal.until(">")
        assert not terminal.is_as_before()
        terminal.type("Tell me a tale\r")
        terminal.until(lambda text: len(text) > 100)
        workers = psutil.Process(terminal.process.pid).children()
        assert len(workers) == 1
        terminal.process.send_signal(signal.SIGTERM)
        terminal.until(lambda text: len(text) > 20)
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.end() == 143
        assert terminal.is_as_before()
        until(lambda: are_gone(workers), "its worker is gone")
    finally:
        terminal.close()
