"""What `scripts/check_packages` checks without installing anything: versions, names, and what the archives hold."""

import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

_TOP = {"splitinfer", "transports"}  # of the wheel
_NEEDED = (
    "splitinfer/_layouts/demo.yaml",
    "splitinfer/demo/target/model.safetensors",
    "splitinfer/demo/draft/model.safetensors",
    "splitinfer/demo/drafter/model.safetensors",
    "splitinfer/py.typed",
    "splitinfer/server/page/site/index.html",
    "splitinfer/server/page/vendor/preact.js",
)
_MOST = 100e6  # bytes; PyPI takes no larger file


def faults(root: Path, folder: Path, tag: str | None) -> list[str]:
    """A sentence for each thing that keeps the archives in ``folder`` from being released; empty if nothing does."""
    version = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    found = []
    if tag is not None and tag != f"v{version}":
        found.append(f"the tag is {tag}, and the project's version {version}")
    names = {f"splitinfer-{version}-py3-none-any.whl", f"splitinfer-{version}.tar.gz"}
    there = {each.name for each in folder.iterdir()}
    if there != names:
        return [*found, f"{folder} holds {_listed(there)} instead of {_listed(names)}"]
    found += [f"{name} is larger than PyPI takes" for name in sorted(names) if (folder / name).stat().st_size > _MOST]
    wheel, source = (folder / name for name in sorted(names))
    return found + _of_wheel(wheel, version) + _of_source(source, version)


def _of_wheel(path: Path, version: str) -> list[str]:
    with zipfile.ZipFile(path) as file:
        names = set(file.namelist())
    top = {name.partition("/")[0] for name in names}
    surplus = top - _TOP - {f"splitinfer-{version}.dist-info"}
    missing = [name for name in _NEEDED if name not in names]
    found = [f"the wheel holds {_listed(surplus)}, which nobody needs"] if surplus else []
    return found + ([f"the wheel lacks {_listed(missing)}"] if missing else [])


def _of_source(path: Path, version: str) -> list[str]:
    with tarfile.open(path) as file:
        names = set(file.getnames())
    needed = [
        f"splitinfer-{version}/{name}" for name in ("pyproject.toml", "README.md", "LICENSE", "layouts/demo.yaml")
    ]
    missing = [name for name in needed if name not in names]
    return [f"the source archive lacks {_listed(missing)}"] if missing else []


def _listed(names: object) -> str:
    return ", ".join(sorted(names)) or "nothing" if isinstance(names, (set, list)) else str(names)


if __name__ == "__main__":
    complaints = faults(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None)
    for complaint in complaints:
        print(f"check_packages: {complaint}", file=sys.stderr)
    sys.exit(bool(complaints))
