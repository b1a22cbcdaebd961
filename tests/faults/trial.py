"""Runs tests on a copy of the tree with a fault in it.

The copy is what is imported, in the tests and in every process they start: its folder stands first in ``PYTHONPATH``,
before the environment's editable install (``Copy.check`` makes sure). A file with a fault gets a time of change that no
other had, so that no compiled file of it is taken for another's.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import outcomes
from faults import HERE, ROOT, Fault, Rooms

_LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".mypy_cache", ".ruff_cache", ".hypothesis")
_PACKAGES = ("splitinfer", "transports")


@dataclass(frozen=True, slots=True)
class Limits:
    """When enough is known of a fault: ``failures`` tests caught it, or its tests have run for ``seconds``.

    ``test_seconds``: what a single test may take. ``tiers``: how many of the fault's groups of tests are run at most.
    """

    failures: int = 3
    seconds: float = 240.0
    test_seconds: int = 40
    tiers: int = 100


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of a run of pytest: tests that failed, and whether it came to its own end."""

    failed: tuple[str, ...]
    is_complete: bool


@dataclass(slots=True)
class Caught:
    """What is known of a fault. ``by``: tests that failed with it. ``is_complete``: every test that it is tried by has
    run, or so many have failed that the others were not needed."""

    fault: Fault
    by: list[str] = field(default_factory=list)
    seconds: float = 0.0
    is_complete: bool = True


@contextlib.contextmanager
def planted(fault: Fault, tree: Path, number: int) -> Iterator[None]:
    """The tree has this fault, the ``number``-th in it, until the end of the block."""
    file = tree / fault.file
    sound, status = file.read_text(), file.stat()
    file.write_text(fault.planted(sound))
    changed = status.st_mtime + 10 * number
    os.utime(file, (changed, changed))
    try:
        yield
    finally:
        file.write_text(sound)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


class Copy:
    """A copy of the tree in ``folder``, in which one fault at a time is planted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._num_planted = 0
        shutil.copytree(ROOT, folder, ignore=_LEFT_OUT, symlinks=True)
        self._check()
        self._warm = subprocess.Popen(
            [sys.executable, str(folder / HERE.relative_to(ROOT) / "warm.py")],
            cwd=folder, env=self._env(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def _check(self) -> None:
        """Processes that run elsewhere must import the copy, too."""
        code = f"import {', '.join(_PACKAGES)}; print({', '.join(f'{name}.__file__' for name in _PACKAGES)}, sep='\\n')"
        said = subprocess.run([sys.executable, "-c", code], cwd="/", env=self._env(), capture_output=True, check=True)
        strange = [path for path in said.stdout.decode().split() if not Path(path).is_relative_to(self.folder)]
        if strange:
            raise RuntimeError(f"{strange} would be tested, not the copy in {self.folder}")

    @contextlib.contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        """The copy has this fault, until the end of the block."""
        self._num_planted += 1
        with planted(fault, self.folder, self._num_planted):
            yield

    def run(self, tests: Sequence[str], limits: Limits, ignored: Sequence[str] = ()) -> Ran:
        """Run tests, but for those in ``ignored`` paths."""
        log = self.folder / "outcomes.jsonl"
        log.unlink(missing_ok=True)
        log.touch()
        arguments = [
            *("-p", "outcomes", "-p", "no:xdist", "-q", "--tb", "no"),
            *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # of what was imported before
            *("--timeout", str(limits.test_seconds), "--maxfail", str(limits.failures)),
            *(f"--ignore={path}" for path in ignored),
            *tests,
        ]  # fmt: skip
        is_complete = self._finishes(arguments, {outcomes.VARIABLE: str(log)}, limits.seconds)
        return read_outcomes(log, is_complete=is_complete)

    def _finishes(self, arguments: Sequence[str], changes: dict[str, str], seconds: float) -> bool:
        """Run pytest with all that it starts; whether it ended by itself in time."""
        assert self._warm.stdin is not None
        assert self._warm.stdout is not None
        self._warm.stdin.write(json.dumps([arguments, changes]) + "\n")
        self._warm.stdin.flush()
        group = int(self._warm.stdout.readline())
        timer = threading.Timer(seconds, _kill, (group,))
        timer.start()
        self._warm.stdout.readline()
        in_time = timer.is_alive()
        timer.cancel()
        _kill(group)  # also what a test has left behind
        return in_time

    def close(self) -> None:
        """End the process that runs the tests."""
        assert self._warm.stdin is not None
        assert self._warm.stdout is not None
        self._warm.stdin.close()
        self._warm.stdout.close()
        self._warm.wait()

    def _env(self) -> dict[str, str]:
        paths = f"{self.folder}{os.pathsep}{self.folder / HERE.relative_to(ROOT)}"
        env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        return env | {"PYTHONPATH": paths}


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def read_outcomes(log: Path, *, is_complete: bool) -> Ran:
    """What the plugin has written. A test that killed the process it ran in has failed."""
    failed: dict[str, None] = {}
    running: str | None = None
    for event, node in map(json.loads, log.read_text().splitlines()):
        if event == "failed":
            failed[node] = None
        running = {"begun": node, "ended": None}.get(event, running)
    if is_complete and not failed and "begun" not in log.read_text():
        raise RuntimeError("pytest ran no test")
    if running is not None and is_complete:
        failed[running] = None
    return Ran(tuple(failed), is_complete)


def try_fault(copy: Copy, fault: Fault, rooms: Rooms, limits: Limits) -> Caught:
    """Plant a fault and run its tests, from near to far, until enough is known."""
    caught, began = Caught(fault), time.monotonic()
    done: list[str] = []
    with copy.planted(fault):
        tiers = rooms.tiers(fault)
        caught.is_complete = limits.tiers >= len(tiers)
        for tests in tiers[: limits.tiers]:
            left = limits.seconds - (time.monotonic() - began)
            if left <= 1:
                caught.is_complete = False
                break
            rest = Limits(limits.failures - len(caught.by), left, limits.test_seconds)
            ran = copy.run(tests, rest, ignored=done)
            done += tests
            caught.by += ran.failed
            caught.is_complete &= ran.is_complete
            if len(caught.by) >= limits.failures:
                caught.is_complete = True
                break
    caught.seconds = time.monotonic() - began
    return caught
