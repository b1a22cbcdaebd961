"""How ssh is run: with a stand-in for the program, which writes down what it was given."""

import shlex
import stat
from pathlib import Path

import pytest

from splitinfer.launch.hosts import Host
from splitinfer.launch.ssh import NO_SSH, OWN_FAILURE, TIMED_OUT, Ended, Ssh, trouble

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
    with Ssh([str(program)]) as ssh:
        ended = ssh.run(MINI, "main\n")
    assert (ended.code, ended.output, ended.complaints) == (0, "main\n", "")
    line, closing = (tmp_path / "said").read_text().splitlines()
    for option in (
        "BatchMode=yes",
        "StrictHostKeyChecking=yes",
        "ClearAllForwardings=yes",
        "RemoteCommand=none",
        "-a -x",
    ):
        assert option in line
    assert line.endswith("-- eve@mini.local /bin/sh -s")
    assert closing.endswith("-O exit -- eve@mini.local")


def test_the_control_socket_is_the_users_alone_and_short(program: Path, tmp_path: Path):
    with Ssh([str(program)]) as ssh:
        ssh.run(MINI, "")
        line = (tmp_path / "said").read_text()
        path = Path(line.partition("ControlPath=")[2].split()[0])
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert len(str(path.parent)) + 1 + 40 + 17 < 104  # %C is 40 digits, and ssh adds 17 characters for a moment
    assert not path.parent.exists()


@pytest.mark.parametrize(
    ("does", "code"),
    [("exit 255", OWN_FAILURE), ("exit 3", 3), ("kill -9 $$", OWN_FAILURE), ("exec sleep 600", TIMED_OUT)],
)
def test_how_it_ends(program: Path, tmp_path: Path, does: str, code: int):
    (tmp_path / "does").write_text(f"echo out; echo err >&2; {does}\n")
    with Ssh([str(program)]) as ssh:
        ended = ssh.run(MINI, "", seconds=60.0 if code != TIMED_OUT else 0.3)
        (tmp_path / "does").unlink()
    assert ended.code == code
    if code != TIMED_OUT:  # a process that is slow to start has said nothing yet
        assert (ended.output, ended.complaints) == ("out\n", "err\n")


def test_there_is_no_ssh(tmp_path: Path):
    with Ssh([str(tmp_path / "none")]) as ssh:
        assert ssh.run(MINI, "").code == NO_SSH
        assert ssh.hostname(MINI) == "mini.local"


def test_where_an_alias_leads(program: Path, tmp_path: Path):
    (tmp_path / "does").write_text("printf 'user eve\\nhostname 10.0.0.7\\nport 22\\n'; exit 0\n")
    with Ssh([str(program)]) as ssh:
        assert ssh.hostname(MINI) == "10.0.0.7"
    assert "-G -- eve@mini.local" in (tmp_path / "said").read_text()


# ----- what went wrong -----------------------------------------------------------------------------

# OpenSSH 9.2 on Debian 12, connected to an sshd of its own.
CHANGED = """\
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
IT IS POSSIBLE THAT SOMEONE IS DOING SOMETHING NASTY!
Add correct host key in /home/eve/.ssh/known_hosts to get rid of this message.
Offending ED25519 key in /home/eve/.ssh/known_hosts:1
  remove with:
  ssh-keygen -f "/home/eve/.ssh/known_hosts" -R "[127.0.0.1]:2229"
Host key for [127.0.0.1]:2229 has changed and you have requested strict checking.
Host key verification failed.
"""
UNKNOWN = """\
No ED25519 host key is known for [127.0.0.1]:2229 and you have requested strict checking.
Host key verification failed.
"""


@pytest.mark.parametrize(
    ("complaint", "said"),
    [
        (CHANGED, "ssh-keygen -R '[127.0.0.1]:2229'"),
        (CHANGED, "is not the one that this machine knows"),
        (UNKNOWN, "does not know the ssh host key of eve@mini.local yet"),
        ("root@h: Permission denied (publickey,password,keyboard-interactive).", "ssh-copy-id eve@mini.local"),
        ("ssh: connect to host 127.0.0.1 port 2230: Connection refused", "Remote Login"),
        ("ssh: Could not resolve hostname nosuch.invalid: Name or service not known", "finds no address"),
        ("ssh: connect to host 10.0.0.9 port 22: Operation timed out", "nothing comes back"),
        ("ssh: connect to host 10.0.0.9 port 22: No route to host", "nothing comes back"),
        ("Bad owner or permissions on /home/eve/.ssh/config", "own settings: Bad owner"),
        ("something\x1b[2J new", "failed: something [2J new"),
    ],
)
def test_what_ssh_says_is_one_sentence(complaint: str, said: str):
    found = trouble(Ended(255, "", complaint), MINI)
    assert found is not None
    assert said in str(found)
    assert not found.may_pass
    assert "\n" not in str(found)


@pytest.mark.parametrize(
    "complaint",
    [
        "Connection to 127.0.0.1 closed by remote host.",
        "client_loop: send disconnect: Broken pipe",
        "Timeout, server mini.local not responding.",
        "kex_exchange_identification: Connection closed by remote host",
        "mux_client_request_session: read from master failed: Broken pipe",
        "",  # how a session over a kept connection ends
    ],
)
def test_a_connection_that_broke_may_be_tried_again(complaint: str):
    heard = trouble(Ended(255, "", complaint), MINI)
    assert heard is not None
    assert heard.may_pass
    assert "eve@mini.local broke off" in str(heard)


def test_a_command_that_fails_is_no_trouble_of_ssh():
    assert trouble(Ended(1, "", "Connection refused"), MINI) is None
    assert "OpenSSH" in str(trouble(Ended(127, "", "no ssh"), MINI))
    assert "in time" in str(trouble(Ended(124), MINI))
