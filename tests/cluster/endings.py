"""End coordinators and workers by signals at random moments of their start and work, and look how they end.

    python -m tests.cluster.endings --coordinators 200 --workers 200 --busy 2
    python -m tests.cluster.endings --trial coordinator-17 --seed 7            # one of them again

A trial: a coordinator answers without end, or waits in the REPL, on local and remote stages; or a worker waits, or
serves. SIGINT or SIGTERM comes at a moment between its start and half as long again as it takes to be ready. Every
other trial has ``--busy`` processes beside it that never rest.

It must end with 130 or 143, within 3 seconds; after SIGTERM an answer under way has 5 more. Nothing may be left of
it: no process, no temporary file, no segment of shared memory, and no traceback. Only where the signal comes before
``main`` has taken signals over, the system may end it. The last line is one JSON document; what was wrong is printed
with the trial that showed it, and the exit code is 1.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

sys.path[:0] = [str(folder) for folder in (Path(__file__).parent, *Path(__file__).resolve().parents[1:3])]

import psutil
from processes import Running, RunningWorker, until, worker, write_layout

from splitinfer.cli.progress import DRAIN_SECONDS

KINDS = ("coordinator", "worker")
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
WORKS = {"coordinator": ("answers", "chats"), "worker": ("waits", "serves")}
STAGES = (("local",), ("remote",), ("local", "remote"))
LONG = ("--raw", "--prompt", "Once upon a time", "--temp", "0.9", "--seed", "1", "--max-tokens", "8000")
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
        if trial.work == "answers":
            return bool(running.out)
        return {"chats": "context", "waits": "waits at", "serves": "holding layers"}[trial.work] in running.err

    # -- what is started -------------------------------------------------------------------------

    @contextmanager
    def _started(self, trial: Trial) -> Iterator[Running]:
        """The process that is to be ended, and who works with it."""
        marked = {_MARK: str(os.getpid()), "TMPDIR": str(self._temporary)}
        with ExitStack() as stack:
            if trial.kind == "worker":
                running: Running = RunningWorker("worker", "--name", "back", "--port", "0", env=marked)
                stack.callback(running.end)
                if trial.work == "serves":
                    stack.enter_context(self._client(running))
            else:
                addresses = [self._remote if stage == "remote" else stage for stage in trial.stages]
                layers = 12 if len(addresses) < 3 else 0
                layout = write_layout(self._folder, addresses, layers=layers)
                how = LONG if trial.work == "answers" else ("--chat",)
                running = Running("coord", "--layout", str(layout), "--kv-dir", "none", *how, env=marked)
                stack.callback(running.end)
            yield running

    @contextmanager
    def _client(self, running: Running) -> Iterator[None]:
        """A coordinator that comes as soon as the worker is there; nobody waits for either."""
        code = _CLIENT.format(folder=str(self._folder), paths=sys.path[:3])
        waits = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            assert waits.stdin is not None
            assert isinstance(running, RunningWorker)
            yield
        finally:
            waits.kill()
            waits.communicate()

    @contextmanager
    def _busy(self, is_busy: bool) -> Iterator[None]:
        """Processes that never rest."""
        others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(self._num_busy * is_busy)]
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
