"""The document has what it is to have, and nothing of its owner, whatever was measured."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted import EXACT, LINUX, MAC, ROUNDS, answer, branch, exact, link, loops, memory
from recordings import RDMA_READY, said

from splitinfer.core.json_text import dumps
from splitinfer.probes.branches import BRANCHES
from splitinfer.probes.child import Result
from splitinfer.probes.evidence import MACOS, Seen
from splitinfer.probes.finding import Fault, Finding, Outcome, Reason, passed
from splitinfer.probes.rdma import requirements, verdict
from splitinfer.probes.registry import selftest_probes
from splitinfer.probes.sharing import CONTAINS, CONTAINS_NOT, KIND, document, shareable

PRIVATE = (
    "alice", "alices-studio.local", "/Users/alice/models", "C:\\Users\\alice", "192.168.1.23", "10.0.0.5",
    "fe80::1%en5", "tcp://mini.local:5577", "ab" * 32, "Once upon a time", "alice@example.org", "Alice", "ALICE",
    "failed: PermissionError: /Users/alice/key",
)  # fmt: skip
MARKS = ("alice", "mini", "192.168", "10.0.0", "fe80", "abab", "once upon", "example")
PROBES = (*selftest_probes(None), replace(selftest_probes(None)[0], name="network"))


def outcomes(about: Mapping[str, Any] = MAC) -> dict[str, Result]:
    gpu = about["gpu"]
    outputs = {name: said(RDMA_READY.get(name, "")) for name in MACOS}
    rdma = verdict(requirements(Seen(outputs, "Darwin", True, {})))
    answers = [passed(name, "", answer()) for name in ("greedy", "sampled", "greedy, drafts", "kept KV")]
    steps = {"rows": [1, 512], "launch_ms": [1.0, 2.0], "step_ms": [2.0, 30.0]}
    found: dict[str, list[Finding]] = {
        "about": [passed("device", "alice's", about)],
        "tcp": [passed("rounding", "", ROUNDS if gpu else EXACT), *answers, passed("loops", "", loops(gpu=gpu))],
        "branches": [passed(name, "", branch(gpu=gpu)) for name in BRANCHES],
        "memory": [passed("growth", "", memory())],
        "network": [passed("link", "", link())],
        "doctor": [rdma, Finding("power", Outcome.WARNING, "alices-studio sleeps", "sudo pmset")],
        "costs": [passed("demo", "", steps)],
        "exact": [passed("exact", "", exact())],
    }
    return {name: Result(tuple(each), None, 1.0, 20.0) for name, each in found.items()}


def made(results: Mapping[str, Result]) -> dict[str, Any]:
    return document(PROBES, results, seconds=61.23, limit_s=180.0, quick=False)


def planted(value: Any, text: str) -> Any:
    """``value`` with ``text`` in place of every text, in a list beside every element, and under other keys."""
    if isinstance(value, Mapping):
        return {**{name: planted(one, text) for name, one in value.items()}, text: text, "hostname": text}
    if isinstance(value, list | tuple):
        return [*(planted(one, text) for one in value), text]
    return text if isinstance(value, str) else value


def blanked(value: Any, text: str) -> Any:
    """``value`` with ``text`` in place of everything that is no mapping."""
    return {name: blanked(one, text) for name, one in value.items()} if isinstance(value, Mapping) else text


@pytest.mark.parametrize("text", PRIVATE)
@pytest.mark.parametrize("plant", [planted, blanked])
def test_nothing_private_gets_into_it(text: str, plant: Any):
    bad = Finding(text, Outcome.FAILED, text, text, text, Fault.DEVICE, Reason.FAILED, {text: text}, text, text, text)
    results = {
        name: replace(
            result,
            found=tuple(replace(each, numbers=plant(each.numbers, text), sentence=text) for each in result.found),
            ending=bad,
        )
        for name, result in outcomes().items()
    }
    written = dumps(made({**results, text: results["tcp"]})).lower()
    assert [mark for mark in MARKS if mark in written] == []


@pytest.mark.parametrize("about", [MAC, LINUX], ids=["mac", "linux"])
def test_nothing_that_may_be_in_it_is_lost(about: Mapping[str, Any]):
    found, given = made(outcomes(about)), outcomes(about)
    machine = {name: value for name, value in about.items() if name not in ("name", "kv_folder")}
    shown = {"chip": "AMD", "system_version": "6.8.0"} if about is LINUX else {}
    assert found["machine"] == {**machine, **shown}
    for name, measured in found["measured"].items():
        assert measured == {each.name: json.loads(dumps(each.numbers)) for each in given[name].found if each.numbers}, (
            name
        )
    assert found["measured"]["doctor"]["RDMA over Thunderbolt"]["cable to a Mac"] == "passed"
    assert found["parts"]["tcp"] == {"seconds": 1.0, "limit_s": 20.0}
    assert (found["kind"], found["contains"], found["contains_not"]) == (KIND, CONTAINS, CONTAINS_NOT)
    assert (found["exit_code"], found["seconds"], found["limit_s"], found["quick"]) == (0, 61.2, 180.0, False)


def test_every_finding_is_in_it_by_its_name():
    results = outcomes()
    crash = Finding(
        "greedy", Outcome.FAILED, "", "", "rdma over MLX's ring", Fault.TRANSPORT, Reason.CRASHED, {}, "", "SIGSEGV",
        "splitinfer.llm.llm:80",
    )  # fmt: skip
    found = made({**results, "ring": Result((), crash)})
    assert found["exit_code"] == 11
    assert {
        "group": "rdma over MLX's ring", "name": "greedy", "outcome": "failed", "fault": 11, "reason": "crashed",
        "error": "", "signal": "SIGSEGV", "at": "splitinfer.llm.llm:80",
    } in found["checks"]  # fmt: skip
    advice = next(one for one in found["checks"] if one["name"] == "power")
    assert (advice["outcome"], advice["fault"]) == ("warning", 0)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda one: st.lists(one, max_size=80) | st.dictionaries(st.text() | st.just("rows"), one),
)


@given(VALUES)
def test_anything_may_be_measured(value: Any):
    found = shareable(value)
    assert json.loads(dumps(found)) == found
    assert not isinstance(found, list) or len(found) <= 64
