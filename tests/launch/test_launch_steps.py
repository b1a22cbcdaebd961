"""What follows from what a machine answers: recorded outputs of ssh, answers, sentences."""

import json
from dataclasses import replace

import pytest

from splitinfer.launch.answers import (
    Broken,
    Do,
    Found,
    How,
    NotInstalled,
    OtherVersion,
    Refusal,
    Request,
    Seen,
    Started,
    Stopped,
    Why,
    asked_versions,
    decode_request,
    encode,
    encode_versions,
    understand,
)
from splitinfer.launch.carry import Carrier
from splitinfer.launch.hosts import Host
from splitinfer.launch.install import Origin, install_line, origin
from splitinfer.launch.ssh_errors import Ended, Trouble, trouble
from splitinfer.launch.steps import Failed, Looking, Own, Starting, State, Up, advance, sentence
from splitinfer.launch.words import down_lines, line_of, status_rows
from splitinfer.wire.messages import Versions

VERSIONS = Versions(11, "0.1.0", "0.32.4", "0.32.2")
KEY = "ab" * 32
MINI = Host("mini", "eve@mini.local")
OWN = Own("cd" * 32, "studio", VERSIONS)
MARK = "@splitinfer-0123"
WORKER = Found(5577, 71, How.UP, "studio", True, 2 * 10**9, 65.0, ("10.0.0.1",))
SEEN = Seen(VERSIONS, ("/x/splitinfer",), "eve", "mini", "macOS 26.1", 40 * 10**9, 64 * 10**9, (WORKER,))
STARTED = Started(KEY, WORKER, True, "/x/worker-5577.log", 39 * 10**9)

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
    assert said in found.text
    assert not found.may_pass
    assert "\n" not in found.text


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
def test_a_connection_that_broke_is_tried_once_more(complaint: str):
    heard = trouble(Ended(255, "", complaint), MINI)
    assert heard is not None
    again = advance(Starting(MINI, SEEN), heard, OWN)
    assert again == Starting(MINI, SEEN, 2)
    assert "once more" in str(line_of(again))
    assert isinstance(advance(Starting(MINI, SEEN, 2), heard, OWN), Failed)


def test_a_command_that_fails_is_no_trouble_of_ssh():
    assert trouble(Ended(1, "", "Connection refused"), MINI) is None
    assert "OpenSSH" in str(trouble(Ended(127, "", "no ssh"), MINI))
    assert "in time" in str(trouble(Ended(124), MINI))


def test_the_way_of_a_host_that_has_all():
    starting = advance(Looking(MINI), SEEN, OWN)
    assert starting == Starting(MINI, SEEN)
    assert advance(Starting(MINI, SEEN), STARTED, OWN) == Up(MINI, SEEN, STARTED)


@pytest.mark.parametrize(
    ("heard", "said"),
    [
        (NotInstalled(), "is not installed on mini"),
        (OtherVersion(replace(VERSIONS, splitinfer="0.0.9"), ""), "mini has splitinfer 0.0.9"),
        (OtherVersion(None, "/x/splitinfer"), "an older or newer version (/x/splitinfer)"),
        (Broken("/x/splitinfer", "ImportError: mlx"), "/x/splitinfer on mini does not run: ImportError: mlx"),
        (
            Refusal(Why.TAKEN, "python3"),
            "port 5577 of mini is in use by python3; take another: mini=eve@mini.local:5578",
        ),
        (Refusal(Why.TAKEN), "in use by another program"),
        (Refusal(Why.OTHER_USER, "an\x1bna"), "a worker of an na, another user"),
        (Refusal(Why.LOOPBACK), "--host 0.0.0.0"),
        (Refusal(Why.INSECURE), "--insecure"),
        (Refusal(Why.OLD), "before this version"),
        (Refusal(Why.ENDED, "boom"), "ended at once: boom"),
        (Refusal(Why.ERROR, "disk full"), "mini: disk full"),
        (None, "runs no commands as it should"),
        (STARTED, "runs no commands as it should"),
        (Trouble("no way"), "no way"),
    ],
)
def test_what_stands_in_the_way_is_one_sentence(heard: object, said: str):
    state = advance(Looking(MINI), heard, OWN)  # type: ignore[arg-type]
    assert isinstance(state, Failed)
    assert said in state.text
    assert "\n" not in state.text


def test_every_refusal_has_its_sentence():
    assert len({sentence(Refusal(why, "x"), MINI, OWN) for why in Why}) == len(Why)


def test_the_other_port_of_the_last_port():
    assert "eve@mini.local:65534" in sentence(Refusal(Why.TAKEN), replace(MINI, port=65535), OWN)


# ----- answers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [SEEN, STARTED, Stopped((WORKER,), ()), Refusal(Why.TAKEN, "x")])
def test_answers_come_back_as_they_were(answer: Seen):
    noise = "Welcome to mini!\n{}\n"
    assert understand(f"{noise}{MARK} {encode(answer)}\n{MARK} none\n", "", MARK) == answer


def test_requests_come_back_as_they_were():
    asked = Request(Do.START, VERSIONS, KEY, "eve's studio\n", 5577, "mini")
    assert decode_request(asked.encode()) == asked
    assert asked_versions(asked.encode()) == VERSIONS
    assert asked_versions('{"versions": {"protocol": 1}}') is None
    assert asked_versions("[") is None
    for changes in ({"key": "x"}, {"port": 0}, {"do": "rm"}):
        with pytest.raises(ValueError, match="validation error"):
            decode_request(json.dumps({**json.loads(asked.encode()), **changes}))


def test_lines_without_the_mark_are_nobodys():
    assert understand(encode(SEEN), "", MARK) is None
    assert understand(f"x{MARK} {encode(SEEN)}", "", MARK) is None
    assert understand(f"{MARK}4 {encode(SEEN)}", "", MARK) is None


@pytest.mark.parametrize(
    "changes",
    [{"key": "AB" * 32}, {"key": "ab"}, {"is_new": "yes"}, {"free": -1}, {"log": "x" * 5000}, {"worker": None}],
)
def test_an_answer_that_lies_about_its_shape_is_none(changes: dict[str, object]):
    whole = json.loads(encode(STARTED))
    assert understand(f"{MARK} {json.dumps(whole)}", "", MARK) == STARTED
    whole["answer"].update(changes)
    assert understand(f"{MARK} {json.dumps(whole)}", "", MARK) is None


def test_other_versions_say_which_they_are():
    old = replace(VERSIONS, mlx="0.31.0")
    assert understand(f"{MARK} {encode_versions(old)}\n{MARK} none", "", MARK) == OtherVersion(old, "")
    words = "splitinfer 0.0.1, protocol 3, mlx 0.30.1, mlx-lm 0.29.0"
    lines = f"{MARK} failed 2 /opt/homebrew/bin/splitinfer\n{MARK} version {words}\n{MARK} none\n"
    found = understand(lines, "Usage: ...", MARK)
    assert found == OtherVersion(Versions(3, "0.0.1", "0.30.1", "0.29.0"), "/opt/homebrew/bin/splitinfer")
    lines = lines.replace(words, "")
    assert understand(lines, "", MARK) == OtherVersion(None, "/opt/homebrew/bin/splitinfer")


def test_one_of_the_same_version_is_found_behind_another():
    other = encode_versions(replace(VERSIONS, splitinfer="0.0.1"))
    assert understand(f"{MARK} {other}\n{MARK} {encode(SEEN)}", "", MARK) == SEEN


def test_programs_that_do_not_run_and_none():
    lines = f"{MARK} failed 1 /x y/splitinfer\n{MARK} none\n"
    assert understand(lines, "Traceback\nImportError: no mlx\n\n", MARK) == Broken(
        "/x y/splitinfer", "ImportError: no mlx"
    )
    assert understand(f"{MARK} none\n", "", MARK) == NotInstalled()


# ----- the line that installs ----------------------------------------------------------------------


def test_the_line_that_installs_brings_along_what_is_here():
    wheel = origin('{"url": "file:///home/eve/my%20wheels/splitinfer-0.1.0-py3-none-any.whl", "archive_info": {}}')
    assert wheel == Origin("/home/eve/my wheels/splitinfer-0.1.0-py3-none-any.whl")
    line = install_line("mini", VERSIONS, wheel)
    assert line.startswith("ssh mini 'cat > ./splitinfer-0.1.0-py3-none-any.whl && PATH=")
    assert line.endswith(" < '/home/eve/my wheels/splitinfer-0.1.0-py3-none-any.whl'")
    assert (
        "uv tool install --force ./splitinfer-0.1.0-py3-none-any.whl --with mlx==0.32.4 --with mlx-lm==0.32.2" in line
    )
    folder = origin('{"url": "file:///src/splitinfer", "dir_info": {"editable": true}}')
    assert install_line("mini", VERSIONS, folder).startswith("tar -C /src/splitinfer -cf - pyproject.toml")
    for nothing in (None, "{", "[]", '{"url": "https://example.com/splitinfer.git"}'):
        assert "uv tool install --force splitinfer==0.1.0 --with" in install_line("mini", VERSIONS, origin(nothing))


# ----- all hosts at once ---------------------------------------------------------------------------


def answering(answers: dict[str, list[Ended | Seen | Started | Refusal]], asked: list[str]):
    """Machines that give these answers in turn."""

    def run(host: Host, script: str) -> Ended:
        asked.append(script)
        mark = script.split("mark=")[1].split("\n")[0]
        heard = answers[host.name].pop(0)
        return heard if isinstance(heard, Ended) else Ended(0, f"{mark} {encode(heard)}\n")

    return run


def test_every_host_comes_to_its_end():
    hosts = (MINI, Host("air", "air"), Host("old", "old"))
    asked = list[str]()
    dropped = Ended(255, "", "Connection to mini closed by remote host.")
    run = answering(
        {"mini": [SEEN, dropped, STARTED], "air": [SEEN, Refusal(Why.TAKEN)], "old": [Ended(1, "", "")]}, asked
    )
    said = list[State]()
    ends = Carrier(OWN, run).bring_up(hosts, said.append)
    assert [type(each) for each in ends] == [Up, Failed, Failed]
    assert [each.host for each in ends] == list(hosts)
    assert sum("ask /x/splitinfer\n" in script for script in asked) == 3  # each start goes to what answered the look
    assert sum(isinstance(each, Starting) and each.tries == 2 for each in said) == 1


def test_what_people_read():
    assert line_of(Starting(MINI, SEEN)) == "mini: splitinfer 0.1.0 is there, 40.0 of 64.0 GB free"
    assert "worker started, port 5577" in str(line_of(Up(MINI, SEEN, STARTED)))
    theirs = replace(STARTED, is_new=False, worker=replace(WORKER, by="a\x1bir", is_own=False))
    assert "a worker is there, started by `up` of a ir" in str(line_of(Up(MINI, SEEN, theirs)))
    assert "nothing runs" in down_lines(MINI, Stopped((), ()))[0]
    left = replace(WORKER, how=How.SERVICE, by="", is_own=False)
    assert down_lines(MINI, Stopped((WORKER,), (left,))) == [
        "mini: the worker at port 5577 is stopped",
        "mini: a worker at port 5577, started as a service, still runs: it is not of this `up`",
    ]
    assert status_rows(MINI, SEEN) == [
        ("mini", "0.1.0", "40.0 of 64.0 GB", "port 5577", "by `up`, 1 min ago", "2.00 GB", "10.0.0.1")
    ]
    assert status_rows(MINI, replace(SEEN, workers=()))[0][3] == "none runs"
