"""Judges the machine: what computes, memory before and after, times, and whether roads part. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from splitinfer.selftest.checks import Check, Fault, Reason, failed, not_applicable, passed
from splitinfer.selftest.outcome import PartOutcome, broken

GROUP, MEMORY, TIMES, EXACT = "this machine", "memory", "times", "exactness"
LEAST_FREE = 2e9  # bytes: less is not enough for a stage of any real model
MOST_LEAKED = 8 * 2**20  # bytes of arrays that may stay; MLX and Python keep some for later
MOST_RESIDENT = 128 * 2**20  # bytes by which a process may grow in twelve rounds
_MOST_DIFFERING = 0.25  # share of positions at which a road may choose another token, all by rounding
_SEND = "send the file in (--json FILE)"


def judge_about(outcome: PartOutcome) -> list[Check]:
    """What computes here, and what is free."""
    about = outcome.finding("about")
    if about is None:
        return broken(GROUP, outcome, Fault.DEVICE, "install it anew: MLX does not even say what it computes on")
    return [_computes(about), _free(about), _load(about)]


def _computes(about: Mapping[str, Any]) -> Check:
    if about["system"] == "Darwin" and not about["gpu"]:
        sentence = "MLX computes on the processor, and not on this Mac's GPU"
        remedy = "use a native Python for Apple silicon (not under Rosetta), and install mlx again"
        return failed(GROUP, "device", Fault.DEVICE, Reason.NO_GPU, sentence, remedy)
    exact = "bit for bit whatever rows come together" if about["exact"] else "up to rounding"
    return passed(GROUP, "device", f"MLX {about['version_mlx']} computes on {about['device']}, {exact}")


def _free(about: Mapping[str, Any]) -> Check:
    free, total = about["free_bytes"], about["memory_bytes"]
    said = f"{free / 1e9:,.3g} GB of {total / 1e9:,.3g} GB are free for a stage"
    if free < LEAST_FREE:
        remedy = "close other programs, or give this machine fewer layers"
        return failed(GROUP, "free memory", Fault.MEMORY, Reason.LOW_MEMORY, f"only {said}", remedy)
    return passed(GROUP, "free memory", said)


def _load(about: Mapping[str, Any]) -> Check:
    load, processors = about["load_average"], about["processors"]
    said = f"a load of {load:.3g} on {processors} processors"
    if load > processors:
        return passed(GROUP, "load", f"{said}: other programs compute, so times say little, and may not suffice")
    return passed(GROUP, "load", said)


def judge_memory(outcome: PartOutcome, about: Mapping[str, Any]) -> list[Check]:
    """Leaks, and what is wired."""
    given = outcome.finding("memory")
    found = [] if given is None else [_leak(given), _freed(given), _wired(given["wired"], about)]
    return found + broken(MEMORY, outcome, Fault.MEMORY)


def _leak(given: Mapping[str, Any]) -> Check:
    arrays, resident = (given["used"][name] - given["warm"][name] for name in ("active", "resident"))
    said = f"{arrays / 1e6:+.1f} MB of arrays and {resident / 1e6:+.1f} MB of the process in {given['rounds']} rounds"
    if arrays > MOST_LEAKED or resident > MOST_RESIDENT:
        sentence = f"memory grows with every request: {said}"
        return failed(MEMORY, "growth", Fault.MEMORY, Reason.LEAK, sentence, _SEND)
    return passed(MEMORY, "growth", said)


def _freed(given: Mapping[str, Any]) -> Check:
    left = given["closed"]["active"] - given["before"]["active"]
    if left > MOST_LEAKED:
        sentence = f"{left / 1e6:.1f} MB of arrays are not freed when the model is closed"
        return failed(MEMORY, "closing", Fault.MEMORY, Reason.LEAK, sentence, _SEND)
    return passed(MEMORY, "closing", "all arrays are freed when the model is closed")


def _wired(wired: Mapping[str, Any], about: Mapping[str, Any]) -> Check:
    name = "wired limit"
    if about.get("backend") != "metal":
        return not_applicable(MEMORY, name, "only Metal has one", Reason.OTHER_DEVICE)
    limit, recommended = wired["limit"], wired["recommended"]
    if recommended is None:
        sentence = "MLX names no recommended working set, so a stage counts on all free memory"
        return failed(MEMORY, name, Fault.MEMORY, Reason.NOT_WIRED, sentence, _SEND)
    if limit != recommended:
        sentence = f"a loaded stage keeps {(limit or 0) / 1e9:.3g} GB wired and not {recommended / 1e9:.3g} GB"
        return failed(MEMORY, name, Fault.MEMORY, Reason.NOT_WIRED, sentence, _SEND)
    return passed(MEMORY, name, f"the GPU may keep {recommended / 1e9:.3g} GB wired, as it recommends")


def judge_costs(outcome: PartOutcome) -> list[Check]:
    """What a launch and a step take: figures, which no bound is known for."""
    launch = outcome.finding("launch")
    found = []
    if launch is not None:
        sentence = f"a launch takes {launch['launch_us'][0]:.3g} µs and a wait {launch['wait_us'][0]:.3g} (median)"
        found.append(passed(TIMES, "launch", sentence))
    steps = [one for name in outcome.found if name != "launch" and (one := outcome.finding(name)) is not None]
    if steps:
        by_rows = ", ".join(f"{one['rows']}: {one['step_ms']:.3g}" for one in steps)
        found.append(passed(TIMES, "steps", f"ms by rows: {by_rows}"))
    return found + broken(TIMES, outcome, Fault.DEVICE)


def judge_exact(outcome: PartOutcome) -> list[Check]:
    """``bench --mode exact`` in short: on a batch-invariant device no road may part; elsewhere only where it rounds."""
    given = outcome.finding("exact")
    found = [] if given is None else [_roads(given)]
    return found + broken(EXACT, replace(outcome, silent_s=0.0), Fault.DEVICE)  # it says nothing while it gets on


def _roads(given: Mapping[str, Any]) -> Check:
    roads, name = given["roads"], "roads"
    parted = [one for one in roads if one["parted"]]
    if parted and given["batch_invariant"]:
        sentence = f"{len(parted)} of {len(roads)} roads part, though rows do not depend on each other here"
        return failed(EXACT, name, Fault.TOKENS, Reason.WRONG_TOKEN, sentence, _SEND)
    worst = max(roads, key=lambda one: one["positions_that_differ"] / max(1, one["positions"]))
    if worst["positions_that_differ"] > _MOST_DIFFERING * worst["positions"]:
        sentence = (
            f"{worst['road']} would choose {worst['positions_that_differ']} of {worst['positions']} tokens otherwise, "
            "which is more than rounding"
        )
        return failed(EXACT, name, Fault.TOKENS, Reason.WRONG_TOKEN, sentence, _SEND)
    if not parted:
        return passed(EXACT, name, f"none of {len(roads)} ways to compute the same tokens parts")
    margin = max(one["largest_margin"] for one in parted)
    sentence = f"{len(parted)} of {len(roads)} ways to compute the same tokens part, at margins of up to {margin:.2g}"
    return passed(EXACT, name, sentence, Reason.ROUNDING)


def judge_doctor(outcome: PartOutcome, about: Mapping[str, Any], *, has_worker: bool) -> list[Check]:
    """Whether the doctor sees what computes, and whether RDMA over Thunderbolt could be used, which nobody has to."""
    given = outcome.finding("doctor")
    found = []
    if given is not None:
        found = [_diagnosis(given, about), _rdma(given["verdict"], has_worker=has_worker), *_advice(given["advice"])]
    return found + broken(GROUP, outcome, Fault.DEVICE)


def _diagnosis(given: Mapping[str, Any], about: Mapping[str, Any]) -> Check:
    name, backend, dtype = "doctor", given["backend"], given["hidden_dtype"]
    wanted = "bfloat16" if about.get("gpu") else "float32"
    if about and (backend, dtype) != (about["backend"], wanted):
        sentence = f"splitinfer doctor takes this for {backend} with rows in {dtype}, and it is {about['backend']}"
        return failed(GROUP, name, Fault.DEVICE, Reason.NOT_TAKEN, sentence, _SEND)
    return passed(GROUP, name, f"splitinfer doctor counts on {backend}, and on rows in {dtype}")


def _advice(advice: Sequence[Mapping[str, Any]]) -> list[Check]:
    """What the doctor would have changed, which is no fault of what is tested here: the worst of it in words."""
    serious = [one["text"] for one in advice if one["severity"] in ("problem", "warning")]
    if not serious:
        return []
    more = f" (and {len(serious) - 1} more)" if serious[1:] else ""
    return [passed(GROUP, "advice", f"splitinfer doctor has advice: {serious[0]}{more}")]


def _rdma(verdict: Mapping[str, Any], *, has_worker: bool) -> Check:
    name = "RDMA over Thunderbolt"
    if verdict["state"] == "ok":
        more = "" if has_worker else "; whether it does, --worker with another Mac shows"
        return passed(GROUP, name, f"it can be used{more}")
    return not_applicable(GROUP, name, f"it {verdict['text']} (splitinfer doctor says what to do)")
