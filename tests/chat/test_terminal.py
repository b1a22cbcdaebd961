"""The REPL in a real terminal: keys in, a screen out, a process that ends and leaves nothing behind."""

import io
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from terminals import Terminal

from splitinfer.chat import formatting, screens

PROMPT = ">"


def children(pid: int) -> list[int]:
    return [int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()]


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    command = [sys.executable, "-m", "splitinfer", "coord", "--layout", "demo.yaml", "--max-tokens", "3000"]
    made = Terminal(*command, "--temp", "0", "--draft", "none", home=tmp_path)  # plans with drafts take ten seconds
    yield made
    made.close()


def test_a_talk_in_a_terminal(terminal: Terminal, tmp_path: Path):
    terminal.until("/help lists the commands.\n")
    terminal.until(PROMPT)
    workers = children(terminal.process.pid) if Path("/proc").is_dir() else []

    terminal.type("Once upon a time\r")
    first = terminal.until(lambda text: len(text) > 200)
    assert terminal.process.poll() is None
    terminal.type("typed meanwhile ")
    more = terminal.until(lambda text: len(text) > 100)
    assert "typed" not in first + more, "keys mix with the answer"
    terminal.type(f"\x1b[200~{'x ' * 2300}\nend\x1b[201~")  # a paste, longer than a terminal's line
    terminal.type("\x03")
    stopped = terminal.until("[stopped]")
    assert len(stopped) < 2000
    terminal.until(lambda text: "tok/s" in text and "stopped" in text)  # a prompt, the status line

    terminal.type("\r")
    terminal.until(re.compile(r"the prompt has 4,6\d\d tokens").search)
    terminal.until(PROMPT)
    terminal.type("not sent\x03")  # clears the line
    terminal.type("/stats\r")
    table = terminal.until("1 stopped")
    assert re.search(r"front +0-5", table)
    assert re.search(r"back +6-11", table)

    terminal.type("\x1b[200~two\nlines\x1b[201~")  # a paste
    terminal.type("\r")
    terminal.until(lambda text: len(text) > 700)  # of which the prompt, drawn again, is a part
    terminal.type("\x03")
    terminal.until("[stopped]")
    terminal.until(PROMPT)

    terminal.type("/quit\r")
    assert terminal.end() == 0
    assert terminal.is_as_before()
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    history = (tmp_path / "state" / "splitinfer" / "history").read_text()
    assert "+two\n+lines\n" in history


@pytest.mark.nightly
def test_lines_of_a_pipe():
    command = [sys.executable, "-m", "splitinfer", "coord", "--layout", "demo.yaml", "--chat", "--max-tokens", "8"]
    lines = b"Once upon a time\n\n/layout\n/nonsense\n/set\nThen\xff\n"
    done = subprocess.run([*command, "--temp", "0"], input=lines, capture_output=True, timeout=100)
    assert done.returncode == 1, "one line could not be carried out"
    assert len(done.stdout.decode().split()) > 8
    assert b"front  0-5 (6) " in done.stderr
    assert b"there is no command /nonsense" in done.stderr
    assert re.search(rb"temperature +0 +command line\n *top_p +0\.95 +generation_config\.json", done.stderr)
    assert b"\x1b" not in done.stdout + done.stderr


def test_what_came_from_a_file_cannot_command_the_terminal(capsys: pytest.CaptureFixture[str]):
    for screen in (screens.TerminalScreen(None), screens.LineScreen(io.StringIO())):
        screen.say("the system message is: \x1b]0;title\x07\x9b31mred\nand more")
        assert capsys.readouterr().err == "the system message is: ]0;title31mred\nand more\n"
    lines = screens.LineScreen(io.StringIO("a\r\n\n b "))
    assert [lines.read() for _ in range(4)] == ["a", "", " b ", None]


def test_a_stop_is_seen_at_once(capsys: pytest.CaptureFixture[str]):
    with create_pipe_input() as keys, create_app_session(input=keys, output=DummyOutput()):
        stopped, takes = list[str](), list[Callable[[int], bool]]()

        def offer(take: Callable[[int], bool]) -> AbstractContextManager[None]:
            takes.append(take)
            return nullcontext()

        screen = screens.TerminalScreen(None, offer)
        with screen.answering(lambda: stopped.append("abort")):
            screen.wait("reading 512 of 1,850, 40 s left")
            takes[0](signal.SIGINT)
            screen.wait("reading 512 of 1,850, 39 s left")
        assert stopped == ["abort"]
        *_, before, first, second, _ = capsys.readouterr().out.split(formatting.ERASE)
        assert (before[:7], first, second) == ("reading", screens.STOPPING, screens.STOPPING)
        with screen.answering(lambda: None):
            screen.wait("reading 5 tokens")
        assert "reading 5 tokens" in capsys.readouterr().out


def test_enter():
    sent: list[str] = []
    buffer = Buffer(multiline=True, accept_handler=lambda b: bool(sent.append(b.text)))
    screens.enter(buffer)
    assert sent == []  # nothing to send
    buffer.insert_text("one\\")
    screens.enter(buffer)
    buffer.insert_text("two")
    screens.enter(buffer)
    assert sent == ["one\ntwo"]


def test_history_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = screens.history_file()
    assert path == tmp_path / "state" / "splitinfer" / "history"
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    path.write_text("kept")
    assert screens.history_file() == path
    assert path.read_text() == "kept"
    monkeypatch.setenv("XDG_STATE_HOME", str(path))  # a file: no folder can be made in it
    assert screens.history_file() is None


def test_tab_completes_commands_settings_and_paths(tmp_path: Path):
    (tmp_path / "talk.json").touch()

    def completed(text: str) -> list[str]:
        found = screens._Inputs().get_completions(Document(text), CompleteEvent())
        return [text[: len(text) + each.start_position] + each.text for each in found]

    assert completed("/lo") == ["/load"]
    assert completed("/set te") == ["/set temperature"]
    assert completed(f"/load {tmp_path}/ta") == [f"/load {tmp_path}/talk.json"]
    assert completed(f"/system {tmp_path}/ta") == completed(f"see {tmp_path}/ta") == []
