"""Runs each probe in its own process with a time limit. If the process ends early, that is a finding; the others run.

The process (``python -m splitinfer.probes.child PROBE``) writes lines of JSON: what it tries, and what it found. So
both are known when it ends, whatever ended it.
"""

import contextlib
import importlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TextIO

from splitinfer.common.json_text import dumps
from splitinfer.errors import CannotFit
from splitinfer.probes.finding import SEND, Blame, Finding, Outcome, failed, from_data, passed
from splitinfer.probes.registry import ProbeEntry
from splitinfer.shutdown import shutdown
from splitinfer.system.command import TIMED_OUT, Done
from splitinfer.system.command import run as run_command

HANGING = 15.0  # seconds without a word, after which a probe that overran was hanging and not slow; at least
_COMMAND = (sys.executable, "-m", "splitinfer.probes.child")
_NO_TIME = 1.0  # seconds with which no process is started
_MORE_TIME = "run it again when the machine does nothing else, or with more time: --seconds 600"
_AGAIN = f"run it again; if it hangs again, {SEND}"


# -- the parent's end --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a probe found, and how it ended if it did not come to its end. ``limit_s``: its share of the time."""

    found: tuple[Finding, ...] = ()
    ending: Finding | None = None
    seconds: float = 0.0
    limit_s: float = 0.0

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings, the ending last."""
        return self.found if self.ending is None else (*self.found, self.ending)

    def numbers(self, name: str) -> Mapping[str, Any] | None:
        """Return the numbers of a finding that was made and is not broken."""
        return next((each.numbers for each in self.found if each.name == name and each.numbers), None)


def run_probe(
    probe: ProbeEntry,
    limit: float,
    folder: str = "",
    environment: Mapping[str, str] | None = None,
    *,
    patience_s: float = HANGING,
    command: Sequence[str] = _COMMAND,
) -> ProbeResult:
    """Run a probe for at most ``limit`` seconds.

    Args:
        folder: where it may write.
        environment: variables of its process, besides its own.
        patience_s: a probe that overran was hanging, and not slow, if it had been silent for so long.
    """
    began, found, ending = time.monotonic(), list[Finding](), None
    if limit < _NO_TIME:
        ending = _no_time()
    else:
        asked = json.dumps({"function": probe.function, "options": {**probe.options, "folder": folder}})
        ended = run_command([*command, asked], limit, {**(environment or {}), **probe.environment})
        found, tried = _read(ended.output)
        if ended.code == TIMED_OUT:
            ending = _overran(tried, limit, ended.silent_s, patience_s)
        elif ended.code not in (0, 1) or (ended.code == 1 and not found):
            ending = _crashed(tried, ended)
    seconds = round(time.monotonic() - began, 1)
    return ProbeResult(tuple(map(probe.own, found)), ending and probe.own(ending), seconds, round(limit, 1))


def _read(out: str) -> tuple[list[Finding], str]:
    """Return the findings of a process, and the name of its last attempt if that has no finding, else ""."""
    found: list[Finding] = []
    tried = ""
    for line in out.splitlines():
        with contextlib.suppress(ValueError):  # cut off when it was ended
            told = json.loads(line)
            if "found" in told:
                found.append(from_data(told["found"]))
            tried = told.get("trying", tried)
    return found, "" if tried in {each.name for each in found} else tried


def _overran(tried: str, limit: float, silent_s: float, patience_s: float) -> Finding:
    if silent_s < patience_s:
        return _no_time(tried)
    return Finding(tried, Outcome.FAILED, f"it did not end within its {limit:.1f} s", _AGAIN, error="TimeoutError")


def _no_time(name: str = "") -> Finding:
    sentence = "there was not enough time to try all of it"
    return Finding(name, Outcome.NOT_RUN, sentence, _MORE_TIME, fault=Blame.TIME)


def _crashed(tried: str, ended: Done) -> Finding:
    signalled = signal.Signals(-ended.code).name if ended.code < 0 else ""
    lines = ended.complaint.strip().splitlines()
    more = f" ({lines[-1].strip():.300})" if lines else ""
    sentence = f"its process ended with {f'signal {signalled}' if signalled else f'exit code {ended.code}'}{more}"
    return Finding(tried, Outcome.FAILED, sentence, SEND, signal=signalled)


def run_probes(
    probes: Sequence[ProbeEntry],
    seconds: float,
    folder: str,
    run: Callable[..., ProbeResult] = run_probe,
    after: Callable[[ProbeEntry, Mapping[str, ProbeResult]], None] = lambda _probe, _results: None,
    **more: Any,
) -> dict[str, ProbeResult]:
    """Run the probes in order within ``seconds`` and return their results by name.

    Each may take its share by weight; the time that it leaves goes to the next ones. The first probe tells how long a
    start takes on this machine, which decides when a silent probe counts as hanging.
    """
    ends, results = time.monotonic() + seconds, dict[str, ProbeResult]()
    for number, probe in enumerate(probes):
        left = max(0.0, ends - time.monotonic())
        share = left * probe.weight / sum(each.weight for each in probes[number:])
        patience = max(HANGING, 10 * results.get(probes[0].name, ProbeResult()).seconds)
        results[probe.name] = run(probe, share, folder, patience_s=patience, **more)
        after(probe, results)
    return results


# -- the process -------------------------------------------------------------------------------------------------------


class ProbeReport:
    """Takes findings. ``write``: takes a line."""

    def __init__(self, write: Callable[[dict[str, Any]], None]) -> None:
        self._write = write

    def __call__(self, *findings: Finding) -> None:
        for each in findings:
            self._write({"found": asdict(each)})

    def is_alive(self) -> None:
        """Say that it goes on."""
        self._write({})

    def guarded(self, name: str, find: Callable[[], Finding | Mapping[str, Any]]) -> Finding:
        """Report and return the finding of ``find``, made from its numbers or its exception if need be. An exception
        does not stop the probe."""
        self._write({"trying": name})
        try:
            value = find()
            found = replace(value, name=name) if isinstance(value, Finding) else passed(name, "", value)
        except Exception as error:  # noqa: BLE001 - goes into the document
            found = broken(name, error)
        self(found)
        return found


def broken(name: str, error: BaseException) -> Finding:
    text = " ".join(str(error).split())
    sentence = f"{type(error).__name__}: {text:.300}" if text else type(error).__name__
    if isinstance(error, CannotFit):  # whatever was tried: it is not what failed
        found = failed(name, Blame.MEMORY, sentence, "close other programs, or give this machine fewer layers")
    else:
        found = Finding(name, Outcome.FAILED, sentence, SEND)
    return replace(found, error=type(error).__name__, at=_place(error))


def _place(error: BaseException) -> str:
    """Return the innermost module and line of this project that an error went through, such as
    "splitinfer.llm.llm:80"."""
    frames = [(frame.f_globals.get("__name__", ""), line) for frame, line in traceback.walk_tb(error.__traceback__)]
    ours = [(name, line) for name, line in frames if name.partition(".")[0] in ("splitinfer", "transports")]
    return next((f"{name}:{line}" for name, line in reversed(ours) if name != __name__), "")


def serve(text: str, write: Callable[[dict[str, Any]], None]) -> int:
    """Run the probe of a request and write its findings. Return the exit code."""
    asked = json.loads(text)
    module, _, function = asked["function"].partition(":")
    try:
        look = getattr(importlib.import_module(module, "splitinfer.probes"), function)
        write({})  # that it got so far: a start takes seconds
        look(asked["options"], ProbeReport(write))
    except Exception as error:  # noqa: BLE001 - goes into the document
        write({"found": asdict(broken("", error))})
        return 1
    return 0


def own_output() -> TextIO:
    """Return standard output for the answers only; what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def main() -> int:
    answers = own_output()

    def write(line: dict[str, Any]) -> None:
        answers.write(dumps(line) + "\n")
        answers.flush()

    return serve(sys.argv[1], write)


if __name__ == "__main__":
    shutdown.exit(main())  # Python's own end would stop threads inside MLX, and std::terminate with them
