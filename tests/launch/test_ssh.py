"""How ssh is run: with a stand-in for the program, which writes down what it was given."""

import shlex
import stat
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from splitinfer.launch.hosts import Host
from splitinfer.launch.ssh import OWN_FAILURE, Ssh, script

MINI = Host("mini", "eve@mini.local")


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Writes its words to ``said``, answers what it reads, and does what ``does`` holds."""
    path = tmp_path / "ssh"
    does = shlex.quote(str(tmp_path / "does"))
    said = shlex.quote(str(tmp_path / "said"))
    path.write_text(f'#!/bin/sh\necho "$@" >> {said}\n[ -f {does} ] && . {does}\nexec cat\n')
    path.chmod(0o755)
    return path


def test_nothing_is_asked_accepted_or_lent(program: Path, tmp_path: Path):
    with closing(Ssh([str(program)])) as ssh:
        ended = ssh.run(MINI, "main\n")
    assert (ended.code, ended.output, ended.complaint) == (0, "main\n", "")
    line, last = (tmp_path / "said").read_text().splitlines()
    for option in (
        "BatchMode=yes",
        "StrictHostKeyChecking=yes",
        "ClearAllForwardings=yes",
        "RemoteCommand=none",
        "-a -x",
    ):
        assert option in line
    assert line.endswith("-- eve@mini.local /bin/sh -s")
    assert last.endswith("-O exit -- eve@mini.local")


def test_the_control_socket_is_the_users_alone_and_short(program: Path, tmp_path: Path):
    with closing(Ssh([str(program)])) as ssh:
        ssh.run(MINI, "")
        line = (tmp_path / "said").read_text()
        path = Path(line.partition("ControlPath=")[2].split()[0])
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert len(str(path.parent)) + 1 + 40 + 17 < 104  # %C is 40 digits, and ssh adds 17 characters for a moment
    assert not path.parent.exists()


@pytest.mark.parametrize(("does", "code"), [("exit 255", OWN_FAILURE), ("exit 3", 3), ("kill -9 $$", OWN_FAILURE)])
def test_how_it_ends(program: Path, tmp_path: Path, does: str, code: int):
    (tmp_path / "does").write_text(f"echo out; echo err >&2; {does}\n")
    with closing(Ssh([str(program)])) as ssh:
        ended = ssh.run(MINI, "")
        (tmp_path / "does").unlink()
    assert (ended.code, ended.output, ended.complaint) == (code, "out\n", "err\n")


def test_what_does_not_end_or_is_not_there_is_a_failure_of_ssh(program: Path, tmp_path: Path):
    (tmp_path / "does").write_text("exec sleep 600\n")
    with closing(Ssh([str(program)])) as ssh:
        ended = ssh.run(MINI, "", seconds=0.3)
        (tmp_path / "does").unlink()
    assert (ended.code, ended.complaint[:9]) == (OWN_FAILURE, "no answer")
    with closing(Ssh([str(tmp_path / "none")])) as ssh:
        assert ssh.run(MINI, "").code == OWN_FAILURE
        assert ssh.hostname(MINI) == "mini.local"


def test_where_an_alias_leads(program: Path, tmp_path: Path):
    (tmp_path / "does").write_text("printf 'user eve\\nhostname 10.0.0.7\\nport 22\\n'; exit 0\n")
    with closing(Ssh([str(program)])) as ssh:
        assert ssh.hostname(MINI) == "10.0.0.7"
    assert "-G -- eve@mini.local" in (tmp_path / "said").read_text()


# ----- what is run there ---------------------------------------------------------------------------

WORDS = ("--by", 'eve\'s "Mac" $HOME `reboot` \\', "*")


def install(path: Path) -> None:
    """A program that prints how it was called."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('#!/bin/sh\ncat\nprintf "%s|" "$0" "$@"\n')
    path.chmod(0o755)


def run(home: Path, text: str, shell: str = "/bin/sh") -> tuple[int, str]:
    """What the script does for a user whose PATH has the system's programs alone."""
    environment = {"HOME": str(home), "PATH": "/nowhere:/usr/bin:/bin", "SHELL": shell}
    done = subprocess.run(["/bin/sh", "-s"], input=text, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


@pytest.mark.parametrize("place", [".local/bin", "Library/Python/3.12/bin", ".local/share/uv/tools/splitinfer/bin"])
def test_programs_are_found_that_are_not_on_the_path(tmp_path: Path, place: str):
    program = tmp_path / place / "splitinfer"
    install(program)
    assert run(tmp_path, script(WORDS)) == (0, "|".join((str(program), "worker", *WORDS, "")))


def test_the_same_place_as_here_comes_first(tmp_path: Path):
    install(tmp_path / ".local/bin/splitinfer")
    install(tmp_path / "my src/.venv/bin/splitinfer")
    said = run(tmp_path, script((), "/Users/eve/my src/.venv/bin/splitinfer", "/Users/eve"))
    assert said == (0, f"{tmp_path}/my src/.venv/bin/splitinfer|worker|")


def test_a_login_shell_knows_where_else(tmp_path: Path):
    install(tmp_path / "o'ther/splitinfer")
    (tmp_path / "shell").write_text(f'#!/bin/sh\necho "Good morning"\necho "{tmp_path}/o\'ther/splitinfer"\n')
    (tmp_path / "shell").chmod(0o755)
    assert run(tmp_path, script(("x",)), str(tmp_path / "shell")) == (0, f"{tmp_path}/o'ther/splitinfer|worker|x|")
    assert run(tmp_path, script(("x",))) == (127, "")
