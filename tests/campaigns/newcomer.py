"""A newcomer's evening as keystrokes, on the machines of ``up``: alone, and two machines by `init`.

Each screen is printed, and what is typed: commands, codes, answers to questions, and what is said to the model. Each
scene ends with the first whole answer.
"""

import os
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from machines import Machine
from terminals import Terminal

if TYPE_CHECKING:
    from .up import Campaign

SECONDS = 240.0  # for the next thing on a screen; measuring takes 12 of them on each machine
PROMPT, ANSWERED = "/help lists the commands.", r"tok/s · first token"
LEAST = 5.0  # tokens a second of the demo, planned from figures of machines that never computed before
CODE = re.compile(r"this machine's code: (\w{3}-\w{3})")


class Evening:
    def __init__(self, campaign: "Campaign") -> None:
        self.campaign = campaign

    @contextmanager
    def terminal(self, machine: Machine, *words: str) -> Iterator[Terminal]:
        print(f"  eve@{machine.name}$ {' '.join(words)}")
        program = f"/home/eve/.local/bin/{words[0]}" if words[0] == "splitinfer" else words[0]
        with closing(Terminal(*machine.command("eve", [program, *words[1:]]), home=machine.home("eve"))) as made:
            yield made

    def sees(self, terminal: Terminal, what: str) -> str:
        """What is on the screen up to this; it is printed."""
        said = terminal.until(lambda text: re.search(what, text), SECONDS)
        for line in filter(str.strip, said.splitlines()):
            if "━" not in line:  # bars of progress, one after the other
                print(f"  | {line[:160]}")
        return said

    def chats(self, terminal: Terminal) -> None:
        """Until the first whole answer, then away."""
        self.sees(terminal, re.escape(PROMPT))
        terminal.type("/set max_tokens 24\r")
        terminal.type("Tell me about a wolf.\r")
        self.sees(terminal, ANSWERED)
        terminal.type("/quit\r")
        self.campaign.check(terminal.end() == 0, "the REPL did not end with 0")


def alone(campaign: "Campaign") -> None:
    """One machine, one word."""
    evening = Evening(campaign)
    with evening.terminal(campaign.studio, "splitinfer", "chat") as terminal:
        evening.sees(terminal, r"Chat with the demo\? \[Y/n\]")
        terminal.type("\r")
        evening.chats(terminal)


def init(campaign: "Campaign") -> None:
    """Two machines that ssh does not connect."""
    evening, studio, air = Evening(campaign), campaign.studio, campaign.air
    with (
        evening.terminal(air, "splitinfer", "init") as there,
        evening.terminal(studio, "splitinfer", "init", "--model", "demo") as here,
    ):
        codes = [CODE.search(evening.sees(each, CODE.pattern + r"(?s:.*):")) for each in (there, here)]
        for terminal, code in zip((here, there), codes, strict=True):
            terminal.type(f"{code[1] if code else 'no code'}\r")
        said = evening.sees(here, r"Chat with:\s+splitinfer chat --layout demo-pair.yaml")
        expected = re.search(r"one chat +(\S+) tokens/s", said)
        figures = [file.read_text() for file in studio.home("eve").glob(".cache/splitinfer/profiles/*.json")]
        campaign.check(expected and float(expected[1]) > LEAST, f"far too slow; load {os.getloadavg()}: {figures}")
        campaign.check(here.end() == 0, "init did not end with 0")
        with evening.terminal(studio, "splitinfer", "chat", "--layout", "demo-pair.yaml") as terminal:
            evening.chats(terminal)


SCENES = (alone, init)
