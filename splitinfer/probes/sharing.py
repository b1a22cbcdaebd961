"""The document to be sent in: machine, outcomes and figures, and nothing private. Pure.

It is built of what cannot be private: numbers, truth values, and words of this program (outcomes, reasons, the names of
probes and checks, the keys of figures, types and places of errors). What the world wrote is not copied: of the texts of
a system, a version becomes its numbers, and a chip is one of those below or left out. Sentences and remedies, which may
name hosts and paths, are never in it.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from splitinfer.probes.child import Result
from splitinfer.probes.finding import Finding, Outcome, exit_code
from splitinfer.probes.registry import Probe

FORMAT = 3
KIND = "splitinfer selftest"
CONTAINS = (
    "versions, the kind of machine and its sizes, which checks passed, and the times, bytes and numbers of the "
    "built-in demo model's tokens that were measured"
)
CONTAINS_NOT = "names of machines or people, addresses, keys, paths, prompts, or texts of any kind"
_MOST = 64  # elements of a list
_OUTCOMES = frozenset(map(str, Outcome))
_SYSTEMS, _BACKENDS = ("Darwin", "Linux"), ("cpu", "metal", "cuda")
_VERSIONS = ("system_version", "python", "version_splitinfer", "version_mlx", "version_mlx_lm")
_CHIP = re.compile(r"Apple M\d\d?(?: (?:Pro|Max|Ultra))?|NVIDIA (?:GeForce RTX )?[A-Z]{0,2}\d{2,4}|AMD|Intel", re.ASCII)


def document(
    probes: Iterable[Probe], results: Mapping[str, Result], *, seconds: float, limit_s: float, quick: bool
) -> dict[str, Any]:
    """The document of a run, ready to be written as JSON."""
    ran = {probe.name: results[probe.name] for probe in probes if probe.name in results}
    about = ran["about"].numbers("device") if "about" in ran else None
    return {
        "kind": KIND,
        "format": FORMAT,
        "contains": CONTAINS,
        "contains_not": CONTAINS_NOT,
        "exit_code": exit_code(each for result in ran.values() for each in result.findings),
        "seconds": round(seconds, 1),
        "limit_s": limit_s,
        "quick": quick,
        "machine": about and machine(about),
        "checks": [_check(name, each) for name, result in ran.items() for each in result.findings],
        "parts": {name: {"seconds": each.seconds, "limit_s": each.limit_s} for name, each in ran.items()},
        "measured": {
            name: {each.name: figures(each.numbers) for each in result.found if each.numbers}
            for name, result in ran.items()
            if name != "about"
        },
    }


def machine(about: Mapping[str, Any]) -> dict[str, Any]:
    """What kind of machine it is."""
    chips = {name: _CHIP.match(str(about[name] or "")) for name in ("chip", "device")}
    return {
        "system": about["system"] if about["system"] in _SYSTEMS else None,
        "backend": about["backend"] if about["backend"] in _BACKENDS else None,
        **{name: chip and chip[0] for name, chip in chips.items()},
        **{name: numbers_of(str(about[name])) for name in _VERSIONS},
        **{name: value for name, value in figures(about).items() if value is not None},
    }


def numbers_of(version: str) -> list[int]:
    """The numbers that a version begins with, at most three.

    >>> numbers_of("6.8.0-45-generic"), numbers_of("alice")
    ([6, 8, 0], [])
    """
    found = re.match(r"\d{1,4}(?:\.\d{1,4}){0,2}(?![\d.])", version, re.ASCII)
    return [] if found is None else [int(part) for part in found[0].split(".")]


def figures(value: Any) -> Any:
    """The numbers, truth values and outcomes of what was measured; ``None`` in the place of any other text.

    >>> figures({"rows": [1, "alice", 2], "cable": "passed", "host": "alice"})
    {'rows': [1, None, 2], 'cable': 'passed', 'host': None}
    """
    if isinstance(value, Mapping):
        return {name: figures(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [figures(each) for each in value[:_MOST]]
    if isinstance(value, str):
        return str(value) if value in _OUTCOMES else None
    return value if value is None or isinstance(value, bool | int) or math.isfinite(value) else None


def _check(probe: str, finding: Finding) -> dict[str, Any]:
    """A finding without its sentences."""
    return {
        "probe": probe,
        "name": finding.name,
        "outcome": str(finding.outcome),
        "fault": int(finding.fault),
        "reason": str(finding.reason),
        "error": finding.error,
        "signal": finding.signal,
        "at": finding.at,
    }
