"""A campaign ends as it says, the film of the front page can be made, ``scripts/_setup`` installs what an NVIDIA card
needs, and the faults that ``--all`` plants are of this program.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.planted import wrong
from tests.planted_faults import FAULTS

ROOT = Path(__file__).resolve().parents[1]


def run(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)


def test_every_fault_can_be_planted():
    assert not wrong(FAULTS)


@pytest.mark.nightly
def test_a_campaign_that_finds_something_wrong_ends_with_1_and_one_document(tmp_path: Path):
    out = tmp_path / "found.json"
    done = run("-m", "tests.campaigns", "deaths", "--trial", "one", "--seed", "7", "--out", str(out))
    document = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, document["campaign"], document["seed"]) == (1, "deaths", 7), done.stdout + done.stderr
    assert document["num_troubles"] == len(document["troubles"]) == 1
    assert json.loads(out.read_text()) == document


@pytest.mark.nightly
def test_the_front_page_s_film_can_be_made(tmp_path: Path):
    out = tmp_path / "film.svg"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    done = run("scripts/filming.py", "--out", str(out), "--port", str(port))
    assert done.returncode == 0, done.stderr
    assert all(
        text in out.read_text() for text in ("is gone", "all stages are back", "the worker is killed", "token limit")
    )


# ----- scripts/_setup ------------------------------------------------------------------------------

_PYTHON = """#!/bin/sh
case $1 in
-c) echo 0.99.1 ;;
*) echo "$@ $PIP_NO_INDEX $PIP_FIND_LINKS" >>"$CALLS" ;;
esac
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The scripts of a clone whose interpreter only notes what it is asked, on a Linux with an NVIDIA card."""
    (tmp_path / "scripts").mkdir()
    for name in ("_setup", "on_gpu"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    (tmp_path / "pyproject.toml").write_text("[project]")
    programs = {".venv/bin/python": _PYTHON, "bin/nvidia-smi": "#!/bin/sh", "bin/uname": "#!/bin/sh\necho Linux"}
    for place, text in programs.items():
        path = tmp_path / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return tmp_path


def called(clone: Path, *words: str, **environment: str) -> list[str]:
    """What the interpreter of ``clone`` is asked by ``scripts/on_gpu`` with these words."""
    calls, before = clone / "calls", dict(os.environ)
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "SPLITINFER_CUDA"):
        before.pop(name, None)
    path = f"{clone / 'bin'}:{before['PATH']}"
    command = ["bash", str(clone / "scripts" / "on_gpu"), *words]
    subprocess.run(
        command, env={**before, **environment, "PATH": path, "CALLS": str(calls)}, cwd=clone, capture_output=True,
        check=True, timeout=60,
    )  # fmt: skip
    found = calls.read_text().splitlines()
    calls.unlink()
    return [line.replace(str(clone), "CLONE").strip() for line in found]


def test_an_nvidia_card_gets_cudas_library_last_and_once(clone: Path):
    first = called(clone, "--parts", "send")
    assert first == [
        "-m pip install -qq --no-compile --editable CLONE[cuda]",
        "-m pip install -qq --no-compile --force-reinstall --no-deps mlx-cuda-13==0.99.1",
        "-m gpu_figures --parts send",
    ]
    assert called(clone) == ["-m gpu_figures"]


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a card")
def test_without_a_card_or_where_it_is_left_out_there_is_no_cuda(clone: Path):
    assert called(clone, SPLITINFER_CUDA="0")[:-1] == ["-m pip install -qq --no-compile --editable CLONE"]
    (clone / ".venv" / ".made-for-base").unlink()
    (clone / "bin" / "nvidia-smi").unlink()
    assert called(clone)[:-1] == ["-m pip install -qq --no-compile --editable CLONE"]


@pytest.mark.parametrize("words", [["--find-links", "wheels"], ["--find-links=wheels"]])
def test_wheels_in_a_folder_need_no_network(words: list[str], clone: Path):
    (clone / "wheels").mkdir()
    last = called(clone, "--on", "gpu", *words, "--parts", "send")
    assert last[0] == "-m pip install -qq --no-compile --editable CLONE[cuda] 1 CLONE/wheels"
    assert last[-1] == "-m gpu_figures --on gpu --parts send 1 CLONE/wheels"
