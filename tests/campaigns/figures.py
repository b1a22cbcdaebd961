"""Figures of plans against what the library then does, and advice against the truth, quiet and under made-up load.

    python -m tests.campaigns figures --runs 10 --advice 0          # on a quiet machine: `plan --model demo --measure`
    python -m tests.campaigns figures --runs 0 --advice 25          # on emulated machines, equal and unequal
    python -m tests.campaigns figures --runs 0 --advice 2 --slower 10     # on a busy machine

*Runs*: `splitinfer plan --measure` in a process of its own, so many times. What the library then does is measured in
front of them and behind them; if these two differ, the machine was not quiet, which is said. Wrong is a figure that is
not within ``--near`` of the library's.

*Advice*: two emulated machines whose costs are known are measured as for `init` and `plan`, and a pipeline over them
is asked for `/plan` after an answer. The half of it is under load: processes that compute and rest by turns. Wrong is
advice more than 1.1 times worse than the best cut by the known costs: quiet always, under load where nothing warns; and
a figure that is shown and off by more than 1.5.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import psutil

from scripts.random_model import Shape as ModelShape
from scripts.random_model import make
from splitinfer.bench.parts import made_up
from splitinfer.core.layout import LOCAL
from splitinfer.core.sequence import SamplingParams
from splitinfer.llm import LLM, Settings
from splitinfer.machine.profile import Profiles
from splitinfer.models.folder.hub import open_model
from splitinfer.placement.asked import Aim, Asked
from splitinfer.placement.bounds import assumed, doubts, why_not
from splitinfer.placement.cuts import Cut
from splitinfer.placement.formulas import Formulas
from splitinfer.placement.plan import Planner
from tests.sim.pipelines import pipeline_of

from .report import Report
from .truth import LAYERS, LOOPBACK, VOCAB, emulated, of_each_layer, profiles, surveyed

PROMPT, ANSWER, STREAMS, LONG = 256, 128, 8, 4000
_OFF, _WORSE = 1.5, 1.1
_QUIET = 1.15  # times as long: what the library does in front of the runs and behind them
_PLAIN = Asked(context=4096, streams=STREAMS, prompt=PROMPT, answer=ANSWER)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=10, help="of `plan --measure` on this machine")
    parser.add_argument("--advice", type=int, default=5, help="rounds of advice, each four times")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--near", type=float, default=1.3, help="times as much or as little, at most")
    parser.add_argument("--slower", type=float, default=3.0, help="factor on the emulated machines' times")


def campaign(report: Report, given: argparse.Namespace) -> None:
    if given.runs:
        _on_this_machine(report, given)
    with tempfile.TemporaryDirectory(prefix="figures-") as folder:
        model = Path(folder) / "model"
        make(model, ModelShape(layers=LAYERS, hidden=32, heads=2, kv_heads=2, mlp=64, vocab=VOCAB), num_files=1)
        counts = report.figures.setdefault("advice", {})
        for number in range(given.advice):
            for ratio in ((1.0, 1.0), (1.0, 2.0)):
                for is_loaded in (False, True):
                    with _load(report.chance(number, ratio)) if is_loaded else ExitStack():
                        for said in (_planned(model, ratio, given.slower), _live(model, ratio, given.slower)):
                            name = f"{'load' if is_loaded else 'quiet'}, {said.pop('what')}, {ratio}"
                            report.say(f"{name}: {said}")
                            is_wrong = said["worse"] > _WORSE or said["off"] > _OFF
                            report.check(not is_wrong or (is_loaded and said["warned"]), f"{name}: {said}")
                            found = counts.setdefault(name, {"of": 0, "warned": 0, "worst": 0.0, "most_off": 0.0})
                            found["of"] += 1
                            found["warned"] += bool(said["warned"])
                            found["worst"] = max(found["worst"], said["worse"])
                            found["most_off"] = max(found["most_off"], said["off"])


# -- this machine ----------------------------------------------------------------------------------


def _on_this_machine(report: Report, given: argparse.Namespace) -> None:
    before, planned = _library(given.model), list[dict[str, Any]]()
    command = [sys.executable, "-m", "splitinfer", "plan", "--model", given.model, "--workers", "", "--measure"]
    command += ["--json", "--prompt-tokens", str(PROMPT), "--answer-tokens", str(ANSWER)]
    for number in range(given.runs):
        began = time.monotonic()
        said = json.loads(subprocess.run(command, capture_output=True, check=True).stdout.splitlines()[-1])
        figures = said["best"]["chat"]["figures"]
        planned.append({"seconds": time.monotonic() - began, "doubts": said["doubts"], "figures": figures})
        report.say(f"run {number + 1}: {planned[-1]}")
    after = _library(given.model)
    report.figures |= {"library": [before, after], "planned": planned}
    report.say(f"the library: {before}, {after}")
    for name, value in before.items():
        apart = max(value, after[name]) / min(value, after[name])
        report.check(apart < _QUIET, f"{name}: the machine was not quiet: {value:.4g} before, {after[name]:.4g} after")
        for number, run in enumerate(planned, 1):
            figure = run["figures"][name]
            truth = (value + after[name]) / 2
            is_near = figure is not None and 1 / given.near <= figure / truth <= given.near
            report.check(is_near, f"run {number}, {name}: {figure}, the library {truth:.4g}; {run['doubts']}")


def _library(model: str) -> dict[str, float]:
    """Return what the library does with a model on this machine, under the names that a plan's figures have."""
    layers = int(open_model(model).config["num_hidden_layers"])
    layout = {"model": model, "stages": [{"name": "here", "layers": layers}]}
    with LLM(layout, settings=Settings(context=4096, prefix_cache=False, max_running=STREAMS)) as llm:

        def times(name: str, count: int, prompt: int, answer: int) -> list[tuple[float, ...]]:
            params = SamplingParams(max_tokens=answer, ignore_eos=True, temperature=0.7)
            every = [llm.submit(list(made_up(f"{name} {i}", prompt, 400)), params) for i in range(count)]
            return [tuple(each.result().token_times) for each in every]

        times("warm", STREAMS, 32, 16)
        turns = [times(f"turn {i}", 1, PROMPT, ANSWER)[0] for i in range(7)]
        several = times("several", STREAMS, PROMPT, ANSWER)
        begin, end = max(each[0] for each in several), min(each[-1] for each in several)
        (long,) = times("long", 1, LONG, 2)
        return {
            "one": median((len(each) - 1) / (each[-1] - each[0]) for each in turns),
            "turn": median(each[-1] for each in turns),
            "many": sum(begin < at <= end for each in several for at in each) / (end - begin),
            "ttft": long[0] * 4096 / LONG,
        }


# -- emulated machines -----------------------------------------------------------------------------


@contextmanager
def _load(chance: Random) -> Iterator[None]:
    """Have twice as many processes as there are processors compute and rest by turns."""
    count = 2 * (psutil.cpu_count() or 1)
    ends, every = threading.Event(), [psutil.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]

    def turns() -> None:
        while not ends.wait(chance.uniform(0.2, 2.0)):
            for each in every:
                each.resume() if chance.random() < 0.6 else each.suspend()

    thread = threading.Thread(target=turns)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()
        for each in every:
            each.kill()
            each.wait()


def _planned(model: Path, ratio: tuple[float, float], slower: float) -> dict[str, Any]:
    """Measure both machines as `init` and `plan` do, and compare the plan with the known costs."""
    truth = profiles(ratio, LOOPBACK, slower)
    machines, links = surveyed(model, of_each_layer(truth), of_each_layer(profiles(ratio[1:], LOOPBACK, slower)))
    model_profile = replace(truth.model, draft=None)
    apart = [
        replace(each, layers={"layer": next(iter(each.layers.values()))}, address=address)
        for each, address in zip(machines, (None, "tcp://m1:1"), strict=True)
    ]
    return _judged("plan", Profiles(model_profile, apart, links), replace(truth, model=model_profile))


def _live(model: Path, ratio: tuple[float, float], slower: float) -> dict[str, Any]:
    """Ask a pipeline of two halves for `/plan` after an answer."""
    truth, halves = profiles(ratio, LOOPBACK, slower), Cut((0, 1), (LAYERS // 2, LAYERS // 2))
    stages: list[dict[str, Any]] = [{"name": f"m{i}", "layers": n} for i, n in enumerate(halves.layers)]
    stages[1]["address"] = LOCAL
    settings = Settings(context=4096, prefix_cache=False, token_budget=512, rejoin_timeout=0.0)
    with emulated(pipeline_of(truth, halves)), LLM({"model": str(model), "stages": stages}, settings=settings) as llm:
        for i in range(2):
            prompt = list(made_up(f"live {i}", PROMPT, VOCAB))
            llm.submit(prompt, SamplingParams(max_tokens=ANSWER, ignore_eos=True)).result()
        found = llm.plan(Aim.CHAT)
    planner = Planner(replace(truth, model=replace(truth.model, draft=None)), _PLAIN)
    stages_then = found.layout.stages
    advised = Cut(tuple(int(each.name[1:]) for each in stages_then), tuple(each.num_layers for each in stages_then))
    worse = planner.score(Aim.CHAT, halves) / planner.score(Aim.CHAT, advised) if found.is_worth_it else 1.0
    return {"what": "/plan", "worse": worse, "off": 1.0, "warned": "--measure" in found.text, "cut": advised.name}


def _judged(what: str, measured: Profiles, truth: Profiles) -> dict[str, Any]:
    """Compare a plan with the best cut by the known costs, and its figures with theirs."""
    planner, warned, worse = Planner(truth, _PLAIN), list(doubts(measured)), 1.0
    cuts = list[str]()
    for aim in (Aim.CHAT, Aim.THROUGHPUT):
        chosen, best = Planner(assumed(measured), _PLAIN).best(aim), planner.best(aim)
        worse = max(worse, planner.score(aim, best.cut) / planner.score(aim, chosen.cut))
        cuts.append(chosen.cut.name)
    off, alone = 1.0, Cut((0,), (LAYERS,))
    ours, theirs = Formulas(measured, _PLAIN), Formulas(truth, _PLAIN)
    for reads, figure in ((False, lambda f: f.one(alone, None)), (True, lambda f: f.prompt(alone, 4096))):
        if not why_not(measured.machines[:1], 128, 4096 if reads else 1, reads=reads):
            times = figure(ours) / figure(theirs)
            off = max(off, times, 1 / times)
    return {"what": what, "worse": worse, "off": off, "warned": warned, "cut": cuts}
