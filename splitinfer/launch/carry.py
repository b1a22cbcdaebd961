"""Carries the steps of all hosts out, each host in a thread of its own.

``Run`` is all that the steps need of ssh: tests give another one.
"""

import secrets
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from splitinfer.launch.answers import Do, Heard, Request, understand
from splitinfer.launch.hosts import Host
from splitinfer.launch.script import script
from splitinfer.launch.ssh_errors import Ended, Trouble, trouble
from splitinfer.launch.steps import Failed, Looking, Own, Starting, State, Up, advance, request, request_to

_Of = TypeVar("_Of")

Run = Callable[[Host, str], Ended]
"""Runs a script on a machine."""

Notice = Callable[[State], None]
"""Called with each new state of a host, from that host's thread."""


@dataclass(frozen=True, slots=True)
class Carrier:
    """This machine, as what asks others. ``program``: the path of its own command, if it has one."""

    own: Own
    run: Run
    program: str | None = None

    def bring_up(self, hosts: Sequence[Host], notice: Notice) -> list[Up | Failed]:
        """Take each host to its last state, all at the same time; in the order of ``hosts``."""
        return _each(hosts, lambda host: self._steps(host, notice))

    def ask(self, hosts: Sequence[Host], do: Do) -> list[Heard | Trouble | None]:
        """Ask all hosts the same, at the same time; in their order."""
        return _each(hosts, lambda host: self._ask(host, request_to(do, host, self.own)))

    def _steps(self, host: Host, notice: Notice) -> Up | Failed:
        state: State = Looking(host)
        while isinstance(state, Looking | Starting):
            program = state.seen.program if isinstance(state, Starting) else ()
            state = advance(state, self._ask(host, request(state, self.own), program), self.own)
            notice(state)
        return state

    def _ask(self, host: Host, what: Request, program: Iterable[str] = ()) -> Heard | Trouble | None:
        mark = f"@splitinfer-{secrets.token_hex(8)}"
        home = str(Path.home())
        ended = self.run(host, script(mark, what.encode(), tuple(program), self.program, home))
        answer = understand(ended.output, ended.complaints, mark)
        return answer if answer is not None else trouble(ended, host)


def _each(hosts: Sequence[Host], work: Callable[[Host], _Of]) -> list[_Of]:
    with ThreadPoolExecutor(max(1, len(hosts)), "host") as pool:
        return list(pool.map(work, hosts))
