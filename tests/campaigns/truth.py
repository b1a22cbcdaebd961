"""Plans against the truth: every cut of a small model measured live on emulated accelerators, and what a plan chose.

    python -m tests.campaigns truth --ratios 1:1,1:2,1:4 --hops 0.1,3
    python -m tests.campaigns truth --ratios 1:1:3,1:2:4 --hops 0.1 --best 10 --random 10
    python -m tests.campaigns truth --ratios 1:2 --hops 1 --slower 5 --trials 1 --tokens 100     # on a busy machine
    python -m tests.campaigns truth --ratios "" --sums 20,100,500,2000 --slower 10               # two as one stage

A model of 12 layers stands in for a large one: it is really computed, by a coordinator and workers in processes of
their own, in the times of accelerators whose costs are known for each layer; the worker's are so many times as slow as
its ratio says. What hosts and hops take here is measured first, as for a plan. Beside the best measured cut stands what
a plan chose (what memory forces is in ``tests/placement``). Wrong is a plan below ``--least`` of the best. Where too
many steps of an accelerator were late the figures mean nothing, and this is wrong, too: nothing else may run on the
machine. Without ``--minutes`` all cuts are measured; with them, what the plans choose and as many others as there is
time for.

With ``--sums`` two equal machines are a pipeline, and then one stage whose sums take so many microseconds, and so many
times as long if all is ``--slower``. Wrong is a figure that is not within 5 % of the plan's, or another way that is
clearly faster than the one that the plan says is.
"""

import argparse
import json
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from scripts.comparing import machine as this_machine
from scripts.random_model import Shape as ModelShape
from scripts.random_model import make
from splitinfer.bench.parts import made_up
from splitinfer.bench.systems import together, whole
from splitinfer.core.layout import LOCAL, StageSpec
from splitinfer.core.sequence import SamplingParams
from splitinfer.core.speculation.flight import OFF, Flight
from splitinfer.engine.fleet.local_workers import LocalWorker
from splitinfer.engine.profiling.measure import Question
from splitinfer.engine.profiling.survey import Surveyor
from splitinfer.keyring import Keyring
from splitinfer.llm import LLM, Settings
from splitinfer.machine.costs import Costs
from splitinfer.machine.profile import DraftProfile, LayerProfile, LinkProfile, MachineProfile, ModelProfile, Profiles
from splitinfer.machine.selection import VARIABLE
from splitinfer.models.folder.checkpoint import open_folder
from splitinfer.placement.asked import Aim, Asked
from splitinfer.placement.cuts import Cut, on_grid
from splitinfer.placement.pairs import with_sums
from splitinfer.placement.plan import Planner
from tests.emulation.late_steps import MOST_LATE, LateSteps, counted
from tests.emulation.links import LinkProfile as EmulatedLink
from tests.emulation.links import installed
from tests.emulation.machine import EachLayer, Machine
from tests.emulation.replay import Replay
from tests.sim.pipelines import pipeline_of

from .report import Report

MINUTES = math.inf  # without the option
LAYERS, VOCAB = 12, 512
ACCEPTANCE, STREAMS, PROMPT, ANSWER = 0.7, 8, 512, 128
LAYER_MS = {1: 0.6, 8: 0.68, 16: 1.0, 32: 1.8, 128: 7.0, 512: 27.5}
KV_PER_TOKEN = 256  # bytes of the stand-in's layer
FREE = 4 * 10**9
LOOPBACK = 0.0001  # seconds of a hop between processes of this machine
MOST_CONTEXT = 10**8  # tokens: memory is the bound


def profiles(ratio: Sequence[float], hop: float, slower: float = 1.0) -> Profiles:
    """Machines that are so many times as slow as the ratio says, with hops of ``hop`` seconds. ``slower``: all of them
    take so many times as long."""
    coordinator = MachineProfile(
        "m0",
        {"layer": Costs.through({rows: ms / 1000 for rows, ms in LAYER_MS.items()})},
        step=0.001,
        draft=0.001,
        draft_more=0.00002,
        launches_ahead=True,
        free_bytes=FREE,
    ).slower(slower)
    machines = [
        replace(
            coordinator.slower(times), name=f"m{i}", address="tcp://127.0.0.1:1" if i else None, free_bytes=FREE,
            draft=coordinator.draft, draft_more=coordinator.draft_more,
        )
        for i, times in enumerate(ratio)
    ]  # fmt: skip
    names = [machine.name for machine in machines]
    links = tuple(LinkProfile(a, b, hop) for a in names for b in names if a != b)
    model = ModelProfile(
        "stand-in", (LayerProfile("layer", 50_000, KV_PER_TOKEN),) * LAYERS, hidden_row=128,
        context_length=MOST_CONTEXT, draft=DraftProfile("replay"),
    )  # fmt: skip
    return Profiles(model, tuple(machines), links)


def asked(acceptance: float | None) -> Asked:
    """What both the plan and the measurement are for."""
    return Asked(streams=STREAMS, prompt=PROMPT, answer=ANSWER, acceptance=acceptance, uses_all=True, token_budget=512)


@dataclass(frozen=True, slots=True)
class Effort:
    """``trials`` of each cut; ``tokens`` of an answer alone, of which streams side by side get a quarter each. Whether
    drafts are measured, too."""

    trials: int
    tokens: int
    drafts: bool = True


# -- measuring ---------------------------------------------------------------------------------


Lines = dict[Cut, dict[str, Any]]  # what was measured of each cut of a rig


@dataclass(frozen=True, slots=True)
class Rig:
    """Machines with their names for a report. ``hop``: seconds, as they are emulated."""

    name: str
    profiles: Profiles
    hop: float


def measure(report: Report, given: argparse.Namespace, model: Path, rig: Rig) -> Lines:
    """A rig's cuts, as many as there is time for."""
    effort = Effort(given.trials, given.tokens)
    found: Lines = {}
    for cut in _to_measure(rig.profiles, given.best, given.random, report.chance(rig.name)):
        if len(found) > 1 and report.is_over:
            break
        found[cut] = _measured(rig.profiles, cut, model, rig.hop, effort)
        report.say(f"{rig.name}, {cut.machines} {cut.name}: { ({k: round(v, 4) for k, v in found[cut].items()}) }")
    return found


def _to_measure(rig: Profiles, best: int, at_random: int, chance: Random) -> list[Cut]:
    """What plans choose, then in any order: all cuts in the machines' order, or with ``best`` so many by each formula,
    in every order of machines, and some at random."""
    chosen: dict[Cut, None] = {}
    ranked: dict[Cut, None] = {}
    for acceptance in (None, ACCEPTANCE):
        planner = Planner(rig, asked(acceptance))
        for aim in (Aim.CHAT, Aim.THROUGHPUT):
            plan = planner.best(aim)
            chosen |= {plan.cut: None} if plan else {}
            ranked |= dict.fromkeys(sorted(planner.cuts, key=lambda c: planner.score(aim, c), reverse=True)[:best])
    if not best:
        every = list(on_grid([tuple(range(len(rig.machines)))], LAYERS))
        chosen, ranked = {cut: None for cut in chosen if cut in every}, dict.fromkeys(every)
    others = [cut for cut in Planner(rig, asked(None)).cuts if cut not in ranked and cut not in chosen] if best else []
    rest = [cut for cut in ranked if cut not in chosen] + chance.sample(others, min(at_random, len(others)))
    return [*chosen, *chance.sample(rest, len(rest))]


@dataclass(frozen=True, slots=True)
class Here:
    """What processes of this machine take, in seconds: hosts for a step, and ``hop`` from one to the other."""

    coordinator: float
    worker: float
    hop: float

    def of(self, rig: Profiles) -> Profiles:
        """The same machines on hosts and hops as they are here."""
        first, *others = rig.machines
        return replace(
            rig,
            machines=(replace(first, host=self.coordinator), *(replace(each, host=self.worker) for each in others)),
            links=tuple(replace(link, latency=self.hop + link.latency - LOOPBACK) for link in rig.links),
        )


def here(rig: Profiles, model: Path) -> Here:
    """Measure what hosts and hops take here on accelerators like the rig's first."""
    machines, links = surveyed(model, *[of_each_layer(rig)] * 2)
    return Here(machines[0].host, machines[1].host, links[0].latency)


def surveyed(model: Path, first: Machine, second: Machine) -> tuple[Sequence[MachineProfile], Sequence[LinkProfile]]:
    """Measure two emulated machines and their links as a plan does."""
    with ExitStack() as stack:
        stack.enter_context(emulated(second))
        worker = LocalWorker("m1")
        stack.callback(worker.kill)
        worker.address()  # it has its environment
        stack.enter_context(emulated(first))
        question, stages = Question(str(model), open_folder(model)), [StageSpec("m1", 1, 2, LOCAL)]
        own = Keyring().own
        return Surveyor(question, "m0", stages, own, 30, lambda *_: None, lambda _: worker, again=True).run()


@contextmanager
def emulated(machine: Machine) -> Iterator[None]:
    """Devices of this process and its children take the times of ``machine``."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "machine.json"
        file.write_text(json.dumps(machine.as_dict()), encoding="utf-8")
        os.environ[VARIABLE] = str(file)
        yield


def of_each_layer(rig: Profiles, sums: Costs | None = None) -> Machine:
    """The rig's first machine, whatever layers it has, or a half of them."""
    each = EachLayer(rig.machines[0].layers["layer"], rig.machines[0].step)
    return replace(pipeline_of(rig, Cut((0,), (LAYERS,))), each_layer=each, sum=sums or Costs())


def compare_ways(
    report: Report, given: argparse.Namespace, model: Path, rig: Profiles, microseconds: float
) -> dict[str, Any]:
    """A plan's figures for two equal machines as a pipeline and as one stage, and the same measured."""
    half = replace(rig.model, layers=(LayerProfile("layer", 25_000, KV_PER_TOKEN // 2, sums=2),) * LAYERS)
    first, second = rig.machines
    sums = Costs.line(microseconds * 1e-6 * given.slower, 0.0)
    rig = replace(rig, model=replace(rig.model, half=half), machines=(first, replace(second, address="tcp://m1:1")))
    planner = Planner(with_sums(rig, ("m0", "m1"), sums), asked(None))
    ways, effort = planner.ways(Aim.THROUGHPUT), Effort(given.trials, given.tokens, drafts=False)
    found = dict[str, Any]()
    for name, best in (("pipeline", ways.pipeline), ("one stage", ways.tensor_parallel)):
        line = _measured(planner.profiles, best.cut, model, LOOPBACK, effort, sums)
        figures = {"one": best.figures.one, "many": best.figures.many}
        found[name] = {"planned": figures, "measured": line}
        report.say(f"sums of {microseconds:g} us, {name}: { ({k: (v, line[k]) for k, v in figures.items()}) }")
        is_late = line["late"] > MOST_LATE * line["steps"]
        report.check(not is_late, f"sums of {microseconds:g} us, {name}: steps were late{MEANS_NOTHING}")
        for figure, value in figures.items():
            near = abs(line[figure] / value - 1) <= _NEAR
            report.check(is_late or near, f"sums of {microseconds:g} us, {name}, {figure}: {line[figure]:.4g}")
    return found


def _measured(
    rig: Profiles, cut: Cut, model: Path, hop: float, effort: Effort, sums: Costs | None = None
) -> dict[str, Any]:
    """A cut's figures on real processes."""
    machine = pipeline_of(rig, cut)
    stages: list[dict[str, Any]] = [
        {"name": f"stage{i}", "layers": count, **({"address": "local"} if i else {})}
        for i, count in enumerate(cut.layers)
    ]
    if rig.machines[cut.machines[0]].across:
        machine = of_each_layer(rig, sums)
        stages = [{"name": "both", "layers": LAYERS, "across": ["local", "local"]}]
    replay = Replay(VOCAB)
    settings = Settings(context=8192, prefix_cache=False, token_budget=512, rejoin_timeout=0.0, max_running=STREAMS)
    with ExitStack() as stack:
        stack.enter_context(emulated(machine))
        steps = stack.enter_context(counted())
        if hop > LOOPBACK:
            stack.enter_context(installed(EmulatedLink(latency=hop - LOOPBACK)))
        layout = {"model": str(model), "stages": stages}
        llm = stack.enter_context(LLM(layout, settings=settings, drafter=lambda: replay))
        this_machine.pin_stages(llm.layout.stages)
        live = Live(llm, replay, effort.tokens, steps)
        found = live.measured(effort.trials, OFF)
        if effort.drafts:
            found |= live.measured(effort.trials, None, "_with_drafts")
        return found


@dataclass(slots=True)
class Live:
    """A pipeline that is up, and what it is asked. ``tokens``: of an answer alone; ``steps``: of its accelerators
    so far."""

    llm: LLM
    replay: Replay
    tokens: int
    steps: Callable[[], LateSteps]

    def measured(self, trials: int, flight: Flight | None, suffix: str = "") -> dict[str, float]:
        """Medians of turns and of streams side by side, once the costs of steps are known. With drafts (``flight`` is
        ``None``) the answers without are what the drafter knows."""
        before = self.steps()
        self.many(self.prompts("warm", STREAMS, 16), flight, self.tokens // 4)
        if flight is None:
            self.turn(self._turn(0), None, self.tokens // 2)  # numbers of drafts are tried
        turns = [self.turn(self._turn(number), flight, self.tokens) for number in range(trials)]
        many = [self.many(self._streams(number), flight, self.tokens // 4) for number in range(trials)]
        counted_steps = self.steps().since(before)
        found = {
            "one": statistics.median(rate for _, rate in turns), "turn": statistics.median(took for took, _ in turns),
            "many": statistics.median(many), "steps": counted_steps.steps, "late": counted_steps.late,
        }  # fmt: skip
        return {f"{name}{suffix}": value for name, value in found.items()}

    def _turn(self, number: int) -> list[int]:
        return self.prompts(f"turn {number}", 1, PROMPT)[0]

    def _streams(self, number: int) -> list[list[int]]:
        return self.prompts(f"streams {number}", STREAMS, 16)

    def prompts(self, name: str, count: int, length: int) -> list[list[int]]:
        """So many prompts that have nothing in common with those of other names."""
        return [list(made_up(f"truth {name} {i}", length, VOCAB)) for i in range(count)]

    def turn(self, prompt: list[int], flight: Any, tokens: int) -> tuple[float, float]:
        """Seconds of a turn, and the rate of its answer behind the first quarter, as ``sim.pipelines`` has it."""
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        output = whole(self.llm.submit(prompt, params, flight=flight).result())
        self.replay.know(prompt, output.token_ids, error=1 - ACCEPTANCE)
        times = output.token_times
        begin = len(times) // 4
        rate = (len(times) - 1 - begin) / (times[-1] - times[begin])
        return times[0] + (ANSWER - 1) / rate, rate

    def many(self, prompts: Sequence[list[int]], flight: Any, tokens: int) -> float:
        """Tokens per second while all streams decode, behind the first quarter."""
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        runs = together([self.llm.submit(prompt, params, flight=flight) for prompt in prompts])
        for prompt, run in zip(prompts, runs, strict=True):
            self.replay.know(prompt, run.token_ids, error=1 - ACCEPTANCE)
        every = [run.token_times for run in runs]
        first, last = max(times[tokens // 4] for times in every), min(times[-1] for times in every)
        return sum(first < at <= last for times in every for at in times) / (last - first)


_NEAR = 0.05


def judge(report: Report, given: argparse.Namespace, rig: Rig, cuts: Lines) -> list[dict[str, Any]]:
    """What a plan chose beside the best measured cut, for each aim."""
    found = list[dict[str, Any]]()
    late = {suffix: _late(cuts, suffix) for suffix in ("", "_with_drafts")}
    for suffix, share in late.items():
        report.check(share <= MOST_LATE, f"{rig.name}{suffix}: {share:.2%} of steps late{MEANS_NOTHING}")
    for verdict in _verdicts(rig.profiles, cuts):
        suffix = verdict.pop("suffix")
        said = f"{rig.name}, {verdict['aim']}: {verdict['chosen']} gives {verdict['to_best']:.3f} of {verdict['best']}"
        report.say(said)
        found.append({"rig": rig.name, **verdict})
        report.check(late[suffix] > MOST_LATE or verdict["to_best"] >= given.least, said)
    return found


MEANS_NOTHING = ", so these figures mean nothing"


def _late(cuts: Lines, suffix: str) -> float:
    """The share of steps that were late."""
    counted = [line for line in cuts.values() if "steps" + suffix in line]
    steps = sum(line["steps" + suffix] for line in counted)
    return sum(line["late" + suffix] for line in counted) / steps if steps else 0.0


def _verdicts(rig: Profiles, cuts: Lines) -> Iterator[dict[str, Any]]:
    for acceptance, suffix in ((None, ""), (ACCEPTANCE, "_with_drafts")):
        if not all("many" + suffix in line for line in cuts.values()):
            continue
        planner = Planner(rig, asked(acceptance), tuple(cuts))
        for aim in (Aim.CHAT, Aim.THROUGHPUT):
            chosen = planner.best(aim)
            is_many = aim is Aim.THROUGHPUT
            values = {c: line["many" + suffix] if is_many else 1 / line["turn" + suffix] for c, line in cuts.items()}
            best = max(values, key=values.__getitem__)
            yield {
                "suffix": suffix, "aim": aim + suffix.replace("_", " "), "chosen": chosen.cut.name, "best": best.name,
                "to_best": values[chosen.cut] / values[best],
            }  # fmt: skip


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ratios", default="1:1,1:2,1:4", help="of the machines' times")
    parser.add_argument("--hops", default="0.1,3", help="milliseconds")
    parser.add_argument("--sums", default="", help="microseconds")
    parser.add_argument("--best", type=int, default=0, help="only so many by each formula, in any order of machines")
    parser.add_argument("--random", type=int, default=10, help="with --best, so many others")
    parser.add_argument("--trials", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=400, help="of an answer alone")
    parser.add_argument("--slower", type=float, default=1.0, help="factor on all times, for a busy machine")
    parser.add_argument("--least", type=float, default=0.97, help="of the best cut's figure, that a plan must give")


def campaign(report: Report, given: argparse.Namespace) -> None:
    verdicts, rigs = list[dict[str, Any]](), list[dict[str, Any]]()
    wanted = [(ratio, float(hop)) for ratio in given.ratios.split(",") if ratio for hop in given.hops.split(",")]
    sums = [float(each) for each in given.sums.split(",") if each]
    with tempfile.TemporaryDirectory(prefix="truth-") as folder:
        model = Path(folder) / "model"
        make(model, ModelShape(layers=LAYERS, hidden=32, heads=2, kv_heads=2, mlp=64, vocab=VOCAB), num_files=1)
        equal = profiles((1, 1), LOOPBACK, slower=given.slower)
        hosts = here(equal, model)
        for ratio, hop in wanted:
            report.begin(1 / (len(wanted) + len(sums)))
            times = [float(each) for each in ratio.split(":")]
            machines = hosts.of(profiles(times, hop / 1000, slower=given.slower))
            rig = Rig(f"{ratio} {hop:g} ms", machines, hop / 1000)
            cuts = measure(report, given, model, rig)
            verdicts += judge(report, given, rig, cuts)
            measured = [{"machines": cut.machines, "layers": cut.layers, **line} for cut, line in cuts.items()]
            rigs.append({"ratio": ratio, "hop_ms": hop, "slower": given.slower, "measured": measured})
        for microseconds in sums:
            report.begin(1 / (len(wanted) + len(sums)))
            rigs.append({"sums_us": microseconds, **compare_ways(report, given, model, hosts.of(equal), microseconds)})
    report.figures |= {
        "worst": min((v["to_best"] for v in verdicts), default=None), "verdicts": verdicts, "rigs": rigs,
        "means_nothing": any(MEANS_NOTHING in trouble for trouble in report.troubles),
    }  # fmt: skip
