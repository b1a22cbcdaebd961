"""From a result to the next launch, live: ``python -m tests.campaigns.launch_path two-small two-large``.

One stream of the demo model in two stages of an emulated accelerator. Requests are run in turns: with the step that is
expected launched before the scheduler takes in the result, and with the scheduler first. Times are of the loop's
thread, in microseconds from the result's event to the device's launch. Python's calls on that way are counted in a run
of their own.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

from splitinfer import SamplingParams
from splitinfer.core.scheduler.scheduler import Scheduler
from splitinfer.engine.coordinator.loop import Loop
from splitinfer.engine.coordinator.worker_handle import Event
from splitinfer.engine.device.emulated import EmulatedDevice
from splitinfer.llm import LLM
from splitinfer.machine.selection import VARIABLE

_WARM = 10  # tokens
_STAGES = [{"name": "front", "layers": 6}, {"name": "back", "layers": 6, "address": "local"}]


@contextmanager
def watched(begin: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
    """``begin`` is called when the loop comes to a result, ``end`` when the device is given a step."""
    handle, launch = Loop._handle, EmulatedDevice.launch

    def handled(loop: Loop, event: Any, *more: Any) -> None:
        if isinstance(event, Event):
            begin()
        handle(loop, event, *more)

    def launched(device: EmulatedDevice, *args: Any) -> Any:
        end()
        return launch(device, *args)

    with patch.object(Loop, "_handle", handled), patch.object(EmulatedDevice, "launch", launched):
        yield


def gaps_of(llm: LLM, tokens: int) -> list[float]:
    """Run a request; the milliseconds between its tokens."""
    (output,) = llm.generate([list(range(5, 21))], SamplingParams(max_tokens=tokens, ignore_eos=True))
    return [1000 * (b - a) for a, b in pairwise(output.token_times)][_WARM:]


def timed(llm: LLM, tokens: int) -> tuple[list[float], list[float]]:
    """A request's gaps, and the microseconds from results to launches."""
    began, took = [0.0], list[float]()

    def end() -> None:
        if began[0]:
            took.append(1e6 * (time.perf_counter() - began[0]))
        began[0] = 0.0

    with watched(lambda: began.__setitem__(0, time.perf_counter()), end):
        return gaps_of(llm, tokens), took[_WARM:]


def calls(llm: LLM, tokens: int) -> float:
    """The median of Python's calls from a result to a launch."""
    counts = list[int]()

    def count(_frame: object, event: str, _argument: object) -> None:
        counts[-1] += event == "call"

    def begin() -> None:
        counts.append(0)
        sys.setprofile(count)

    with watched(begin, lambda: sys.setprofile(None)):
        gaps_of(llm, tokens)
    return statistics.median(counts)


def main() -> None:
    """Print a line for each machine and way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("machines", nargs="+", help="names of examples")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    ways = {"expected": Scheduler.expected, "scheduler first": lambda _scheduler: None}
    for machine in args.machines:
        os.environ[VARIABLE] = machine
        found: dict[str, tuple[list[float], list[float]]] = {way: ([], []) for way in ways}
        with LLM({"model": "demo", "stages": _STAGES}) as llm:
            gaps_of(llm, args.tokens)
            for way in [*ways] * args.turns:
                with patch.object(Scheduler, "expected", ways[way]):
                    for every, some in zip(found[way], timed(llm, args.tokens), strict=True):
                        every += some
            for way, (gaps, took) in found.items():
                with patch.object(Scheduler, "expected", ways[way]):
                    number = calls(llm, args.tokens)
                print(
                    f"{machine}, {way}: {number:g} calls, {statistics.median(took):.0f} us to the launch "
                    f"(p90 {statistics.quantiles(took, n=10)[-1]:.0f}), {statistics.median(gaps):.2f} ms a token"
                )


if __name__ == "__main__":
    main()
