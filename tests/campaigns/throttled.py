"""A plan by what this machine is measured to do, while one of its processors is throttled to half, against every cut.

    LD_PRELOAD=libopenblas.so.0 OPENBLAS_NUM_THREADS=1 python -m tests.campaigns.throttled

A coordinator and a worker, each on a processor of its own. The worker's is throttled by a process that computes there
without end, with which the system shares it equally; it runs while machines are measured and while cuts are. The plan
knows nothing of it but what the layers of the worker take. Nothing else may run on the machine meanwhile.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from splitinfer.bench.shared import machine as this_machine
from splitinfer.bench.shared.random_model import Shape as ModelShape
from splitinfer.bench.shared.random_model import make
from splitinfer.bench.speculation.replay import Replay
from splitinfer.core.costs.shape import Shape
from splitinfer.core.speculation.flight import OFF
from splitinfer.llm import LLM, Settings
from splitinfer.llm.automatic import as_workers, measured_profiles
from splitinfer.machine.profile import Profiles
from splitinfer.placement.asked import Aim
from splitinfer.placement.cuts import Cut, on_grid
from splitinfer.placement.plan import Planner

from .truth import PROMPT, STREAMS, VOCAB, Live, asked

LAYERS = 12
SHAPE = ModelShape(layers=LAYERS, hidden=768, heads=12, kv_heads=4, mlp=2048, vocab=VOCAB)
TOKENS = 96  # of an answer


@contextmanager
def process(command: list[str], processor: int) -> Iterator[subprocess.Popen[str]]:
    """A process that is pinned before it starts anything."""
    pinned = {"preexec_fn": lambda: os.sched_setaffinity(0, {processor})}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **pinned) as started:
        try:
            yield started
        finally:
            started.kill()


def measured(model: str, address: str, cut: Cut, trials: int) -> dict[str, float]:
    """Turns per second, and tokens per second of many, of a cut; medians."""
    layout = {
        "model": model,
        "stages": [
            {"name": "here", "layers": cut.layers[0]},
            {"name": "there", "layers": cut.layers[1], "address": address},
        ],
    }
    settings = Settings(context=2048, prefix_cache=False, max_running=STREAMS, token_budget=512)
    replay = Replay(VOCAB)
    with LLM(layout, settings=settings, drafter=lambda: replay) as llm:
        live = Live(llm, replay, TOKENS)
        live.many(live.prompts("warm", STREAMS, 16), OFF, TOKENS // 4)
        turns, many = [], []
        for number in range(trials):
            turns.append(1 / live.turn(live.prompts(f"turn {number}", 1, PROMPT)[0], OFF, TOKENS)[0])
            many.append(live.many(live.prompts(f"streams {number}", STREAMS, 16), OFF, TOKENS))
    return {Aim.CHAT: statistics.median(turns), Aim.THROUGHPUT: statistics.median(many)}


def main() -> None:
    """Plan, measure every cut, and print one beside the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--full-speed", action="store_true", help="without the throttle")
    args = parser.parse_args()
    own, other = this_machine.free_processors()[:2]
    os.sched_setaffinity(0, {own})
    with ExitStack() as stack:
        model = str(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model")
        make(Path(model), SHAPE, num_files=1)
        if not args.full_speed:
            stack.enter_context(process([sys.executable, "-c", "while True: pass"], other))
        worker = stack.enter_context(
            process(
                [sys.executable, "-m", "splitinfer", "worker", "--name", "there", "--child", "--kv-dir", "none"], other
            )
        )
        assert worker.stdout is not None
        address = json.loads(worker.stdout.readline())["address"]
        found = measured_profiles(model, as_workers([f"there={address}"]), Settings(), lambda *_: None, again=True)
        report(found, {cut: measured(model, address, cut, args.trials) for cut in on_grid([(0, 1)], LAYERS)})


def report(found: Profiles, figures: dict[Cut, dict[str, float]]) -> None:
    """Print what was measured of the machines and the cuts, and what the plan chose of them."""
    for machine in found.machines:
        layers = ", ".join(f"{kind}: {costs.at(Shape(1)) * 1000:.2f} ms" for kind, costs in machine.layers.items())
        print(f"{machine.name}: a row of {layers}")
    for cut, values in figures.items():
        print(cut.name, {aim.value: round(value, 3) for aim, value in values.items()})
    planner = Planner(found, asked(None), list(figures))
    for aim in (Aim.CHAT, Aim.THROUGHPUT):
        chosen = planner.best(aim)
        assert chosen is not None
        best = max(figures, key=lambda cut: figures[cut][aim])
        ratio = figures[chosen.cut][aim] / figures[best][aim]
        half = figures[Cut((0, 1), (LAYERS // 2, LAYERS // 2))][aim] / figures[best][aim]
        print(f"{aim}: chosen {chosen.cut.name}, best {best.name}: {ratio:.3f} of it; equal parts: {half:.3f}")


if __name__ == "__main__":
    main()
