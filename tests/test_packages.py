"""What is released: the checks of the wheel and the source archive, and the formula that is made of a lock."""

import hashlib
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import packages
import pytest
from formula.lock import Archive, LockError, read_lock
from formula.ruby import OF_HOMEBREW, Release, formula

ROOT = Path(__file__).parents[1]

# As `uv pip compile --format pylock.toml` writes it, shortened, with another host.
LOCK = """\
lock-version = "1.0"
created-by = "uv"
requires-python = ">=3.14"

[[packages]]
name = "mlx"
version = "0.32.4"
marker = "sys_platform == 'darwin'"
wheels = [{ url = "https://files.example.org/mlx-0.32.4-cp314-cp314-macosx_14_0_arm64.whl", size = 643551, hashes = { sha256 = "00" } }]

[[packages]]
name = "pyzmq"
version = "27.3.0"
sdist = { url = "https://files.example.org/pyzmq-27.3.0.tar.gz", upload-time = 2026-10-02T08:12:01Z, size = 281, hashes = { sha256 = "AA" } }
wheels = [{ url = "https://files.example.org/pyzmq-27.3.0-cp314-cp314-macosx_10_15_universal2.whl", size = 134, hashes = { sha256 = "BB" } }]

[[packages]]
name = "annotated-doc"
version = "0.0.7"
sdist = { url = "https://files.example.org/annotated_doc-0.0.7.tar.gz", size = 10764, hashes = { sha256 = "CC" } }
""".replace("AA", "a" * 64).replace("BB", "b" * 64).replace("CC", "c" * 64)  # fmt: skip  # noqa: E501

PYZMQ = Archive("pyzmq", "27.3.0", "https://files.example.org/pyzmq-27.3.0.tar.gz", "a" * 64)


# ----- the lock ------------------------------------------------------------------------------------


def test_a_lock_gives_source_archives_by_name():
    found = read_lock(LOCK, without=frozenset(OF_HOMEBREW))
    assert [each.name for each in found] == ["annotated-doc", "pyzmq"]
    assert found[1] == PYZMQ


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("requests==2.32", "no TOML"),
        (LOCK.replace('"mlx"', '"other"'), "other has no sdist in the lock"),
        (LOCK.replace("sha256", "md5"), "pyzmq has no sha256 in the lock"),
    ],
)
def test_a_lock_that_is_of_no_use_is_one_sentence(text: str, said: str):
    with pytest.raises(LockError, match=said):
        read_lock(text, frozenset(OF_HOMEBREW))


# ----- the formula ---------------------------------------------------------------------------------


def made() -> str:
    release = Release(
        "https://example.org/#home", Archive("splitinfer", "1.2.3", "https://example.org/x.tar.gz", "d" * 64)
    )
    return formula(release, read_lock(LOCK, frozenset(OF_HOMEBREW)))


def test_a_formula_names_the_release_and_every_archive():
    text = made()
    assert re.findall(r'^  (?:url|sha256) "(.+)"', text, re.MULTILINE) == ["https://example.org/x.tar.gz", "d" * 64]
    assert re.findall(r'resource "(.+)" do\n    url "(.+)"\n    sha256 "(.+)"\n  end', text) == [
        ("annotated-doc", "https://files.example.org/annotated_doc-0.0.7.tar.gz", "c" * 64),
        (PYZMQ.name, PYZMQ.url, PYZMQ.sha256),
    ]
    assert 'homepage "https://example.org/\\#home"' in text  # else an expression of Ruby's could begin there


def test_the_script_writes_a_formula_or_one_sentence(tmp_path: Path):
    (tmp_path / "pylock.toml").write_text(LOCK)
    sdist = tmp_path / "splitinfer-1.2.3.tar.gz"
    sdist.write_bytes(b"an archive")
    command = [
        ROOT / "scripts" / "make_formula", "--lock", tmp_path / "pylock.toml", "--url", "https://example.org/x",
        "--homepage", "https://example.org", "--sdist",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run([*command, sdist], capture_output=True, text=True, check=False, env=environment, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert hashlib.sha256(b"an archive").hexdigest() in done.stdout
    assert 'assert_match "splitinfer 1.2.3"' in done.stdout
    done = subprocess.run(
        [*command, tmp_path / "pylock.toml"], capture_output=True, text=True, check=False, env=environment, timeout=60
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "make_formula: pylock.toml is no source archive of splitinfer\n"


# ----- the archives --------------------------------------------------------------------------------


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
