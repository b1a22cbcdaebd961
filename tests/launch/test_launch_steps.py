"""What follows from what machines answer: the steps of each host, answers, sentences."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from splitinfer.launch.answers import (
    Do,
    Found,
    How,
    OtherVersion,
    Refusal,
    Request,
    Seen,
    Started,
    Stopped,
    asked_versions,
    decode_request,
    encode,
    understand,
)
from splitinfer.launch.hosts import Host
from splitinfer.launch.own import Own, install_line, origin
from splitinfer.launch.ssh import Ended
from splitinfer.launch.steps import Steps, problems, refused, unanswered
from splitinfer.wire.messages import Versions

VERSIONS = Versions(11, "0.1.0", "0.32.4", "0.32.2")
KEY = "ab" * 32
MINI, AIR = Host("mini", "eve@mini.local"), Host("air", "air")
OWN = Own("cd" * 32, "studio", VERSIONS)
MARK = "@splitinfer-0123"
WORKER = Found(5577, 71, How.UP, "studio", True, 2 * 10**9, 65.0, ("10.0.0.1",))
SEEN = Seen(VERSIONS, ("/x/splitinfer",), 40 * 10**9, 64 * 10**9, (WORKER,), {5578: "anna"})
STARTED = Started(KEY, WORKER, True, "/x/worker-5577.log")
DROPPED = Ended(255, "", "Connection to mini closed by remote host.")


class MadeUp:
    """Machines that give these answers in turn; what was asked of them, and what was said."""

    def __init__(self, **answers: Sequence[Ended | Seen | Started | Stopped | Refusal]) -> None:
        self.answers = {name: list(each) for name, each in answers.items()}
        self.asked: list[str] = []
        self.said: list[str] = []
        self.steps = Steps(OWN, self.run, lambda mark, line: self.said.append(f"{mark} {line}"))

    def run(self, host: Host, script: str) -> Ended:
        self.asked.append(script)
        mark = script.split("mark=")[1].split("\n")[0]
        heard = self.answers[host.name].pop(0)
        return heard if isinstance(heard, Ended) else Ended(0, f"{mark} {encode(heard)}\n")


# ----- the steps -----------------------------------------------------------------------------------


def test_every_host_comes_to_its_end():
    taken = Refusal("port 5577 of air is in use by python3; take another port", other_port=True)
    made = MadeUp(mini=[SEEN, DROPPED, STARTED], air=[SEEN, taken], old=[Ended(1, "", "")])
    assert made.steps.up([MINI, AIR, Host("old", "old")]) == [STARTED, None, None]
    assert sum("ask /x/splitinfer\n" in script for script in made.asked) == 3  # each start asks what answered the look
    assert [line for line in made.said if "mini" in line] == [
        "✓ mini: splitinfer 0.1.0 is there, 40.0 of 64.0 GB free",
        "! mini: the connection broke off; once more",
        "✓ mini: worker started, port 5577; each machine has the other's key; log: /x/worker-5577.log",
    ]
    assert "✗ port 5577 of air is in use by python3; take another port: air=air:5578" in made.said
    assert problems(["air", "old"]).startswith("air and old did not start; the other hosts are unchanged.")


def test_a_connection_that_breaks_twice_is_told():
    made = MadeUp(mini=[DROPPED, DROPPED])
    assert made.steps.up([MINI]) == [None]
    assert "the same command finds it again" in made.said[-1]


def test_down_says_what_it_stopped_and_what_still_runs():
    left = replace(WORKER, how=How.SERVICE, by="", is_own=False)
    made = MadeUp(mini=[Stopped((WORKER,), (left,))], air=[Stopped((), ())])
    assert all(made.steps.down([MINI]))
    assert made.said == [
        "✓ mini: the worker at port 5577 is stopped",
        "✓ mini: a worker at port 5577, started as a service, still runs: this `up` did not start it",
    ]
    made.steps.down([AIR])
    assert made.said[-1] == "✓ air: no worker runs that `up` from here has started"
    made = MadeUp(mini=[DROPPED])
    assert made.steps.down([MINI]) == [None]  # a second try would not know what the first has stopped


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (OtherVersion(replace(VERSIONS, splitinfer="0.0.9\x1b")), "mini has splitinfer 0.0.9 "),
        (
            Refusal("port 5577 is in\x1b use; take another port", True),
            "in use; take another port: mini=eve@mini.local:5578",
        ),
        (Refusal("the worker ended"), "the worker ended"),
        (STARTED, "runs no commands as it should"),
    ],
)
def test_another_answer_than_what_was_asked_for_is_one_sentence(answer: Refusal, said: str):
    text = refused(answer, MINI, OWN)
    assert said in text
    assert text.isprintable()


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (f"{MARK} none\n", "is not installed on mini"),
        (f"{MARK} failed /x y/splitinfer\n{MARK} none\n", "/x y/splitinfer on mini does not run: ImportError: mlx; to"),
        ("none\n", "runs no commands as it should"),
    ],
)
def test_no_answer_is_one_sentence(output: str, said: str):
    text = unanswered(Ended(1, output, "Traceback\nImportError: mlx\x1b\n\n"), MARK, MINI, OWN)
    assert said in text
    assert text.isprintable()


# ----- answers -------------------------------------------------------------------------------------


def test_requests_come_back_as_they_were():
    asked = Request(Do.START, VERSIONS, KEY, "eve's studio\n", 5577, "mini")
    assert decode_request(asked.encode()) == asked
    assert asked_versions(asked.encode()) == VERSIONS
    assert asked_versions('{"versions": {"protocol": 1}}') is None
    assert asked_versions("[") is None
    for changes in ({"key": "x"}, {"port": 0}, {"do": "rm"}):
        with pytest.raises(ValueError, match="validation error"):
            decode_request(json.dumps({**json.loads(asked.encode()), **changes}))


@pytest.mark.parametrize(
    "changes",
    [
        {"key": "AB" * 32},
        {"key": "ab"},
        {"is_new": "yes"},
        {"worker": {"port": 0}},
        {"log": "x" * 5000},
        {"worker": None},
    ],
)
def test_an_answer_that_lies_about_its_shape_is_none(changes: dict[str, object]):
    whole = json.loads(encode(STARTED))
    assert understand(f"{MARK} {json.dumps(whole)}", MARK) == STARTED
    whole["answer"].update(changes)
    assert understand(f"{MARK} {json.dumps(whole)}", MARK) is None


def test_other_versions_say_which_they_are():
    old = OtherVersion(replace(VERSIONS, mlx="0.31.0"))
    assert understand(f"{MARK} {encode(old)}\n{MARK} none", MARK) == old
    assert understand(f"{MARK} {encode(old)}\n{MARK} {encode(SEEN)}", MARK) == SEEN  # found behind it


# ----- the line that installs ----------------------------------------------------------------------


def test_the_line_that_installs_brings_along_what_is_here(tmp_path: Path):
    wheel = origin('{"url": "file:///home/eve/my%20wheels/splitinfer-0.1.0-py3-none-any.whl", "archive_info": {}}')
    assert wheel == Path("/home/eve/my wheels/splitinfer-0.1.0-py3-none-any.whl")
    line = install_line("mini", VERSIONS, wheel)
    assert line.startswith("ssh mini 'cat > ./splitinfer-0.1.0-py3-none-any.whl && PATH=")
    assert line.endswith(" < '/home/eve/my wheels/splitinfer-0.1.0-py3-none-any.whl'")
    assert (
        "uv tool install --force ./splitinfer-0.1.0-py3-none-any.whl --with mlx==0.32.4 --with mlx-lm==0.32.2" in line
    )
    folder = origin(json.dumps({"url": tmp_path.as_uri(), "dir_info": {"editable": True}}))
    assert install_line("mini", VERSIONS, folder).startswith(f"tar -C {tmp_path} -cf - pyproject.toml")
    for nothing in (None, "{", "[]", '{"url": "https://example.com/splitinfer.git"}'):
        assert "uv tool install --force splitinfer==0.1.0 --with" in install_line("mini", VERSIONS, origin(nothing))
