"""``splitinfer selftest``: what the first owner of a machine runs before trusting anything. Four minutes at most.

Its document is to be sent in, so it has nothing private: numbers, truth values, and words of this program (outcomes,
the names of probes and checks, the keys of figures, types and places of errors). Of the texts of a system, a
version becomes its numbers, and a chip is one of those below or left out. Sentences and remedies, which may name hosts
and paths, are never in it.
"""

import json
import math
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from splitinfer import cleanup
from splitinfer.common.json_text import dumps
from splitinfer.errors import ConfigError
from splitinfer.places import write
from splitinfer.probes.child import ProbeResult, run_probe, run_probes
from splitinfer.probes.finding import Blame, Finding, Outcome, exit_code
from splitinfer.probes.page import lines, print_page, selftest_page, title
from splitinfer.probes.registry import USUAL_SECONDS, ProbeEntry, selftest_probes

CONTAINS = (
    "versions, the kind of machine and its sizes, which checks passed, and the times, bytes and numbers of the "
    "built-in demo model's tokens that were measured"
)
CONTAINS_NOT = "names of machines or people, addresses, keys, paths, prompts, or texts of any kind"
_NEXT = "Next: splitinfer coord with a layout (docs/start/two-macs.md). On another Mac, use --worker, too."
_OWN_SECONDS = 2.0  # for the page, and for ending processes
_MOST = 64  # elements of a list
KIND, FORMAT = "splitinfer selftest", 6
_VERSIONS = ("system_version", "python", "version_splitinfer", "version_mlx", "version_mlx_lm")
_WORDS = {*map(str, Outcome), "Darwin", "Linux", "cpu", "metal", "cuda", "jaccl", "ring"}
_CHIP = re.compile(r"Apple M\d\d?(?: (?:Pro|Max|Ultra))?|NVIDIA (?:GeForce RTX )?[A-Z]{0,2}\d{2,4}|AMD|Intel", re.ASCII)


def run_selftest(
    worker: Mapping[str, Any] | None = None,
    limit_s: float = USUAL_SECONDS,
    *,
    quick: bool = False,
    file: Path,
    run: Any = run_probe,
) -> int:
    """Run everything, in at most ``limit_s`` seconds; the exit code. ``worker``: what a layout's stage says of one that
    runs elsewhere; ``file``: for the document; ``run``: runs one probe.

    Raises:
        ConfigError: the document could not be written.
    """
    began, errors = time.monotonic(), Console(stderr=True, highlight=False)
    write(file, "{}\n")  # that it cannot be written is told before all else
    probes = selftest_probes(worker, quick=quick)
    with cleanup.temporary_folder("splitinfer-selftest-") as folder:
        left = limit_s - _OWN_SECONDS - (time.monotonic() - began)
        results = run_probes(probes, left, folder, partial(_run_shown, run, errors))
    seconds = time.monotonic() - began
    made = document(probes, results, seconds=seconds, limit_s=limit_s, quick=quick)
    write(file, dumps(made) + "\n")
    findings = [each for probe in probes for each in results[probe.name].findings]
    following = f"Send {file} in. It has {CONTAINS}.\nIt has no {CONTAINS_NOT}. This page may name some."
    code = exit_code(findings)
    print_page([*selftest_page(findings, seconds=seconds), *([] if code else [Text(_NEXT)]), Text(following)])
    return code


def _run_shown(run: Any, errors: Console, probe: ProbeEntry, limit: float, folder: str, **more: Any) -> ProbeResult:
    """Run a probe, and say so on standard error."""
    with errors.status(f"{probe.title}, at most {limit:.0f} s"):
        result: ProbeResult = run(probe, limit, folder, **more)
    if not errors.is_terminal:
        errors.print(f"{probe.name}: {result.seconds:.1f} s", soft_wrap=True)
    return result


# -- the document ------------------------------------------------------------------------------------------------------


def document(
    probes: Iterable[ProbeEntry], results: Mapping[str, ProbeResult], *, seconds: float, limit_s: float, quick: bool
) -> dict[str, Any]:
    """Return the document of a run, ready to be written as JSON."""
    ran = {probe.name: results[probe.name] for probe in probes if probe.name in results}
    about = ran["about"].numbers("device") if "about" in ran else None
    findings = [(name, each) for name, result in ran.items() for each in result.findings]
    return {
        "kind": KIND,
        "format": FORMAT,
        "contains": CONTAINS,
        "contains_not": CONTAINS_NOT,
        "exit_code": exit_code(each for _, each in findings),
        "seconds": round(seconds, 1),
        "limit_s": limit_s,
        "quick": quick,
        "machine": about and _machine(about),
        "parts": {name: {"seconds": each.seconds, "limit_s": each.limit_s} for name, each in ran.items()},
        "checks": [_check(name, each) for name, each in findings],
    }


def _check(probe: str, finding: Finding) -> dict[str, Any]:
    """Return a finding without its sentences and its empty fields."""
    known = {key: getattr(finding, key) for key in ("fault", "error", "signal", "at")}
    numbers = {} if finding.name == "device" else dict(finding.numbers)
    if "gaps" in numbers:  # mostly zeros: by the token's number, from 1
        numbers["gaps"] = {str(at): gap for at, gap in enumerate(numbers["gaps"], 1) if gap != 0}
    known["numbers"] = figures(numbers)
    return {
        "probe": probe, "name": finding.name, "outcome": finding.outcome,
        **{key: value for key, value in known.items() if value},
    }  # fmt: skip


def read_report(file: Path) -> int:
    """Print a document that somebody sent in as a page; return its exit code.

    Raises:
        ConfigError: the file cannot be read, or is not such a document.
    """
    try:
        made = json.loads(file.read_text(encoding="utf-8"))
        if made["kind"] != KIND or made["format"] != FORMAT:
            raise ValueError(f"it is of format {made['format']}, and this program reads {FORMAT}")
        titles = {probe.name: probe for probe in selftest_probes({})}
        found = [titles[each["probe"]].own(_read(each)) for each in made["checks"]]
        every = [
            replace(each, name=f"{one['probe']}, {each.name}") for one, each in zip(made["checks"], found, strict=True)
        ]
        machine = [f"{name}: {_words(value)}" for name, value in (made["machine"] or {}).items()]
        every_line = [title("The machine"), *map(Text, machine), title("Every check"), *lines(every)]
        page = [*every_line, *selftest_page(found, seconds=made["seconds"])]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} cannot be read as a file of selftest --json: {error!r:.200}") from error
    print_page(page)
    return int(made["exit_code"])


def _read(check: Mapping[str, Any]) -> Finding:
    """Return a finding of the document. Its sentence lists its known fields."""
    numbers = check.get("numbers", {})
    said = [f"{key} {check[key]}" for key in ("error", "signal", "at") if key in check]
    said += [f"{name} {_words(value)}" for name, value in numbers.items() if value not in ([], {}, None)]
    return Finding(
        check["name"], Outcome(check["outcome"]), "; ".join(said), fault=Blame(check.get("fault", 0)), numbers=numbers
    )


def _words(value: Any) -> str:
    """Return a figure as text.

    >>> _words([0, 32, 4]), _words({"5": 3.1}), _words(0.0123456)
    ('0, 32, 4', '5: 3.1', '0.0123')
    """
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_words(each)}" for name, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(_words, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _machine(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return what kind of machine it is."""
    chips = {name: _CHIP.match(str(about[name] or "")) for name in ("chip", "device")}
    return {
        **{name: value for name, value in figures(about).items() if value is not None},
        **{name: chip and chip[0] for name, chip in chips.items()},
        **{name: numbers_of(str(about[name])) for name in _VERSIONS},
    }


def numbers_of(version: str) -> list[int]:
    """Return the numbers that a version begins with, at most three.

    >>> numbers_of("6.8.0-45-generic"), numbers_of("alice")
    ([6, 8, 0], [])
    """
    found = re.match(r"\d{1,4}(?:\.\d{1,4}){0,2}(?![\d.])", version, re.ASCII)
    return [] if found is None else [int(part) for part in found[0].split(".")]


def figures(value: Any) -> Any:
    """Return the numbers, truth values and known words of measured values. Any other text becomes None.

    >>> figures({"rows": [1, "alice", 2], "cable": "passed", "host": "alice"})
    {'rows': [1, None, 2], 'cable': 'passed', 'host': None}
    """
    if isinstance(value, Mapping):
        return {name: figures(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [figures(each) for each in value[:_MOST]]
    if isinstance(value, str):
        return str(value) if value in _WORDS else None
    return value if value is None or isinstance(value, bool | int) or math.isfinite(value) else None
