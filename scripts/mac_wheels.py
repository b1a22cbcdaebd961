"""What `scripts/mac_wheels` does: uv resolves `pyproject.toml` for another system than this, with its markers."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from itertools import product
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_MACOS, _PYTHONS = ("14", "15", "26"), ("3.11", "3.12", "3.13", "3.14")
_LEFT_OUT = "nightly"  # an extra for this project's own tests; yattag comes as source only
_EXTRAS = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
_LACKS = re.compile(r"(?:Because|that) (?:all versions of )?([a-z0-9.-]+).{0,80}? ha(?:s|ve) no (?:usable )?wheels")


def lacking(macos: str, python: str) -> str:
    """Return a package that has no wheel for Apple silicon with these versions, of those that the program and its
    extras need; "" if there is none.

    Raises:
        SystemExit: uv could not resolve it for another reason, such as a network that fails.
    """
    done = subprocess.run(
        [
            *(sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--only-binary", ":all:"),
            *("--python-platform", "aarch64-apple-darwin", "--python-version", python),
            *(f"--extra={extra}" for extra in _EXTRAS if extra != _LEFT_OUT),
            "pyproject.toml",
        ],
        env={**os.environ, "MACOSX_DEPLOYMENT_TARGET": f"{macos}.0"},
        cwd=_ROOT,
        capture_output=True,
        text=True,
    )
    found = _LACKS.search(" ".join(done.stderr.split()))
    if done.returncode and found is None:
        raise SystemExit(f"mac_wheels: macOS {macos}, Python {python}: {done.stderr}")
    return "" if found is None else found[1]


def table(macos: Sequence[str] = _MACOS) -> str:
    """Return a table of Markdown: for each version of Python and macOS what has no wheel."""
    found = {each: lacking(*each) for each in product(macos, _PYTHONS)}
    rows = [["Python", *(f"macOS {each}" for each in macos)], ["---"] * (1 + len(macos))]
    for python in _PYTHONS:
        rows.append([python, *(f"no {name}" if (name := found[each, python]) else "all" for each in macos)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows).replace(" --- ", "---")


if __name__ == "__main__":
    print(table(sys.argv[1:] or _MACOS), end="")
