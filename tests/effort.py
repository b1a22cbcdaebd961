"""What the tests cost: ``--effort`` prints the processor seconds of each room and of the dearest tests, those of the
processes included that tests start and wait for."""

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

_DEAREST = 60  # tests that --effort names


class ProcessorSeconds:
    """A plugin that adds up what the tests of each room take, on all processes of pytest-xdist."""

    def __init__(self, is_shown: bool) -> None:
        self._is_shown = is_shown
        self._rooms: Counter[str] = Counter()
        self._tests: Counter[str] = Counter()  # all cases of a test together
        self._before = 0.0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        self._before = sum(os.times()[:4])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[None]:
        report: Any = yield
        if call.when == "teardown":
            report.user_properties.append(("processor seconds", sum(os.times()[:4]) - self._before))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = dict(report.user_properties).get("processor seconds", 0.0)
        if report.when == "teardown":
            test = report.nodeid.removeprefix("tests/").partition("[")[0]
            self._tests[test] += float(str(seconds))
            self._rooms[test.partition("::")[0].rpartition("/")[0].partition("/")[0]] += float(str(seconds))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._is_shown:
            terminalreporter.section("processor seconds of each room")
            for room, seconds in self._rooms.most_common():
                terminalreporter.line(f"{seconds:8.1f}  {room or 'tests'}")
            terminalreporter.line(f"{sum(self._rooms.values()):8.1f}  together")
            terminalreporter.section("... of the dearest tests")
            for test, seconds in self._tests.most_common(_DEAREST):
                terminalreporter.line(f"{seconds:8.1f}  {test}")
