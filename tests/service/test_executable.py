"""Which program a service starts."""

import sys
from pathlib import Path

import pytest

from splitinfer.errors import ConfigError
from splitinfer.service import definition
from splitinfer.service.definition import find_executable, stable


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh")
    path.chmod(0o755)
    return path


def test_a_shim_is_written_down_as_it_is(tmp_path: Path):
    shim = tmp_path / ".local" / "bin" / "splitinfer"
    shim.parent.mkdir(parents=True)
    shim.symlink_to(program(tmp_path / ".local" / "share" / "uv" / "tools" / "splitinfer" / "bin" / "splitinfer"))
    assert stable(shim, ()) == shim


@pytest.mark.parametrize(
    "folder",
    [".cache/uv/archive-v0/Xy/bin", "Library/Caches/uv/bin", ".local/pipx/.cache/4f/bin", "uv/archive-v0/X/bin"],
)
def test_what_lies_in_a_cache_is_refused(folder: str, tmp_path: Path):
    path = program(tmp_path / folder / "splitinfer")
    with pytest.raises(ConfigError, match="may be emptied any time"):
        stable(path, ())
    link = tmp_path / "splitinfer"
    link.symlink_to(path)
    with pytest.raises(ConfigError, match="uv tool install"):
        stable(link, ())


def test_the_command_that_runs_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(definition, "temporary_folders", tuple)
    shim = program(tmp_path / "bin" / "splitinfer")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("PATH", str(shim.parent))
    for called in (str(shim), "splitinfer"):
        monkeypatch.setattr(sys, "argv", [called])
        assert find_executable() == str(shim)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "splitinfer" / "__main__.py")])
    with pytest.raises(ConfigError, match="no installed command"):
        find_executable()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert find_executable() == str(shim)
