"""A pytest plugin that writes what came of each test at once, so that nothing is lost when the run is killed.

A line of JSON for each event in the file that ``PLANTED_OUTCOMES`` names: a test begins, or something has failed.
"""

import json
import os

import pytest

VARIABLE = "PLANTED_OUTCOMES"


def _write(event: str, node: str) -> None:
    with open(os.environ[VARIABLE], "a") as file:
        file.write(json.dumps([event, node]) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    """A test begins."""
    _write("begun", nodeid)


def pytest_runtest_logfinish(nodeid: str) -> None:
    """It is over, its fixtures too."""
    _write("ended", nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A phase of a test is over."""
    if report.failed:
        _write("failed", report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file was read, or could not be."""
    if report.failed:
        _write("failed", report.nodeid)
