"""Plants the faults of `planted_faults.py`, one at a time, and says of each which test finds it.

    python -m tests.planted                                  # all, as scripts/test --all does
    python -m tests.planted --rooms transports --name silence --processes 1 --map /tmp/map.json

First the default tier runs once without a fault, room by room, and notes which functions each file calls; tests that
fail are left out. Then each fault is written into a copy of the tree, processes that tests start included, and the
files that call the changed function run there, the quickest first, until a test fails. What runs in processes of their
own is in no note, so the files of `tests/cluster` come last, for the server those of `tests/server` and `tests/llm`,
too. A test that fails must pass in the same place without the fault; else it is left out, and the others go on.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import psutil

from tests.planted_faults import FAULTS, Fault
from tests.who_calls import ROOT, first_lines, in_processes, note_calls

IN_PROCESSES = {"engine": ("cluster",), "transports": ("cluster",), "server": ("server", "llm", "cluster")}
BATCH_SECONDS = 15.0  # of tests that are collected at once: most faults are found by the first
TEST_SECONDS = 60  # for one test; over that it hangs
HANG_SECONDS = 180.0  # beyond a run's bound, until its processes are killed
MAP_SECONDS = 1800.0  # for a room
_VERDICT = re.compile(r"^(tests/.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b", re.MULTILINE)
_BEGUN = re.compile(r"^(tests/[^ ]+\.py::.+?) *$", re.MULTILINE)  # without a verdict: it hangs, or has ended pytest
_NOT_READ = re.compile(r"ERROR collecting (\S+)")


# -- a copy of the tree ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tree:
    """A copy of the checkout, in which faults are planted."""

    folder: Path

    @classmethod
    def copied(cls, folder: Path) -> Tree:
        left_out = shutil.ignore_patterns(".git", ".venv", ".hypothesis", ".*_cache", "*.tmp")
        shutil.copytree(ROOT, folder, ignore=left_out, symlinks=True)
        (folder / ".venv").symlink_to((ROOT / ".venv").resolve())
        return cls(folder)

    @contextlib.contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        path = self.folder / fault.path
        text = path.read_text()
        try:
            _write(path, text.replace(fault.before, fault.after))
            yield
        finally:
            _write(path, text)

    def failing(self, tests: Sequence[str], left_out: Sequence[str], seconds: float) -> tuple[str, int]:
        """The first of these tests that fails, or hangs, or nothing; and how many were run."""
        words = ["-x", "-vv", "-n0", "--no-header", "-p", "no:cacheprovider", f"--timeout={TEST_SECONDS}"]
        command = [sys.executable, "-m", "pytest", *words, *(f"--deselect={test}" for test in left_out), *tests]
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "PYTHONUNBUFFERED": "1"}
        with tempfile.TemporaryFile("w+") as said:
            run = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code = run.wait(seconds + HANG_SECONDS)
            except subprocess.TimeoutExpired:
                code = _kill(run)
            said.seek(0)
            text = said.read()
        verdicts: list[tuple[str, str]] = _VERDICT.findall(text)
        wrong = [test for test, verdict in verdicts if verdict in ("FAILED", "ERROR")] + _NOT_READ.findall(text)
        if code not in (0, 5) and not wrong:  # 5: all tests are left out
            wrong = _BEGUN.findall(text)[-1:]
            if not wrong:
                raise SystemExit(f"pytest could not run {tests}:\n{text[-4000:]}")
        return wrong[0] if wrong else "", len({test for test, _ in verdicts})


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)  # it may be of the same second


def _kill(run: subprocess.Popen[bytes]) -> int:
    children = psutil.Process(run.pid).children(recursive=True)
    os.killpg(run.pid, signal.SIGKILL)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    return run.wait()


# -- which tests can see a fault ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Map:
    """Of the default tier without a fault: each file's seconds and calls, and the tests that fail."""

    seconds: dict[str, float]
    calls: dict[str, list[str]]
    failing: list[str]

    @classmethod
    def made(cls, tree: Tree) -> Map:
        tests, failing = ROOT / "tests", list[str]()
        seconds, calls = defaultdict[str, float](float), defaultdict[str, set[str]](set)
        rooms = [[str(one)] for one in sorted(tests.iterdir()) if one.is_dir() and any(one.rglob("test_*.py"))]
        rooms.append(sorted(map(str, tests.glob("test_*.py"))))
        with tempfile.TemporaryDirectory() as folder:
            notes = [Path(folder, str(number)) for number in range(len(rooms))]
            in_processes([partial(note_calls, *each) for each in zip(rooms, notes, strict=True)], MAP_SECONDS)
            for room, note in zip(rooms, notes, strict=True):
                if not note.exists():
                    raise SystemExit(f"the tests of {room[0]} did not end")
                found = json.loads(note.read_text())
                for test, (took, called) in found["tests"].items():
                    file = test.partition("::")[0]
                    seconds[file] += took
                    calls[file] |= set(called)
                # Noting makes some too slow.
                failing += [test for test in found["failed"] if tree.failing([test], (), TEST_SECONDS)[0]]
        for test in failing:
            print(f"fails without a fault: {test}", flush=True)
        return cls(dict(seconds), {file: sorted(called) for file, called in calls.items()}, failing)

    def files_for(self, fault: Fault) -> list[str]:
        """The files that can see a fault, the quickest first, then those whose processes may."""
        text = (ROOT / fault.path).read_text()
        indent = len(fault.before) - len(fault.before.lstrip())
        begins = first_lines(fault.path, text[: text.index(fault.before) + indent].count("\n") + 1)
        callers = [
            file
            for file, calls in self.calls.items()
            if any(call in begins if begins else call.startswith(f"{fault.path}:") for call in calls)
        ]
        rooms = tuple(f"tests/{room}/" for room in IN_PROCESSES[fault.room])
        others = [file for file in self.seconds if file.startswith(rooms) and file not in callers]
        quickest = self.seconds.__getitem__
        return [*sorted(callers, key=quickest), *sorted(others, key=quickest)]

    def batches(self, fault: Fault, seconds: float) -> list[list[str]]:
        """These files up to so many seconds, a few at a time, as collecting many takes longer than the first tests."""
        found, total, batch = list[list[str]](), 0.0, 0.0
        for file in self.files_for(fault):
            if found and total + self.seconds[file] > seconds:
                break
            if not found or batch + self.seconds[file] > BATCH_SECONDS * len(found):
                found.append([])
                batch = 0.0
            found[-1].append(file)
            total, batch = total + self.seconds[file], batch + self.seconds[file]
        return found


# -- all of them -------------------------------------------------------------------------------------------------------


def is_caught(fault: Fault, notes: Map, trees: SimpleQueue[Tree], seconds: float) -> bool:
    """Whether a test fails that does not fail without the fault."""
    tree, caught, unsure = trees.get(), "", list[str]()
    began, num_tests = time.monotonic(), 0
    for batch in notes.batches(fault, seconds):
        while time.monotonic() - began < seconds:
            with tree.planted(fault):
                test, count = tree.failing(batch, [*notes.failing, *unsure], seconds)
            num_tests += count
            if test and tree.failing([test], (), TEST_SECONDS)[0]:
                unsure.append(test)
                continue
            caught = test
            break
        if caught:
            break
    trees.put(tree)
    said = f"caught by {caught}" if caught else "survived"
    print(f"{fault.name}: {said}, {num_tests} tests, {time.monotonic() - began:.0f} s", flush=True)
    return bool(caught)


def wrong(faults: Sequence[Fault]) -> list[str]:
    """Faults that cannot be planted, and why."""
    counts = {fault: (ROOT / fault.path).read_text().count(fault.before) for fault in faults}
    return [f"{fault.name}: its code is in {fault.path} {count} times" for fault, count in counts.items() if count != 1]


def main() -> int:
    rooms = sorted({fault.room for fault in FAULTS})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="", help="only those with this in their names")
    parser.add_argument("--rooms", default=rooms, type=lambda text: text.split(","), help=f"of {','.join(rooms)}")
    parser.add_argument("--map", type=Path, help="a file for what the tests call: read if it is there, else written")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=240.0, help="of tests for each fault")
    options = parser.parse_args()
    faults = [fault for fault in FAULTS if fault.room in options.rooms and options.name in fault.name]
    began = time.monotonic()
    if problems := wrong(FAULTS):
        print(*problems, sep="\n")
        return 1
    with tempfile.TemporaryDirectory(prefix="planted-") as folder, ThreadPoolExecutor(options.processes) as pool:
        copies = [Tree.copied(Path(folder).resolve() / str(number)) for number in range(options.processes)]
        is_known = options.map and options.map.exists()
        notes = Map(**json.loads(options.map.read_text())) if is_known else Map.made(copies[0])
        if options.map:
            options.map.write_text(json.dumps(asdict(notes)))
        trees = SimpleQueue[Tree]()
        for tree in copies:
            trees.put(tree)
        caught = sum(pool.map(lambda fault: is_caught(fault, notes, trees, options.seconds), faults))
    print(f"{caught} of {len(faults)} faults are caught, in {time.monotonic() - began:.0f} s")
    return int(caught < len(faults))


if __name__ == "__main__":
    sys.exit(main())
