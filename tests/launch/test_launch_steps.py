"""What follows from what machines answer: the steps of each host, answers, sentences."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from splitinfer.launch.answer import FoundWorker, How, OtherVersion, WorkersAnswer, encode, lines, understand
from splitinfer.launch.hosts import Host
from splitinfer.launch.own import Own, install_line, origin
from splitinfer.launch.steps import LaunchSteps, problems
from splitinfer.system.command import Done
from splitinfer.wire.messages import Versions

VERSIONS = Versions(11, "0.1.0", "0.32.4", "0.32.2")
KEY = "ab" * 32
MINI, AIR = Host("mini", "eve@mini.local"), Host("air", "air")
OWN = Own("cd" * 32, "studio", VERSIONS)
WORKER = FoundWorker(5577, 71, How.UP, "studio", OWN.key, "/x/worker-5577.log", 2 * 10**9, 65.0, ("10.0.0.1",))
SEEN = WorkersAnswer(VERSIONS, KEY, 40 * 10**9, 64 * 10**9)
STARTED = replace(SEEN, workers=(WORKER,), is_new=True)
DROPPED = Done(255, "", "Connection to mini closed by remote host.")


class MadeUp:
    """Machines that give these answers in turn; what was asked of them, and what was said."""

    def __init__(self, **answers: Sequence[Done | WorkersAnswer]) -> None:
        self.answers = {name: list(each) for name, each in answers.items()}
        self.asked: list[str] = []
        self.said: list[str] = []
        self.steps = LaunchSteps(OWN, self.run, lambda mark, line: self.said.append(f"{mark} {line}"))

    def run(self, host: Host, script: str) -> Done:
        self.asked.append(script)
        heard = self.answers[host.name].pop(0)
        return heard if isinstance(heard, Done) else Done(0, f"Welcome, {{eve}}!\n{encode(heard)}\n")


# ----- the steps -----------------------------------------------------------------------------------


def test_every_host_comes_to_its_end():
    taken = Done(1, "", "splitinfer: port 5577 is in use by python3; take another port, such as 5578\n")
    made = MadeUp(mini=[SEEN, DROPPED, STARTED], air=[SEEN, taken], old=[Done(1, "", "")])
    assert made.steps.up([MINI, AIR, Host("old", "old")]) == [STARTED, None, None]
    start = f"worker --detach --host 0.0.0.0 --port 5577 --name mini --by={OWN.key}:studio --json"
    assert sum(start in script for script in made.asked) == 2
    assert [line for line in made.said if "mini" in line] == [
        "✓ mini: splitinfer 0.1.0 is there, 40.0 of 64.0 GB free",
        "! mini: the connection broke off; trying once more",
        "✓ mini: worker started, port 5577; each machine has the other's key; log: /x/worker-5577.log",
    ]
    assert "✗ air: port 5577 is in use by python3; take another port, such as 5578" in made.said
    assert problems(["air", "old"], others=True).startswith("air and old did not start; the other hosts are unchanged.")


def test_a_host_that_has_this_machines_key_is_left_alone():
    made = MadeUp(mini=[replace(SEEN, key=OWN.key)])
    assert made.steps.up([MINI]) == [None]
    assert made.said[0].startswith("✗ mini: unless it is this machine, it has the same key as this machine, so the two")
    assert len(made.asked) == 1


def test_down_says_what_it_stopped_and_what_still_runs():
    others = (FoundWorker(5578, 72, How.SERVICE), FoundWorker(5579, 73, How.UP, "air", KEY))
    made = MadeUp(mini=[replace(SEEN, stopped=(WORKER,), workers=others)], air=[SEEN])
    assert all(made.steps.down([MINI]))
    assert made.said == [
        "✓ mini: the worker at port 5577 is stopped",
        "✓ mini: a worker at port 5578, started as a service, still runs: this `up` did not start it",
        "✓ mini: a worker at port 5579, started by `up` of air, still runs: this `up` did not start it",
    ]
    made.steps.down([AIR])
    assert made.said[-1] == "✓ air: no worker runs that `up` from here has started"
    made = MadeUp(mini=[DROPPED])
    assert made.steps.down([MINI]) == [None]  # a second try would not know what the first has stopped


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        (Done(0, encode(replace(SEEN, versions=replace(VERSIONS, splitinfer="0.0.9\x1b")))), "has splitinfer 0.0.9 "),
        (
            Done(2, "", "splitinfer: no such option: --show"),
            "(no such option: --show); this command installs the same there:\n\n    ssh eve@mini.local ",
        ),
        (Done(127), "splitinfer was not found there; this command installs the same there:\n\n    ssh "),
        (
            Done(1, "", "Traceback\nImportError: mlx\x1b\n\n"),
            "mini: ImportError: mlx; this command installs the same there:\n\n    ssh ",
        ),
        (Done(0, "This account is currently not available.\n"), "runs no commands as it should"),
        (DROPPED, "must work without a question. It said:\n  Connection to mini closed by remote host."),
        (Done(255, "", "Host key\x1b[2J has changed\n\nfailed.\n"), ":\n  Host key [2J has changed\n  failed."),
    ],
)
def test_what_stands_in_the_way_is_said_with_its_cure(ended: Done, said: str):
    made = MadeUp(mini=[ended])
    assert made.steps.up([MINI]) == [None]
    assert said in made.said[-1]
    assert made.said[-1].replace("\n", "").isprintable()


# ----- answers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [{"key": "AB" * 32}, {"key": "ab"}, {"is_new": "yes"}, {"free": -1}, {"workers": [{"port": 0}]},
     {"workers": None}],
)  # fmt: skip
def test_an_answer_that_lies_about_its_shape_is_none(changes: dict[str, object]):
    assert understand(f"hello\n{encode(STARTED)}\n", VERSIONS) == STARTED
    with pytest.raises(ValueError, match="validation error"):
        understand(json.dumps({**json.loads(encode(STARTED)), **changes}), VERSIONS)


@pytest.mark.parametrize("output", ["", "hello", "{", "{}", '{"versions": {"protocol": 1}}'])
def test_what_is_no_answer_is_told(output: str):
    with pytest.raises(ValueError, match=r".*"):
        understand(output, VERSIONS)


def test_of_another_version_only_that_is_read():
    other = replace(VERSIONS, mlx="0.31.0")
    with pytest.raises(OtherVersion) as raised:
        understand(json.dumps({**json.loads(encode(replace(SEEN, versions=other))), "new": "field"}), VERSIONS)
    assert raised.value.versions == other


def test_an_answer_for_people_of_that_machine():
    assert lines(SEEN) == ["no worker runs"]
    assert lines(STARTED) == ["a worker waits at port 5577, started by `up` of studio"]


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
