"""The document has what it is to have, and nothing of its owner, whatever was measured."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_probes import EXACT, LINUX, MAC, ROUNDS, answer, link, memory, other
from recordings import RDMA_READY, said

from splitinfer.common.json_text import dumps
from splitinfer.probes.child import ProbeResult, broken
from splitinfer.probes.evidence import MACOS, SeenHere
from splitinfer.probes.finding import Blame, Finding, Outcome, passed
from splitinfer.probes.links import judge_link
from splitinfer.probes.rdma import requirements, verdict
from splitinfer.probes.registry import selftest_probes
from splitinfer.probes.selftest import document, figures

PRIVATE = (
    "alice", "alices-studio.local", "/Users/alice/models", "C:\\Users\\alice", "192.168.1.23", "10.0.0.5",
    "fe80::1%en5", "tcp://mini.local:5577", "ab" * 32, "Once upon a time", "alice@example.org", "Alice", "ALICE",
    "failed: PermissionError: /Users/alice/key",
)  # fmt: skip
MARKS = ("alice", "mini", "192", "10.0.0", "fe80", "abab", "once upon", "example")
PROBES = (*selftest_probes(None), replace(selftest_probes(None)[0], name="network"))


def outcomes(about: Mapping[str, Any] = MAC) -> dict[str, ProbeResult]:
    gpu = about["gpu"]
    outputs = {name: said(RDMA_READY.get(name, "")) for name in MACOS}
    rdma = verdict(requirements(SeenHere(outputs, "Darwin", True)))
    answers = [passed(name, "", other(0.12)) for name in ("greedy", "sampled", "greedy, drafts", "kept KV")]
    found: dict[str, list[Finding]] = {
        "about": [passed("device", "alice's", about)],
        "tcp": [passed("rounding", "", ROUNDS if gpu else EXACT), *answers],
        "memory": [passed("growth", "", memory())],
        "network": judge_link(link()),
        "doctor": [rdma, Finding("power", Outcome.WARNING, "alices-studio sleeps", "sudo pmset")],
    }
    return {name: ProbeResult(tuple(each), None, 1.0, 20.0) for name, each in found.items()}


def made(results: Mapping[str, ProbeResult]) -> dict[str, Any]:
    return document(PROBES, results, seconds=61.23, limit_s=180.0, quick=False)


def planted(value: Any, text: str) -> Any:
    """``value`` with ``text`` in the place of every text, and in every list."""
    if isinstance(value, Mapping):
        return {name: planted(one, text) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [*(planted(one, text) for one in value), text]
    return text if isinstance(value, str) else value


@pytest.mark.parametrize("text", PRIVATE)
def test_nothing_private_gets_into_it(text: str):
    """Whatever a system, a network, a worker or an error says."""
    bad = broken("greedy", OSError(text))
    results = {
        name: replace(
            result,
            found=tuple(
                replace(each, numbers=planted(each.numbers, text), sentence=text, remedy=text) for each in result.found
            ),
            ending=bad,
        )
        for name, result in outcomes().items()
    }
    written = dumps(made(results)).lower()
    assert [mark for mark in MARKS if mark in written] == []


def test_what_kind_of_machine_it_is():
    found, numbers = made(outcomes())["machine"], {name: value for name, value in MAC.items() if type(value) is not str}
    assert found == {
        **numbers, "system": "Darwin", "backend": "metal", "chip": "Apple M4 Max", "device": "Apple M4 Max",
        "system_version": [26, 2], "python": [3, 12, 4], "version_splitinfer": [0, 1, 0], "version_mlx": [0, 32, 4],
        "version_mlx_lm": [0, 32, 2],
    }  # fmt: skip
    found = made(outcomes({**LINUX, "device": "NVIDIA H200"}))["machine"]
    assert (found["chip"], found["device"], found["system_version"]) == ("AMD", "NVIDIA H200", [6, 8, 0])
    assert made({**outcomes(), "about": ProbeResult()})["machine"] is None


def test_every_figure_is_in_it():
    found = made(outcomes())
    measured = {(one["probe"], one["name"]): one.get("numbers") for one in found["checks"]}
    assert measured["tcp", "greedy"] == answer(gaps={"5": 0.12})
    assert measured["memory", "growth"] == memory()
    assert measured["doctor", "RDMA over Thunderbolt"]["cable to a Mac"] == "passed"
    assert measured["network", "link"]["figures"] == {"latency_p50": 2e-4, "latency_p99": 4e-4, "down": 1e9, "up": None}
    assert found["parts"]["tcp"] == {"seconds": 1.0, "limit_s": 20.0}
    assert found["kind"] == "splitinfer selftest"
    assert (found["exit_code"], found["seconds"], found["limit_s"], found["quick"]) == (0, 61.2, 180.0, False)


def test_every_finding_is_in_it_by_its_name():
    crash = Finding(
        "greedy", Outcome.FAILED, "", "", "rdma over MLX's ring", Blame.TRANSPORT, {}, "", "SIGSEGV",
        "splitinfer.llm.llm:80",
    )  # fmt: skip
    found = made({**outcomes(), "ring": ProbeResult((), crash)})
    assert found["exit_code"] == 11
    assert {
        "probe": "ring", "name": "greedy", "outcome": "failed", "fault": 11,
        "signal": "SIGSEGV", "at": "splitinfer.llm.llm:80",
    } in found["checks"]  # fmt: skip
    advice = next(one for one in found["checks"] if one["name"] == "power")
    assert advice == {"probe": "doctor", "name": "power", "outcome": "warning"}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda one: st.lists(one, max_size=80) | st.dictionaries(st.just("rows"), one),
)


@given(VALUES)
def test_anything_may_be_measured(value: Any):
    found = figures(value)
    assert json.loads(dumps(found)) == found
    assert not isinstance(found, list) or len(found) <= 64
