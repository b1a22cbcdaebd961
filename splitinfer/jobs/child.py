"""Runs a job in a process of its own, with a limit, and collects what it reports.

The process writes what it tries and what it found, so both are known when it ends, whatever ended it: an error of the
device often ends the process, and always its context. Another process then goes on behind what was tried last.
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
from splitinfer.jobs.job import Job

_COMMAND = (sys.executable, "-m", "splitinfer.jobs.process")
_NO_TIME = 1.0  # seconds with which no process is started


@dataclass(slots=True)
class Outcome:
    """What a job reported, by name, and in one sentence why it reported no more; ``None`` if it came to its end.
    ``processes``: how many it took; ``trying``: what it was at when it overran; ``at``: where it failed;
    ``silent_s``: seconds since it last said anything when it overran."""

    limit_s: float
    seconds: float = 0.0
    processes: int = 0
    problem: str | None = None
    found: dict[str, Any] = field(default_factory=dict)
    trying: str | None = None
    at: str | None = None
    silent_s: float = 0.0


def problems(outcome: Outcome) -> list[str]:
    """A job's problem, and those of single findings together, each in one sentence.

    >>> problems(Outcome(9.0, found={"a": {"problem": "no kernel"}, "b": {"problem": "no memory"}, "c": {"ms": 1.0}}))
    ['2 of 3 findings failed, the first, a, by: no kernel']
    """
    failed = [name for name, one in outcome.found.items() if isinstance(one, dict) and "problem" in one]
    sentences = [] if outcome.problem is None else [outcome.problem]
    if failed:
        why = outcome.found[failed[0]]["problem"]
        sentences.append(f"{len(failed)} of {len(outcome.found)} findings failed, the first, {failed[0]}, by: {why}")
    return sentences


def run_job(
    job: Job,
    limit: float,
    environment: Mapping[str, str],
    command: Sequence[str] = _COMMAND,
    *,
    known: Mapping[str, Any] | None = None,
) -> Outcome:
    """Run a job for at most ``limit`` seconds, which it is told. ``environment``: of all jobs; ``known``: what it has
    found already, and need not find again."""
    began, outcome, goes_on = time.monotonic(), Outcome(round(limit, 1), found=dict(known or {})), True
    while goes_on:
        left = limit - (time.monotonic() - began)
        if left < _NO_TIME:
            outcome.problem = "its time was over before all was tried" if outcome.found else "no time was left for it"
            break
        count = len(outcome.found)
        ending = _run_once(job, left, environment, command, outcome)
        if ending.overran:
            outcome.problem = f"overran: ended after {limit:.1f} s, which was its share of the time"
            outcome.trying, outcome.silent_s = ending.tried, round(ending.silent_s, 1)
        elif ending.tried is not None:
            outcome.found[ending.tried] = {"problem": f"ended its process, with {ending.how}"}
        elif ending.code and outcome.problem is None and len(outcome.found) == count:
            outcome.problem = f"ended by itself with {ending.how}"
        # Each further process has less to try.
        goes_on = bool(ending.code) and outcome.problem is None
    outcome.seconds = round(time.monotonic() - began, 1)
    return outcome


@dataclass(frozen=True, slots=True)
class _Ending:
    """How a process ended. ``tried``: what it tried and did not find; ``silent_s``: seconds since its last line."""

    code: int
    overran: bool
    tried: str | None
    how: str
    silent_s: float


def _run_once(
    job: Job, limit: float, environment: Mapping[str, str], command: Sequence[str], outcome: Outcome
) -> _Ending:
    """Have one process go on with a job."""
    text = json.dumps({**asdict(job), "limit_s": limit, "skip": list(outcome.found)})
    outcome.processes += 1
    with tempfile.TemporaryFile("w+", prefix="splitinfer-job-") as log:
        process = cleanup.start(
            [*command, text], env={**os.environ, **environment, **job.environment}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=log, start_new_session=True, text=True,
        )  # fmt: skip
        overran = threading.Event()

        def end() -> None:
            overran.set()
            _kill(process)

        timer = threading.Timer(limit, end)
        timer.start()
        try:
            tried, heard = _collect(process, outcome)
            silent = time.monotonic() - heard
            code = process.wait()
        finally:
            timer.cancel()
            _kill(process)
            process.wait()
        log.seek(0)
        return _Ending(code, overran.is_set(), tried, _ending(code) + _last_line(log.read()), silent)


def _collect(process: subprocess.Popen[str], outcome: Outcome) -> tuple[str | None, float]:
    """Read what the process writes, until its end; what it tried and did not find, and when its last line came."""
    assert process.stdout is not None
    tried: str | None = None
    heard = time.monotonic()
    with process.stdout:
        for line in process.stdout:
            heard = time.monotonic()
            with contextlib.suppress(ValueError):  # cut off when it was ended
                told = json.loads(line)
                tried = told.get("trying", tried)
                outcome.found |= told.get("found", {})
                outcome.problem = told.get("problem", outcome.problem)
                outcome.at = told.get("at", outcome.at)
    return (None if tried in outcome.found else tried), heard


def _kill(process: subprocess.Popen[str]) -> None:
    """End a process and those that it has started in its group; others end when their input does."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return f" ({lines[-1].strip():.300})" if lines else ""
