"""``splitinfer bench`` as a process that measures on less text than it does for people."""

import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE, TESTS = Path(__file__).parent, Path(__file__).parents[1]
sys.path.insert(0, str(TESTS))

from effort import thorough  # noqa: E402


def command(arguments: Sequence[str], constants: Mapping[str, Any]) -> list[str]:
    """The command line of ``splitinfer bench``, with other values for some constants, named with their modules below
    ``splitinfer.bench``; under --all with their own. A constant that is not there ends the process."""
    if thorough(False, True):
        return [sys.executable, "-m", "splitinfer", "bench", *arguments]
    code = f"import brief; brief.run({dict(constants)!r})"
    return [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(HERE)!r}); {code}", "bench", *arguments]


def run(constants: Mapping[str, Any]) -> None:
    """Run the command line of this process with other values for constants."""
    for dotted, value in constants.items():
        path, _, name = f"splitinfer.bench.{dotted}".rpartition(".")
        module = importlib.import_module(path)
        getattr(module, name)
        setattr(module, name, value)
    importlib.import_module("splitinfer.cli").main()
