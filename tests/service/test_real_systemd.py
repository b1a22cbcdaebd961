"""Units that a user's systemd really starts. Where there is none, `tests/service/user_instance` makes one."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import until

from splitinfer.errors import ConfigError
from splitinfer.service import systemd
from splitinfer.service.actions import install, remove, status
from splitinfer.service.definition import Definition, ServicePlace
from splitinfer.service.systemd import Systemd
from splitinfer.system.command import run

pytestmark = pytest.mark.nightly


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServicePlace]:
    answer = run(("systemctl", "--user", "show-environment"))
    if answer.code != 0:
        pytest.skip(f"no systemd runs for this user: {answer.why}")
    monkeypatch.setattr(systemd, "UNIT", f"splitinfer-test-{os.getpid()}.service")
    volatile = {"XDG_CONFIG_HOME": os.environ["XDG_RUNTIME_DIR"]}  # systemd looks for units there, too
    made = ServicePlace("linux", tmp_path, os.geteuid(), volatile)
    yield made
    remove(Systemd(made))


def program(folder: Path, does: str) -> str:
    """A program whose path and words systemd must not change."""
    path = folder / "a b%h$HOME"
    path.write_text(f'#!/bin/sh\necho "$1" >"{folder}/words"\n{does}\n')
    path.chmod(0o755)
    return str(path)


def test_a_unit_is_started_kept_running_replaced_and_removed(place: ServicePlace, tmp_path: Path):
    manager = Systemd(place)
    first = Definition(
        (program(tmp_path, "echo it is up; exec sleep 1000"), 'we ird %h $HOME "q" \\ ü'), {"HF_HOME": "/a %b"}
    )
    assert install(first, manager, place, force=False)
    until(lambda: any(line.endswith("it is up") for line in manager.last_lines()), "in the journal")
    assert (tmp_path / "words").read_text() == 'we ird %h $HOME "q" \\ ü\n'
    pid = manager.state().pid
    assert b"HF_HOME=/a %b\0" in Path(f"/proc/{pid}/environ").read_bytes()
    assert not install(first, manager, place, force=False)

    os.kill(pid, signal.SIGKILL)
    until(lambda: manager.state().pid not in (None, pid), "started again")
    assert manager.state().starts == 2

    other = Definition((*first.command, "--more"))
    with pytest.raises(ConfigError, match="--more`; nothing was done"):
        install(other, manager, place, force=False)
    failing = Definition(("/bin/sh", "-c", "exit 3"))
    with pytest.raises(ConfigError, match=r"ended at once \(exit code 3\)|did not start .* exited with error code"):
        install(failing, manager, place, force=True)
    state, is_installed, _ = status(manager, place)
    assert (state.is_running, is_installed, manager.read(manager.file.read_bytes())) == (True, True, first)

    assert remove(manager)
    assert not manager.state().is_loaded
    assert not manager.file.exists()
