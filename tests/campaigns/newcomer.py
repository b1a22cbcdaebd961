"""A newcomer's evening as keystrokes: alone, and two machines by `init` (`up`: its own campaign). Root, Linux, sshd.

    python -m tests.campaigns.newcomer                 # both; the commands are installed before, as in `up`
    python -m tests.campaigns.newcomer --only init

Prints each screen, the seconds, and the things typed: commands, codes, answers to questions, and what is said to the
model. Each scene ends with the first whole answer. The machines are those of `tests.campaigns.up`: namespaces with
users, homes and an sshd of their own.
"""

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from machines import Machine, is_possible
from terminals import Terminal

from tests.campaigns.up import Campaign

SECONDS = 240.0  # for the next thing on a screen; measuring takes 12 of them on each machine
PROMPT, ANSWERED = "/help lists the commands.", r"tok/s · first token"
LEAST = 5.0  # tokens a second of the demo, planned from figures of machines that never computed before
CODE = re.compile(r"this machine's code: (\w{3}-\w{3})")


@dataclass
class Evening:
    """What a person has typed since the scene began."""

    campaign: Campaign
    began: float = field(default_factory=time.monotonic)
    typed: list[str] = field(default_factory=list)

    @contextmanager
    def terminal(self, machine: Machine, *words: str) -> Iterator[Terminal]:
        """A terminal at a machine, in which a command was typed."""
        print(f"  eve@{machine.name}$ {' '.join(words)}")
        self.typed.append(" ".join(words))
        program = f"/home/eve/.local/bin/{words[0]}" if words[0] == "splitinfer" else words[0]
        with closing(Terminal(*machine.command("eve", [program, *words[1:]]), home=machine.home("eve"))) as made:
            yield made

    def types(self, terminal: Terminal, text: str) -> None:
        """Somebody types a line."""
        self.typed.append(text or "Enter")
        terminal.type(f"{text}\r")

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
        self.types(terminal, "/set max_tokens 24")
        self.types(terminal, "Tell me about a wolf.")
        self.sees(terminal, ANSWERED)
        terminal.type("/quit\r")
        self.campaign.check(terminal.end() == 0, "the REPL did not end with 0")


def alone(evening: Evening) -> None:
    """One machine, one word."""
    with evening.terminal(evening.campaign.studio, "splitinfer", "chat") as terminal:
        evening.sees(terminal, r"Chat with the demo\? \[Y/n\]")
        evening.types(terminal, "")
        evening.chats(terminal)


def init(evening: Evening) -> None:
    """Two machines that ssh does not connect."""
    studio, air = evening.campaign.studio, evening.campaign.air
    with (
        evening.terminal(air, "splitinfer", "init") as there,
        evening.terminal(studio, "splitinfer", "init", "--model", "demo") as here,
    ):
        codes = [CODE.search(evening.sees(each, CODE.pattern + r"(?s:.*):")) for each in (there, here)]
        for terminal, code in zip((here, there), codes, strict=True):
            evening.types(terminal, code[1] if code else "no code")
        said = evening.sees(here, r"Chat with: splitinfer chat --layout demo-pair.yaml")
        expected = re.search(r"Expected: (\S+) tokens a second", said)
        evening.campaign.check(expected and float(expected[1]) > LEAST, "the machines were measured as far too slow")
        evening.campaign.check(here.end() == 0, "init did not end with 0")
        with evening.terminal(studio, "splitinfer", "chat", "--layout", "demo-pair.yaml") as terminal:
            evening.chats(terminal)


SCENES: dict[str, Callable[[Evening], None]] = {"alone": alone, "init": init}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SCENES)
    options = parser.parse_args()
    if (reason := is_possible()) is not None:
        print(f"left out: {reason}")
        return 0
    with tempfile.TemporaryDirectory(prefix="newcomer-") as folder:
        Path(folder).chmod(0o755)
        with closing(Campaign(Path(folder))) as campaign:
            for name in [options.only] if options.only else SCENES:
                print(f"{name}: {' '.join((SCENES[name].__doc__ or '').split())}")
                evening = Evening(campaign)
                SCENES[name](evening)
                seconds = time.monotonic() - evening.began
                print(f"{name}: {seconds:.1f} s, {len(evening.typed)} things typed: {'; '.join(evening.typed)}")
        print(f"{len(campaign.wrong)} wrong" if campaign.wrong else "all as it should be")
    return int(bool(campaign.wrong))


if __name__ == "__main__":
    sys.exit(main())
