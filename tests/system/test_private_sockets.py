"""Sockets of a user's processes: private, found by their number, removed when nobody listens any more."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from splitinfer.system import private_sockets
from splitinfer.system.private_sockets import PrivateListener, listening

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("length", [1, 150], ids=["as it is", "too long for a socket"])
def test_only_the_owner_can_enter(tmp_path: Path, length: int):
    folder = tmp_path / ("f" * length)
    folder.mkdir(mode=0o755)
    listener = PrivateListener(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    target = (folder / str(os.getpid())).resolve()
    assert stat.S_IMODE(target.parent.stat().st_mode) == 0o700
    (number, connection), *more = listening(folder).items()
    assert (number, more) == (os.getpid(), [])
    accepted = listener.accept()
    assert accepted is not None
    connection.sendall(b"?")
    assert accepted.recv(1) == b"?"
    connection.close()
    accepted.close()
    listener.wake()
    assert listener.accept() is None
    listener.close()
    assert list(folder.iterdir()) == []
    assert not target.exists()
    assert listening(folder) == {}


def test_what_a_killed_process_leaves_is_removed_but_not_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    code = (
        "import sys, os; from pathlib import Path; from splitinfer.system.private_sockets import PrivateListener;"
        "listener = PrivateListener(Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    )
    folder = tmp_path / "f"
    subprocess.run([sys.executable, "-c", code, str(folder)], cwd=ROOT, check=False, timeout=60)
    (left,) = folder.iterdir()
    (folder / "no number").touch()
    assert listening(folder) == {}
    assert left.is_socket() or left.is_symlink(), "a new one may be about to listen"
    monkeypatch.setattr(private_sockets, "_YOUNG", -60.0)
    assert listening(folder) == {}
    assert [each.name for each in folder.iterdir()] == ["no number"]
