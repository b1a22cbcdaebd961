"""The REPL: a conversation in a terminal, or over the lines of a pipe.

commands        what a typed text means          pure
conversation    turns; what to drop; JSON        pure
figures         status line and tables           pure
chat            one input carried out on an LLM
screens         where things are shown and typed: a terminal, or plain lines
"""

import sys

from splitinfer.chat.chat import Chat
from splitinfer.chat.screens import LineScreen, Offers, TerminalScreen, history_file
from splitinfer.core.sampling_defaults import ResolvedSampling
from splitinfer.core.sequence import SamplingParams
from splitinfer.llm import LLM


def run_chat(llm: LLM, params: SamplingParams | ResolvedSampling, offers: Offers) -> int:
    """Chat until the person leaves; the exit code. ``offers``: how a screen gets the process's signals.

    On a terminal with line editing and a status line. Elsewhere every line of standard input is a turn or a
    command, answers go to standard output, and the code is 1 if any line could not be carried out.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        screen = LineScreen(sys.stdin)
        chat = Chat(llm, params, screen)
        return chat.run() or int(chat.has_refused)
    with TerminalScreen(history_file(), offers) as terminal:
        return Chat(llm, params, terminal).run()
