"""Pictures of the terminal, from real runs: ``python -m book.pictures`` writes ``docs/pictures/*.svg``.

tmux runs what a reader would type, in two windows that stand for the two machines, each with a home of its own; its
screen is captured with its colours, and rich draws it. Nothing is edited. Keys are made for the run and thrown away.
"""

import io
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "pictures"
_COLUMNS, _ROWS = 100, 30
_PATIENCE = 300.0  # seconds
_SOCKET = "splitinfer-pictures"
_FETCHED_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


class Step(NamedTuple):
    """A line typed on a machine, what the screen must show then, and the name of the picture to take of it.

    ``clear; `` at its beginning clears the screen. ``typed`` may have what a group of an earlier ``shows`` has matched,
    by the group's name.
    """

    machine: str
    typed: str
    shows: str
    picture: str = ""


_PLAN = "splitinfer plan --model demo --workers mini=127.0.0.1 --use-all --out mine.yaml"
_CODE = "[A-Z0-9]{3}-[A-Z0-9]{3}"
ANSWERED = "token limit reached"
STEPS = (
    Step("studio", "scripts/demo", ANSWERED, "demo"),
    Step("studio", "cd", r"\$$"),
    Step("mini", "clear; splitinfer init", rf"code: (?P<mini>{_CODE})"),
    Step("studio", "clear; splitinfer init --model demo", rf"code: (?P<studio>{_CODE})"),
    Step("mini", "{studio}", r"waiting|paired"),
    Step("studio", "{mini}", r"Chat with", "init"),
    Step("mini", "", r"(?s)key: (?P<key>[0-9a-f]{64}).*measured this machine", "worker"),
    Step("studio", "clear; splitinfer pair {key} --name mini", r"admitted"),
    Step("studio", f"clear; {_PLAN}", r"mine.yaml\b", "plan"),
    Step("studio", "clear; splitinfer coord --layout mine.yaml", r"/help lists"),
    Step("studio", "The wolf came to the door and", ANSWERED),
    Step("studio", "/layout", r"layers", "chat"),
    Step("studio", "Once upon a time there was a king", r"."),
    Step("mini", "C-c", r"\$$"),
    Step("studio", "", r"waiting up to", "lost"),
    Step("mini", "splitinfer worker --host 0.0.0.0 --port 5577", r"key: [0-9a-f]{64}"),
    Step("studio", "", ANSWERED, "back"),
)  # fmt: skip


def main() -> None:
    """Take the pictures that are named, or all; every step runs in either case."""
    with tempfile.TemporaryDirectory() as home:
        found: dict[str, str] = {}
        try:
            for machine in ("studio", "mini"):
                _tmux("new-session", "-d", "-s", machine, "-x", str(_COLUMNS), "-y", str(_ROWS), _shell(machine, home))
            for step in STEPS:
                screen = _done(step, found)
                if step.picture and (not sys.argv[1:] or step.picture in sys.argv[1:]):
                    (FOLDER / f"{step.picture}.svg").write_text(drawn(step, screen), encoding="utf-8")
        finally:
            _tmux("kill-server")


def drawn(step: Step, screen: str) -> str:
    """A screen as SVG, with no font that would have to be fetched."""
    console = Console(record=True, width=_COLUMNS, file=io.StringIO(), force_terminal=True)
    for line in screen.rstrip().splitlines():
        console.print(Text.from_ansi(line), soft_wrap=True)
    title = f"{step.machine} (both machines are one {platform.system()} computer)"
    return _FETCHED_FONTS.sub("", console.export_svg(title=title, unique_id=step.picture))


def _shell(machine: str, home: str) -> str:
    variables = {"HOME": f"{home}/{machine}", "PATH": f"{ROOT}/.venv/bin:/usr/bin:/bin", "PS1": f"{machine} $ "}
    said = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
    return f"cd {shlex.quote(str(ROOT))}; mkdir {home}/{machine}; env {said} bash --norc --noprofile"


def _done(step: Step, found: dict[str, str]) -> str:
    """Type a step and wait for what it shows; the screen with its colours. Raises TimeoutError: it did not come."""
    typed = step.typed.format(**found)
    time.sleep(1)
    if typed:
        if typed.startswith("clear; "):
            typed = typed.removeprefix("clear; ")
            _tmux("send-keys", "-t", step.machine, "C-l")
        _tmux("send-keys", "-t", step.machine, *([typed] if typed == "C-c" else [typed, "Enter"]))
    until = time.monotonic() + _PATIENCE
    time.sleep(0.5)
    while not (match := re.search(step.shows, _screen(step.machine).replace(typed, "", 1))):
        if time.monotonic() > until:
            raise TimeoutError(f"{step.shows!r} did not come after {typed!r}:\n{_screen(step.machine)}")
        time.sleep(0.2)
    found.update(match.groupdict())
    time.sleep(0.5)
    return _tmux("capture-pane", "-e", "-p", "-t", step.machine)


def _screen(machine: str) -> str:
    return _tmux("capture-pane", "-J", "-p", "-t", machine).rstrip()


def _tmux(*words: str) -> str:
    command = ["tmux", "-L", _SOCKET, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
