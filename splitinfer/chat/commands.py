"""Parses typed text into a turn for the model, a command, or an invalid input."""

import difflib
import re
import shutil
import textwrap
from dataclasses import dataclass

from splitinfer.common.plain_text import wrapped


@dataclass(frozen=True, slots=True)
class CommandUsage:
    """A command's argument as /help names it, and what the command does."""

    argument: str
    help: str


COMMANDS = {
    "help": CommandUsage("", "list the commands"),
    "retry": CommandUsage("", "ask the last question again"),
    "edit": CommandUsage("", "change the last question and ask it again"),
    "reset": CommandUsage("", "clear the conversation and free its KV; keep the system message"),
    "temp": CommandUsage("[VALUE]", "show or set the temperature; 0 always picks the most likely token"),
    "set": CommandUsage(
        "[NAME VALUE]",
        "show the sampling settings and where each comes from, or set one; VALUE may be `default`; reasoning may be "
        "`on`, `off` or how much, such as `low`",
    ),
    "system": CommandUsage("[TEXT]", "show or set the system message; `/system clear` removes it"),
    "stats": CommandUsage("", "what each stage has done since the start"),
    "model": CommandUsage("", "which model answers"),
    "layout": CommandUsage("", "which stage holds which layers, where, its memory and how busy it is"),
    "plan": CommandUsage(
        "[apply]", "compare the current cut with the best one by measured costs; `/plan apply` loads the best"
    ),
    "image": CommandUsage("FILE", "show the model a picture with your next message, if it sees pictures"),
    "save": CommandUsage("FILE", "save the conversation as JSON to a new file; its KV stays on disk"),
    "load": CommandUsage("FILE", "continue a saved conversation, with its KV if that is still on disk"),
    "read": CommandUsage("FILE", "send the text of a file with your next message"),
    "quit": CommandUsage("", "quit; Ctrl-D does the same"),
}

# The names of other programs, which work, too.
_ELSEWHERE = {"exit": "quit", "bye": "quit", "clear": "reset", "new": "reset", "regenerate": "retry"}

_WIDTH = 80  # characters of a line of /help, where the terminal has them
KEYS = (
    'Enter sends. Alt-Enter, or a backslash at the end of the line, begins a new line. Between """ and """ a '
    "text may have several lines. Ctrl-C ends an answer.\n"
    "Text that begins with / is a command; put a space before it to send it as a message. /exit and /bye are /quit, "
    "/clear and /new are /reset, /regenerate is /retry."
)
_QUOTES = '"""'


@dataclass(frozen=True, slots=True)
class Command:
    """One of ``COMMANDS``, with its argument."""

    name: str
    argument: str


def parse(text: str) -> str | Command | None:
    """Return the meaning of ``text``: a text for the model, or a command. Return None if it is blank.

    Only a single word after the slash makes a command: paths and code comments are turns.

    Raises:
        ValueError: the command does not exist, or lacks its argument; one sentence says so.
    """
    if not text.strip():
        return None
    match = re.fullmatch(r"/([^/\s]*)(?:\s+(.*))?", text, re.DOTALL)
    if match is None:
        return text.strip().removeprefix(_QUOTES).removesuffix(_QUOTES) if text.startswith(_QUOTES) else text
    name, argument = match[1].lower(), (match[2] or "").strip()
    name = _ELSEWHERE.get(name, name)
    if name not in COMMANDS:
        raise ValueError(_unknown(name))
    usage = COMMANDS[name]
    if argument and not usage.argument:
        raise ValueError(f"/{name} takes no argument")
    if not argument and usage.argument == "FILE":
        raise ValueError(f"/{name} needs a file name: /{name} {usage.argument}")
    return Command(name, argument)


def is_open(text: str) -> bool:
    """Return whether Enter begins a new line in it: it begins with three quotation marks, and does not end with three.

    >>> marks = '"' * 3
    >>> is_open(marks + "one"), is_open(marks + "one" + marks), is_open("one")
    (True, False, False)
    """
    return text.startswith(_QUOTES) and not text[len(_QUOTES) :].rstrip().endswith(_QUOTES)


def help_text() -> str:
    """Return the text that /help shows."""
    heads = {name: f"/{name} {usage.argument}".strip() for name, usage in COMMANDS.items()}
    indent = max(map(len, heads.values())) + 2
    width = min(_WIDTH, shutil.get_terminal_size().columns)
    lines = [
        textwrap.fill(f"{heads[name]:{indent}}{usage.help}", width, subsequent_indent=" " * indent)
        for name, usage in COMMANDS.items()
    ]
    return "\n".join([*lines, "", wrapped(KEYS, width)])


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5) or [c for c in COMMANDS if name and name in c]
    hint = f"did you mean /{near[0]}?" if near else "/help lists the commands"
    return f"there is no command /{name}; {hint}"
