"""What is released: the checks of the wheel and the source archive."""

import tarfile
import zipfile
from pathlib import Path

import mac_wheels
import packages
import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """A project of version 1.2.3, and a folder with what is to be released of it."""
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
    (tmp_path / "dist").mkdir()
    wheel(tmp_path)
    with tarfile.open(tmp_path / "dist" / "splitinfer-1.2.3.tar.gz", "w:gz") as file:
        for name in ("pyproject.toml", "README.md", "LICENSE", "layouts/demo.yaml"):
            file.addfile(tarfile.TarInfo(f"splitinfer-1.2.3/{name}"))
    return tmp_path


def wheel(folder: Path, *more: str, without: str = "") -> None:
    names = {*packages._NEEDED, "transports/__init__.py", "splitinfer-1.2.3.dist-info/METADATA", *more} - {without}
    with zipfile.ZipFile(folder / "dist" / "splitinfer-1.2.3-py3-none-any.whl", "w") as file:
        for name in sorted(names):
            file.writestr(name, "")


def faults(folder: Path, tag: str | None = None) -> list[str]:
    return packages.faults(folder, folder / "dist", tag)


def test_sound_packages_have_no_fault(release: Path):
    assert faults(release) == faults(release, "v1.2.3") == []


def test_another_version_is_not_released(release: Path):
    assert faults(release, "v1.2.4") == ["the tag is v1.2.4, and the project's version 1.2.3"]
    (release / "pyproject.toml").write_text('[project]\nversion = "1.2.4"\n')
    assert [fault.partition(" holds ")[1] for fault in faults(release)] == [" holds "]


def test_a_wheel_holds_what_is_needed_and_no_more(release: Path):
    wheel(release, "tests/test_x.py", "scripts/test")
    assert faults(release) == ["the wheel holds scripts, tests, which nobody needs"]
    wheel(release, without="splitinfer/_layouts/demo.yaml")
    assert faults(release) == ["the wheel lacks splitinfer/_layouts/demo.yaml"]


def test_what_a_wheel_needs_is_in_the_project():
    sources = [
        Path("layouts", name.rpartition("/")[2]) if "_layouts" in name else Path(name) for name in packages._NEEDED
    ]
    assert [str(path) for path in sources if not (ROOT / path).is_file()] == []


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_every_mac_gets_wheels():
    """As the page says, for each version of macOS and Python; one that is missing is named."""
    assert mac_wheels.table() in (ROOT / "docs" / "start" / "install.md").read_text()
    assert mac_wheels.lacking("13", "3.13") == "mlx"
