"""Another cut under eight streams: what `splitinfer plan --live --apply` predicts and what comes of it.

    python -m tests.campaigns.rebalance
    python -m tests.campaigns.rebalance --cuts 2-10,4-8,10-2 --ratio 1:2 --tokens 1000
    python -m tests.campaigns.rebalance --cuts 4-8 --slower 5 --tokens 200        # on a busy machine, to try it

A model of 12 layers stands in for a large one: it is really computed, by this process and a worker in a process of its
own, in the times of accelerators whose costs are known for each layer; the worker's are so many times as slow as the
ratio says. For each cut the pipeline starts so badly cut, eight streams decode, and in the middle the command is run,
as a person runs it, in a process of its own. One line for each: the cut that it chose; tokens a second before and
after, without the seconds in which the command ran and in which the streams' tokens were computed again; the gain that
it predicted beside the one measured; the pause that it said, and the longest gap between two tokens of a stream; and
whether every token is the one that the same streams have where nothing is changed. Once the machines are known from
their steps alone ("steps"), once they were measured before, with the fixed part of a step apart ("profiles"). Nothing
else may run on the machine meanwhile.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import yaml
from processes import worker

from splitinfer.bench.shared.random_model import Shape as ModelShape
from splitinfer.bench.shared.random_model import make
from splitinfer.bench.shared.systems import together
from splitinfer.bench.shared.workload import made_up
from splitinfer.core.costs.stage import StageCosts
from splitinfer.core.sequence import SamplingParams
from splitinfer.engine.device.late_steps import LATE_STEPS, MOST_LATE
from splitinfer.llm import LLM, Settings
from splitinfer.llm.live_socket import LiveSocket
from splitinfer.machine.profile import LinkProfile, MachineProfile, ModelProfile, Profiles
from splitinfer.machine.selection import VARIABLE

from .truth import LAYER_MS, LAYERS, STREAMS, VOCAB

PROMPT = 16  # tokens
STEP_MS = 1.0
AGAIN = 3  # tokens
SETTLED = 0.1  # of a stream's tokens, that are not counted at either end
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Rig:
    """``times``: how many times as slow each machine is; ``tokens``: of each stream."""

    folder: Path
    model: Path
    times: tuple[float, float]
    tokens: int

    def file(self, machine: int) -> Path:
        """The accelerator of a machine."""
        path, times = self.folder / f"machine-{machine}.yaml", self.times[machine]
        layer = {rows: times * ms for rows, ms in LAYER_MS.items()}
        described = {
            "each_layer": {"rows_ms": layer, "buffers": 2}, "each_step_ms": times * STEP_MS, "launches_ahead": True
        }  # fmt: skip
        path.write_text(yaml.safe_dump(described), encoding="utf-8")
        return path

    def profiles(self, model: ModelProfile, address: str) -> Profiles:
        """The machines as if they had been measured."""
        kinds = {layer.kind for layer in model.layers}
        machines = tuple(
            MachineProfile(
                f"m{i}", {kind: _layer(times) for kind in kinds}, address if i else None, step=times * STEP_MS / 1000,
                host=0.0005, buffers=2.0, launches_ahead=True,
            )
            for i, times in enumerate(self.times)
        )  # fmt: skip
        return Profiles(model, machines, (LinkProfile("m0", "m1", 0.0002),))


def _layer(times: float) -> StageCosts:
    return StageCosts.through({rows: times * ms / 1000 for rows, ms in LAYER_MS.items()})


@dataclass(frozen=True, slots=True)
class Ran:
    """What eight streams gave. ``times``: when each token of each stream came, on one clock."""

    tokens: tuple[tuple[int, ...], ...]
    times: tuple[tuple[float, ...], ...]

    def rate(self, begin: float, end: float) -> float:
        """Tokens a second of all streams between two moments."""
        count = sum(begin < at <= end for times in self.times for at in times)
        return count / (end - begin) if end > begin else 0.0

    @property
    def all_decode(self) -> tuple[float, float]:
        """From when on, and until when, all streams decode, less what is not settled."""
        few = round(SETTLED * len(self.times[0]))
        return max(times[few] for times in self.times), min(times[-1 - few] for times in self.times)

    def all_again(self, moment: float) -> float:
        """When all streams have got some tokens behind a moment, so that what was held is computed again; never, where
        one has not."""
        later = [[at for at in times if at > moment] for times in self.times]
        return max(times[AGAIN] if len(times) > AGAIN else float("inf") for times in later)

    @property
    def longest_gap(self) -> float:
        """Seconds between two tokens of a stream, at most."""
        return max(b - a for times in self.times for a, b in pairwise(times))


@contextmanager
def opened(rig: Rig, cut: Sequence[int]) -> Iterator[tuple[LLM, str]]:
    """The pipeline, and its worker's address."""
    with worker(env={VARIABLE: str(rig.file(1))}) as there:
        os.environ[VARIABLE] = str(rig.file(0))
        stages = [
            {"name": "m0", "layers": cut[0]},
            {"name": "m1", "layers": cut[1], "address": there.address},
        ]
        settings = Settings(context=8192, prefix_cache=False, max_running=STREAMS, rejoin_timeout=0.0)
        with LLM({"model": str(rig.model), "stages": stages}, settings=settings) as llm:
            run(llm, 32)  # steps of every kind, so that costs are known
            yield llm, there.address


def run(llm: LLM, num_tokens: int, act: float | None = None) -> tuple[Ran, list[dict[str, float]]]:
    """Eight streams; with ``act``, the command is run once the first has that share of its tokens. Returns when it
    began and ended, too, and what it said."""
    submitted, said = [], list[dict[str, float]]()
    for i in range(STREAMS):
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.8 * (i % 2), seed=i)
        submitted.append((time.monotonic(), llm.submit(list(made_up(f"rebalance {i}", PROMPT, VOCAB)), params)))
    if act is not None:
        events = iter(submitted[0][1])  # kept: an iterator that is dropped ends its request
        for _ in range(round(act * num_tokens)):
            next(events)
        began = time.monotonic()
        said.append({**command(), "began": began, "ended": time.monotonic()})
    found = together(submitted)
    return Ran(found.token_ids, found.token_times), said


def command() -> dict[str, float]:
    """`splitinfer plan --live --apply` in a process of its own."""
    words = [sys.executable, "-m", "splitinfer", "plan", "--live", "--apply", "--for", "throughput", "--json"]
    words += ["--pid", str(os.getpid())]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def row(rig: Rig, cut: Sequence[int], *, measured: bool) -> list[str]:
    """One line of the table."""
    steps, late = LATE_STEPS.steps, LATE_STEPS.late
    with opened(rig, cut) as (llm, address), closing(LiveSocket(llm)):
        plain, _ = run(llm, rig.tokens)
        if measured:
            llm._profiles = rig.profiles(llm.live_figures().profiles.model, address)
        changed, (said,) = run(llm, rig.tokens, act=2 * SETTLED)
        best = llm.layout.cut
    begin, end = changed.all_decode
    again = changed.all_again(said["ended"])
    before, after = changed.rate(begin, said["began"]), changed.rate(again, end)
    gain = after / before if before else 0.0
    late_share = (LATE_STEPS.late - late) / max(1, LATE_STEPS.steps - steps)
    return [
        "profiles" if measured else "steps", "-".join(map(str, cut)), best, f"{before:.1f}", f"{after:.1f}",
        f"{said['gain']:.2f}", f"{gain:.2f}" if end > again and before else "too few tokens",
        f"{said.get('paused', 0.0):.2f}", f"{changed.longest_gap:.2f}", f"{plain.longest_gap:.2f}",
        "equal" if changed.tokens == plain.tokens else "NOT EQUAL",
        f"{late_share:.2%}{' (means nothing)' if late_share > MOST_LATE else ''}",
    ]  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuts", default="2-10,4-8,10-2", help="to begin with")
    parser.add_argument("--ratio", default="1:2", help="of the machines' times")
    parser.add_argument("--tokens", type=int, default=1000, help="of each stream")
    parser.add_argument("--slower", type=float, default=1.0, help="factor on all times, for a busy machine")
    args = parser.parse_args()
    first, second = (args.slower * float(each) for each in args.ratio.split(":"))
    titles = [
        "known by", "cut", "chosen", "tok/s before", "after", "gain predicted", "measured", "pause s", "longest gap s",
        "without a change", "tokens", "late steps",
    ]  # fmt: skip
    print(" | ".join(titles), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        rig = Rig(Path(folder), Path(folder) / "model", (first, second), args.tokens)
        make(rig.model, ModelShape(layers=LAYERS, hidden=32, heads=1, kv_heads=1, mlp=64, vocab=VOCAB), num_files=1)
        for text in args.cuts.split(","):
            for measured in (False, True):
                print(" | ".join(row(rig, [int(n) for n in text.split("-")], measured=measured)), flush=True)


if __name__ == "__main__":
    main()
