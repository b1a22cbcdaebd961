"""The one way out of a process: by signal, with its parent, or because it is done. Nothing keeps it from ending."""

import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NoReturn

import psutil
import pytest
from processes import until
from terminals import Terminal

from splitinfer.shutdown import PARENT_GONE, Closing, Shutdown

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
both = pytest.mark.parametrize("number", CODES, ids=lambda number: signal.Signals(number).name)
AT_MOST = 20.0  # seconds; what is awaited takes a tenth of one
READY = 'print("ready", flush=True)'


class _LeftError(Exception):
    """In place of the process's end."""


class Process:
    """A ``Shutdown`` that ends no process: how it would have ended, and what was called before."""

    def __init__(self) -> None:
        self.codes: list[int] = []
        self.called: list[str] = []
        self.shutdown = Shutdown(self._leave)

    def _leave(self, code: int) -> NoReturn:
        self.codes.append(code)
        raise _LeftError

    def told(self, number: int) -> None:
        try:
            self.shutdown.handle(number)
        except _LeftError:
            self.called.append("left")

    def closing(self, at_once: Callable[[], object], patiently: Callable[[], object]) -> Closing:
        return Closing(at_once, AT_MOST, patiently, AT_MOST)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    monkeypatch.setattr("splitinfer.cleanup.clear", lambda: None)
    monkeypatch.setattr("threading.excepthook", lambda _: None)  # the thread that closes ends with _LeftError
    yield Process()
    for thread in threading.enumerate():
        if thread.name in ("closing", "clearing"):  # afterwards it would clear this process, which then starts no child
            thread.join(AT_MOST)


@pytest.mark.parametrize(("number", "code"), [*CODES.items(), (PARENT_GONE, 0)])
def test_where_nothing_is_open_it_ends_at_once(process: Process, number: int, code: int):
    process.told(number)
    assert (process.codes, process.called) == ([code], ["left"])


@pytest.mark.parametrize(("number", "how"), [(signal.SIGINT, "at once"), (signal.SIGTERM, "patiently")])
def test_what_is_open_is_closed_first(process: Process, number: int, how: str):
    called = process.called
    closing = process.closing(lambda: called.append("at once"), lambda: called.append("patiently"))
    with process.shutdown.closed_by(closing):
        process.told(number)
        until(lambda: process.codes, "it ends", AT_MOST)
    assert called == [how]
    assert process.codes == [128 + number]


def test_a_second_signal_does_not_wait(process: Process):
    closed = threading.Event()
    with process.shutdown.closed_by(process.closing(lambda: None, closed.wait)):
        process.told(signal.SIGTERM)
        assert process.codes == []
        process.told(signal.SIGINT)
        until(lambda: process.codes, "it ends", AT_MOST)
        process.told(signal.SIGINT)
        assert process.codes == [130]
        closed.set()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # that of ``_LeftError``
def test_closing_that_fails_ends_it_too(process: Process):
    def fail() -> None:
        raise KeyboardInterrupt

    with process.shutdown.closed_by(process.closing(fail, fail)):
        process.told(signal.SIGINT)
        until(lambda: process.codes == [130], "it ends", AT_MOST)


def test_a_signal_may_be_taken(process: Process):
    def fail(_: int) -> bool:
        raise ValueError

    with process.shutdown.offered_to(lambda number: number == signal.SIGINT):
        process.told(signal.SIGINT)
        assert not process.shutdown.has_begun
    with process.shutdown.offered_to(fail):
        process.told(signal.SIGTERM)
    assert process.codes == [143]


def test_a_command_that_is_done_has_its_own_code_unless_it_was_told_to_end(process: Process):
    with pytest.raises(_LeftError):
        process.shutdown.exit(1)
    process.told(signal.SIGTERM)
    with pytest.raises(_LeftError):
        process.shutdown.exit(0)
    assert process.codes == [1, 143, 143]


# -- in a process of its own -----------------------------------------------------------------------


def installed(code: str) -> list[str]:
    """The command of a program that has installed ``shutdown``, and then does what ``code`` does."""
    text = "from splitinfer.shutdown import Closing, shutdown\nshutdown.install()\n" + textwrap.dedent(code)
    return [sys.executable, "-c", text]


@contextmanager
def program(code: str) -> Iterator[subprocess.Popen[str]]:
    """Such a program, up to READY."""
    pipe = subprocess.PIPE
    with subprocess.Popen(installed(code), stdin=pipe, stdout=pipe, stderr=pipe, text=True) as running:
        try:
            assert running.stdout.readline() == "ready\n"  # type: ignore[union-attr]
            yield running
        finally:
            running.kill()


def code_of(running: subprocess.Popen[str]) -> int:
    code = running.wait(AT_MOST)
    assert running.stderr.read() == ""  # type: ignore[union-attr]
    return code


SWALLOWS = f"""
    import time
    {READY}
    while True:
        try:
            time.sleep(1)
        except BaseException:
            pass
"""
IN_C = f"""
    import hashlib
    {READY}
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # minutes without a handler
"""
TAKES_WAKEUPS = f"""
    import asyncio
    async def stay():
        asyncio.get_running_loop().add_signal_handler(__import__("signal").SIGWINCH, print)
        {READY}
        await asyncio.sleep(1000)
    asyncio.run(stay())
"""


@both
@pytest.mark.parametrize("code", [SWALLOWS, IN_C, TAKES_WAKEUPS], ids=["swallows", "in C", "asyncio"])
def test_whatever_the_main_thread_does(number: int, code: str):
    with program(code) as running:
        time.sleep(0.2)  # it goes on from READY to where it stays
        running.send_signal(number)
        assert code_of(running) == CODES[number]


def test_closing_that_hangs_has_a_deadline():
    hangs = f"""
        import time
        def hang():
            while True:
                try:
                    time.sleep(1)
                except BaseException:
                    pass
        with shutdown.closed_by(Closing(hang, 1.0, hang, 0.5)):
            {READY}
            hang()
    """
    with program(hangs) as running:
        running.send_signal(signal.SIGTERM)
        assert code_of(running) == 143


def test_the_parents_end_is_one():
    follows = f"""
        import sys, time
        shutdown.follow_parent(0)
        {READY}
        time.sleep(1000)
    """
    with program(follows) as running:
        running.stdin.close()  # type: ignore[union-attr]
        assert code_of(running) == 0


def test_nothing_is_left_over():
    leaves = f"""
        import sys, time
        from splitinfer import cleanup
        child = cleanup.start([sys.executable, "-c", "import time; time.sleep(1000)"])
        with cleanup.temporary_folder("splitinfer-test-") as folder:
            open(folder + "/file", "w").close()
            {READY}
            print(child.pid, folder, flush=True)
            time.sleep(1000)
    """
    with program(leaves) as running:
        pid, folder = running.stdout.readline().split()  # type: ignore[union-attr]
        child = psutil.Process(int(pid))
        assert Path(folder, "file").exists()
        running.send_signal(signal.SIGINT)
        assert code_of(running) == 130
        assert not Path(folder).exists()
        until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "its child is gone", AT_MOST)


def test_the_terminal_is_as_it_was(tmp_path: Path):
    changes = f"""
        import os, termios, time
        changed = termios.tcgetattr(0)
        changed[3] &= ~termios.ECHO
        termios.tcsetattr(0, termios.TCSANOW, changed)
        {READY}
        time.sleep(1000)
    """
    with closing(Terminal(*installed(changes), home=tmp_path)) as terminal:
        terminal.until("ready\n")
        assert not terminal.is_as_before()
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.end(AT_MOST) == 130
        assert terminal.is_as_before()
        terminal._read(0.1)
        assert terminal._text.endswith(" " * 99 + "\r\x1b[?25h\x1b[?2004l"), "the cursor is shown, where a line begins"


def test_what_was_printed_is_written_before_the_end():
    prints = f"""
        import contextlib, os, sys
        sys.stdout.reconfigure(write_through=False)  # whatever PYTHONUNBUFFERED says
        sys.modules["splitinfer.shutdown"]._CLEAR_SECONDS = 0.2
        {READY}
        sys.stdin.readline()
        os.set_blocking(1, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(1, b"x")  # until the pipe is full
        os.set_blocking(1, True)
        sys.stdout.write("y" * 5000)
        shutdown.exit(3)
    """
    with program(prints) as running:
        assert running.stdin
        assert running.stdout
        running.stdin.write("go on\n")
        running.stdin.flush()
        time.sleep(0.6)  # longer than a process that is told to end waits for its reader
        assert running.stdout.read().endswith("x" + "y" * 5000)
        assert code_of(running) == 3


def test_the_library_leaves_signals_alone():
    code = """
        import signal
        before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        import splitinfer.llm
        assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        assert signal.set_wakeup_fd(-1) == -1
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=100)
