"""The document has what it is to have, and nothing of its owner, whatever was measured."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measured import LINUX, MAC, memory, sound

from splitinfer.core.json_text import dumps
from splitinfer.selftest.checks import Check, State
from splitinfer.selftest.document import CONTAINS, CONTAINS_NOT, FORMAT, KIND, document
from splitinfer.selftest.judge import judge
from splitinfer.selftest.outcome import PartOutcome
from splitinfer.selftest.schema import flag, form, listing, number, record, table, word

PRIVATE = (
    "alice", "alices-studio.local", "/Users/alice/models", "C:\\Users\\alice", "192.168.1.23", "10.0.0.5",
    "fe80::1%en5", "tcp://mini.local:5577", "ab" * 32, "Once upon a time", "alice@example.org", "Alice", "ALICE",
    "failed: PermissionError: /Users/alice/key",
)  # fmt: skip
MARKS = ("alice", "mini", "192.168", "10.0.0", "fe80", "abab", "once upon", "example")


def made(outcomes: Mapping[str, PartOutcome], checks: list[Check] | None = None) -> dict[str, Any]:
    found = judge(outcomes) if checks is None else checks
    return document(outcomes, found, seconds=61.23, limit_s=180.0, quick=False)


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
    outcomes = {
        name: PartOutcome(plant(one.found, text), text, text, text, seconds=2.0, limit_s=3.0)
        for name, one in sound(MAC).items()
    }
    checks = [
        Check(text, text, State.FAILED, text, text, error=text, signal=text, at=text),
        *(replace(check, sentence=text, remedy=text, name=text) for check in judge(sound(MAC))),
    ]
    written = dumps(made({**outcomes, text: outcomes["tcp"]}, checks)).lower()
    assert [mark for mark in MARKS if mark in written] == []


@pytest.mark.parametrize("about", [MAC, LINUX])
def test_nothing_that_may_be_in_it_is_lost(about: Mapping[str, Any]):
    found = made(sound(about))
    said = found["machine"]
    assert {name for name, value in said.items() if value != about[name]} <= {"system_version", "chip"}
    assert said["system_version"] == {"Darwin": "26.2", "Linux": "6.8.0"}[said["system"]]
    assert said["chip"] == {"Darwin": "Apple M4 Max", "Linux": "AMD"}[said["system"]]
    measured = found["measured"]
    assert measured["tcp"]["greedy"]["tokens_per_second"] == 90.0
    assert measured["network"]["link"]["figures"] == {"latency_p50": 2e-4, "latency_p99": 4e-4, "down": 1e9, "up": None}
    assert measured["branches"]["cohort"]["way"] == "rows"
    assert measured["memory"] == {"memory": memory()["memory"]}
    state = "ok" if about is MAC else "missing"
    assert measured["doctor"]["doctor"]["requirements"] == [{"about": "macOS", "state": state}]
    assert measured["doctor"]["doctor"]["advice"] == [{"area": "power", "severity": "warning"}]
    assert measured["costs"]["8 x 2048, 4-bit, 512"]["step_ms"] == 30.0
    assert measured["exact"]["exact"]["roads"][0]["road"] == "2 rows together"
    assert found["parts"]["ring"] == {"seconds": 1.0, "limit_s": 20.0}


def test_every_check_is_in_it_by_its_name():
    outcomes = sound(MAC)
    outcomes["ring"] = replace(
        outcomes["ring"], problem="ended by itself with signal SIGSEGV", at="splitinfer.llm.llm:80"
    )
    checks = judge(outcomes)
    found = made(outcomes)["checks"]
    assert [(one["group"], one["name"], one["state"]) for one in found] == [
        (check.group, check.name, check.state) for check in checks
    ]
    crash = next(one for one in found if one["signal"])
    assert (crash["fault"], crash["reason"], crash["signal"], crash["at"]) == (
        11, "crashed", "SIGSEGV", "splitinfer.llm.llm:80",
    )  # fmt: skip
    assert made(outcomes)["exit_code"] == 11


def test_it_says_what_it_is():
    found = made(sound(MAC))
    assert (found["kind"], found["format"], found["contains"], found["contains_not"]) == (
        KIND, FORMAT, CONTAINS, CONTAINS_NOT,
    )  # fmt: skip
    assert (found["exit_code"], found["seconds"], found["limit_s"], found["quick"]) == (0, 61.2, 180.0, False)
    assert json.loads(dumps(found)) == found


def test_a_run_that_found_nothing_has_a_document():
    assert made({})["machine"] is None
    assert made({"tcp": PartOutcome({}, "no time was left for it")})["exit_code"] == 16


def test_an_exception_of_somebody_elses_is_another():
    crashed = PartOutcome({}, "failed: AliceError: no", at="alice.models:3")
    one = made({"tcp": crashed})["checks"][0]
    assert (one["error"], one["at"]) == ("other", None)


# ----- kinds ---------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda one: st.lists(one) | st.dictionaries(st.text(), one),
)


@settings(max_examples=25)
@given(VALUES)
def test_no_kind_lets_a_text_through_that_it_does_not_name(value: Any):
    kinds = record(
        a=number,
        b=flag,
        c=word(("yes",)),
        d=form(r"\d\.\d"),
        e=listing(word(("no",), "other")),
        f=table(("x",), number),
    )
    written = json.dumps(kinds(dict.fromkeys("abcdef", value)))
    left = written
    for allowed in ('"a"', '"b"', '"c"', '"d"', '"e"', '"f"', '"x"', '"yes"', '"other"', '"no"'):
        left = left.replace(allowed, "")
    assert '"' not in left or form(r"\d\.\d")(value) is not None


def test_kinds():
    assert [number(one) for one in (1, 2.5, True, float("nan"), float("inf"), "1", None)] == [1, 2.5, *[None] * 5]
    assert [flag(one) for one in (True, False, 1, "true")] == [True, False, None, None]
    assert [word(("a",), "other")(one) for one in ("a", "b", 1)] == ["a", "other", None]
    version = form(r"(\d+\.\d+)(?:-.*)?")
    assert [version(one) for one in ("6.8-generic", "6.8", "x6.8", "6.8\n", 6.8)] == ["6.8", "6.8", None, None, None]
    assert listing(number)([1, "x", 2]) == [1, None, 2]
    assert len(listing(number)([1] * 1000) or []) == 64
    assert record(a=number)({"b": 1}) == {"a": None}
    assert table(("a", "b"), number)({"b": 1, "c": 2}) == {"b": 1}
    assert [kind("text") for kind in (listing(number), record(a=number), table(("a",), number))] == [None] * 3
