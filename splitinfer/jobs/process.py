"""The process of a job: ``python -m splitinfer.jobs.process JOB``, where JOB is JSON.

It writes lines of JSON: what it tries, what it found, and in one sentence why it failed. A device that has failed once
fails at everything that a process asks of it afterwards, so the process then ends, and another goes on behind that.
"""

import importlib
import json
import re
import sys
import traceback
from collections.abc import Callable, Collection
from typing import Any

from splitinfer.core.json_text import dumps
from splitinfer.jobs.output import own_output

FAILED, DEVICE_FAILED = 1, 3  # exit codes: the job cannot go on; another process may go on with it
_OURS = ("splitinfer", "transports")
_DEVICE_FAILED = re.compile(r"\bcu\w+\(.*\) failed|illegal|cuda error|command buffer execution failed", re.IGNORECASE)


class DeviceLost(Exception):
    """The device failed, and will go on to, in this process."""


class Report:
    """Takes findings. ``write``: a line; ``skip``: names of what is not to be found again."""

    def __init__(self, write: Callable[[dict[str, Any]], None], skip: Collection[str] = ()) -> None:
        self._write, self._skip = write, frozenset(skip)

    def __call__(self, name: str, value: Any) -> None:
        """Report a finding: its name, and its value as plain data."""
        self._write({"found": {name: value}})

    def guarded(self, name: str, find: Callable[[], Any]) -> Any:
        """Report what ``find`` returns; or what it raised, so that others are found all the same. Returns what was
        reported, ``None`` if it was skipped.

        Raises:
            DeviceLost: the device failed.
        """
        if name in self._skip:
            return None
        self._write({"trying": name})
        try:
            value = find()
        except Exception as error:
            value = {"problem": sentence(error), "at": place(error)}
            self(name, value)
            if _DEVICE_FAILED.search(str(error)):
                raise DeviceLost from error
        else:
            self(name, value)
        return value


def sentence(error: BaseException) -> str:
    """An error in one line.

    >>> sentence(ValueError("no\\nkernel"))
    'ValueError: no kernel'
    """
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text:.300}" if text else type(error).__name__


def place(error: BaseException) -> str:
    """The innermost module and line of this project that an error went through, such as "splitinfer.llm.llm:80"; empty
    if it went through none."""
    frames = [(frame.f_globals.get("__name__", ""), line) for frame, line in traceback.walk_tb(error.__traceback__)]
    ours = [f"{name}:{line}" for name, line in frames if name.partition(".")[0] in _OURS and name != __name__]
    return ours[-1] if ours else ""


def run(text: str, write: Callable[[dict[str, Any]], None]) -> int:
    """Run a job and write what it finds; the exit code."""
    job = json.loads(text)
    options = {**job["options"], "limit_s": job["limit_s"]}
    try:
        module = importlib.import_module(job["module"])
        write({"found": {}})  # that it got so far: a start takes seconds
        module.measure(options, Report(write, job["skip"]))
    except DeviceLost:
        return DEVICE_FAILED
    except Exception as error:  # noqa: BLE001 - goes into the document
        write({"problem": f"failed: {sentence(error)}", "at": place(error)})
        return FAILED
    return 0


def main() -> int:
    """The entry point; the exit code."""
    answers = own_output()

    def write(line: dict[str, Any]) -> None:
        answers.write(dumps(line) + "\n")
        answers.flush()

    return run(sys.argv[1], write)


if __name__ == "__main__":
    raise SystemExit(main())
