"""Plants sixty faults (`planted_faults.py`), one at a time, and says of each which test finds it.

    python -m tests.planted                                  # all, as scripts/test --all does
    python -m tests.planted --rooms transports --name silence --processes 1
    python -m tests.planted --tests ../before --map /tmp/before.map --out /tmp/before.json

First the default tier runs once without a fault, room by room, and each of its files notes which functions it calls;
tests that fail are left out. Then each fault is written into a copy of the tree, processes that tests start included,
and the files that call the changed function run there, the quickest first, until a test fails. What runs in processes
of their own is in no note, so the files of `tests/cluster` come last, for the server those of `tests/server` and
`tests/llm`, too. A test that fails must pass in the same place without the fault; else it is left out, and the others
go on. Everything is read from the copy, so `--tests` may name another checkout, whose tests are then judged by the same
faults of this program.

This file is also the program that tries one fault (`--inside`), for which one command `--through` is enough: it imports
nothing of the tree, and runs pytest in children.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import psutil
import pytest

if TYPE_CHECKING:
    from tests.planted_faults import Fault

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("splitinfer", "transports")
IN_PROCESSES = {"engine": ("cluster",), "transports": ("cluster",), "server": ("server", "llm", "cluster")}
QUIETLY = ("-q", "-n0", "--no-header", "-p", "no:cacheprovider")
FIRST_SECONDS = 15.0  # of tests that are collected first: most faults are found by them
TEST_SECONDS = 60  # for one test; over that it hangs
HANG_SECONDS = 180.0  # beyond a run's bound, until its processes are killed
MAP_SECONDS = 1800.0  # for a room
LARGE_ROOM = 14  # files; it has a run of its own


# -- inside: a run of pytest -------------------------------------------------------------------------------------------


class Run:
    """A plugin: the order of the files, what failed, the end after so many seconds; and, if `notes` is asked for, the
    seconds of each file and the functions of the program that are called in it."""

    def __init__(self, files: Sequence[str], seconds: float, *, notes: bool) -> None:
        self._place = {name: number for number, name in enumerate(files)}
        self._give_up, self._notes = time.monotonic() + seconds, notes
        self._folders = tuple(f"{Path.cwd()}/{folder}/" for folder in PRODUCT)
        self._seen: dict[int, CodeType] = {}  # by its id: its hash takes longer than most calls
        self.num_tests, self.is_over = 0, False
        self.failed: list[str] = []
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, set[str]] = defaultdict(set)
        if notes:
            threading.settrace(self._trace)
            sys.settrace(self._trace)

    def _trace(self, frame: FrameType, _event: str, _arg: object) -> None:
        self._seen[id(frame.f_code)] = frame.f_code

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self._place.get(item.nodeid.partition("::")[0], 0))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[object]:
        began = time.monotonic()
        self.num_tests += 1
        if self._notes:
            self._seen = {}
        try:
            return (yield)
        finally:
            file = item.nodeid.partition("::")[0]
            self.seconds[file] += time.monotonic() - began
            self.calls[file] |= {
                f"{code.co_filename.removeprefix(f'{Path.cwd()}/')}:{code.co_firstlineno}"
                for code in [*self._seen.values()]
                if code.co_filename.startswith(self._folders)
            }
            if time.monotonic() > self._give_up:
                item.session.shouldstop, self.is_over = "its time is over", True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self.failed:
            self.failed.append(report.nodeid)


@dataclass(frozen=True)
class Found:
    """What a run of pytest found. `code`: pytest's; `None`: it hung, and was killed."""

    code: int | None
    failed: list[str]
    took: float
    num_tests: int
    seconds: dict[str, float] = field(default_factory=dict)
    calls: dict[str, list[str]] = field(default_factory=dict)


def run_tests(files: Sequence[str], seconds: float, options: Sequence[str] = (), *, notes: bool = False) -> Found:
    """Run these files in a child, which is killed with all its children if it hangs."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        answer, said = Path(folder, "answer"), Path(folder, "said")
        (pid := os.fork()) or _run_pytest(files, seconds, options, notes, answer, said)
        give_up = time.monotonic() + seconds + HANG_SECONDS
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() > give_up:
                _kill(pid)
                break
            time.sleep(0.02)
        found = Found(**json.loads(answer.read_text()))
        if found.code in (2, 3, 4) and not found.failed:
            raise SystemExit(f"pytest could not run {files}:\n{said.read_text()[-4000:]}")
        return found


def _kill(pid: int) -> None:
    children = psutil.Process(pid).children(recursive=True)
    os.killpg(pid, signal.SIGKILL)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    os.waitpid(pid, 0)


def _run_pytest(
    files: Sequence[str], seconds: float, options: Sequence[str], notes: bool, answer: Path, said: Path
) -> None:
    os.setsid()
    with said.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    run, began = Run(files, seconds, notes=notes), time.monotonic()

    def say(code: int | None, failed: list[str], **more: Any) -> None:
        whole = answer.with_suffix(".new")
        found = {"code": code, "failed": failed, "took": time.monotonic() - began, "num_tests": run.num_tests}
        whole.write_text(json.dumps({**found, **more}))
        whole.replace(answer)

    class Saying:
        def pytest_runtest_logstart(self, nodeid: str) -> None:
            say(None, run.failed or [nodeid])  # what hangs cannot say so

    say(None, run.failed)
    code = pytest.main([*files, f"--timeout={TEST_SECONDS}", *options, *QUIETLY], plugins=[run, Saying()])
    sys.settrace(None)
    code = 0 if run.is_over and code == pytest.ExitCode.INTERRUPTED else code  # not a fault of the tests
    say(int(code), run.failed, seconds=run.seconds, calls={name: sorted(calls) for name, calls in run.calls.items()})
    os._exit(0)


def note_all(files: Sequence[str], seconds: float) -> Found:
    """What these files call; of the tests that fail those that also fail without noting, which makes some too slow."""
    found = run_tests(files, seconds, notes=True)
    return replace(found, failed=run_tests(found.failed, seconds).failed if found.failed else [])


@dataclass(frozen=True)
class Tried:
    """`caught`: the test; empty: none. `unsure`: tests that failed without the fault, too."""

    caught: str
    num_tests: int
    seconds: float
    unsure: list[str]


def try_out(fault: Sequence[str], batches: Sequence[Sequence[str]], failing: Sequence[str], seconds: float) -> Tried:
    """Try a fault (path, before and after) with some files after each other, without the tests that fail anyway."""
    unsure, took, num_tests = list[str](), 0.0, 0
    for batch in batches:
        while took < seconds:
            with _planted(*fault):
                found = run_tests(
                    batch, seconds - took, ["-x", *(f"--deselect={test}" for test in (*failing, *unsure))]
                )
            took, num_tests = took + found.took, num_tests + found.num_tests
            if not found.failed:
                break
            test = found.failed[0]
            if not run_tests([test], TEST_SECONDS).failed:
                return Tried(test, num_tests, took, unsure)
            unsure.append(test)
    return Tried("", num_tests, took, unsure)


@contextlib.contextmanager
def _planted(path: str, before: str, after: str) -> Iterator[None]:
    text = Path(path).read_text()
    try:
        _write(path, text.replace(before, after))
        yield
    finally:
        _write(path, text)


def _write(path: str, text: str) -> None:
    Path(path).write_text(text)
    Path(importlib.util.cache_from_source(path)).unlink(missing_ok=True)  # it may be of the same second


def inside(task: Path) -> None:
    told = json.loads(task.read_text())
    os.chdir(told["folder"])
    sys.path[:] = [told["folder"], *(path for path in sys.path if Path(path or ".").resolve() != Path(__file__).parent)]
    work: Callable[..., Found | Tried] = {"note_all": note_all, "try_out": try_out}[told["work"]]
    task.with_suffix(".done").write_text(json.dumps(asdict(work(**told["given"]))))


# -- outside: copies of the tree ---------------------------------------------------------------------------------------


class Tree:
    """A copy: the program of this checkout, everything else of `tests`, a checkout, too. `through`: a command in front
    of all that is done in it."""

    def __init__(self, folder: Path, tests: Path, through: Sequence[str]) -> None:
        self._folder, self._through = folder, through
        left_out = shutil.ignore_patterns(".git", ".venv", ".hypothesis", ".*_cache", "*.tmp")
        shutil.copytree(tests, folder, ignore=left_out, symlinks=True)
        for name in PRODUCT:
            shutil.rmtree(folder / name)
            shutil.copytree(ROOT / name, folder / name)
        (folder / ".venv").symlink_to((ROOT / ".venv").resolve())

    def do(self, work: str, **given: Any) -> dict[str, Any]:
        """What `note_all` or `try_out` returns."""
        task, done = self._folder.with_suffix(".task"), self._folder.with_suffix(".done")
        task.write_text(json.dumps({"folder": str(self._folder), "work": work, "given": given}))
        done.unlink(missing_ok=True)
        command = [*self._through, sys.executable, str(Path(__file__).resolve()), "--inside", str(task)]
        environment = {**os.environ, "PYTHONPATH": str(self._folder)}
        ended = subprocess.run(
            command, cwd=self._folder, env=environment, stderr=subprocess.PIPE, text=True, check=False
        )
        if not done.exists():
            raise SystemExit(f"{work} did not end: {ended.stderr[-4000:]}")
        found: dict[str, Any] = json.loads(done.read_text())
        return found


class Trees:
    """As many copies as there are runs at once."""

    def __init__(self, folder: Path, tests: Path, through: Sequence[str], count: int) -> None:
        self._free: SimpleQueue[Tree] = SimpleQueue()
        for number in range(count):
            self._free.put(Tree(folder / str(number), tests, through))

    def do(self, work: str, **given: Any) -> dict[str, Any]:
        """As `Tree.do`, in one of them."""
        tree = self._free.get()
        try:
            return tree.do(work, **given)
        finally:
            self._free.put(tree)


# -- which tests can see a fault ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Map:
    """Of the default tier without a fault: each file's seconds and calls, and the tests that fail."""

    seconds: dict[str, float]
    calls: dict[str, list[str]]
    failing: list[str]

    @classmethod
    def made(cls, trees: Trees, tests: Path, pool: ThreadPoolExecutor) -> Map:
        folder, whole = tests / "tests", cls({}, {}, [])
        rooms = [each for each in sorted(folder.iterdir()) if each.is_dir() and any(each.rglob("test_*.py"))]
        large = [each for each in rooms if len([*each.rglob("test_*.py")]) >= LARGE_ROOM]
        others = [each for each in (*rooms, *sorted(folder.glob("test_*.py"))) if each not in large]

        def note(paths: list[Path]) -> None:
            files = [str(path.relative_to(tests)) for path in paths]
            found = Found(**trees.do("note_all", files=files, seconds=MAP_SECONDS))
            whole.seconds.update(found.seconds)
            whole.calls.update(found.calls)
            whole.failing.extend(found.failed)
            said = f"{' '.join(files):.60}: {found.num_tests} tests, {found.took:.0f} s"
            print(said, *(f"fails without a fault: {test}" for test in found.failed), sep="\n", flush=True)

        list(pool.map(note, [*([each] for each in large), others]))
        return whole

    def files_for(self, fault: Fault) -> list[str]:
        """The files that can see a fault, the quickest first, then those whose processes may."""
        begins = _function_of(fault)
        callers = [
            file
            for file, calls in self.calls.items()
            if any(call == begins if ":" in begins else call.startswith(f"{begins}:") for call in calls)
        ]
        rooms = tuple(f"tests/{room}/" for room in IN_PROCESSES[fault.room])
        others = [file for file in self.seconds if file.startswith(rooms) and file not in callers]
        quickest = self.seconds.__getitem__
        return [*sorted(callers, key=quickest), *sorted(others, key=quickest)]

    def batches(self, fault: Fault, seconds: float) -> Iterator[list[str]]:
        """The files up to so many seconds; first a few, as collecting many takes longer than the first tests."""
        first: list[str] = []
        rest: list[str] = []
        total = 0.0
        for file in self.files_for(fault):
            total += self.seconds[file]
            if total > seconds and first:
                break
            (first if total <= FIRST_SECONDS or not first else rest).append(file)
        yield from filter(None, (first, rest))


def _function_of(fault: Fault) -> str:
    """The innermost function of a fault as `file:line`, or the file alone, if it is in none."""
    text = (ROOT / fault.path).read_text()
    indent = len(fault.before) - len(fault.before.lstrip())
    line = text[: text.index(fault.before) + indent].count("\n") + 1
    around = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    if not around:
        return fault.path
    inner = max(around, key=lambda node: node.lineno)
    return f"{fault.path}:{min([inner.lineno, *(decorator.lineno for decorator in inner.decorator_list)])}"


# -- all of them -------------------------------------------------------------------------------------------------------


def verdict_of(fault: Fault, notes: Map, trees: Trees, seconds: float) -> dict[str, Any]:
    batches = [*notes.batches(fault, seconds)]
    told = {"fault": (fault.path, fault.before, fault.after), "batches": batches, "failing": notes.failing}
    tried = Tried(**trees.do("try_out", **told, seconds=seconds))
    said = f"caught by {tried.caught}" if tried.caught else "survived"
    print(f"{fault.name}: {said}, {tried.num_tests} tests, {tried.seconds:.0f} s", flush=True)
    files = {"num_files": len(notes.files_for(fault)), "num_tried": sum(map(len, batches))}
    return {"name": fault.name, "room": fault.room, "path": fault.path, **asdict(tried), **files}


def wrong(faults: Sequence[Fault]) -> list[str]:
    """Faults that cannot be planted, and why."""
    counts = {fault: (ROOT / fault.path).read_text().count(fault.before) for fault in faults}
    return [f"{fault.name}: its code is in {fault.path} {count} times" for fault, count in counts.items() if count != 1]


def chosen(options: argparse.Namespace, faults: Sequence[Fault]) -> list[Fault]:
    found = [fault for fault in faults if fault.room in options.rooms and options.name in fault.name]
    count = min(options.num or len(found), len(found))
    return [found[number * len(found) // count] for number in range(count)]  # of all rooms, where it is a few


def main() -> int:
    from tests.planted_faults import FAULTS

    rooms = sorted({fault.room for fault in FAULTS})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, help="only so many")
    parser.add_argument("--name", default="", help="only those with this in their names")
    parser.add_argument("--rooms", default=rooms, type=lambda text: text.split(","), help=f"of {','.join(rooms)}")
    parser.add_argument("--tests", type=Path, default=ROOT, help="another checkout, whose tests are judged")
    parser.add_argument("--map", type=Path, help="a file for what the tests call: read if it is there, else written")
    parser.add_argument("--out", type=Path, help="a file for the results, in JSON")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=240.0, help="of tests for each fault")
    parser.add_argument("--through", type=shlex.split, default=[], help="a command in front of each run of pytest")
    options = parser.parse_args()
    faults, began, tests = chosen(options, FAULTS), time.monotonic(), options.tests.resolve()
    if problems := wrong(FAULTS):
        print(*problems, sep="\n")
        return 1
    with tempfile.TemporaryDirectory(prefix="planted-") as folder, ThreadPoolExecutor(options.processes) as pool:
        trees = Trees(Path(folder).resolve(), tests, options.through, options.processes)
        if options.map and options.map.exists():
            notes = Map(**json.loads(options.map.read_text()))
        else:
            notes = Map.made(trees, tests, pool)
            if options.map:
                options.map.write_text(json.dumps(asdict(notes)))
        verdicts: list[dict[str, Any]] = []
        for verdict in pool.map(lambda fault: verdict_of(fault, notes, trees, options.seconds), faults):
            verdicts.append(verdict)
            if options.out:
                options.out.write_text(json.dumps(verdicts, indent=1))
    caught = sum(bool(verdict["caught"]) for verdict in verdicts)
    print(f"{caught} of {len(faults)} faults are caught, in {time.monotonic() - began:.0f} s")
    return int(caught < len(faults))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        inside(Path(sys.argv[2]))
    else:
        sys.exit(main())
