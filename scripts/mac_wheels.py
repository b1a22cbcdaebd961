"""What `scripts/mac_wheels` does: uv resolves `pyproject.toml` for another system than this, with that system's markers."""

import os
import re
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_MACOS, _PYTHONS = ("14", "15", "26"), ("3.11", "3.12", "3.13", "3.14")
_LACKS = re.compile(r"(?:Because|that) (?:all versions of )?([a-z0-9.-]+).{0,80}? ha(?:s|ve) no (?:usable )?wheels")


def lacking(macos: str, python: str, extra: str) -> str:
    """Return the package without a wheel that keeps ``extra``, or the program itself for "", from being installed there;
    "" if nothing does.

    Raises:
        SystemExit: uv could not resolve it for another reason, such as a network that fails.
    """
    done = subprocess.run(
        [
            *(sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--only-binary", ":all:"),
            *("--python-platform", "aarch64-apple-darwin", "--python-version", python),
            *(("--extra", extra) if extra else ()),
            "pyproject.toml",
        ],
        env={**os.environ, "MACOSX_DEPLOYMENT_TARGET": f"{macos}.0"},
        cwd=_ROOT,
        capture_output=True,
        text=True,
    )
    found = _LACKS.search(" ".join(done.stderr.split()))
    if done.returncode and found is None:
        raise SystemExit(f"mac_wheels: macOS {macos}, Python {python}, {extra or 'no extra'}: {done.stderr}")
    return "" if found is None else found[1]


def table(macos: tuple[str, ...]) -> str:
    """Return a table of Markdown: for each version of Python and macOS what has no wheel."""
    extras = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    asked = list(product(_PYTHONS, macos, ("", *extras)))
    with ThreadPoolExecutor(4) as pool:
        found = dict(zip(asked, pool.map(lambda each: lacking(each[1], each[0], each[2]), asked), strict=True))
    rows = [["Python", *(f"macOS {each}" for each in macos)], ["---"] * (1 + len(macos))]
    for python in _PYTHONS:
        cells = [
            ", ".join(f"no {name} (`{extra}`)" if extra else f"no {name}" for extra in ("", *extras)
                      if (name := found[python, version, extra]))
            for version in macos
        ]  # fmt: skip
        rows.append([python, *(cell or "all" for cell in cells)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


if __name__ == "__main__":
    print(table(tuple(sys.argv[1:]) or _MACOS), end="")
