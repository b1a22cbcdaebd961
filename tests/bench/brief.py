"""``splitinfer bench`` as a process that measures on less text than it does for people."""

import sys
from collections.abc import Mapping, Sequence

from effort import thorough


def command(arguments: Sequence[str], module: str, constants: Mapping[str, int]) -> list[str]:
    """The command line of ``splitinfer bench``, with other values for some of a module's constants; under --all with
    its own."""
    if thorough(False, True):
        return [sys.executable, "-m", "splitinfer", "bench", *arguments]
    changes = "; ".join(f"changed.{name} = {value}" for name, value in constants.items())
    code = f"import {module} as changed; from splitinfer.cli import main; {changes}; main()"
    return [sys.executable, "-c", code, "bench", *arguments]
