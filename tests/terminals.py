"""A command in a pseudo-terminal, as a person has it: keys in, a screen out."""

import os
import pty
import re
import select
import subprocess
import termios
import time
from collections.abc import Callable
from pathlib import Path

WHERE_IS_THE_CURSOR, TOP_LEFT = "\x1b[6n", "\x1b[1;1R"


class Terminal:
    """A process in a pseudo-terminal, and everything it wrote. Answers when asked where the cursor is."""

    def __init__(self, *command: str, home: Path) -> None:
        self.master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (30, 100))
        self.before = termios.tcgetattr(slave)
        inherited = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}  # of another terminal
        environment = {**inherited, "HOME": str(home), "XDG_STATE_HOME": str(home / "state"), "TERM": "xterm-256color"}
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True,
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # makes it the controlling terminal
        )  # fmt: skip
        self._slave = slave
        self._text = ""
        self._answered = 0

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def until(self, found: Callable[[str], object] | str, timeout: float = 40.0) -> str:
        """What was written since the last ``until``, once it is or has what is looked for."""
        is_there: Callable[[str], object] = found if callable(found) else lambda text: found in text
        deadline = time.monotonic() + timeout
        while not is_there(plain(self._text)):
            assert time.monotonic() < deadline, f"waited {timeout:.0f} s in vain; on the screen: {plain(self._text)!r}"
            self._read(0.1)
        text, self._text, self._answered = plain(self._text), "", 0
        return text

    def _read(self, timeout: float) -> None:
        if select.select([self.master], [], [], timeout)[0]:
            self._text += os.read(self.master, 65536).decode(errors="replace")
            for _ in range(self._text.count(WHERE_IS_THE_CURSOR) - self._answered):
                self.type(TOP_LEFT)
                self._answered += 1

    def end(self, timeout: float = 20.0) -> int:
        deadline = time.monotonic() + timeout
        while self.process.poll() is None and time.monotonic() < deadline:
            self._read(0.1)
        return self.process.wait(timeout=1)

    def is_as_before(self) -> bool:
        return termios.tcgetattr(self._slave) == self.before

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.master)
        os.close(self._slave)


def plain(text: str) -> str:
    return re.sub(r"\x1b(\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|[=>])|\r", "", text)
