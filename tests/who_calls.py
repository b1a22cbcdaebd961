"""Which tests call which functions of the program: what ``mutants.py`` and ``planted.py`` choose tests by."""

from __future__ import annotations

import ast
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType

import pytest

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("splitinfer", "transports")
QUIETLY = ("-q", "-n0", "--no-header", "--hypothesis-seed=0", "-W", "ignore::pytest.PytestAssertRewriteWarning")


class Calls:
    """A plugin: the functions of the program that each test calls, the processor seconds that it takes, and the tests
    that fail."""

    def __init__(self) -> None:
        self.tests: dict[str, tuple[float, list[str]]] = {}
        self.failed: list[str] = []
        self._seen: dict[int, CodeType] = {}  # by its id: its hash takes longer than most calls

    def _trace(self, frame: FrameType, _event: str, _arg: object) -> None:
        self._seen[id(frame.f_code)] = frame.f_code

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[object]:
        self._seen = {}
        began = sum(os.times()[:4])
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            names = {f"{os.path.relpath(one.co_filename, ROOT)}:{one.co_firstlineno}" for one in [*self._seen.values()]}
            self.tests[item.nodeid] = (sum(os.times()[:4]) - began, sorted(filter(_is_ours, names)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def _is_ours(name: str) -> bool:
    return name.partition("/")[0] in PRODUCT


def note_calls(paths: Sequence[str], found: Path) -> int:
    """Run these tests, and write down what they call; pytest's exit code."""
    calls = Calls()
    code = pytest.main([*paths, *QUIETLY], plugins=[calls])
    found.write_text(json.dumps({"tests": calls.tests, "failed": calls.failed}))
    return int(code)


def first_lines(path: str, line: int) -> set[str]:
    """As ``Calls`` has it, the innermost function at a line of a file: at itself, or at its decorators; empty: none."""
    inside = [
        node
        for node in ast.walk(ast.parse((ROOT / path).read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        and node.lineno <= line <= (node.end_lineno or 0)
    ]
    if not inside:
        return set()
    inner = max(inside, key=lambda node: node.lineno)
    decorators = [] if isinstance(inner, ast.Lambda) else inner.decorator_list
    return {f"{path}:{one}" for one in (inner.lineno, *(decorator.lineno for decorator in decorators))}


def in_processes(tasks: Sequence[Callable[[], int]], seconds: float) -> list[int]:
    """Each task in a process of its own, one for each processor at a time; their exit codes, -9 after `seconds`."""
    codes, waiting, running = [-1] * len(tasks), list(range(len(tasks)))[::-1], dict[int, tuple[int, float]]()
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            index = waiting.pop()
            if (pid := os.fork()) == 0:
                _become(tasks[index])
            running[pid] = (index, time.monotonic() + seconds)
        for pid, (index, until) in [*running.items()]:
            if time.monotonic() > until:
                os.kill(pid, 9)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[index] = os.waitstatus_to_exitcode(status)
                del running[pid]
        time.sleep(0.01)
    return codes


def _become(task: Callable[[], int]) -> None:
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    os._exit(task())
