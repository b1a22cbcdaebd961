"""Judges tokens: those of every road against plain mlx-lm's on the same device. Pure.

Where arithmetic is batch invariant, tokens must be equal. Elsewhere a token may be another one where the reference's
own margin was no larger than what rounding moves: as much as mlx-lm's own logits move when it computes the same rows in
other numbers, or a few units in the last place of the largest logit, whichever is more. Any other token is wrong.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from splitinfer.selftest.checks import Check, Fault, Reason, failed, not_applicable, passed
from splitinfer.selftest.outcome import PartOutcome, broken

CASES = ("greedy", "sampled", "greedy, drafts", "sampled, drafts", "kept KV")
_TIMES_MOVED, _UNITS = 4.0, 8.0  # of a margin: both logits move, and other kernels move them otherwise
WORDS = {
    "one process": "one process",
    "inproc": "two stages in one process (inproc)",
    "tcp": "two processes (tcp)",
    "curve": "an encrypted link (curve + tcp)",
    "ring": "rdma over MLX's ring",
    "worker, tcp": "the worker elsewhere",
    "worker, rdma": "the worker elsewhere over rdma (JACCL)",
}


def judge_road(road: str, outcome: PartOutcome, about: Mapping[str, Any]) -> list[Check]:
    """The checks of one road. ``about``: this machine; empty if that is not known."""
    group, fault = WORDS[road], _fault(road)
    if (unavailable := outcome.finding("unavailable")) is not None:
        return [not_applicable(group, "", f"it cannot be used here: {unavailable['why']}")]
    rounding = outcome.finding("rounding") or {}
    found = [_judge(group, name, given, rounding) for name in CASES if (given := outcome.finding(name)) is not None]
    found += [_loops(group, seen, about) for seen in [outcome.finding("device")] if seen is not None]
    return found + broken(group, outcome, fault)


def _fault(road: str) -> Fault:
    if road == "one process":
        return Fault.DEVICE
    return Fault.WORKER if road.startswith("worker") else Fault.TRANSPORT


def tolerance(rounding: Mapping[str, Any]) -> float:
    """The margin, in logits, up to which another token is rounding.

    >>> tolerance({"exact": True, "logits_move": 0.0})
    0.0
    >>> tolerance({"exact": False, "logits_move": 0.0625, "epsilon": 2**-10, "largest_logit": 16.0})
    0.25
    """
    if rounding.get("exact") or not rounding:
        return 0.0
    units: float = _UNITS * rounding["epsilon"] * rounding["largest_logit"]
    return max(_TIMES_MOVED * (rounding["logits_move"] or 0.0), units)


def _judge(group: str, name: str, given: Mapping[str, Any], rounding: Mapping[str, Any]) -> Check:
    partings: Sequence[Mapping[str, Any]] = given["partings"]
    allowed = tolerance(rounding)
    wrong = [one for one in partings if one["margin"] is None or one["margin"] > allowed]
    if wrong:
        return _wrong(group, name, given, wrong[0], rounding)
    if given["compared"] < given["tokens"]:
        sentence = f"{len(partings)} of the first {given['compared']} tokens are others than plain mlx-lm's"
        return failed(group, name, Fault.TOKENS, Reason.WRONG_TOKEN, sentence, _STOP)
    if given.get("drafts_sent") == 0:
        sentence = "the tokens are plain mlx-lm's, but no draft was sent"
        return failed(group, name, Fault.DEVICE, Reason.NO_DRAFTS, sentence, _SEND)
    if name == "kept KV" and not given["cached_tokens"]:
        sentence = "the tokens are plain mlx-lm's, but KV kept on disk was not found after a restart"
        return failed(group, name, Fault.MEMORY, Reason.KV_NOT_FOUND, sentence, "look at the free disk space; " + _SEND)
    if partings:
        near = max(one["margin"] for one in partings)
        sentence = (
            f"{given['tokens']} tokens are plain mlx-lm's but for {len(partings)} that were within {near:.2g} logits "
            f"of the one chosen, which is rounding here (up to {allowed:.2g})"
        )
        return passed(group, name, sentence, Reason.ROUNDING)
    return passed(group, name, f"{given['tokens']} tokens are plain mlx-lm's{_more(given)}")


def _more(given: Mapping[str, Any]) -> str:
    if "drafts_sent" in given:
        return f"; {given['drafts_accepted']} of {given['drafts_sent']} drafts were right"
    if "kept_before" in given:
        return f"; {given['cached_tokens']} tokens of KV came back from disk"
    return "" if not given.get("tokens_per_second") else f", {given['tokens_per_second']:.3g} a second"


def _wrong(
    group: str, name: str, given: Mapping[str, Any], one: Mapping[str, Any], rounding: Mapping[str, Any]
) -> Check:
    place = f"token {one['at'] + 1} of {given['tokens']}"
    if one["token"] is None:
        sentence = f"{place} never came"
        return failed(group, name, Fault.TOKENS, Reason.TOO_FEW_TOKENS, sentence, _STOP)
    sentence = (
        f"{place} is {one['token']}, and plain mlx-lm's is {one['wanted']} by {one['margin']:.3g} logits; "
        f"mlx-lm's own rounding moves them by {rounding.get('logits_move') or 0.0:.2g}"
    )
    return failed(group, name, Fault.TOKENS, Reason.WRONG_TOKEN, sentence, _STOP)


def _loops(group: str, seen: Mapping[str, Any], about: Mapping[str, Any]) -> Check:
    """Whether results are sent by a thread that waits for the device, exactly where the device computes by itself; and
    whether steps are as large as the devices allow."""
    name, launches = "loops", about.get("computes_at_launch")
    if launches is not None and seen["waiter"] is launches:
        words = "no thread waits for the device" if launches is False else "a thread waits for a device that needs none"
        return failed(group, name, Fault.DEVICE, Reason.NOT_TAKEN, words, _SEND)
    wanted = 128 if all(device == "cpu" for device in seen["stages"]) else 512
    if seen["token_budget"] != wanted:
        sentence = f"steps have up to {seen['token_budget']} tokens, and should have {wanted} on this device"
        return failed(group, name, Fault.DEVICE, Reason.NOT_TAKEN, sentence, _SEND)
    who = "a thread that waits for the device sends results" if seen["waiter"] else "the loop itself sends results"
    return passed(group, name, f"{who}; steps of up to {seen['token_budget']} tokens")


_SEND = "send the file in (--json FILE)"
_STOP = f"do not trust answers on this machine yet; {_SEND}"
