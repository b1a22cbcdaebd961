"""The scripts among the tests start from a clone as they are: by file or by module, with nothing in the environment."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted(
    path.relative_to(ROOT)
    for path in (ROOT / "tests" / "fuzz.py", *(ROOT / "tests" / "cluster").glob("*.py"))
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
)

# One process for all, which loads the libraries once; before each script it forgets where the last one searched.
_START = """
import runpy, sys
from pathlib import Path
scripts, root = sys.argv[1:], Path.cwd()
before = sys.path[1:]
for script in scripts:
    for how, first in (("file", root / Path(script).parent), ("module", root)):
        sys.path[:] = [str(first), *(each for each in before if each not in ("", str(root)))]
        for name, module in [*sys.modules.items()]:
            if str(root / "tests") in (getattr(module, "__file__", None) or ""):
                del sys.modules[name]
        sys.argv[:] = [script, "--help"]
        try:
            if how == "file":
                runpy.run_path(script, run_name="__main__")
            else:
                runpy.run_module(script.removesuffix(".py").replace("/", "."), run_name="__main__")
        except SystemExit as ending:
            print(f"{how} {script} {ending.code}", file=sys.stderr)
"""


def test_there_are_scripts():
    assert {"campaign", "fuzz", "kv_kills", "storm"} <= {path.stem for path in SCRIPTS}


def test_they_start_without_a_search_path(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    command = [sys.executable, "-c", _START, *map(str, SCRIPTS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    expected = [f"{how} {script} 0" for script in SCRIPTS for how in ("file", "module")]
    assert sorted(done.stderr.splitlines()) == sorted(expected)
