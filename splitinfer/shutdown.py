"""Ends the command line's process: on SIGINT, on SIGTERM, with its parent, or when it is done.

A signal does not raise an exception here, because foreign code may swallow it; and while the main thread is inside a
long call into C, no handler runs at all. So arriving signals are written to a pipe, and a separate thread reads them:

    signal -> pipe -> watching thread -> run the registered closing (``closed_by``), within its time limit
                                      -> kill children, remove temporary folders, restore the terminal, os._exit

Exit codes: 130 for SIGINT, 143 for SIGTERM. Only the command line installs this: a program that uses
``splitinfer.LLM`` has its own.
"""

import contextlib
import os
import select
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

from splitinfer import cleanup

PARENT_GONE = 0
"""In place of a signal's number: the parent process is gone, so the exit code is not read."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_CLEAR_SECONDS = 1.5  # for killing children, removing folders and flushing, which may block on a full pipe
_STDIN, _STDOUT, _STDERR = 0, 1, 2
_RESET_TERMINAL = b"\x1b[?25h\x1b[?2004l"  # the cursor is shown, and pastes are not bracketed

SignalOffer = Callable[[int], bool]
"""Takes a signal's number and handles it (returns true), or lets it end the process (false). Runs in any thread."""


@dataclass(frozen=True, slots=True)
class Closing:
    """How to close a pipeline or a worker. Each callable runs in its own thread; the process ends when it returns.

    ``at_once``: after SIGINT, a second signal, or the parent's end. ``patiently``: after SIGTERM, when running work may
    be finished first. ``within``, ``patiently_within``: the seconds that each may take.
    """

    at_once: Callable[[], object]
    within: float
    patiently: Callable[[], object]
    patiently_within: float


class Shutdown:
    """The only way to end the process. ``leave`` ends it: ``os._exit``, except in tests."""

    def __init__(self, leave: Callable[[int], NoReturn] = os._exit) -> None:
        self._leave = leave
        self._code: int | None = None
        self._closing: Closing | None = None
        self._offer: SignalOffer | None = None
        self._deadline: float | None = None
        self._read, self._write = -1, -1
        self._terminal: _Terminal | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the process has been asked to end."""
        return self._code is not None

    # -- signals ---------------------------------------------------------------------------------

    def install(self) -> None:
        """Handle SIGINT and SIGTERM from now on. Call once, in the main thread, before any slow call."""
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._terminal = _Terminal()
        threading.Thread(target=self._watch, name="shutdown", daemon=True).start()
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup and in background jobs of a script
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal in the main thread, as Python's handler. The signal is already in the pipe, unless asyncio
        owns the wakeup descriptor, which it takes while a prompt is shown and does not restore."""
        owner = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if owner == self._write:
            return
        with contextlib.suppress(BlockingIOError):
            os.write(self._write, bytes([number]))
        if owner != -1:
            signal.set_wakeup_fd(owner)

    def follow_parent(self, pipe: int) -> None:
        """End the process when ``pipe`` closes. The parent holds it open and never writes to it."""

        def read() -> None:
            with contextlib.suppress(OSError):
                while os.read(pipe, 4096):
                    pass
            os.write(self._write, bytes([PARENT_GONE]))

        threading.Thread(target=read, name="parent", daemon=True).start()

    def _watch(self) -> None:
        """Read signals and keep the time limit until the process ends; nothing else could end it."""
        try:
            while self._wait_for_signal():
                for number in os.read(self._read, 256):
                    if number in (*_SIGNALS, PARENT_GONE):
                        self.handle(number)
            self.exit(1)
        finally:
            self._leave(1 if self._code is None else self._code)

    def _wait_for_signal(self) -> bool:
        """Wait for a signal. Return False if the time for closing is over."""
        left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        return bool(select.select([self._read], [], [], left)[0])

    def handle(self, number: int) -> None:
        """Act on a signal, or on the parent's end."""
        if self.has_begun:
            self._hurry(number)
        elif not self._is_taken(number):
            self._begin(number)

    def _is_taken(self, number: int) -> bool:
        offer = self._offer
        try:
            return offer is not None and offer(number)
        except Exception:  # noqa: BLE001 - no error may keep the process from ending
            return False

    def _begin(self, number: int) -> None:
        code = self._code = _code_of(number)
        closing = self._closing
        if closing is None:
            self.exit(code)
        elif number == signal.SIGTERM:
            self._close(closing.patiently, closing.patiently_within)
        else:
            self._close(closing.at_once, closing.within)

    def _hurry(self, number: int) -> None:
        """Close at once on a second signal; further ones change nothing."""
        closing, self._closing = self._closing, None
        if closing is not None:
            self._code = _code_of(number) or self._code
            self._close(closing.at_once, closing.within)

    def _close(self, close: Callable[[], object], within: float) -> None:
        deadline = time.monotonic() + within
        self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)

        def run() -> None:
            with contextlib.suppress(BaseException):
                close()
            self.exit(1)

        threading.Thread(target=run, name="closing", daemon=True).start()

    # -- registration ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def closed_by(self, closing: Closing) -> Iterator[None]:
        """Let a signal run ``closing`` before the process ends, during the ``with`` block."""
        self._closing = closing
        try:
            yield
        finally:
            self._closing = None

    @contextlib.contextmanager
    def offered_to(self, offer: SignalOffer) -> Iterator[None]:
        """Let signals go to ``offer`` before they end the process, during the ``with`` block."""
        self._offer = offer
        try:
            yield
        finally:
            self._offer = None

    # -- the end ---------------------------------------------------------------------------------

    def exit(self, code: int) -> NoReturn:
        """End the process now, with ``code``, or with the code of the signal that ended it.

        It does not wait for threads in a long computation, which have nothing to save. Output is flushed, after a
        signal for a limited time, because nobody may read a full pipe.
        """
        if not self.has_begun:
            _flush()
        clearing = threading.Thread(target=self._clear, name="clearing", daemon=True)
        with contextlib.suppress(RuntimeError):  # no more threads can be started
            clearing.start()
            clearing.join(_CLEAR_SECONDS)
        self._leave(code if self._code is None else self._code)

    def _clear(self) -> None:
        cleanup.clear()
        if self.has_begun and self._terminal is not None:
            self._terminal.restore()
        _flush()


def _code_of(number: int) -> int:
    return 0 if number == PARENT_GONE else 128 + number


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # without a reader; closed; None
            stream.flush()


class _Terminal:
    """The terminal's state when the process began; code that changed it may have no time to restore it."""

    def __init__(self) -> None:
        self._attributes: list[Any] | None = None
        with contextlib.suppress(OSError, termios.error):
            self._attributes = termios.tcgetattr(_STDIN)

    def restore(self) -> None:
        """Restore echo and line mode, show the cursor, end bracketed paste, and begin a line.

        The spaces written here reach the next line from all columns but the first.
        """
        if self._attributes is not None and _is_in_foreground(_STDIN):
            with contextlib.suppress(OSError, termios.error):
                termios.tcsetattr(_STDIN, termios.TCSANOW, self._attributes)
        terminal = next(filter(_is_in_foreground, (_STDERR, _STDOUT)), None)
        if terminal is not None:
            with contextlib.suppress(OSError):
                spaces = os.get_terminal_size(terminal).columns - 1
                os.write(terminal, b" " * spaces + b"\r" + _RESET_TERMINAL)


def _is_in_foreground(descriptor: int) -> bool:
    """Return whether it is a terminal that this process may set; the system would stop a background process."""
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:
        return False


shutdown = Shutdown()
"""The shutdown of this process."""
