"""What drafts are worth to one stream and to several, and whether the live choice of them is the best. Prints JSON.

    python scripts/experiments/drafts.py --machine two-large --streams 1,2,4,8 --acceptance 0.6,0.8
    python scripts/experiments/drafts.py --layout halves.yaml --streams 1 --trials 3      # on this machine's processors
    python scripts/experiments/drafts.py --layout both.yaml --machine each-layer          # on emulated accelerators

A drafter that knows the answers is right as often as is asked for (``tests/emulation/replay.py``), so acceptance is
given and all else is real. For each acceptance and number of streams the systems take turns, every other trial in
reverse order: without drafts in as many groups as stages and in fewer, with fixed drafts, and with the live choice.
``to_none`` and ``to_best`` are the live choice's tokens a second to those of the best system without drafts, and of the
best of all. All systems must give the same tokens (``same_tokens``). Rates are of the time in which all streams decode.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from device import stand_in

from scripts.comparing import machine as this_machine
from scripts.comparing.machine import prefer_openblas
from splitinfer.bench.figures import Run, throughput
from splitinfer.bench.parts import made_up
from splitinfer.bench.systems import together
from splitinfer.config import find_layout
from splitinfer.core.scheduler.scheduler import Scheduler
from splitinfer.core.sequence import SamplingParams
from splitinfer.core.speculation.flight import OFF, Flight
from splitinfer.llm import LLM, Settings
from splitinfer.machine.selection import VARIABLE
from splitinfer.models.folder.hub import open_model
from splitinfer.probes.machine import describe
from tests.emulation.files import read_machine
from tests.emulation.replay import Replay

LIVE = "live"
_PROMPT, _SETTLE = 16, 60  # tokens
_SHARE = 0.05  # of a step, that a draft takes on a processor
_BLOCKS = {f"{k} drafts": Flight(k) for k in (1, 2, 4, 7)} | {f"3, then {k} in flight": Flight(3, k, 2) for k in (2, 4)}

System = tuple[int | None, Flight | None]  # groups and drafts; None: as the live choice has it


class Trials:
    """The cases on a pipeline, and the drafter that knows its answers."""

    def __init__(self, llm: LLM, replay: Replay, vocab_size: int, tokens: int) -> None:
        self.llm, self.replay, self.vocab_size, self.tokens = llm, replay, vocab_size, tokens
        self.known: dict[tuple[int, ...], tuple[int, ...]] = {}

    def case(self, acceptance: float, streams: int, trials: int) -> dict[str, Any]:
        """One acceptance and number of streams."""
        stages = min(self.llm.layout.num_stages, streams)
        systems: dict[str, System] = {f"none, groups {groups}": (groups, OFF) for groups in range(stages, 0, -1)}
        systems |= {name: (stages, flight) for name, flight in _BLOCKS.items()} | {LIVE: (None, None)}
        self.ask(self.prompts("settle", streams, acceptance), systems[LIVE], _SETTLE)
        rates, same = {name: list[float]() for name in systems}, True
        for number in range(trials):
            prompts = self.prompts(str(number), streams, acceptance)
            for name in list(systems)[:: -1 if number % 2 else 1]:
                runs = self.ask(prompts, systems[name], self.tokens)
                rates[name].append(throughput(runs))
                same &= [run.token_ids for run in runs] == [self.known[prompt] for prompt in prompts]
            print(f"acceptance {acceptance:g}, {streams} streams, trial {number + 1}", file=sys.stderr)
        medians = {name: median(each) for name, each in rates.items()}
        without = max(rate for name, rate in medians.items() if name.startswith("none"))
        return {
            "acceptance": acceptance, "streams": streams, "tokens_per_second": medians, "same_tokens": same,
            "to_none": medians[LIVE] / without, "to_best": medians[LIVE] / max(medians.values()),
            "choice": self.llm.stats()["grouping"],
        }  # fmt: skip

    def prompts(self, name: str, streams: int, acceptance: float) -> list[tuple[int, ...]]:
        """Prompts whose answers the drafter knows."""
        prompts = [made_up(f"{name} {streams} {i}", _PROMPT, self.vocab_size) for i in range(streams)]
        if unknown := [prompt for prompt in prompts if prompt not in self.known]:
            runs = self.ask(unknown, (None, OFF), self.tokens)
            self.known |= zip(unknown, (run.token_ids for run in runs), strict=True)
        for prompt in prompts:
            self.replay.know(prompt, self.known[prompt], error=1 - acceptance)
        return prompts

    def ask(self, prompts: Sequence[tuple[int, ...]], system: System, tokens: int) -> list[Run]:
        """All requests at once, by one system."""
        groups, flight = system
        self.llm._engine.call(lambda loop: _fix_groups(loop.scheduler, groups))
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        return together([self.llm.submit(list(prompt), params, flight=flight) for prompt in prompts])


def _fix_groups(scheduler: Scheduler, count: int | None) -> None:
    """Have the next sequences decode in ``count`` groups, at most as many as configured; None: as configured."""
    chooser, most = scheduler.chooser, scheduler.config.num_groups
    chooser.most_groups = most if count is None else min(count, most)
    chooser.fixed = scheduler.config.fixed_groups or count is not None
    chooser.choose({}, None, has_drafter=False)


def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure all cases; the document."""
    on, layout, model = describe(), given.layout, folder / "model"
    if given.machine is not None:
        os.environ[VARIABLE] = str(given.machine)
    if layout is None:
        layout = stand_in(folder, read_machine(given.machine).num_stages)
    else:
        model = find_layout(layout).model
    vocab_size = open_model(str(model)).vocab_size or 2
    replay, most = Replay(vocab_size), max(8, *given.streams)
    settings = Settings(context=4 * given.tokens + 512, prefix_cache=False, rejoin_timeout=0.0, max_running=most)
    with LLM(layout, settings=settings, drafter=lambda: replay) as llm:
        pinned = this_machine.pin_stages(llm.layout.stages)
        trials = Trials(llm, replay, vocab_size, given.tokens)
        trials.prompts("pace", 1, 1.0)
        stages = llm.stats()["speculation"]["step_seconds_by_rows"]
        replay.seconds = _SHARE * sum(seconds[1] for seconds in stages)
        cases = [trials.case(share, count, given.trials) for share in given.acceptance for count in given.streams]
    return {"measured_on": {**on, "pinned": pinned}, "tokens": given.tokens, "trials": given.trials, "cases": cases}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", type=Path, help="a machine file of an emulated accelerator, or the name of one")
    parser.add_argument("--layout", help="a layout; needed without --machine, and then on the real device")
    parser.add_argument("--streams", type=lambda text: [int(each) for each in text.split(",")], default=[1, 2, 4, 8])
    parser.add_argument("--acceptance", type=lambda text: [float(each) for each in text.split(",")], default=[0.6, 0.8])
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=120, help="of each answer")
    given = parser.parse_args()
    if given.layout is None and given.machine is None:
        parser.error("--layout or --machine is needed")
    prefer_openblas()  # may start this program anew
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(given, Path(folder))))


if __name__ == "__main__":
    main()
