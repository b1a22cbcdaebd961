"""A pipeline as people have it, all of it real processes on one machine, and nothing of it switched off.

    clients -> coordinator, with drafts, KV on disk, and local workers of its own
                 | CURVE, a wire codec, through a cable that can be pulled
               machines: workers with keys, a folder of KV each, and somebody who starts them again

A rig knows what it should say (one undisturbed run), and when something has leaked out of it.
"""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import tiny
from cable import Cable
from processes import are_gone, local_workers, until
from trained import of_kind

from splitinfer.core.codecs import INT8
from splitinfer.core.kv.budget import STAGE_MARGIN
from splitinfer.core.layout import LOCAL
from splitinfer.keyring import Keyring
from splitinfer.kvstore.files import Folder
from splitinfer.kvstore.maintenance import clean
from splitinfer.models.folder.checkpoint import open_folder
from splitinfer.models.load.layer_kinds import describe

from .coordinating import Answer, Coordinator
from .serving import RestartedWorker

REMOTE = "remote"
MODEL, VOCAB, CONTEXT = "llama", 160, 1024
NUM_REQUESTS, NUM_TOKENS = 32, 100
FAMILIES, SHARED = 6, 280  # prompts that begin alike, with a block of KV and a part of another
STREAMS = (1, 4, 8)  # one with blocks in flight, four with drafts of all in one step, eight
KV_BYTES, DISK_BYTES = 6 * 2**20, 4 * 2**20  # so little that KV is given up, and comes back from disk
ANSWER_SECONDS = 90.0
REJOIN_SECONDS = 60.0  # in which a lost worker must be there again
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


@dataclass(frozen=True)
class Way:
    """The links' codec, what else the layout says of a stage on another machine, and the kind of the drafter on the
    last stage, with random weights; without, a drafter knows what will be said. ``leave_after``: seconds until the
    others go on without a worker; by default never, because another cut packs hidden states at other places, and says
    other tokens. ``is_tight``: whether the coordinator has memory for its own layers alone."""

    codec: str = INT8
    remote: Mapping[str, Any] = field(default_factory=dict)
    drafter: str = ""
    leave_after: float = REJOIN_SECONDS
    is_tight: bool = False


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


class Machine(RestartedWorker):
    """Another machine: its keys, its disk, the cable to it, and whoever starts its worker again."""

    def __init__(self, folder: Path, name: str, admitted: str) -> None:
        self.name, self.kv, config = name, folder / name / "kv", folder / name / "config"
        self.keys = Keyring(config / "splitinfer")
        self.keys.admit(admitted, "studio")
        kept = ("--kv-dir", str(self.kv), "--kv-disk-gb", str(DISK_BYTES / 1e9))
        super().__init__("--name", name, "--host", "0.0.0.0", *kept, env={"XDG_CONFIG_HOME": str(config)})
        self.cable = Cable(self.port)

    @property
    def stage(self) -> dict[str, Any]:
        """How a layout names it."""
        return {"name": self.name, "address": f"tcp://127.0.0.1:{self.cable.port}", "key": self.keys.own().public}

    def close(self) -> None:
        self.cable.close()
        super().close()


class Rig:
    """A coordinator on the stages of a shape. ``expected``: what it says to each request when nothing happens."""

    def __init__(self, shape: Shape, folder: Path, way: Way) -> None:
        self.shape, self.folder, self._way = shape, folder, way
        self._kv = folder / "kv"
        own = Keyring(folder / "studio" / "splitinfer").own().public
        large = {"hidden_size": 128, "intermediate_size": 512} if way.is_tight else {}  # against KV and scores
        self.model = tiny.save(folder / "model", MODEL, max_position_embeddings=CONTEXT, **large)
        self._draft = of_kind(way.drafter, self.model, folder / "drafter") if way.drafter else ""
        named = zip("bcd", shape.workers, strict=False)
        self.machines = {name: Machine(folder, name, own) for name, where in named if where == REMOTE}
        self.num_killed = 0  # writers that may have left half a file
        self._usual: dict[int, tuple[int, int]] = {}  # what each process held when it was looked at first
        self.usual: dict[int, float] = {}  # seconds an undisturbed run takes, by how many streams
        self.expected: list[list[int]] = []
        self.start_coordinator()
        self.begin()

    # -- requests --------------------------------------------------------------------------------

    def ask(self, index: int, num_streams: int) -> Answer:
        """One request of so many: one with blocks of drafts in flight, four with drafts; else as the controller
        likes."""
        flight = {1: (3, 4, len(self.shape.layers)), 4: (2 + index % 3, 0, 1)}.get(num_streams)
        flight = (1 + index % 4, 0, 1) if self._draft else flight  # it is wrong, and would be off
        return self.coordinator.ask(prompt(index), params(index), flight)

    def begin(self) -> None:
        """Learn what is said when nothing happens, and how long that takes; tell the drafter."""
        answers = [self.coordinator.ask(prompt(i), params(i), (0, 0, 1)) for i in range(NUM_REQUESTS)]
        wait_for(answers)
        assert {answer.ending for answer in answers} == {"length"}, self.coordinator.state()
        self.expected = [answer.token_ids for answer in answers]
        self.tell_drafter()
        for num_streams in STREAMS:
            began = time.monotonic()
            indices = range(1, 1 + num_streams)
            answers = [self.ask(index, num_streams) for index in indices]
            wait_for(answers)
            assert all(
                answer.token_ids == self.expected[index] for index, answer in zip(indices, answers, strict=True)
            ), "an undisturbed run says something else"
            self.usual[num_streams] = answers[0].times[-1] - began

    def tell_drafter(self) -> None:
        """A new coordinator's drafter knows nothing yet."""
        for index, tokens in enumerate(self.expected):
            self.coordinator.know(prompt(index), tokens)

    # -- processes -------------------------------------------------------------------------------

    def start_coordinator(self) -> None:
        """One serves on return."""
        stages: list[dict[str, Any]] = [{"name": "a", "layers": self.shape.layers[0]}]
        for name, where, layers in zip("bcd", self.shape.workers, self.shape.layers[1:], strict=False):
            there = {"name": name, "address": LOCAL} if where == LOCAL else self.machines[name].stage | self._way.remote
            stages.append(there | {"layers": layers, "codec": self._way.codec})
        layout = {"model": str(self.model), "stages": stages} | ({"draft": self._draft} if self._draft else {})
        settings = {
            "kv_dir": str(self._kv), "kv_dir_bytes": DISK_BYTES, "kv_bytes": KV_BYTES, "context": CONTEXT,
            "token_budget": 64, "rejoin_timeout": REJOIN_SECONDS, "leave_after": self._way.leave_after,
        }  # fmt: skip
        order = {"layout": layout, "settings": settings, "vocab_size": VOCAB, "free_bytes": self._free_bytes()}
        self.coordinator = Coordinator(order, {"XDG_CONFIG_HOME": str(self.folder / "studio")})
        self.tell_drafter()

    def _free_bytes(self) -> int | None:
        """The memory of a coordinator that could load half of the other layers beside its own."""
        if not self._way.is_tight:
            return None
        model = describe(open_folder(self.model), None, "tiny").profile
        return STAGE_MARGIN + sum(model.weights(0, end) for end in (self.shape.layers[0], model.num_layers)) // 2

    def processes(self) -> list[psutil.Process]:
        """The coordinator and all workers."""
        machines = [machine.process for machine in self.machines.values()]
        return [self.coordinator.process, *machines, *local_workers(self.coordinator.process).values()]

    def local_worker(self, name: str) -> psutil.Process:
        """One of them; there again soon if it was lost."""
        until(lambda: name in local_workers(self.coordinator.process), f"{name} runs", 10)
        return local_workers(self.coordinator.process)[name]

    # -- what may leak ---------------------------------------------------------------------------

    def troubles(self) -> list[str]:
        """What is not as it should be between two trials, once things had time to settle."""
        answer = self.coordinator.ask(prompt(0), params(0) | {"max_tokens": 3})
        wait_for([answer])
        if answer.token_ids != self.expected[0][:3]:
            return ["it does not serve on"]
        give_up = time.monotonic() + _SETTLE_SECONDS
        while (found := [*self._accounts(), *self._processes(), *self._files()]) and time.monotonic() < give_up:
            time.sleep(0.1)
        return found

    def _accounts(self) -> Iterator[str]:
        looked = self.coordinator.look()
        if looked["broken"]:
            yield looked["broken"]
        elif not looked["idle"] or any(looked["used"].values()):
            yield f"KV or plans of nobody: {looked['used']}"

    def _processes(self) -> Iterator[str]:
        there, known = ours(self.folder), self.processes()
        yield from (f"a process of nobody's: {process.pid}" for process in there if process not in known)
        if len(there) < 1 + len(self.shape.workers):
            yield f"{len(there)} processes for {len(self.shape.workers)} workers"
        for process in (self.coordinator.process, *(machine.process for machine in self.machines.values())):
            now = _held(process)
            usual = self._usual.setdefault(process.pid, now)
            if any(after > before + _SLACK for before, after in zip(usual, now, strict=True)):
                yield f"{process.cmdline()} holds {now} descriptors and threads, and held {usual}"

    def _files(self) -> Iterator[str]:
        left = sum(1 for folder in self._folders for _ in folder.rglob("*.tmp"))
        if left > self.num_killed:
            yield f"{left} files are half written, and {self.num_killed} writers were killed"

    @property
    def _folders(self) -> list[Path]:
        return [self._kv, *(machine.kv for machine in self.machines.values())]

    # -- the end ---------------------------------------------------------------------------------

    def close(self) -> list[str]:
        """End it as a person does; what was wrong with that, or is left on disk."""
        code = self.coordinator.close()
        for machine in self.machines.values():
            machine.close()
        found = [] if code == 0 else [f"the coordinator ended with {code}"]
        until(lambda: are_gone(ours(self.folder)), "nobody is left", 5)
        damaged = sum(clean(folder, DISK_BYTES).damaged for folder in self._folders)
        unfinished = sum(Folder(folder).sweep(stale=0.0)[0] for folder in self._folders)
        if damaged or unfinished > self.num_killed:
            found.append(f"{damaged} damaged files of KV, {unfinished} half written ones of {self.num_killed} killed")
        return found


@contextmanager
def running(shape: Shape, folder: Path, way: Way) -> Iterator[Rig]:
    """A rig that has run undisturbed. Whatever becomes of it, no process of it stays."""
    try:
        yield Rig(shape, folder, way)
    finally:
        for process in ours(folder):
            with suppress(psutil.NoSuchProcess):
                process.kill()


def wait_for(answers: Sequence[Answer]) -> None:
    """Until all have ended."""
    until(lambda: all(answer.ending for answer in answers), "all answers end", ANSWER_SECONDS)


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
