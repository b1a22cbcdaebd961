"""The process of a job: ``python -m splitinfer.bench.gpu.job JOB``, where JOB is JSON. Writes a line for each finding."""

import importlib
import json
import sys
from collections.abc import Callable
from typing import Any, Protocol, TextIO

from splitinfer.bench.shared.child_process import own_output
from splitinfer.core.json_text import dumps


class Report(Protocol):
    """Takes a finding: its name, and its value as plain data."""

    def __call__(self, name: str, value: Any) -> None:
        """Report it."""
        ...


def sentence(error: BaseException) -> str:
    """An error in one line.

    >>> sentence(ValueError("no\\nkernel"))
    'ValueError: no kernel'
    """
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text:.300}" if text else type(error).__name__


def guarded(report: Report, name: str, find: Callable[[], Any]) -> None:
    """Report what ``find`` returns; or what it raised, so that others are found all the same."""
    try:
        report(name, find())
    except Exception as error:  # noqa: BLE001 - whatever a backend does not have
        report(name, {"problem": sentence(error)})


def run(text: str, answers: TextIO) -> int:
    """Run a job and write what it finds; the exit code."""

    def write(line: dict[str, Any]) -> None:
        answers.write(dumps(line) + "\n")
        answers.flush()

    job = json.loads(text)
    try:
        module = importlib.import_module(f"splitinfer.bench.gpu.{job['module']}")
        options = {**job["options"], "limit_s": job["limit_s"]}
        module.measure(options, lambda name, value: write({"found": {name: value}}))
    except Exception as error:  # noqa: BLE001 - goes into the document
        write({"problem": f"failed: {sentence(error)}"})
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(run(sys.argv[1], own_output()))
