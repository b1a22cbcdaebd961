"""Runs a job in a process of its own, with a limit, and collects what it reports.

The process writes a line of JSON for each thing that it found, so what it had found when it ended is known, whatever
ended it: an error of the device often ends the process, and always its context.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from splitinfer import cleanup
from splitinfer.bench.gpu.parts import Job

_COMMAND = (sys.executable, "-m", "splitinfer.bench.gpu.job")
_NO_TIME = 1.0  # seconds with which no process is started


@dataclass(slots=True)
class Outcome:
    """What a job reported, by name, and in one sentence why it reported no more; ``None`` if it came to its end."""

    limit_s: float
    seconds: float = 0.0
    problem: str | None = None
    found: dict[str, Any] = field(default_factory=dict)


def run_job(job: Job, limit: float, environment: Mapping[str, str], command: Sequence[str] = _COMMAND) -> Outcome:
    """Run a job for at most ``limit`` seconds, which it is told. ``environment``: of all jobs."""
    outcome = Outcome(round(limit, 1))
    if limit < _NO_TIME:
        outcome.problem = "no time was left for it"
        return outcome
    began = time.monotonic()
    with tempfile.TemporaryFile("w+", prefix="splitinfer-gpu-") as log:
        process = cleanup.start(
            [*command, json.dumps({**asdict(job), "limit_s": limit})],
            env={**os.environ, **environment, **job.environment}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=log, start_new_session=True, text=True,
        )  # fmt: skip
        overrun = threading.Event()
        timer = threading.Timer(limit, lambda: (overrun.set(), _kill(process)))
        timer.start()
        try:
            _collect(process, outcome)
            process.wait()
        finally:
            timer.cancel()
            _kill(process)
            process.wait()
        if overrun.is_set():
            outcome.problem = f"overran: ended after {limit:.1f} s, which was its share of the time"
        elif process.returncode and outcome.problem is None:
            outcome.problem = f"ended by itself with {_ending(process.returncode)}{_last_line(log.seek(0), log.read())}"
    outcome.seconds = round(time.monotonic() - began, 1)
    return outcome


def _collect(process: subprocess.Popen[str], outcome: Outcome) -> None:
    """Read what the process writes, until its end."""
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            with contextlib.suppress(ValueError):  # cut off when it was ended
                told = json.loads(line)
                outcome.found |= told.get("found", {})
                outcome.problem = told.get("problem", outcome.problem)


def _kill(process: subprocess.Popen[str]) -> None:
    """End a process and those that it has started in its group; others end when their input does."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _last_line(_at: int, text: str) -> str:
    lines = text.strip().splitlines()
    return f" ({lines[-1].strip():.300})" if lines else ""
