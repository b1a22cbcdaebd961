"""Faults planted in what was measured: each is named, and decides the exit code."""

import doctest
import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from measured import EXACT as EXACTLY
from measured import LINUX, MAC, answer, branches, doctor, exact, memory, network, parting, road, sound

from splitinfer.errors import ConfigError
from splitinfer.selftest.address import worker_address
from splitinfer.selftest.checks import Check, Fault, Reason, State, exit_code, failed
from splitinfer.selftest.judge import judge
from splitinfer.selftest.outcome import HANGING, PartOutcome
from splitinfer.selftest.parts import WORKER_ROADS, is_worth_it, parts

ROOT = Path(__file__).parents[2]


def only_failure(outcomes: dict[str, PartOutcome]) -> Check:
    """The one check that failed or was not run."""
    found = [check for check in judge(outcomes) if check.fault]
    assert len(found) == 1, found
    assert exit_code(found) == found[0].fault
    return found[0]


@pytest.mark.parametrize("about", [MAC, LINUX], ids=["mac", "linux"])
def test_on_a_sound_machine_nothing_fails(about: dict[str, Any]):
    checks = judge(sound(about))
    assert [check for check in checks if check.fault or check.state is State.FAILED] == []
    assert exit_code(checks) == 0
    other = [check.name for check in checks if check.reason is Reason.OTHER_DEVICE]
    assert len(other) == (0 if about is MAC else 8)  # every branch of a GPU, and the wired limit


# ----- tokens --------------------------------------------------------------------------------------


def test_a_wrong_token_is_named():
    wrong = only_failure(sound(tcp=road(greedy=answer(partings=[parting(3.1)]))))
    assert (wrong.fault, wrong.reason, wrong.group, wrong.name) == (
        Fault.TOKENS, Reason.WRONG_TOKEN, "two processes (tcp)", "greedy",
    )  # fmt: skip
    assert "token 5 of 32 is 417, and plain mlx-lm's is 88 by 3.1 logits" in wrong.sentence


@pytest.mark.parametrize(("margin", "is_wrong"), [(0.0, False), (0.12, False), (0.13, True)])
def test_what_rounding_moves_is_no_wrong_token(margin: float, is_wrong: bool):
    checks = judge(sound(tcp=road(sampled=answer(partings=[parting(margin)]))))
    found = next(check for check in checks if (check.group, check.name) == ("two processes (tcp)", "sampled"))
    assert (found.state is State.FAILED, found.reason) == (
        is_wrong, Reason.WRONG_TOKEN if is_wrong else Reason.ROUNDING,
    )  # fmt: skip


def test_where_arithmetic_is_exact_a_tie_is_wrong_too():
    tie = road(EXACTLY, gpu=False, greedy=answer(partings=[parting(1e-7)]))
    assert only_failure(sound(LINUX, tcp=tie)).reason is Reason.WRONG_TOKEN


def test_a_missing_token_is_wrong_whatever_its_margin():
    found = only_failure(sound(ring=road(greedy=answer(partings=[parting(None)]))))
    assert (found.reason, found.sentence) == (Reason.TOO_FEW_TOKENS, "token 5 of 32 never came")


def test_too_many_near_ties_are_wrong():
    many = answer(partings=[parting(0.0) for _ in range(4)], compared=9)
    assert only_failure(sound(tcp=road(greedy=many))).fault is Fault.TOKENS


@pytest.mark.parametrize(
    ("name", "given", "fault", "reason"),
    [
        ("greedy, drafts", answer(drafts_sent=0, drafts_accepted=0), Fault.DEVICE, Reason.NO_DRAFTS),
        ("kept KV", answer(cached_tokens=0, kept_before=0), Fault.MEMORY, Reason.KV_NOT_FOUND),
    ],
)
def test_right_tokens_are_not_enough(name: str, given: dict[str, Any], fault: Fault, reason: Reason):
    found = only_failure(sound(one_process=road(**{name: given})))
    assert (found.name, found.fault, found.reason) == (name, fault, reason)


@pytest.mark.parametrize(("about", "waiter"), [(MAC, False), (LINUX, True)])
def test_the_loops_have_to_be_those_of_the_device(about: dict[str, Any], waiter: bool):
    sound_road = sound(about)["tcp"].found
    outcomes = sound(about, tcp={**sound_road, "device": {**sound_road["device"], "waiter": waiter}})
    assert only_failure(outcomes).reason is Reason.NOT_TAKEN


def test_steps_on_a_gpu_are_large():
    small = {**road()["device"], "token_budget": 128}
    assert "up to 128 tokens, and should have 512" in only_failure(sound(tcp=road(device=small))).sentence


# ----- the device ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["sampler", "quantised attention", "launching ahead", "cohort", "large steps", "quantised cohort"]
)
def test_a_branch_that_was_not_taken_is_named(name: str):
    found = only_failure(sound(branches=branches(**{name: {**branches()[name], "taken": False}})))
    assert (found.name, found.fault, found.reason) == (name, Fault.DEVICE, Reason.NOT_TAKEN)
    assert "on this device it should be that" in found.sentence


def test_weights_that_became_float32_on_a_gpu_are_named():
    found = only_failure(sound(branches=branches(**{"kept dtype": {"dtype": "float32", "float32": True}})))
    assert (found.name, found.reason) == ("kept dtype", Reason.NOT_TAKEN)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("cohort", {"error": 0.5}),
        ("cohort", {"error": None}),  # infinite, or no number
        ("quantised attention", {"error": 0.1}),
        ("sampler", {"equal": False}),
        ("launching ahead", {"completed": 5}),
    ],
)
def test_a_branch_with_a_wrong_result_is_named(name: str, changes: dict[str, Any]):
    found = only_failure(sound(branches=branches(**{name: {**branches()[name], **changes}})))
    assert (found.name, found.reason) == (name, Reason.LARGE_ERROR)


def test_an_error_that_the_same_rows_have_in_other_chunks_is_rounding():
    noisy = {**branches()["cohort"], "error": 0.1, "own_rounding": 0.03}
    assert not exit_code(judge(sound(branches=branches(cohort=noisy))))


def test_on_an_exact_device_any_error_is_one():
    off = {**branches(gpu=False)["cohort"], "error": 1e-7}
    assert only_failure(sound(LINUX, branches=branches(gpu=False, cohort=off))).reason is Reason.LARGE_ERROR


def test_trials_that_refuse_the_demo_model_are_named():
    slow = {"way": "sequences", "kept_kv": False}
    assert only_failure(sound(branches=branches(**{"trials at loading": slow}))).name == "trials at loading"


def test_a_mac_that_computes_on_its_processor_is_named():
    about = {**MAC, "gpu": False, "device": "cpu", "backend": "cpu", "computes_at_launch": True}
    as_seen = {"memory": memory(wired={"limit": None, "recommended": None}), "doctor": doctor("ok", "cpu", "float32")}
    found = only_failure(sound(about, **as_seen))
    assert (found.reason, found.fault) == (Reason.NO_GPU, Fault.DEVICE)


def test_a_doctor_that_sees_another_device_is_named():
    found = only_failure(sound(doctor=doctor(backend="cpu", dtype="float32")))
    assert (found.name, found.reason) == ("doctor", Reason.NOT_TAKEN)


def test_the_doctors_advice_is_told_and_no_fault():
    told = next(check for check in judge(sound()) if check.name == "advice")
    assert (told.state, told.fault) == (State.PASSED, Fault.NONE)
    assert "alices-studio sleeps" in told.sentence  # on the page, which is its owner's


def test_a_stage_on_a_gpu_is_not_pinned_to_a_processor():
    pinned = {"name": "Apple M4 Max", "own_processor": True}
    assert "yields its processor" in only_failure(sound(branches=branches(**{"device name": pinned}))).sentence


# ----- memory and times ----------------------------------------------------------------------------


def test_low_memory_is_named():
    found = only_failure(sound({**MAC, "free_bytes": 1.2e9}))
    assert (found.fault, found.reason, found.sentence) == (
        Fault.MEMORY, Reason.LOW_MEMORY, "only 1.2 GB of 128 GB are free for a stage",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("at", "changes"),
    [("used", {"active": 40_000_000}), ("used", {"resident": 900_000_000}), ("closed", {"active": 20_000_000})],
)
def test_a_leak_is_named(at: str, changes: dict[str, int]):
    given = memory()["memory"]
    found = only_failure(sound(memory=memory(**{at: {**given[at], **changes}})))
    assert (found.fault, found.reason) == (Fault.MEMORY, Reason.LEAK)


@pytest.mark.parametrize("wired", [{"limit": 0, "recommended": 96e9}, {"limit": None, "recommended": None}])
def test_memory_that_is_not_wired_is_named(wired: dict[str, Any]):
    assert only_failure(sound(memory=memory(wired=wired))).reason is Reason.NOT_WIRED


def test_roads_that_part_are_named_where_rows_do_not_depend_on_each_other():
    given = exact(parted=1, largest_margin=0.4, positions_that_differ=1)
    assert not exit_code(judge(sound(exact=given)))
    given["exact"]["batch_invariant"] = True
    assert only_failure(sound(exact=given)).fault is Fault.TOKENS
    many = exact(parted=1, largest_margin=0.4, positions_that_differ=4)
    assert "4 of 8 tokens otherwise" in only_failure(sound(exact=many)).sentence


# ----- the network ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("problem", "system", "reason", "words"),
    [
        ("name", "Darwin", Reason.NAME, "NAME.local"),
        ("ECONNREFUSED", "Darwin", Reason.NOTHING_LISTENS, "splitinfer worker --host 0.0.0.0"),
        ("EHOSTUNREACH", "Darwin", Reason.NO_ROUTE, "Privacy & Security, Local Network"),
        ("EHOSTUNREACH", "Linux", Reason.NO_ROUTE, "cables and addresses"),
        ("timeout", "Darwin", Reason.TIMEOUT, "firewall"),
        ("EPERM", "Darwin", Reason.NETWORK, "firewalls"),
    ],
)
def test_a_worker_that_cannot_be_reached_is_named(problem: str, system: str, reason: Reason, words: str):
    outcomes = sound(network=network(problem, system))
    del outcomes["worker, tcp"]
    found = only_failure(outcomes)
    assert (found.fault, found.reason) == (Fault.WORKER, reason)
    assert words in found.remedy


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        ("worker w refuses: run there: splitinfer pair abc", Reason.NOT_ADMITTED),
        ("worker w refuses: it has other versions (mlx 0.31)", Reason.VERSIONS),
        ("worker w refuses: it is busy", Reason.REFUSED),
    ],
)
def test_a_worker_that_refuses_is_named(problem: str, reason: Reason):
    refused = network(figures=None, welcome=None, worker_problem=problem, refused=True)
    assert only_failure(sound(network=refused)).reason is reason


@pytest.mark.parametrize("figures", [{"latency_p50": 6e-3}, {"down": 45e6}, {"up": 45e6}])
def test_a_slow_link_is_named(figures: dict[str, float]):
    usual = network()["link"]["figures"]
    found = only_failure(sound(network=network(figures={**usual, **figures})))
    assert (found.fault, found.reason) == (Fault.SPEED, Reason.SLOW)
    assert "Thunderbolt or Ethernet" in found.remedy


def test_a_worker_that_cannot_be_reached_is_asked_for_no_tokens():
    for problem, is_worth in (("name", False), (None, True)):
        outcomes = {"network": PartOutcome(network(problem))}
        assert [is_worth_it(name, outcomes) for name in (*WORKER_ROADS, "tcp")] == [is_worth, is_worth, True]


# ----- parts that do not come to their end ---------------------------------------------------------


def test_a_crash_is_named_with_its_signal():
    outcomes = sound()
    crashed = {**road(), "sampled": {"problem": "ended its process, with signal SIGSEGV"}}
    found = only_failure({**outcomes, "ring": PartOutcome(crashed)})
    assert (found.fault, found.reason, found.signal, found.name) == (
        Fault.TRANSPORT, Reason.CRASHED, "SIGSEGV", "sampled",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("silent_s", "state", "fault"),
    [(HANGING, State.FAILED, Fault.TRANSPORT), (HANGING - 1, State.NOT_RUN, Fault.TIME)],
)
def test_a_hang_is_told_from_a_slow_machine(silent_s: float, state: State, fault: Fault):
    overran = PartOutcome(
        {}, "overran: ended after 20.0 s, which was its share of the time", "greedy", silent_s=silent_s
    )
    found = only_failure({**sound(), "curve": overran})
    assert (found.state, found.fault, found.name) == (state, fault, "greedy")


def test_on_a_machine_that_does_much_else_nothing_hangs_so_soon():
    outcomes = sound()
    busy = {**outcomes, "about": replace(outcomes["about"], seconds=9.0)}
    overran = PartOutcome({}, "overran: ended after 30.0 s, which was its share of the time", silent_s=30.0)
    assert only_failure({**busy, "curve": overran}).fault is Fault.TIME
    assert only_failure({**outcomes, "curve": overran}).fault is Fault.TRANSPORT


@pytest.mark.parametrize(
    ("part", "fault"),
    [
        ("one process", Fault.DEVICE), ("tcp", Fault.TRANSPORT), ("worker, tcp", Fault.WORKER),
        ("branches", Fault.DEVICE), ("memory", Fault.MEMORY), ("costs", Fault.DEVICE), ("network", Fault.WORKER),
    ],
)  # fmt: skip
def test_a_part_that_fails_is_named_with_its_error(part: str, fault: Fault):
    problem = "failed: TransportUnavailable: ring is not to be had"
    broken = PartOutcome({}, problem, at="transports.rdma.transport:90")
    found = only_failure({**sound(), part: broken})
    assert (found.fault, found.error, found.at) == (fault, "TransportUnavailable", "transports.rdma.transport:90")
    assert found.sentence == problem


def test_what_there_was_no_time_for_was_not_run():
    found = only_failure({**sound(), "exact": PartOutcome({}, "no time was left for it")})
    assert (found.state, found.fault) == (State.NOT_RUN, Fault.TIME)


def test_a_machine_that_is_not_known_takes_no_branch_wrongly():
    outcomes = sound(LINUX)
    broken = replace(outcomes["about"], found={}, problem="ended by itself with exit code 9")
    assert only_failure({**outcomes, "about": broken}).group == "this machine"


def test_rdma_that_cannot_be_had_is_no_failure():
    outcomes = {**sound(), "worker, rdma": PartOutcome({"unavailable": {"why": "no port is active"}})}
    found = next(check for check in judge(outcomes) if "JACCL" in check.group)
    assert (found.state, found.sentence) == (State.NOT_APPLICABLE, "it cannot be used here: no port is active")


# ----- exit codes, parts, addresses ----------------------------------------------------------------


def test_the_most_serious_fault_decides():
    both = [failed("", "", fault, Reason.FAILED, "") for fault in (Fault.SPEED, Fault.TOKENS, Fault.MEMORY)]
    assert (exit_code(both), exit_code(both[::2]), exit_code([])) == (10, 13, 0)


def test_the_table_of_exit_codes_has_all():
    page = (ROOT / "docs" / "selftest.md").read_text()
    assert [fault.name for fault in Fault if fault and f"| {int(fault)} |" not in page] == []


def test_parts_come_with_the_most_important_first():
    there = worker_address("tcp://mini.local:5577", None)
    names = [part.name for part in parts(there)]
    assert names[:6] == ["about", "one process", "tcp", "network", "worker, tcp", "worker, rdma"]
    assert [part.name for part in parts(None)] == [name for name in names if name not in names[3:6]]
    quick = [part.name for part in parts(there, quick=True)]
    assert quick == [name for name in names if name in quick]
    assert len(quick) < len(names)


def test_with_more_time_every_part_may_take_more():
    part = parts(None)[1]
    assert [part.most_of(seconds) for seconds in (60.0, 180.0, 540.0)] == [part.most, part.most, 3 * part.most]


def test_keys_are_made_in_a_folder_of_the_run():
    curve = next(part for part in parts(None) if part.name == "curve")
    assert curve.job("/run").environment == {"XDG_CONFIG_HOME": "/run/config"}


@pytest.mark.parametrize(
    ("text", "address", "link"),
    [
        ("tcp://mini.local:6000", "tcp://mini.local:6000", None),
        ("mini", "tcp://mini:5577", None),
        ("[fe80::1]:7", "tcp://[fe80::1]:7", None),
        ("emulated+tcp://127.0.0.1:5577?link=wifi", "tcp://127.0.0.1:5577", "wifi"),
    ],
)
def test_where_a_worker_may_be(text: str, address: str, link: str | None):
    found = worker_address(text, "ab" * 32)
    assert (found.address, found.link) == (address, link)


@pytest.mark.parametrize("text", ["", "http://mini", "mini:99999", "mini:0", "tcp://mini?link=wifi", "a b"])
def test_an_address_that_is_none_is_refused(text: str):
    with pytest.raises(ConfigError, match="--worker"):
        worker_address(text, None)


def test_a_key_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="--key is no key"):
        worker_address("mini", "secret")


@pytest.mark.parametrize("name", ["address", "checks", "outcome", "tokens", "probes.roads"])
def test_the_examples_are_true(name: str):
    found = doctest.testmod(importlib.import_module(f"splitinfer.selftest.{name}"))
    assert (found.failed, found.attempted > 0) == (0, True)
