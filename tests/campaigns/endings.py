"""End coordinators and workers by signals at random moments of their start and work, and look how they end.

    python -m tests.campaigns.endings --coordinators 200 --workers 200 --busy 2
    python -m tests.campaigns.endings --trial coordinator-17 --seed 7            # one of them again

A trial: a coordinator answers without end, or waits in the REPL after a short answer, on local and remote stages; or a
worker waits, or serves. SIGINT or SIGTERM comes at a moment between its start and half as long again as it takes to be
ready. Every other trial has ``--busy`` processes beside it that never rest.

It must end with 130 or 143, within 3 seconds; after SIGTERM an answer under way has 5 more. Nothing may be left of
it: no process, no temporary file, no segment of shared memory, and no traceback. Only where the signal comes before
``main`` has taken signals over, the system may end it. The last line is one JSON document; what was wrong is printed
with the trial that showed it, and the exit code is 1.
"""

import argparse
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import interrupts
import psutil
from processes import Running, until, worker, write_layout

from splitinfer.cli.draining import DRAIN_SECONDS
from splitinfer.core.json_text import dumps

KINDS = ("coordinator", "worker")
# Never rests, and ends with the process that started it, however that ends.
BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
WORKS = {"coordinator": ("answers", "chats"), "worker": ("waits", "serves")}
STAGES = (("local",), ("remote",), ("local", "remote"))
LONG = ("--raw", "--prompt", "Once upon a time", "--temp", "0.9", "--seed", "1", "--max-tokens", "8000")
CHAT = ("--chat", "--max-tokens", "8")
SOON = 3.0
_BEYOND = 1.5  # times what it takes to be ready: the latest moment
_GIVE_UP, _GONE, _READY = 30.0, 3.0, 120.0
_MARK = "SPLITINFER_ENDINGS"  # in the environment of everything that a trial has started
_SHARED = Path("/dev/shm")


@dataclass(frozen=True)
class Trial:
    """One process to end. ``moment``: of the time from its start to the latest moment."""

    kind: str
    number: int
    work: str
    stages: tuple[str, ...]
    signal: int
    moment: float
    is_busy: bool

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.number}"

    @classmethod
    def drawn(cls, kind: str, number: int, seed: int) -> "Trial":
        chance = random.Random(f"{seed} {kind}-{number}")
        works = WORKS[kind]
        return cls(
            kind, number, works[number // 2 % len(works)], chance.choice(STAGES), chance.choice(list(CODES)),
            chance.random(), number % 2 == 1,
        )  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What came of a trial. ``phase``: what it had come to when the signal came. ``code``: None if it did not end."""

    trial: str
    work: str
    stages: tuple[str, ...]
    signal: str
    is_busy: bool
    delay: float
    phase: str
    code: int | None
    seconds: float
    processes_left: int
    files_left: tuple[str, ...]
    said: str

    @property
    def may_drain(self) -> bool:
        """Whether an answer may have been under way."""
        return self.signal == "SIGTERM" and self.phase in ("loaded", "ready") and self.work in WORKS["coordinator"]

    @property
    def wrong(self) -> list[str]:
        """What should not be."""
        number = signal.Signals[self.signal]
        codes = {CODES[number], -number} if self.phase == "before main" else {CODES[number]}
        found = {
            "code": self.code not in codes,
            "late": self.seconds > SOON + DRAIN_SECONDS * self.may_drain,
            "processes left": self.processes_left > 0,
            "files left": bool(self.files_left),
            "traceback": "Traceback" in self.said and self.phase != "before main",
        }
        return [what for what, is_so in found.items() if is_so]


class Endings:
    """A place for trials: a folder for everything temporary, and a worker for all coordinators."""

    def __init__(self, folder: Path, num_busy: int) -> None:
        self._folder, self._num_busy = folder, num_busy
        self._temporary = folder / "tmp"
        self._temporary.mkdir()
        self._stack = ExitStack()
        self._remote = ""
        self._ready: dict[tuple[str, bool], float] = {}

    def __enter__(self) -> "Endings":
        self._remote = self._stack.enter_context(worker()).address
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, trial: Trial) -> Outcome:
        """One trial; the first of a kind of work takes longer, because its time to be ready is taken before."""
        with self._busy(trial.is_busy):
            latest = _BEYOND * self._seconds_to_be_ready(trial)
            with self._started(trial) as running:
                delay = latest * trial.moment
                time.sleep(delay)
                return self._end(trial, running, delay)

    def _end(self, trial: Trial, running: Running, delay: float) -> Outcome:
        phase = self._phase(trial, running)
        struck = running.signal(trial.signal)
        with suppress(AssertionError):
            until(lambda: not running.is_alive, "it ends", _GIVE_UP)
        seconds = time.monotonic() - struck
        code = None if running.is_alive else running.wait(1)
        left = self._processes_left()
        files = sorted(str(path) for folder in (self._temporary, _SHARED) for path in folder.glob("splitinfer-*"))
        outcome = Outcome(
            trial.name, trial.work, trial.stages, signal.Signals(trial.signal).name, trial.is_busy, round(delay, 3),
            phase, code, round(seconds, 3), len(left), tuple(files), running.err[-2000:],
        )  # fmt: skip
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        for file in files:
            subprocess.run(["rm", "-rf", file], check=True)
        return outcome

    def _phase(self, trial: Trial, running: Running) -> str:
        if not _takes_sigterm(running.pid):
            return "before main"
        if self._is_ready(trial, running):
            return "ready"
        if trial.kind == "worker":
            return "waiting" if "waits at" in running.err else "starting"
        loading = sum(" needs " in line for line in running.err.splitlines())
        return "loaded" if loading > len(trial.stages) else "loading" if loading else "starting"

    def _is_ready(self, trial: Trial, running: Running) -> bool:
        if trial.kind == "coordinator":
            return bool(running.out)
        return {"waits": "waits at", "serves": "holding layers"}[trial.work] in running.err

    # -- what is started -------------------------------------------------------------------------

    @contextmanager
    def _started(self, trial: Trial) -> Iterator[Running]:
        """The process that is to be ended, and who works with it."""
        with ExitStack() as stack:
            if trial.kind == "coordinator":
                addresses = [self._remote if stage == "remote" else stage for stage in trial.stages]
                yield stack.enter_context(self._coordinator(addresses, trial.work, self._marked_environment()))
                return
            port = _free_port()
            running = Running("worker", "--name", "back", "--port", str(port), env=self._marked_environment())
            stack.callback(running.end)
            if trial.work == "serves":
                address = f"tcp://127.0.0.1:{port}"
                stack.enter_context(self._coordinator([address], "answers", {}, "--connect-timeout", "60"))
            yield running

    @contextmanager
    def _coordinator(
        self, addresses: Sequence[str], work: str, environment: dict[str, str], *options: str
    ) -> Iterator[Running]:
        layout = write_layout(self._folder, addresses)
        how = LONG if work == "answers" else CHAT
        running = Running("coord", "--layout", str(layout), *how, *options, env=environment)
        try:
            if work == "chats":
                running.types("Hello\n")
            yield running
        finally:
            running.end()

    def _marked_environment(self) -> dict[str, str]:
        return {_MARK: str(os.getpid()), "TMPDIR": str(self._temporary)}

    @contextmanager
    def _busy(self, is_busy: bool) -> Iterator[None]:
        """Processes that never rest."""
        others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(self._num_busy * is_busy)]
        try:
            yield
        finally:
            for other in others:
                other.kill()
                other.wait()

    def _seconds_to_be_ready(self, trial: Trial) -> float:
        key = (trial.work, trial.is_busy)
        if key not in self._ready:
            with self._started(replace(trial, stages=STAGES[-1])) as running:
                self._ready[key] = until(lambda: self._is_ready(trial, running), "it is ready", _READY)
        return self._ready[key]

    def _processes_left(self) -> list[psutil.Process]:
        """Those of this trial that are still there though they had time to go."""
        with suppress(AssertionError):
            until(lambda: not self._marked(), "nobody is left", _GONE)
        return self._marked()

    def _marked(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get(_MARK) == str(os.getpid()) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


def _takes_sigterm(pid: int) -> bool:
    """Whether the process has a handler for SIGTERM; assumed where the system does not tell."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


# -- all of them -----------------------------------------------------------------------------------


def run(trials: Sequence[Trial], num_busy: int) -> list[Outcome]:
    """All trials, one after another, each told of as it ends."""
    outcomes = []
    with ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="endings-", ignore_cleanup_errors=True))
        stack.enter_context(own_caches(Path(name)))
        endings = stack.enter_context(Endings(Path(name), num_busy))
        for trial in trials:
            outcome = endings.run(trial)
            said = outcome.said if outcome.wrong else ""
            print(dumps({**asdict(outcome), "said": said, "wrong": outcome.wrong}), flush=True)
            outcomes.append(outcome)
    return outcomes


def summary(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """Counts of exit codes by signal, seconds from the signal to the end, and what was left or wrong."""
    found: dict[str, object] = {}
    for kind in KINDS:
        own = [outcome for outcome in outcomes if outcome.work in WORKS[kind]]
        drained = [outcome.seconds for outcome in own if outcome.may_drain]
        others = [outcome.seconds for outcome in own if not outcome.may_drain]
        found[f"{kind}s"] = {
            "ended": len(own),
            "codes": dict(Counter(f"{outcome.signal} {outcome.code}" for outcome in own)),
            "phases": dict(Counter(outcome.phase for outcome in own)),
            "seconds": _middle_and_most(others),
            "seconds_with_drain": _middle_and_most(drained),
        }
    return {
        **found,
        "processes_left": sum(outcome.processes_left for outcome in outcomes),
        "files_left": sum(len(outcome.files_left) for outcome in outcomes),
        "wrong": {outcome.trial: outcome.wrong for outcome in outcomes if outcome.wrong},
    }


def _middle_and_most(seconds: Sequence[float]) -> dict[str, float]:
    return {"p50": round(statistics.median(seconds), 3), "max": max(seconds)} if seconds else {}


@contextmanager
def own_caches(folder: Path) -> Iterator[None]:
    """Nothing of the user's is read or written."""
    own = {"XDG_CACHE_HOME": str(folder / "caches"), "XDG_CONFIG_HOME": str(folder / "config")}
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            os.environ.update({} if value is None else {name: value})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--coordinators", type=int, default=200)
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--busy", type=int, default=2, help="processes beside every other trial")
    parser.add_argument("--trial", help="this one alone, by its name")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    names = [(kind, number) for kind in KINDS for number in range(getattr(args, f"{kind}s"))]
    if args.trial:
        kind, _, number = args.trial.partition("-")
        names = [(kind, int(number))]
    interrupts.let_children_hear_them()
    began = time.monotonic()
    found = summary(run([Trial.drawn(*name, args.seed) for name in names], args.busy))
    print(dumps({**found, "seed": args.seed, "seconds": round(time.monotonic() - began)}))
    raise SystemExit(bool(found["wrong"]))


if __name__ == "__main__":
    main()
