"""Runs the REPL in a terminal, or on the lines of a pipe."""

import sys

from splitinfer.chat.chat import Chat
from splitinfer.chat.screens import LineScreen, Offers, TerminalScreen, history_file
from splitinfer.core.sampling_defaults import ResolvedSampling
from splitinfer.core.sequence import SamplingParams
from splitinfer.llm import LLM


def run_chat(llm: LLM, params: SamplingParams | ResolvedSampling, offers: Offers) -> int:
    """Chat until the user leaves, and return the exit code. ``offers``: how a screen gets the process's signals.

    A terminal has line editing and a status line. Elsewhere every line of standard input is a turn or a command,
    answers go to standard output, and the code is 1 if any line could not be carried out.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        chat = Chat(llm, params, LineScreen(sys.stdin))
        return chat.run() or int(chat.has_refused)
    history = history_file()
    with TerminalScreen(history, offers) as terminal:
        return Chat(llm, params, terminal, rescues=history and history.parent).run()
