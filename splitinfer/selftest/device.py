"""Judges the branches that only one kind of device takes: was each taken where it should be, and is it right? Pure.

A branch that another device takes is not applicable here, if this device's own way gave the right result.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from splitinfer.selftest.checks import Check, Fault, Reason, failed, not_applicable, passed
from splitinfer.selftest.outcome import PartOutcome, broken

GROUP = "this device"
_SEND = "send the file in (--json FILE)"


@dataclass(frozen=True, slots=True)
class Branch:
    """``here``, ``elsewhere``: what a GPU does, and what a processor does. ``bound``: the largest relative error of a
    row where arithmetic is not batch invariant; of several rounding errors of half precision, in twelve layers."""

    here: str
    elsewhere: str
    bound: float = 0.02


BRANCHES: Mapping[str, Branch] = {
    "sampler": Branch("the sampler is compiled", "the sampler is not compiled"),
    "quantised attention": Branch("attention multiplies with stored words", "stored words are unpacked first"),
    "kept dtype": Branch("weights keep the model's dtype", "weights are computed in float32"),
    "launching ahead": Branch(
        "steps are launched ahead, and a thread of its own waits for them", "a step is computed when it is launched"
    ),
    "cohort": Branch("heads of sequences together stay as they are", "heads that share keys become rows"),
    "quantised cohort": Branch("sequences together read stored words", "sequences together unpack stored words"),
    "large steps": Branch("a prompt is read 512 tokens a step", "a prompt is read 128 tokens a step", bound=0.05),
}
NAMES = (*BRANCHES, "trials at loading", "device name")


def judge_branches(outcome: PartOutcome, about: Mapping[str, Any]) -> list[Check]:
    """The checks of all branches. ``about``: this machine; empty if that is not known."""
    found = [
        _judge(name, branch, given, about)
        for name, branch in BRANCHES.items()
        if (given := outcome.finding(name)) is not None
    ]
    if (trials := outcome.finding("trials at loading")) is not None:
        found.append(_trials(trials))
    if (name_found := outcome.finding("device name")) is not None:
        found.append(_name(name_found, about))
    return found + broken(GROUP, outcome, Fault.DEVICE)


def _judge(name: str, branch: Branch, given: Mapping[str, Any], about: Mapping[str, Any]) -> Check:
    if (wrong := _wrong(given, branch, exact=bool(about.get("exact")))) is not None:
        return failed(GROUP, name, Fault.DEVICE, Reason.LARGE_ERROR, wrong, f"do not trust answers yet; {_SEND}")
    should, is_taken = _should(name, about), _taken(name, given)
    if should is None or should == is_taken:
        if is_taken:
            return passed(GROUP, name, f"{branch.here}{_by(given)}")
        sentence = f"only a GPU does this; here {branch.elsewhere}{_by(given)}"
        return not_applicable(GROUP, name, sentence, Reason.OTHER_DEVICE)
    should_words, is_words = (branch.here, branch.elsewhere) if should else (branch.elsewhere, branch.here)
    sentence = f"on this device it should be that {should_words}, but {is_words}"
    return failed(GROUP, name, Fault.DEVICE, Reason.NOT_TAKEN, sentence, _SEND)


def _should(name: str, about: Mapping[str, Any]) -> bool | None:
    """Whether this device should take a branch; ``None`` if it is not known what computes."""
    if name == "launching ahead":
        return None if about.get("computes_at_launch") is None else not about["computes_at_launch"]
    if name == "large steps":
        return None if about.get("device") is None else about["device"] != "cpu"
    gpu = about.get("gpu")
    return gpu if isinstance(gpu, bool) else None


def _taken(name: str, given: Mapping[str, Any]) -> bool:
    if name == "kept dtype":
        return not given["float32"]
    if name == "launching ahead":
        return bool(given["taken"] and given["waiter"])
    return bool(given["taken"])


def _wrong(given: Mapping[str, Any], branch: Branch, *, exact: bool) -> str | None:
    """What is wrong with a branch's result, whichever way was taken."""
    if given.get("equal") is False:
        return "it gives other tokens than the same without it"
    if given.get("completed") != given.get("launched"):
        return f"{given['completed']} of {given['launched']} steps came to an end"
    if "error" not in given:
        return None
    bound = 0.0 if exact else max(branch.bound, 4 * (given.get("own_rounding") or 0.0))
    if given["error"] is None:  # what was not a number
        return "its results are no numbers"
    if given["error"] > bound:
        return f"its results are off by {given['error']:.2g} of a row, and rounding allows {bound:.2g}"
    return None


def _by(given: Mapping[str, Any]) -> str:
    return "" if not given.get("error") else f"; off by {given['error']:.2g} of a row, which is rounding"


def _trials(given: Mapping[str, Any]) -> Check:
    name = "trials at loading"
    if given["way"] == "rows" and given["kept_kv"]:
        return passed(GROUP, name, "rows of many sequences are computed together, and KV is kept")
    kept = "is" if given["kept_kv"] else "is not"
    sentence = f"rows of many sequences are computed by {given['way']}, and KV {kept} kept: the demo model allows both"
    return failed(GROUP, name, Fault.DEVICE, Reason.NOT_TAKEN, sentence, _SEND)


def _name(given: Mapping[str, Any], about: Mapping[str, Any]) -> Check:
    if about.get("gpu") and given["name"] == "cpu":
        sentence = "MLX computes on a GPU, and peers would be told that it is a cpu"
        return failed(GROUP, "device name", Fault.DEVICE, Reason.NOT_TAKEN, sentence, _SEND)
    if about.get("gpu") and given["own_processor"]:
        sentence = "a stage on a GPU yields its processor after every frame, as one that shares it with its device does"
        return failed(GROUP, "device name", Fault.DEVICE, Reason.NOT_TAKEN, sentence, _SEND)
    return passed(GROUP, "device name", f"peers are told that stages compute on {given['name']}")
