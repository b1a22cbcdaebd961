"""What the loops leave of a device's time, on emulated accelerators, whose times are known. Prints one JSON document.

    python scripts/experiments/device.py two-large          # or two-small, three-large, or a machine file of yours
    python scripts/experiments/device.py two-small --cases one_stream groups --trials 3

    one_stream      seconds a token, beside the sum of all stages and hops. A hop is half a round trip of a link between
                    two processes, measured in this run.
    groups          as many groups of eight as there are stages: tokens a second, beside what the slowest stage allows
    after_prompt    the first 50 gaps between tokens after a prompt of many chunks, beside the steady ones
    long_prompt     eight streams decode and a long prompt comes: their gaps, beside the objective of three usual ones

A small random model stands in for a large one: a processor computes its steps in less time than the accelerator takes
for the large one's. Steps that took the processor longer are counted (``late_steps``); where they are more than one in
a thousand, the figures mean nothing: nothing else may run on the machine.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from scripts.comparing import machine as this_machine
from scripts.comparing.links import Kind, Pair
from scripts.comparing.machine import prefer_openblas
from scripts.random_model import Shape as ModelShape
from scripts.random_model import make
from splitinfer.bench.parts import made_up
from splitinfer.bench.systems import whole
from splitinfer.core.costs.shape import Shape
from splitinfer.core.metrics.gaps import Cause
from splitinfer.core.metrics.histogram import Histogram
from splitinfer.core.metrics.records import StepRecord
from splitinfer.core.sequence import SamplingParams
from splitinfer.engine.loop.requests import StreamEvent
from splitinfer.llm import LLM, NO_DRAFT, Request, Settings
from splitinfer.machine.selection import VARIABLE
from splitinfer.probes.machine import describe
from tests.emulation.files import read_devices, read_machine
from tests.emulation.late_steps import MOST_LATE, counted
from tests.emulation.machine import Machine

GROUP = 8  # sequences
LAYERS, VOCABULARY = 2, 512  # of each stage of the model, and of all of it
_CHUNK = 512  # tokens in a step
_PROMPT = 16  # tokens of a stream's prompt
_WARM, _COUNTED = 10, 100  # tokens of each stream
_LONG_CHUNKS = 8
_AFTER = 50  # gaps after a prompt
_BEFORE = 30  # gaps before a long prompt comes
_OBJECTIVE = 3.0  # usual gaps
_PROBES = 20  # of the link
CASES = ("one_stream", "groups", "after_prompt", "long_prompt")


def measure(file: Path, trials: int, cases: Sequence[str], seed: int) -> dict[str, Any]:
    """Measure some cases on a machine's accelerators; the document."""
    num_stages = read_machine(file).num_stages
    devices = read_devices(file, [LAYERS] * num_stages)
    os.environ[VARIABLE] = str(file)
    on = describe()
    settings = Settings(
        context=_LONG_CHUNKS * _CHUNK + 4 * _COUNTED, prefix_cache=False, draft=NO_DRAFT, rejoin_timeout=0.0,
        connect_timeout=20.0, token_budget=_CHUNK, micro_batches=num_stages,
    )  # fmt: skip
    with (
        tempfile.TemporaryDirectory() as folder,
        counted() as steps,
        closing(Pair(Kind("tcp", "tcp://127.0.0.1:0"))) as pair,
    ):
        with LLM(stand_in(Path(folder), num_stages), settings=settings) as llm:
            pinned = this_machine.pin_stages(llm.layout.stages)
            found = Trials(llm, devices, seed, lambda: _hop(pair))
            found.warm_up()
            before = steps()
            results = {case: [getattr(found, case)(number) for number in range(trials)] for case in cases}
        late = steps().since(before)
    return {
        "measured_on": {**on, "pinned": pinned}, "machine": file.name, "trials": trials, **results,
        "late_steps": {**asdict(late), "share": late.share, "are_too_many": late.share > MOST_LATE},
    }  # fmt: skip


def _hop(pair: Pair) -> float:
    """Seconds of a link one way."""
    return statistics.median(each.latency_p50 for each in pair.probe(_PROBES))


def stand_in(folder: Path, num_stages: int) -> dict[str, Any]:
    """A layout of so many stages on this machine for a small random model. It has one head, because what takes a
    processor longest is a chunk's attention to thousands of positions, once for each head."""
    shape = ModelShape(layers=LAYERS * num_stages, hidden=32, heads=1, kv_heads=1, mlp=64, vocab=VOCABULARY)
    make(folder / "model", shape, num_files=1)
    stages = [
        {"name": f"stage{i}", "layers": LAYERS, **({} if i == 0 else {"address": "local"})} for i in range(num_stages)
    ]
    return {"model": str(folder / "model"), "stages": stages}


@dataclass(slots=True)
class Trials:
    """The cases. ``hop``: measures a hop's seconds."""

    llm: LLM
    devices: Sequence[Machine]
    seed: int
    hop: Any

    def warm_up(self) -> None:
        """Steps of all the sizes to come, so that the costs are known before an objective depends on them."""
        for count in (1, GROUP, GROUP * len(self.devices)):
            _results(self._streams(f"warm up {count}", count, _WARM))
        for length in (_CHUNK // 8, _CHUNK // 2, 2 * _CHUNK):
            _results([self._submit(f"warm up {length}", length, 4)])

    def one_stream(self, trial: int) -> dict[str, Any]:
        """One sequence alone: seconds a token, and what stages and hops take."""
        hop = self.hop()
        (stream,) = self._streams(f"one {trial}", 1, _WARM + _COUNTED)
        window = self._window(stream)
        (times,) = _results([stream])
        stages, hops = sum(self._seconds(1)), hop * (len(self.devices) if len(self.devices) > 1 else 0)
        gap = statistics.median(_gaps(times)[_WARM:])
        return {"seconds_a_token": gap, "stages": stages, "hops": hops, "over": gap - stages - hops, "window": window}

    def groups(self, trial: int) -> dict[str, Any]:
        """As many full groups as stages: tokens a second, and what the slowest stage allows."""
        streams = self._streams(f"groups {trial}", GROUP * len(self.devices), _WARM + _COUNTED + _WARM)
        window = self._window(streams[-1])
        every = _results(streams)
        began, ended = every[-1][_WARM - 1], every[-1][_WARM + _COUNTED - 1]
        rate = sum(began < at <= ended for times in every for at in times) / (ended - began)
        allowed = GROUP / max(self._seconds(GROUP))
        return {"tokens_per_second": rate, "allowed": allowed, "share": rate / allowed, "window": window}

    def after_prompt(self, trial: int) -> dict[str, Any]:
        """The gaps behind a prompt of many chunks, and the steady ones of the same sequence."""
        request = self._submit(f"after {trial}", _LONG_CHUNKS * _CHUNK, 2 * _AFTER)
        (times,) = _results([request])
        gaps = _gaps(times)
        first, steady = statistics.median(gaps[:_AFTER]), statistics.median(gaps[_AFTER:])
        return {
            "ttft": times[0] - request.at, "first_seconds": first, "worst_seconds": max(gaps[:_AFTER]),
            "steady_seconds": steady, "to_steady": statistics.mean(gaps[:_AFTER]) / steady,
        }  # fmt: skip

    def long_prompt(self, trial: int) -> dict[str, Any]:
        """Eight streams decode under an objective, and a long prompt comes."""
        usual = statistics.median(
            gap for times in _results(self._streams(f"usual {trial}", GROUP, _BEFORE)) for gap in _gaps(times)[_WARM:]
        )
        objective = _OBJECTIVE * usual
        self.llm.tune(itl_slo_ms=1000 * objective)
        try:
            streams = self._streams(f"streams {trial}", GROUP, _LONG_CHUNKS * _CHUNK)
            _until(streams[-1], _BEFORE)
            long = self._submit(f"long {trial}", _LONG_CHUNKS * _CHUNK, 1)
            (answer,) = _results([long])
            for stream in streams:
                stream.request.abort()
            every = _results(streams)
        finally:
            self.llm.tune(itl_slo_ms=None)
        during = Histogram()
        for times in every:
            for before, at in pairwise(times):
                if at > long.at and before < answer[0]:
                    during.add(at - before)
        p99 = during.quantile(0.99)
        return {"ttft": answer[0] - long.at, "usual": usual, "objective": objective, "p99": p99,
                "p99_to_objective": p99 / objective}  # fmt: skip

    def _seconds(self, rows: int) -> list[float]:
        """Seconds of a step of short sequences on each stage."""
        return [device.stages[0].at(Shape(rows, rows * (_PROMPT + 1))) for device in self.devices]

    def _streams(self, name: str, count: int, num_tokens: int) -> list["Stream"]:
        return [self._submit(f"{name} {i}", _PROMPT, num_tokens) for i in range(count)]

    def _submit(self, name: str, length: int, num_tokens: int) -> "Stream":
        prompt = made_up(f"{self.seed} device {name}", length, VOCABULARY)
        at = time.monotonic()
        return Stream(at, self.llm.submit(prompt, SamplingParams(max_tokens=num_tokens, ignore_eos=True)))

    def _window(self, stream: "Stream") -> list[dict[str, Any]]:
        """Each stage's duty from the stream's token number ``_WARM`` for ``_COUNTED`` tokens, and the seconds before
        its steps that links and hosts took."""
        steps = list[StepRecord]()
        _until(stream, _WARM)
        before = self.llm.stats()["stages"]
        self.llm.watch_steps(steps.append)
        _until(stream, _COUNTED - 1)
        after = self.llm.stats()["stages"]
        self.llm.watch_steps(None)
        return [
            _window(was, now, [step.gaps[i] for step in steps])
            for i, (was, now) in enumerate(zip(before, after, strict=True))
        ]


def _window(was: dict[str, Any], now: dict[str, Any], gaps: Sequence[Mapping[Cause, float]]) -> dict[str, Any]:
    """A stage's figures between two readings of its counters. ``gaps``: before each of its steps."""
    busy = now["busy_seconds"] - was["busy_seconds"]
    idle = sum(now["idle_seconds"].values()) - sum(was["idle_seconds"].values())
    overhead = Histogram()
    for gap in gaps:
        overhead.add(gap.get(Cause.LINK, 0.0) + gap.get(Cause.HOST, 0.0))
    figures = {"seconds": overhead.total, **overhead.as_dict(50, 99)}
    return {"name": now["name"], "duty": busy / (busy + idle), "overhead": figures}


@dataclass(slots=True)
class Stream:
    """A request, and when it was submitted, in seconds."""

    at: float
    request: Request
    events: Iterator[StreamEvent] = field(init=False)

    def __post_init__(self) -> None:
        self.events = iter(self.request)


def _until(stream: Stream, count: int) -> None:
    """Read ``count`` more events of a stream: one for each token."""
    for _ in range(count):
        next(stream.events)


def _results(streams: Sequence[Stream]) -> list[list[float]]:
    """Wait for the ends; the times of each stream's tokens, in seconds."""
    for stream in streams:
        for _ in stream.events:
            pass
    return [[stream.at + each for each in whole(stream.request.output).token_times] for stream in streams]


def _gaps(times: Sequence[float]) -> list[float]:
    return [b - a for a, b in pairwise(times)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machine", type=Path, help="a machine file, or the name of an example")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    prefer_openblas()  # may start this program anew
    print(json.dumps(measure(given.machine, given.trials, given.cases, given.seed)))


if __name__ == "__main__":
    main()
