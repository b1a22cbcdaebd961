"""A probe in a process of its own, with a limit: whatever ends it is a finding, and the other probes go on.

The process (``python -m splitinfer.probes.child PROBE``) writes lines of JSON: what it tries, and what it found. So
both are known when it ends, whatever ended it. An error of the device often ends the process, and a device that has
failed once fails at everything that the process asks of it afterwards. Another process then goes on behind what was
tried last.
"""

import contextlib
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import IO, Any, TextIO

from splitinfer import cleanup
from splitinfer.core.json_text import dumps
from splitinfer.errors import CannotFit
from splitinfer.probes.finding import SEND, Fault, Finding, Outcome, Reason, failed, from_data, passed
from splitinfer.probes.registry import Probe
from splitinfer.shutdown import shutdown

HANGING = 15.0  # seconds without a word, after which a probe that overran was hanging and not slow; at least
_COMMAND = (sys.executable, "-m", "splitinfer.probes.child")
_NO_TIME = 1.0  # seconds with which no process is started
_REAPING = 0.2  # seconds; a call in a driver delays even SIGKILL
_MOST_OUTPUT = 2**22  # bytes
_DEVICE_FAILED = re.compile(r"\bcu\w+\(.*\) failed|illegal|cuda error|command buffer execution failed", re.IGNORECASE)
_GO_ON = 3  # exit code: the device failed, and another process may go on
_MORE_TIME = "run it again when the machine does nothing else, or with more time: --seconds 600"
_AGAIN = "run it again; if it hangs again, send the file in (--json FILE)"


# -- a process with a deadline -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended. ``code``: ``None`` if its time was over; ``silent_s``: seconds since it last wrote."""

    code: int | None
    out: str
    err: str
    silent_s: float


def run_for(command: Sequence[str], seconds: float, environment: Mapping[str, str] | None = None) -> Ended:
    """Run a command for at most ``seconds``; then end it with all that it has started in its group.

    Raises:
        OSError: it cannot be started.
    """
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = cleanup.start(
            command, env={**os.environ, **(environment or {})}, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            start_new_session=True,
        )  # fmt: skip
        code: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(seconds)
        finally:
            _kill_group(process)
        silent = time.time() - os.fstat(out.fileno()).st_mtime
        return Ended(code, _text(out), _text(err), silent)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End a process with all in its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_REAPING)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(_MOST_OUTPUT).decode(errors="replace")


# -- the parent's end --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Result:
    """What a probe found, and how it ended if it did not come to its end. ``limit_s``: its share of the time."""

    found: tuple[Finding, ...] = ()
    ending: Finding | None = None
    seconds: float = 0.0
    limit_s: float = 0.0
    processes: int = 0

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings, the ending last."""
        return self.found if self.ending is None else (*self.found, self.ending)

    def numbers(self, name: str) -> Mapping[str, Any] | None:
        """The numbers of a finding that was made and is not broken."""
        return next((each.numbers for each in self.found if each.name == name and each.numbers), None)


def run_probe(
    probe: Probe,
    limit: float,
    folder: str = "",
    environment: Mapping[str, str] | None = None,
    *,
    patience_s: float = HANGING,
    command: Sequence[str] = _COMMAND,
) -> Result:
    """Run a probe for at most ``limit`` seconds.

    Args:
        folder: where it may write.
        environment: variables of its process, besides its own.
        patience_s: a probe that overran was hanging, and not slow, if it had been silent for so long.
    """
    began, found, ending, processes = time.monotonic(), list[Finding](), None, 0
    variables = {**(environment or {}), **probe.variables(folder)}
    while ending is None:
        left = limit - (time.monotonic() - began)
        if left < _NO_TIME:
            ending = _no_time()
            break
        ended = run_for([*command, _request(probe, left, folder, found)], left, variables)
        processes += 1
        new, tried = _read(ended.out)
        found += new
        if ended.code == 0:
            break
        if ended.code is None:
            ending = _overran(tried, limit, ended.silent_s, patience_s)
        elif tried is not None:
            found.append(_crashed(tried, ended))  # each further process has less to try
        elif ended.code != 1 or not new:
            ending = None if ended.code == _GO_ON else _crashed("", ended)
        else:
            break
    whole = tuple(probe.own(each) for each in found)
    seconds = round(time.monotonic() - began, 1)
    return Result(whole, ending and probe.own(ending), seconds, round(limit, 1), processes)


def _request(probe: Probe, limit: float, folder: str, found: Sequence[Finding]) -> str:
    options = {**probe.options, "folder": folder, "limit_s": limit}
    return json.dumps({"function": probe.function, "options": options, "skip": [each.name for each in found]})


def _read(out: str) -> tuple[list[Finding], str | None]:
    """What a process has found; and what it tried last and did not find."""
    found: list[Finding] = []
    tried: str | None = None
    for line in out.splitlines():
        with contextlib.suppress(ValueError):  # cut off when it was ended
            told = json.loads(line)
            if "found" in told:
                found.append(from_data(told["found"]))
            tried = told.get("trying", tried)
    return found, None if tried in {each.name for each in found} else tried


def _overran(tried: str | None, limit: float, silent_s: float, patience_s: float) -> Finding:
    if silent_s < patience_s:
        return _no_time(tried or "")
    sentence = f"it did not end within its {limit:.1f} s"
    return Finding(tried or "", Outcome.FAILED, sentence, _AGAIN, reason=Reason.HUNG)


def _no_time(name: str = "") -> Finding:
    sentence = "there was not enough time to try all of it"
    return Finding(name, Outcome.NOT_RUN, sentence, _MORE_TIME, fault=Fault.TIME, reason=Reason.NO_TIME)


def _crashed(name: str, ended: Ended) -> Finding:
    assert ended.code is not None
    signalled = signal.Signals(-ended.code).name if ended.code < 0 else ""
    lines = ended.err.strip().splitlines()
    more = f" ({lines[-1].strip():.300})" if lines else ""
    sentence = f"its process ended with {f'signal {signalled}' if signalled else f'exit code {ended.code}'}{more}"
    return Finding(name, Outcome.FAILED, sentence, SEND, reason=Reason.CRASHED, signal=signalled)


def run_probes(
    probes: Sequence[Probe],
    seconds: float,
    folder: str,
    run: Callable[..., Result] = run_probe,
    after: Callable[[Probe, Mapping[str, Result]], None] = lambda _probe, _results: None,
    **more: Any,
) -> dict[str, Result]:
    """The results of probes by name, run one after the other within ``seconds``, each for at most its share.

    What one leaves of its time goes to those behind it. The first probe says how long a start takes here, which decides
    when a silent one hangs.
    """
    ends, results = time.monotonic() + seconds, dict[str, Result]()
    for number, probe in enumerate(probes):
        if (lacking := probe.lacking(results)) is not None:
            results[probe.name] = Result((lacking,) if lacking.sentence else ())
            continue
        share = share_of(ends - time.monotonic(), [each.weight for each in probes[number:]])
        limit = min(share, probe.most * max(1.0, seconds / 180))
        patience = max(HANGING, 10 * results.get(probes[0].name, Result()).seconds)
        results[probe.name] = run(probe, limit, folder, patience_s=patience, **more)
        after(probe, results)
    return results


def share_of(left: float, weights: Sequence[float]) -> float:
    """Seconds for the first of those that are left, by weight, when ``left`` seconds are.

    >>> share_of(60.0, [1.0, 2.0]), share_of(-1.0, [1.0])
    (20.0, 0.0)
    """
    return max(0.0, left) * (weights[0] / sum(weights))


# -- the process -------------------------------------------------------------------------------------------------------


class DeviceLost(Exception):
    """The device failed, and will go on to, in this process."""


class Report:
    """Takes findings. ``write``: takes a line; ``skip``: the names of findings that were made before."""

    def __init__(self, write: Callable[[dict[str, Any]], None], skip: Collection[str] = ()) -> None:
        self._write, self._skip = write, frozenset(skip)

    def __call__(self, *findings: Finding) -> None:
        for each in findings:
            self._write({"found": asdict(each)})

    def is_alive(self) -> None:
        """Say that it goes on."""
        self._write({})

    def guarded(self, name: str, find: Callable[[], Finding | Mapping[str, Any]]) -> Finding | None:
        """Report what ``find`` returns, a finding or mere numbers; or what it raised, so that others are found all the
        same. Returns what was reported, ``None`` if it was skipped.

        Raises:
            DeviceLost: the device failed.
        """
        if name in self._skip:
            return None
        self._write({"trying": name})
        try:
            value = find()
        except Exception as error:
            found = broken(name, error)
            self(found)
            if _DEVICE_FAILED.search(str(error)):
                raise DeviceLost from error
        else:
            found = value if isinstance(value, Finding) else passed(name, "", value)
            self(replace(found, name=name))
        return found


def broken(name: str, error: BaseException) -> Finding:
    text = " ".join(str(error).split())
    sentence = f"{type(error).__name__}: {text:.300}" if text else type(error).__name__
    if isinstance(error, CannotFit):  # whatever was tried: it is not what failed
        remedy = "close other programs, or give this machine fewer layers"
        found = failed(name, Reason.LOW_MEMORY, sentence, remedy)
    else:
        found = Finding(name, Outcome.FAILED, sentence, SEND, reason=Reason.FAILED)
    return replace(found, error=type(error).__name__, at=_place(error))


def _place(error: BaseException) -> str:
    """The innermost module and line of this project that an error went through, such as "splitinfer.llm.llm:80"."""
    frames = [(frame.f_globals.get("__name__", ""), line) for frame, line in traceback.walk_tb(error.__traceback__)]
    ours = [(name, line) for name, line in frames if name.partition(".")[0] in ("splitinfer", "transports")]
    return next((f"{name}:{line}" for name, line in reversed(ours) if name != __name__), "")


def serve(text: str, write: Callable[[dict[str, Any]], None]) -> int:
    """Run the probe of a request and write what it finds; the exit code."""
    asked = json.loads(text)
    module, _, function = asked["function"].partition(":")
    try:
        look = getattr(importlib.import_module(module, "splitinfer.probes"), function)
        write({})  # that it got so far: a start takes seconds
        look(asked["options"], Report(write, asked["skip"]))
    except DeviceLost:
        return _GO_ON
    except Exception as error:  # noqa: BLE001 - goes into the document
        write({"found": asdict(broken("", error))})
        return 1
    return 0


def own_output() -> TextIO:
    """Standard output for the answers only; what libraries print goes to standard error."""
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
