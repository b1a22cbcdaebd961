"""Strike a pipeline at random moments, and compare every token with the undisturbed run.

    python -m tests.campaigns deaths --strikes 200 --seed 7
    python -m tests.campaigns deaths --strikes 40 --only kill --streams 4 --drafter eagle3  # drafts of the last stage
    python -m tests.campaigns deaths --strikes 200 --link rdma       # over a stand-in for JACCL
    python -m tests.campaigns deaths --trial kill-17 --seed 7        # one of them again

A trial: one stream with blocks of drafts in flight, four with drafts of all in one step, or eight, on a rig
(``rig.py``) where everything is on. Somewhere in the middle a fault; then whoever puts such a thing right in life
does so.

    kill          a worker is killed (-9). A local one the coordinator replaces, another is started again
    freeze        a worker stands still. The coordinator replaces its own; others are woken, or killed and started again
    cut           a cable is torn, or goes silent, and is mended; or one connection ends of those that go through it
    stutter       any of the processes, the coordinator among them, stand still and go on, again and again
    twice         any of the first three, and a worker is killed before the pipeline has got over it
    coordinator   the coordinator is killed under its clients and started again; they ask again
    carrier       with ``--link rdma`` only: a process that carries one end of a link is killed
    gone          with ``--only`` alone, over tcp without a codec: a worker of another machine is killed and stays away.
                  The others go on without it; every other time it comes back while they do
    tight         the same, where the others have too little memory: requests wait until it is back

Afterwards all streams must have said exactly what they say undisturbed, and nothing may be left over: no process, no
KV or plan of nobody's, no half written file but those of killed writers, no descriptors, no threads. A rig that showed
something wrong is not used again.
"""

import argparse
import math
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import psutil
import trained
from jaccl import carriers_of
from processes import until

from splitinfer.common.json_text import dumps
from splitinfer.core.codecs import INT8, NONE
from splitinfer.core.layout import LOCAL
from tests.emulation.jaccl.device import Limits
from tests.emulation.jaccl.world import World

from . import rig as rigs
from .coordinating import Answer
from .report import Report
from .rig import REMOTE, SHAPES, STREAMS, Rig, Shape, Way, wait_for
from .serving import scratch

WEIGHTS = {"kill": 40, "freeze": 12, "cut": 15, "stutter": 6, "twice": 7, "coordinator": 20}
RDMA_WEIGHTS = {"kill": 20, "freeze": 8, "cut": 8, "stutter": 4, "twice": 4, "coordinator": 6, "carrier": 50}
KINDS = (*dict.fromkeys([*WEIGHTS, *RDMA_WEIGHTS]), "gone", "tight")
_AT_ONCE = 4  # strikes between two looks at the clock
_NO_LIMITS = Limits(regions=10**6, queue_pairs=10**5)  # killed readers leave some at their device
_LATEST = 0.85  # of an undisturbed run's time, a fault's latest moment: what strikes after the last token says nothing
_ATTEMPTS, _SOONER = 6, 0.6
_ASLEEP = (15.2, 16.5)  # seconds until a person sees to what stands still; the link gives up after 15
_TORN = (0.0, 1.5)
_STILL, _GOES_ON, _STUTTERS = (0.5, 4.2), (0.1, 1.6), 4  # seconds, and how often
_LEAVE = 1.0  # seconds until what stays away is left out
_TO_START = (0.0, 0.3)  # seconds until what died is started again
_TO_GET_OVER = (0.0, 2.5)

_TROUBLE = (AssertionError, OSError, psutil.Error, KeyError)

Strike = Callable[[Rig, random.Random], tuple[str, float]]  # how it was done, and when; all is put right on return


@dataclass(frozen=True)
class Trial:
    kind: str
    number: int
    shape: Shape
    num_streams: int

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.number}"


@dataclass(frozen=True)
class Outcome:
    """What was done and what came of it. Seconds from the fault: ``to_notice`` until the coordinator (its clients, if
    it was that) noticed, ``to_resume`` until a new token came."""

    trial: Trial
    how: str
    troubles: tuple[str, ...]
    to_notice: float = math.nan
    to_resume: float = math.nan

    @property
    def is_missed(self) -> bool:
        """Whether it struck when all was said, and so tells nothing. What only stutters is not lost."""
        return math.isnan(self.to_resume) and self.trial.kind != "stutter"

    @property
    def is_good(self) -> bool:
        return not self.troubles


# -- faults ----------------------------------------------------------------------------------------


def kill(rig: Rig, chance: random.Random) -> tuple[str, float]:
    rig.num_killed += 1
    name, where = _victim(rig, chance)
    if where == LOCAL:
        process = rig.local_worker(name)
        struck = time.monotonic()
        process.kill()
        return LOCAL, struck
    struck = time.monotonic()
    rig.machines[name].kill()
    _wait(chance, _TO_START)
    rig.machines[name].start_again()
    return REMOTE, struck


def freeze(rig: Rig, chance: random.Random) -> tuple[str, float]:
    rig.num_killed += 1
    name, where = _victim(rig, chance)
    process = rig.local_worker(name) if where == LOCAL else rig.machines[name].process
    process.suspend()
    struck = time.monotonic()
    if where == LOCAL:
        return LOCAL, struck
    _wait(chance, _ASLEEP)
    if chance.random() < 0.5:
        process.resume()
        return "woken", struck
    rig.machines[name].start_again()
    return "started again", struck


def cut(rig: Rig, chance: random.Random) -> tuple[str, float]:
    cable = chance.choice(list(rig.machines.values())).cable
    how = chance.choice(("torn", "silent", "snapped"))
    struck = time.monotonic()
    {"torn": cable.tear, "silent": cable.silence, "snapped": cable.snap}[how]()
    if how != "snapped":
        _wait(chance, _TORN if how == "torn" else _ASLEEP)
    cable.mend()
    return how, struck


def stutter(rig: Rig, chance: random.Random) -> tuple[str, float]:
    """As on machines that are far too busy: any of the processes at a time, the coordinator among them."""
    struck = time.monotonic()
    for _ in range(_STUTTERS):
        still = rig.processes()
        still = chance.sample(still, chance.randint(1, len(still)))
        _each(still, psutil.Process.suspend)
        _wait(chance, _STILL)
        _each(still, psutil.Process.resume)
        _wait(chance, _GOES_ON)
    return "all", struck


def _each(processes: Sequence[psutil.Process], act: Callable[[psutil.Process], None]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            act(process)


def twice(rig: Rig, chance: random.Random) -> tuple[str, float]:
    """The second time while a worker comes up, is loaded, or has just begun to serve again."""
    first = chance.choice([kill, freeze, cut] if rig.machines else [kill, freeze])
    struck = first(rig, chance)[1]
    _wait(chance, _TO_GET_OVER)
    kill(rig, chance)
    return f"{first.__name__} first", struck


def carrier(rig: Rig, chance: random.Random) -> tuple[str, float]:
    """Both engines live on, and make a new link."""
    engine = chance.choice([rig.coordinator.process, *(machine.process for machine in rig.machines.values())])
    found = list[psutil.Process]()
    until(lambda: found.extend(carriers_of(engine.pid)) or found, "a link is carried", 10)
    struck = time.monotonic()
    _each([chance.choice(found)], psutil.Process.kill)
    return "writer" if engine == rig.coordinator.process else "reader", struck


def gone(rig: Rig, chance: random.Random) -> tuple[str, float]:
    """Nobody starts it again before the others have gone on without it."""
    returns = chance.random() < 0.5
    name, struck = _kill_for_good(rig, chance)
    until(lambda: any(one["at"] > struck for one in rig.coordinator.heard("left")), "it is left out", 60)
    if returns:
        _wait(chance, _TO_GET_OVER)
        rig.machines[name].start_again()
    return "comes back" if returns else "stays away", struck


def tight(rig: Rig, chance: random.Random) -> tuple[str, float]:
    name, struck = _kill_for_good(rig, chance)
    until(lambda: any(one["at"] > struck for one in rig.coordinator.heard("missing")), "it is said", 60)
    _wait(chance, _TO_GET_OVER)
    rig.machines[name].start_again()
    return REMOTE, struck


def _kill_for_good(rig: Rig, chance: random.Random) -> tuple[str, float]:
    rig.num_killed += 1
    name = chance.choice(list(rig.machines))
    struck = time.monotonic()
    rig.machines[name].kill()
    return name, struck


STRIKES: dict[str, Strike] = {each.__name__: each for each in (kill, freeze, cut, stutter, twice, carrier, gone, tight)}


def _victim(rig: Rig, chance: random.Random) -> tuple[str, str]:
    return chance.choice(list(zip("bcd", rig.shape.workers, strict=False)))


def _wait(chance: random.Random, seconds: tuple[float, float]) -> None:
    time.sleep(chance.uniform(*seconds))


# -- trials ----------------------------------------------------------------------------------------


def attempt(rig: Rig, trial: Trial, seed: int) -> Outcome:
    """One trial; the same again, only sooner, while it strikes too late to matter."""
    strike = _strike_coordinator if trial.kind == "coordinator" else _strike_worker
    for number in range(_ATTEMPTS):
        try:
            outcome = strike(rig, trial, random.Random(f"{seed} {trial.name}"), _SOONER**number)
        except _TROUBLE as error:
            return _failed(trial, error)
        if not outcome.is_missed or not outcome.is_good:
            return outcome
    return outcome


def _failed(trial: Trial, error: Exception) -> Outcome:
    return Outcome(trial, trial.kind, (f"{type(error).__name__}: {error}",))


def _strike_worker(rig: Rig, trial: Trial, chance: random.Random, sooner: float) -> Outcome:
    indices, answers = _ask(rig, trial, chance, sooner)
    how, struck = STRIKES[trial.kind](rig, chance)
    wait_for(answers)
    if trial.kind == "gone":
        for machine in rig.machines.values():  # until all are back, and the cut is the first again
            if not machine.running.is_alive:
                machine.start_again()
        heard = rig.coordinator.heard
        until(lambda: len(heard("returned")) == len(heard("left")), "it takes part again", 60)
    noticed = min((one["at"] for one in rig.coordinator.heard("noticed") if one["at"] >= struck), default=math.nan)
    opened = [*rig.coordinator.heard("back"), *rig.coordinator.heard("left")]
    back = min((one["at"] for one in opened if one["at"] >= noticed), default=math.nan)
    resumed = min((at for answer in answers for at in answer.times if at >= back), default=math.nan)
    troubles = (*_wrong(rig, indices, answers), *rig.troubles())
    return Outcome(trial, f"{trial.kind}, {how}", troubles, noticed - struck, resumed - struck)


def _strike_coordinator(rig: Rig, trial: Trial, chance: random.Random, sooner: float) -> Outcome:
    indices, before = _ask(rig, trial, chance, sooner)
    rig.num_killed += 1 + rig.shape.workers.count(LOCAL)
    workers = [machine.running for machine in rig.machines.values()]
    struck = rig.coordinator.kill()
    noticed = time.monotonic()
    _wait(chance, _TO_START)
    rig.start_coordinator()
    lost = [index for index, answer in zip(indices, before, strict=True) if answer.ending == "lost"]
    again = [rig.ask(index, trial.num_streams) for index in lost]
    wait_for(again)
    troubles = [*_wrong(rig, indices, before, "lost"), *_wrong(rig, lost, again), *rig.troubles()]
    if not all(worker.is_alive for worker in workers):
        troubles.append("a worker ended with its coordinator")
    resumed = min((at for answer in again for at in answer.times), default=math.nan)
    to_notice = noticed - struck if lost else math.nan
    return Outcome(trial, trial.kind, tuple(troubles), to_notice, resumed - struck)


def _ask(rig: Rig, trial: Trial, chance: random.Random, sooner: float) -> tuple[list[int], list[Answer]]:
    """Requests, and a moment of their answers."""
    indices = chance.sample(range(rigs.NUM_REQUESTS), trial.num_streams)
    moment = chance.uniform(0, _LATEST * rig.usual[trial.num_streams]) * sooner
    answers = [rig.ask(index, trial.num_streams) for index in indices]
    time.sleep(moment)
    return indices, answers


def _wrong(rig: Rig, indices: Sequence[int], answers: Sequence[Answer], may_be: str = "") -> Iterator[str]:
    """Where what was said is not what is said undisturbed; of answers that may be lost, its beginning."""
    for index, answer in zip(indices, answers, strict=True):
        said, ending = answer.token_ids, answer.ending
        expected = rig.expected[index][: len(said) if ending == may_be else None]
        if ending not in ("length", may_be):
            yield f"a stream ended with {ending!r}"
        if said != expected:
            differ = (i for i, (a, b) in enumerate(zip(said, expected, strict=False)) if a != b)
            at = next(differ, min(len(said), len(expected)))
            told = f"{said[at : at + 6]}, expected {expected[at : at + 6]}"
            yield f"request {index}, {len(said)} tokens: token {at} differs: {told}"


# -- the campaign ----------------------------------------------------------------------------------


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--strikes", type=int, help="so many in all; without, as long as there is time")
    parser.add_argument("--link", choices=("tcp", "rdma"), default="tcp", help="between machines")
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--trial", help="this one alone, by its name")
    parser.add_argument("--streams", type=int, choices=STREAMS, help="so many in every trial; without, all in turn")
    parser.add_argument("--codec", default=INT8, help="of the links")
    parser.add_argument("--drafter", choices=trained.KINDS, default="", help="on the last stage, of random weights")


class Deaths:
    def __init__(self, report: Report, given: argparse.Namespace) -> None:
        self._report, self._given = report, given
        self._is_rdma = given.link == "rdma"
        self.numbers = Counter[str]()
        self.outcomes: list[Outcome] = []
        self._way = Way(given.codec, drafter=given.drafter)
        if given.only in ("gone", "tight"):  # other cuts pack hidden states at other places
            self._way = replace(self._way, codec=NONE, leave_after=_LEAVE, is_tight=given.only == "tight")
        if self._is_rdma:
            self.world = World.make(report.folder / "jaccl", limits=_NO_LIMITS)
            os.environ.update(self.world.environment)
            self._way = replace(self._way, remote={"transport": "rdma", "device": World.devices()})

    def trial(self, kind: str, number: int) -> Trial:
        """On a shape that has what is struck; over rdma, the one that the stand-in's cable can join."""
        remote = kind in ("cut", "gone", "tight")
        shapes = SHAPES[: 1 if self._is_rdma or kind == "tight" else None]
        shapes = [shape for shape in shapes if not remote or REMOTE in shape.workers]
        streams = self._given.streams or STREAMS[number // len(shapes) % len(STREAMS)]
        return Trial(kind, number, shapes[number % len(shapes)], streams)

    def drawn(self, count: int) -> list[Trial]:
        weights = RDMA_WEIGHTS if self._is_rdma else WEIGHTS
        only, chance = self._given.only, self._report.chance(self.numbers.total())
        found = []
        for _ in range(count):
            kind = only or chance.choices([*weights], [*weights.values()])[0]
            found.append(self.trial(kind, self.numbers[kind]))
            self.numbers[kind] += 1
        return found

    def strike(self, trials: Sequence[Trial]) -> None:
        """All of them, each on a rig of its shape."""
        for shape in SHAPES:
            todo = [trial for trial in trials if trial.shape == shape]
            random.Random(self._report.seed).shuffle(todo)
            todo.sort(key=lambda trial: trial.kind == "coordinator")  # last: until then it is one long-lived process
            while todo:
                self._on_one_rig(shape, todo)

    def _on_one_rig(self, shape: Shape, todo: list[Trial]) -> None:
        """As many of ``todo`` as go well, and the first that does not: its rig is not used again."""
        trial, outcome = todo[0], None
        try:
            with scratch() as folder, rigs.running(shape, folder, self._way) as rig:
                while todo and (outcome is None or outcome.is_good):
                    trial = todo.pop(0)
                    outcome = attempt(rig, trial, self._report.seed)
                    self._note(outcome, rig.coordinator.err)
                left = rig.close()
                if outcome is not None and outcome.is_good:
                    self._report.expect_none(left, f"after {trial.name}")
        except _TROUBLE as error:  # it did not come up, or go down
            todo[:] = [one for one in todo if one != trial]  # else it would be tried for ever
            self._note(_failed(trial, error), "")

    def _note(self, outcome: Outcome, log: str) -> None:
        self.outcomes.append(outcome)
        print(dumps(asdict(outcome)), flush=True)
        if not outcome.is_good:
            self._report.wrong(f"{outcome.trial.name}, {outcome.how}: {outcome.troubles}")
            print(f"to see it again: --seed {self._report.seed} --trial {outcome.trial.name}; the log ends with")
            print(log[-3000:], flush=True)

    def figures(self) -> dict[str, Any]:
        if self._is_rdma:
            overlaps = sum(map(self.world.overlaps, self.world.ports))
            self._report.check(not overlaps, "two operations at once on one rdma device")
        return {
            "strikes": self.numbers.total(), "kinds": self.numbers, "link": self._given.link,
            "codec": self._given.codec, "drafter": self._given.drafter,
            "good": sum(o.is_good for o in self.outcomes),
            "missed": sum(o.is_missed for o in self.outcomes),
            "wrong": [o.trial.name for o in self.outcomes if not o.is_good],
            "trials": [asdict(outcome) for outcome in self.outcomes],
        }  # fmt: skip


def campaign(report: Report, given: argparse.Namespace) -> None:
    deaths = Deaths(report, given)
    report.begin()
    if given.trial:
        kind, _, number = given.trial.partition("-")
        deaths.strike([deaths.trial(kind, int(number))])
    elif given.strikes:
        deaths.strike(deaths.drawn(given.strikes))
    else:
        for _ in report.numbers():
            deaths.strike(deaths.drawn(_AT_ONCE))
    report.figures |= deaths.figures()
