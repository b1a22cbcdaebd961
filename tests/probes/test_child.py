"""A probe in a process of its own: whatever ends it is a finding, and no probe takes the time of another."""

import json
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import psutil
import pytest
from processes import are_gone, until

from splitinfer.probes import child
from splitinfer.probes.child import ProbeReport, ProbeResult, run_probe, run_probes
from splitinfer.probes.finding import Blame, Outcome, passed
from splitinfer.probes.registry import ProbeEntry

PROBE = ProbeEntry(
    "a probe", "a title", "none:none", Blame.TRANSPORT, 1.0, options={"n": 7}, environment={"OWN": "mine"}
)
CODE = (
    "import json, os, signal, subprocess, sys, time\nasked = json.loads(sys.argv[1])\n"
    f"empty = {json.loads(json.dumps(asdict(passed('', '', {}))))!r}\n"
    "def tell(**line): print(json.dumps(line), flush=True)\n"
    "def find(name, **numbers): tell(found={**empty, 'name': name, 'numbers': numbers})\n"
)


def ran(code: str, limit: float = 20.0, **more: Any) -> ProbeResult:
    return run_probe(PROBE, limit, "/run", {"ALL": "ours"}, command=(sys.executable, "-S", "-c", CODE + code), **more)


def is_gone(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return are_gone([psutil.Process(pid)])
    return True


def test_a_probe_knows_its_options_its_folder_and_its_environment():
    code = (
        "given = asked['options']\n"
        "find('seen', n=given['n'], folder=given['folder'], own=os.environ['OWN'], all=os.environ['ALL'])"
    )
    (found,) = ran(code).findings
    assert found.numbers == {"n": 7, "folder": "/run", "own": "mine", "all": "ours"}
    assert found.group == "a title"


@pytest.mark.parametrize(("patience_s", "fault"), [(0.5, Blame.TRANSPORT), (30.0, Blame.TIME)])
def test_a_probe_that_overruns_is_ended_with_what_it_started(patience_s: float, fault: Blame):
    """It was hanging if it had been silent for long; else it was slow, and has not run."""
    code = (
        "started = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'])\n"
        "find('first', pid=started.pid); tell(trying='for ever'); time.sleep(60)"
    )
    began = time.monotonic()
    result = ran(code, limit=1.6, patience_s=patience_s)
    assert time.monotonic() - began < 10
    assert (result.findings[1].name, result.findings[1].fault) == ("for ever", fault)
    until(lambda: is_gone(result.findings[0].numbers["pid"]), "what it started is gone", 10)


def test_what_ends_a_process_is_named_by_what_it_tried():
    result = ran("find('a'); tell(trying='b'); os.kill(os.getpid(), signal.SIGSEGV)")
    assert [each.name for each in result.findings] == ["a", "b"]
    crashed = result.findings[1]
    assert (crashed.signal, crashed.fault) == ("SIGSEGV", Blame.TRANSPORT)


def test_a_probe_that_ends_before_it_tries_anything():
    (ending,) = ran("sys.stderr.write('first\\nno such library\\n'); os._exit(9)").findings
    assert ending.sentence == "its process ended with exit code 9 (no such library)"
    assert ending.outcome is Outcome.FAILED


# -- several probes ----------------------------------------------------------------------------------------------------


def test_a_run_never_takes_longer_than_it_may(monkeypatch: pytest.MonkeyPatch):
    """Every probe hangs for all the time that it gets."""
    now = [100.0]
    monkeypatch.setattr(child.time, "monotonic", lambda: now[0])

    def run(probe: ProbeEntry, limit: float, _folder: str, **_more: Any) -> ProbeResult:
        now[0] += limit
        return ProbeResult((), None, limit, limit)

    probes = [replace(PROBE, name=name) for name in "abcdefgh"]
    assert set(run_probes(probes, 60.0, "", run)) == set("abcdefgh")
    assert now[0] <= 160.0


# -- in the process ----------------------------------------------------------------------------------------------------


def test_a_finding_that_fails_leaves_the_others():
    lines: list[dict[str, Any]] = []
    report = ProbeReport(lines.append)
    report.guarded("wrong", lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    report.guarded("right", lambda: {"ms": 3})
    found = [line["found"] for line in lines if "found" in line]
    assert [(one["name"], one["error"], one["sentence"], one["numbers"]) for one in found] == [
        ("wrong", "ZeroDivisionError", "ZeroDivisionError: division by zero", {}), ("right", "", "", {"ms": 3}),
    ]  # fmt: skip
    assert [line["trying"] for line in lines if "trying" in line] == ["wrong", "right"]


def test_its_process_ends_without_a_word_from_its_threads():
    """Python's own end stops threads that are inside MLX, which ended the process with SIGABRT now and then."""
    request = json.dumps({"function": "no_such:probe", "options": {}})
    code = "import atexit, runpy; atexit.register(print, 'finalised'); "
    code += "runpy.run_module('splitinfer.probes.child', run_name='__main__')"
    words = [sys.executable, "-c", code, request]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "ModuleNotFoundError" in done.stdout, "finalised" in done.stderr) == (1, True, False)
