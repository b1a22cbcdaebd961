"""The campaigns start from a clone as they are, with nothing in the environment; and what ``scripts/_setup`` installs
for an NVIDIA card."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NEEDS_MORE = ("browser", "drive", "looking", "prometheus")  # a browser, Prometheus, a command to run
SCRIPTS = sorted(
    path.relative_to(ROOT)
    for path in (ROOT / "tests" / "campaigns").glob("*.py")
    if path.stem not in NEEDS_MORE and '__name__ == "__main__"' in path.read_text(encoding="utf-8")
)

# One process for all, which loads the libraries once; before each script it forgets where the last one searched.
_START = """
import runpy, sys
from pathlib import Path
scripts, root = sys.argv[1:], Path.cwd()
before = sys.path[1:]
for script in scripts:
    sys.path[:] = [str(root), *(each for each in before if each not in ("", str(root)))]
    for name, module in [*sys.modules.items()]:
        if str(root / "tests") in (getattr(module, "__file__", None) or ""):
            del sys.modules[name]
    sys.argv[:] = [script, "--help"]
    try:
        runpy.run_module(script.removesuffix(".py").replace("/", "."), run_name="__main__")
    except SystemExit as ending:
        print(f"{script} {ending.code}", file=sys.stderr)
"""


@pytest.mark.nightly
def test_they_start_without_a_search_path(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    command = [sys.executable, "-c", _START, *map(str, SCRIPTS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stderr.splitlines()) == [f"{script} 0" for script in SCRIPTS]


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
        "-m splitinfer.probes.on_gpu --parts send",
    ]
    assert called(clone) == ["-m splitinfer.probes.on_gpu"]


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
    assert last[-1] == "-m splitinfer.probes.on_gpu --on gpu --parts send 1 CLONE/wheels"


@pytest.mark.nightly
def test_a_test_that_is_named_runs_whatever_its_tier():
    name = "tests/test_docs.py::test_the_front_page_s_commands_run"  # nightly
    command = [sys.executable, "-m", "pytest", "-n0", "--collect-only", "-q", name]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, "test_docs.py: 2" in done.stdout) == (0, True), done.stdout + done.stderr
