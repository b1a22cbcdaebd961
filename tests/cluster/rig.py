"""A pipeline as people have it, all of it real processes on one machine, and nothing of it switched off.

    clients -> coordinator, with drafts, KV on disk, and local workers of its own
                 | CURVE, a wire codec, through a cable that can be pulled
               machines: workers with keys, a folder of KV each, and somebody who starts them again

A rig knows what it should say (one undisturbed run), and when something has leaked out of it.
"""

import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import tiny
from cable import Cable
from coordinating import Answer, Coordinator
from processes import RunningWorker, are_gone, local_workers, until
from trained import of_kind

from splitinfer.core.layout import LOCAL
from splitinfer.keyring import Keyring
from splitinfer.kvstore.files import Folder
from splitinfer.kvstore.maintenance import clean

REMOTE = "remote"
MODEL, VOCAB, CONTEXT = "llama", 160, 1024
NUM_REQUESTS, NUM_TOKENS = 32, 100
FAMILIES, SHARED = 6, 280  # prompts that begin alike, with a block of KV and a part of another
STREAMS = (1, 4, 8)  # one with blocks in flight, four with drafts of all in one step, eight
KV_BYTES, DISK_BYTES = 6 * 2**20, 4 * 2**20  # so little that KV is given up, and comes back from disk
ANSWER_SECONDS = 90.0
_SLACK = 8  # descriptors and threads that may come and go
_SETTLE_SECONDS = 10.0


@dataclass(frozen=True)
class Shape:
    """Where the stages behind the coordinator's run, and how many layers each stage holds."""

    name: str
    workers: tuple[str, ...]
    layers: tuple[int, ...]


SHAPES = (
    Shape("2 remote", (REMOTE,), (1, 3)),
    Shape("3 remote", (REMOTE, REMOTE), (1, 2, 1)),
    Shape("2 local", (LOCAL,), (2, 2)),
    Shape("3 mixed", (REMOTE, LOCAL), (1, 1, 2)),
)


def prompt(index: int) -> list[int]:
    """Every fourth is short; the others begin like others of their family."""
    own = random.Random(f"own {index}")
    if index % 4 == 0:
        return [own.randrange(VOCAB) for _ in range(30)]
    family = random.Random(f"family {index % FAMILIES}")
    return [family.randrange(VOCAB) for _ in range(SHARED)] + [own.randrange(VOCAB) for _ in range(24 + index)]


def params(index: int) -> dict[str, Any]:
    """Greedy and sampled by turns."""
    return {"max_tokens": NUM_TOKENS, "temperature": 0.8 * (index % 2), "seed": index, "ignore_eos": True}


class Machine:
    """Another machine: its keys, its disk, the cable to it, and whoever starts its worker again."""

    def __init__(self, folder: Path, name: str, admitted: str) -> None:
        self.name, self._folder = name, folder / name
        self.keys = Keyring(self._folder / "config" / "splitinfer")
        self.keys.admit(admitted, "studio")
        self.worker = self._start(0)
        self._usual: tuple[int, int] | None = None

    def _start(self, port: int) -> RunningWorker:
        return RunningWorker(
            "worker", "--no-announce", "--name", self.name, "--host", "0.0.0.0", "--port", str(port),
            "--kv-dir", str(self.kv), "--kv-disk-gb", str(DISK_BYTES / 1e9),
            env={"XDG_CONFIG_HOME": str(self._folder / "config")},
        )  # fmt: skip

    @cached_property
    def _port(self) -> int:
        return int(self.worker.address.rpartition(":")[2])

    @cached_property
    def cable(self) -> Cable:
        """There once the worker is up."""
        return Cable(self._port)

    @property
    def kv(self) -> Path:
        return self._folder / "kv"

    @property
    def stage(self) -> dict[str, Any]:
        """How a layout names it."""
        return {"name": self.name, "address": f"tcp://127.0.0.1:{self.cable.port}", "key": self.keys.own().public}

    def kill(self) -> None:
        self.worker.signal(signal.SIGKILL)
        self.worker.wait(5)

    def start_again(self) -> None:
        """As launchd does, or a person."""
        self.worker.end()
        self.worker = self._start(self._port)
        self._usual = None

    def growth(self) -> str:
        """What it holds more of than when it was looked at first since it was started."""
        now = _held(self.worker.process)
        self._usual = self._usual or now
        return _more(self.name, self._usual, now)

    def close(self) -> None:
        self.cable.close()
        self.worker.end()


class Rig:
    """A coordinator on the stages of a shape. ``expected``: what it says to each request when nothing happens;
    ``kind``: of a drafter with random weights on the last stage, in place of one that knows what will be said;
    ``remote``: what the layout says of a stage on another machine besides."""

    def __init__(
        self, shape: Shape, folder: Path, codec: str, kind: str = "", remote: Mapping[str, Any] | None = None
    ) -> None:
        self.shape, self.folder, self._codec, self._remote = shape, folder, codec, dict(remote or {})
        self._env = {"XDG_CONFIG_HOME": str(folder / "studio")}
        self._kv = folder / "kv"
        own = Keyring(folder / "studio" / "splitinfer").own().public
        self.model = tiny.save(folder / "model", MODEL, max_position_embeddings=CONTEXT)
        self._draft = of_kind(kind, self.model, folder / "drafter") if kind else ""
        self.machines = {
            name: Machine(folder, name, own)
            for name, where in zip("bcd", shape.workers, strict=False)
            if where == REMOTE
        }
        self.num_killed = 0  # writers that may have left half a file
        self._usual: tuple[int, int] | None = None
        self._counts: dict[int, Counter[str]] = {}  # what each coordinator's process has done
        self.usual: dict[int, float] = {}  # seconds an undisturbed run takes, by how many streams
        self.expected: list[list[int]] = []
        self.coordinator = self._new_coordinator()
        self.begin()

    # -- requests --------------------------------------------------------------------------------

    def ask(self, index: int, num_streams: int) -> Answer:
        """One request of so many: one with blocks of drafts in flight, four with drafts; else as the controller
        likes."""
        flight = {1: (3, 4, len(self.shape.layers)), 4: (2 + index % 3, 0, 1)}.get(num_streams)
        flight = (1 + index % 4, 0, 1) if self._draft else flight  # it is wrong, and would be off
        return self.coordinator.ask(prompt(index), params(index), flight)

    def is_right(self, index: int, answer: Answer) -> bool:
        """Whether all was said, and nothing else."""
        return answer.token_ids == self.expected[index] and answer.ending == "length"

    def begin(self) -> None:
        """Learn what is said when nothing happens, and how long that takes; tell the drafter."""
        answers = [self.coordinator.ask(prompt(i), params(i), (0, 0, 1)) for i in range(NUM_REQUESTS)]
        wait_for(answers)
        assert {answer.ending for answer in answers} == {"length"}, self.coordinator.log.read_text()[-2000:]
        self.expected = [answer.token_ids for answer in answers]
        self.tell_drafter()
        for num_streams in STREAMS:
            began = time.monotonic()
            indices = range(1, 1 + num_streams)
            answers = [self.ask(index, num_streams) for index in indices]
            wait_for(answers)
            assert all(map(self.is_right, indices, answers)), "an undisturbed run says something else"
            self.usual[num_streams] = answers[0].times[-1] - began

    def tell_drafter(self) -> None:
        """A new coordinator's drafter knows nothing yet."""
        if self._draft:
            return
        for index, tokens in enumerate(self.expected):
            self.coordinator.know(prompt(index), tokens)

    # -- the coordinator's process ---------------------------------------------------------------

    def restart_coordinator(self) -> int:
        """Start it until it serves; how often that took."""
        for attempt in range(1, 6):
            self.coordinator = self._new_coordinator()
            if self.coordinator.is_alive:
                self._usual = None
                self.tell_drafter()
                return attempt
        raise AssertionError(f"the coordinator does not start: {self.coordinator.log.read_text()[-2000:]}")

    def _new_coordinator(self) -> Coordinator:
        order = {"layout": self._layout(), "settings": self._settings(), "vocab_size": VOCAB}
        made = Coordinator(self.folder, order, self._env)
        made.await_ready()
        return made

    def _layout(self) -> dict[str, Any]:
        stages: list[dict[str, Any]] = [{"name": "a", "layers": self.shape.layers[0]}]
        for name, where, layers in zip("bcd", self.shape.workers, self.shape.layers[1:], strict=False):
            stage = self.machines[name].stage | self._remote if where == REMOTE else {"name": name, "address": LOCAL}
            stages.append(stage | {"layers": layers, "codec": self._codec})
        draft = {"draft": self._draft} if self._draft else {}
        return {"model": str(self.model), "stages": stages} | draft

    def _settings(self) -> dict[str, Any]:
        return {
            "kv_dir": str(self._kv), "kv_dir_bytes": DISK_BYTES, "kv_bytes": KV_BYTES, "context": CONTEXT,
            "token_budget": 64, "rejoin_timeout": 60.0,
        }  # fmt: skip

    def local_workers(self) -> dict[str, psutil.Process]:
        """The coordinator's children, by their stages' names."""
        return local_workers(self.coordinator.process)

    def processes(self) -> list[psutil.Process]:
        """The coordinator and all workers."""
        machines = [machine.worker.process for machine in self.machines.values()]
        return [self.coordinator.process, *machines, *self.local_workers().values()]

    def local_worker(self, name: str) -> psutil.Process:
        """One of them; there again soon if it was lost."""
        found: list[psutil.Process] = []
        until(
            lambda: found.extend(p for n, p in self.local_workers().items() if n == name) or found, f"{name} runs", 10
        )
        return found[0]

    # -- what may leak ---------------------------------------------------------------------------

    def troubles(self) -> list[str]:
        """What is not as it should be between two trials, once things had time to settle."""
        if not self._serves():
            return ["it does not serve on"]
        give_up = time.monotonic() + _SETTLE_SECONDS
        while (found := self._troubles()) and time.monotonic() < give_up:
            time.sleep(0.1)
        return found

    def _troubles(self) -> list[str]:
        if not self.coordinator.is_alive:
            return ["the coordinator is gone"]
        found = [*self._accounts(), *self._processes(), *self._files()]
        now = _held(self.coordinator.process)
        self._usual = self._usual or now
        found += [_more("the coordinator", self._usual, now), *(machine.growth() for machine in self.machines.values())]
        return [trouble for trouble in found if trouble]

    def _serves(self) -> bool:
        """Whether all stages are there, and say what they should."""
        answer = self.coordinator.ask(prompt(0), params(0) | {"max_tokens": 3})
        wait_for([answer])
        return answer.token_ids == self.expected[0][:3]

    def _accounts(self) -> Iterator[str]:
        looked = self.coordinator.look()
        self._remember(looked.get("stats", {}))
        yield looked.get("broken", "")
        if not looked.get("idle") or any(looked.get("used", {"?": 1}).values()):
            yield f"KV or plans of nobody: {looked.get('used')}"

    def _processes(self) -> Iterator[str]:
        there = ours(self.folder)
        expected = {machine.worker.pid for machine in self.machines.values()} | {self.coordinator.process.pid}
        expected |= {child.pid for child in self.local_workers().values()}
        yield from (f"a process of nobody's: {process.pid}" for process in there if process.pid not in expected)
        if len(there) < 1 + len(self.shape.workers):
            yield f"{len(there)} processes for {len(self.shape.workers)} workers"

    def _files(self) -> Iterator[str]:
        left = sum(1 for folder in self._folders() for _ in folder.rglob("*.tmp"))
        if left > self.num_killed:
            yield f"{left} files are half written, and {self.num_killed} writers were killed"

    def _folders(self) -> list[Path]:
        return [self._kv, *(machine.kv for machine in self.machines.values())]

    # -- figures ---------------------------------------------------------------------------------

    def _remember(self, stats: Mapping[str, Any]) -> None:
        """How far this coordinator has come."""
        if stats:
            drafts = stats["speculation"]
            counts = Counter(tokens=stats["generated_tokens"], rejoins=stats["rejoins"])
            counts += Counter(drafts=drafts["sent"], drafts_right=drafts["accepted"], blocks_void=drafts["void_blocks"])
            self._counts[self.coordinator.process.pid] = counts + Counter(fetched=stats["fetched_tokens"])

    def figures(self) -> dict[str, object]:
        """What all coordinators of this rig did between trials."""
        return {"rig": self.shape.name, **sum(self._counts.values(), Counter())}

    # -- the end ---------------------------------------------------------------------------------

    def close(self) -> list[str]:
        """End it as a person does; what was wrong with that, or is left on disk."""
        code, folders = self.coordinator.close(), self._folders()
        for machine in self.machines.values():
            machine.close()
        found = [] if code == 0 else [f"the coordinator ended with {code}"]
        try:
            until(lambda: are_gone(ours(self.folder)), "nobody is left", 5)
        except AssertionError as error:
            found.append(str(error))
        damaged = sum(clean(folder, DISK_BYTES).damaged for folder in folders)
        unfinished = sum(Folder(folder).sweep(stale=0.0)[0] for folder in folders)
        if damaged or unfinished > self.num_killed:
            found.append(f"{damaged} damaged files of KV, {unfinished} half written ones of {self.num_killed} killed")
        return found


@contextmanager
def running(
    shape: Shape, folder: Path, codec: str, kind: str = "", remote: Mapping[str, Any] | None = None
) -> Iterator[Rig]:
    """A rig that has run undisturbed. Whatever becomes of it, no process of it stays."""
    try:
        yield Rig(shape, folder, codec, kind, remote)
    finally:
        for process in ours(folder):
            with suppress(psutil.NoSuchProcess):
                process.kill()


def wait_for(answers: Sequence[Answer]) -> None:
    """Until all have ended."""
    give_up = time.monotonic() + ANSWER_SECONDS
    for answer in answers:
        if not answer.is_over.wait(max(0.0, give_up - time.monotonic())):
            answer.end("hangs")


def ours(folder: Path) -> list[psutil.Process]:
    """Whoever has the rig's folder in its command line, living."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        info: Mapping[str, Any] = process.info
        if info["status"] != psutil.STATUS_ZOMBIE and any(str(folder) in part for part in info["cmdline"] or ()):
            found.append(process)
    return found


def _held(process: psutil.Process) -> tuple[int, int]:
    """Descriptors and threads."""
    with suppress(psutil.NoSuchProcess):
        return process.num_fds(), process.num_threads()
    return 0, 0


def _more(name: str, usual: tuple[int, int], now: tuple[int, int]) -> str:
    if all(after <= before + _SLACK for before, after in zip(usual, now, strict=True)):
        return ""
    return f"{name} holds {now} descriptors and threads, and held {usual}"
