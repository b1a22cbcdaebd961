"""Where inputs come from and answers go: plain lines for scripts, and a terminal with line editing (prompt_toolkit).

Answers go to standard output, everything else to standard error.
"""

import io
import os
import select
import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.buffer import Buffer
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter, WordCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.input import Input
from prompt_toolkit.input.typeahead import store_typeahead
from prompt_toolkit.key_binding import KeyBindings, KeyPress, KeyPressEvent
from prompt_toolkit.shortcuts import CompleteStyle
from prompt_toolkit.styles import Style
from rich.console import Console
from rich.text import Text

from splitinfer.chat import formatting
from splitinfer.chat.commands import COMMANDS, is_open
from splitinfer.chat.markdown import MarkdownStream, drawn
from splitinfer.common.plain_text import without_controls
from splitinfer.core.sampling_defaults import SETTABLE
from splitinfer.places import state

Offers = Callable[[Callable[[int], bool]], AbstractContextManager[None]]
"""Passes the process's signals to a function while the returned context is open; where the function returns false,
the signal ends the process."""


class Write(Protocol):
    """Writes a text of an answer."""

    def __call__(self, text: str, *, is_reasoning: bool = False) -> None:
        """Write ``text``. ``is_reasoning``: it is the model's reasoning, not for the reader."""


CTRL_C_LIMIT = 3  # presses during one answer that end the program though the engine has not stopped
WAITING = "…"
STOPPING = "stopping; the step under way ends first"

_MARK_PASTES = "\x1b[?2004h"  # the prompt switches it on itself, and off when it ends
_STYLE = Style.from_dict({"bottom-toolbar": "noreverse ansibrightblack", "prompt": "bold"})


class LineScreen:
    """Plain lines: each line that is read is one input."""

    def __init__(self, lines: TextIO) -> None:
        if isinstance(lines, io.TextIOWrapper):
            lines.reconfigure(errors="replace")
        self._lines: Iterable[str] = lines
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)

    def read(self, draft: str = "") -> str | None:
        """Return the next input. Return None when there is no more. ``draft``: text to begin with, where it can be
        edited."""
        line = next(iter(self._lines), None)
        return None if line is None else line.rstrip("\r\n")

    @contextmanager
    def answering(self, abort: Callable[[], None]) -> Iterator[Write]:
        """Return the context of one answer, with a function that writes its text; Ctrl-C may call ``abort`` meanwhile.
        A pipe gets no reasoning."""
        yield lambda text, *, is_reasoning=False: None if is_reasoning else _write(text)
        _write("\n")

    def wait(self, text: str) -> None:
        """Show what an answer waits for, until it begins. A pipe waits in silence."""

    def say(self, text: str) -> None:
        """Show a text that is no answer."""
        self._console.print(_text(text))

    def set_status(self, phrases: list[str]) -> None:
        """Set the figures of the last answer. A pipe has no status line."""


class _Inputs(Completer):
    """Completes commands, the names of settings after /set, and paths after the commands that take a file."""

    def __init__(self) -> None:
        self._commands = WordCompleter([f"/{name}" for name in COMMANDS], sentence=True)
        files = dict.fromkeys((name for name, usage in COMMANDS.items() if usage.argument == "FILE"), PathCompleter())
        self._arguments: dict[str, Completer] = {"set": WordCompleter(SETTABLE, sentence=True), **files}

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        name, space, argument = document.text_before_cursor.partition(" ")
        completer = self._arguments.get(name[1:]) if space else self._commands
        if name.startswith("/") and completer is not None:
            yield from completer.get_completions(Document(argument) if space else document, complete_event)


class TerminalScreen(LineScreen):
    """A terminal: line editing with history, and Ctrl-C that ends answers instead of the program.

    While it is open it handles SIGINT, because a Ctrl-C between an answer and the prompt must not end the program
    either. ``offers``: how it gets the process's signals.
    """

    def __init__(self, history: Path | None, offers: Offers = lambda _: nullcontext()) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._status: list[str] = []
        self._hint = ""
        self._is_stopping = False
        self._prompt: PromptSession[str] = PromptSession(
            [("class:prompt", "> ")],
            prompt_continuation="  ",
            multiline=True,
            history=InMemoryHistory() if history is None else _LenientHistory(str(history)),
            key_bindings=self._keys(),
            bottom_toolbar=self._toolbar,
            completer=_Inputs(),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            reserve_space_for_menu=0,
            style=_STYLE,
        )
        self._signals = _Signals(self._prompt)
        self._offered = offers(self._signals.take)
        self._open, self._meanwhile = ExitStack(), ExitStack()  # the latter from an input to the next one

    def __enter__(self) -> Self:
        self._open.enter_context(self._offered)
        self._open.enter_context(_without_echo(self._prompt.app.input.fileno()))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._meanwhile.close()
        self._open.__exit__(kind, error, _)

    def read(self, draft: str = "") -> str | None:
        self._hint = ""
        self._signals.forget()
        self._meanwhile.close()
        _write("\n")
        try:
            text = self._prompt.prompt(default=draft, pre_run=self._signals.leave_if_due)
        except EOFError:
            return None
        self._meanwhile.enter_context(_typed_later(self._prompt.app.input))
        return text

    @contextmanager
    def answering(self, abort: Callable[[], None]) -> Iterator[Write]:
        draws = None if self._console.is_dumb_terminal else drawn
        flow, thinks = MarkdownStream(self._size, draws), False
        has_begun = self._is_stopping = False

        def stop() -> None:
            abort()
            self._is_stopping = True
            if not has_begun:
                self.wait("")

        def write(text: str, *, is_reasoning: bool = False) -> None:
            nonlocal has_begun, flow, thinks
            text = without_controls(text)
            if not text:
                return
            ended = "" if has_begun else formatting.ERASE
            if is_reasoning != thinks:  # each is a text of its own
                ended += _dim(flow.end(), draws and thinks) + "\n" if has_begun else ""
                flow, thinks = MarkdownStream(self._size, None if is_reasoning else draws), is_reasoning
            _write(ended + _dim(flow.feed(text), draws and thinks))
            has_begun = True

        with self._signals.go_to(stop):
            _write(WAITING)
            yield write
        _write(_dim(flow.end(), draws and thinks) if has_begun else formatting.ERASE)

    def wait(self, text: str) -> None:
        shown = STOPPING if self._is_stopping else text
        _write(f"{formatting.ERASE}{shown[: self._size()[0] - 1]}")

    def _size(self) -> tuple[int, int]:
        size = self._prompt.output.get_size()
        return size.columns, size.rows

    def set_status(self, phrases: list[str]) -> None:
        self._status = phrases

    # -- the prompt --------------------------------------------------------------------------

    def _toolbar(self) -> str | None:
        return self._hint or formatting.wrap(self._status, self._size()[0]) or "/help lists the commands"

    def _keys(self) -> KeyBindings:
        keys = KeyBindings()
        typing = has_focus(DEFAULT_BUFFER)  # and not in a search through the history

        @keys.add("enter", filter=typing)
        def send(event: KeyPressEvent) -> None:
            enter(event.current_buffer)

        @keys.add("escape", "enter", filter=typing)
        def new_line(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        @keys.add("c-c", filter=typing)
        @keys.add("<sigint>", filter=typing)
        def clear(event: KeyPressEvent) -> None:
            self._hint = "" if event.current_buffer.text else "/quit or Ctrl-D leaves"
            event.current_buffer.reset()

        return keys


def enter(buffer: Buffer) -> None:
    """Handle Enter. Turn a backslash at the end of the line into a new line, continue text in quotation marks, and send
    other text unless it is blank."""
    if not buffer.text.strip():
        return
    if is_open(buffer.text):
        buffer.insert_text("\n")
    elif buffer.document.current_line_before_cursor.endswith("\\"):
        buffer.delete_before_cursor()
        buffer.insert_text("\n")
    else:
        buffer.validate_and_handle()


class _Signals:
    """Handles signals for a terminal's screen, on the thread that receives them.

    SIGINT aborts the running answer, if there is one. Any other signal ends the program, and the prompt first, which
    restores the terminal.
    """

    def __init__(self, prompt: PromptSession[str]) -> None:
        self._prompt = prompt
        self._abort: Callable[[], None] | None = None
        self._count = 0
        self._is_ending = threading.Event()

    def take(self, number: int) -> bool:
        """Handle a signal; false if it is to end the program."""
        if number == signal.SIGINT:
            self._count += 1
            if self._abort is not None:
                self._abort()
            if self._count < CTRL_C_LIMIT:
                return True
        self._is_ending.set()
        loop = self._prompt.app.loop
        if loop is not None:
            with suppress(RuntimeError):  # the loop has just been closed
                loop.call_soon_threadsafe(self.leave_if_due)
        return False

    def leave_if_due(self) -> None:
        """End the prompt if the program ends. Runs in the prompt's loop, or before it."""
        app = self._prompt.app
        if self._is_ending.is_set() and app.is_running and not app.is_done:
            app.exit(exception=EOFError)

    @contextmanager
    def go_to(self, abort: Callable[[], None]) -> Iterator[None]:
        """Have SIGINT call ``abort`` while this is open."""
        self._count, self._abort = 0, abort
        try:
            yield
        finally:
            self.forget()

    def forget(self) -> None:
        """Reset the count, and let SIGINT abort nothing."""
        self._count, self._abort = 0, None


class _LenientHistory(FileHistory):
    """A history that works without its file where that cannot be read or written."""

    def load_history_strings(self) -> Iterable[str]:
        with suppress(OSError):
            return super().load_history_strings()
        return []

    def store_string(self, string: str) -> None:
        with suppress(OSError, UnicodeError):
            super().store_string(string)


def history_file() -> Path | None:
    """Return the history file, readable by its owner only. Return None if it cannot be made."""
    try:
        path = state() / "history"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_APPEND | os.O_RDWR, 0o600))
    except (OSError, RuntimeError):
        return None
    return path


@contextmanager
def _without_echo(fd: int) -> Iterator[None]:
    """A terminal that shows no key by itself and gives each at once, also in the moments in which nobody reads. The
    prompt's own mode begins with this one and goes back to it. NOFLSH: a Ctrl-C throws nothing away that was typed."""
    before = termios.tcgetattr(fd)
    during = [*before]
    during[3] = during[3] & ~(termios.ECHO | termios.ICANON | termios.IEXTEN) | termios.NOFLSH
    termios.tcsetattr(fd, termios.TCSANOW, during)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSANOW, before)


@contextmanager
def _typed_later(source: Input) -> Iterator[None]:
    """What is typed or pasted meanwhile waits for the prompt, whole, instead of mixing with what is shown.

    It is taken from the terminal at once: of a line that nobody takes, a terminal keeps 4,095 bytes, and a Ctrl-C
    behind it waits, too."""
    fd, keys = source.fileno(), list[KeyPress]()
    stopped, stop = os.pipe()

    def take() -> None:
        while stopped not in select.select([fd, stopped], [], [])[0] and not source.closed:
            keys.extend(source.read_keys())

    taking = threading.Thread(target=take, name="typed", daemon=True)
    _write(_MARK_PASTES)
    taking.start()
    try:
        yield
    finally:
        os.write(stop, b".")
        taking.join()
        for end in (stopped, stop):
            os.close(end)
        store_typeahead(source, keys)


def _dim(text: str, is_dim: object) -> str:
    return f"\x1b[2m{text}\x1b[22m" if is_dim and text else text


def _text(text: str) -> Text:
    return Text(without_controls(text))  # names and messages may come from files


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
