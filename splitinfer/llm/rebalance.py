"""Compares the cut in force with the best one, by what the pipeline's own steps have cost.

Where the machines were measured before (a layout that was planned), a stage's steps say how many times as long its
machine takes as it was measured to take, whatever the reason, and all of its costs are multiplied by that; machines
without layers and links stay as they were measured. Elsewhere a stage's steps say what all of its layers cost together,
and each part is taken to cost in proportion to the bytes of its weights: exactly so where all layers are alike and
decoding reads weights. Then only machines that have layers are compared. What two machines that are one stage take
longer than both were measured to, is the time of their sums.

Advice that was followed is judged by what the same steps cost before and after it (``Followed``).
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from splitinfer.core.costs.model import CostModel
from splitinfer.core.costs.shape import Shape
from splitinfer.core.costs.stage import StageCosts
from splitinfer.core.layout import Layout, StageSpec
from splitinfer.engine.loop.engine import Engine
from splitinfer.engine.profiling.load import LoadWatch
from splitinfer.errors import RequestError
from splitinfer.llm.automatic import ACCEPTANCE, profile_of
from splitinfer.machine.costs import Costs
from splitinfer.machine.profile import DraftProfile, LinkProfile, MachineProfile, ModelProfile, Profiles, Trials
from splitinfer.models.folder.checkpoint import Checkpoint
from splitinfer.placement.asked import Aim, Asked
from splitinfer.placement.bounds import BEYOND, doubts, impossible
from splitinfer.placement.comparison import Comparison, beside
from splitinfer.placement.cuts import Cut
from splitinfer.placement.document import layout_of, name_in_words, why
from splitinfer.placement.formulas import costs_of
from splitinfer.placement.pairs import with_pairs, with_sums
from splitinfer.placement.plan import Planner, plan
from splitinfer.settings import Settings
from splitinfer.wire.messages import Ready

_ENOUGH = 100  # drafts from which their share that was right is taken
_STEPS = 16  # of each stage, with fewer of which nothing is told
_WORTH = 1.1  # times as good: what is less may be an error of the costs
TAKEN_BACK = 0.9  # times as fast: a cut that is slower is not kept
_NOTABLE = 1.2  # times as long as measured, or as short
_WRONG = 1.5  # the same, so that other figures from then are doubted, too
_LOOK = 0.3  # seconds in which other programs are watched
_ROWS, _POSITIONS = (1, 2, 4, 8, 16, 32, 128, 512), 256  # by which learned costs are told


@dataclass(frozen=True, slots=True)
class Rebalance:
    """The best cut beside the one in force. ``gain``: how many times as good it would be for the aim; ``text``: all of
    it in one paragraph. ``beside``: the best one beside the first machine alone."""

    layout: Layout
    gain: float
    text: str
    beside: Comparison | None = None

    @property
    def is_worth_it(self) -> bool:
        """Whether the gain is more than the costs may be wrong by."""
        return self.gain > _WORTH


@dataclass(frozen=True, slots=True)
class LiveFigures:
    """What a running pipeline's machines do, and its layout. ``times``: how many times as long each takes as it was
    measured to take, by its name; empty where nothing was measured before."""

    profiles: Profiles
    layout: Layout
    asked: Asked
    times: Mapping[str, float] = field(default_factory=dict)


def rebalance(live: LiveFigures, aim: Aim) -> Rebalance:
    """Return the best cut for an aim, compared with the one in force; on one machine, what a second one would bring.

    Raises:
        RequestError: no cut meets the aim.
    """
    layout, machines = live.layout, live.profiles.machines
    notable = list(_notable(live))
    if len(machines) == 1 and layout.has_own_stage:
        shown = beside(plan(live.profiles, live.asked, [aim]), aim)
        return Rebalance(layout, 1.0, " ".join([shown.sentence, *notable]), shown)
    planner = Planner(live.profiles, live.asked)
    places = {machine.name: i for i, machine in enumerate(planner.profiles.machines)}
    now = Cut(tuple(places[stage.name] for stage in layout.stages), tuple(stage.num_layers for stage in layout.stages))
    found = planner.plan([aim])
    if aim not in found.best:
        raise RequestError(f"no cut of these machines fits for {aim}")
    best, shown = found.best[aim], beside(found, aim, now)
    gain = 1.0 if best.cut == now else planner.score(aim, best.cut) / planner.score(aim, now)
    named = best.cut.machines != now.machines
    current, better = (
        name_in_words(planner.profiles, cut) if named else " + ".join(map(str, cut.layers)) for cut in (now, best.cut)
    )
    doubted = list(doubts(planner.profiles))
    wrong = next(filter(None, (impossible(planner.formulas, cut) for cut in (now, best.cut))), "")
    if wrong or not all(machine.trials.tell for machine in planner.profiles.machines):
        advice = f"No cut is advised: {wrong}." if wrong else "No cut is advised."
        return Rebalance(layout, 1.0, " ".join([advice, *doubted, *notable]), shown)
    if gain <= _WORTH:
        text = f"The current {current} is the best cut for {aim}, or within {_WORTH - 1:.0%} of it."
        return Rebalance(layout, 1.0, " ".join([text, *doubted, *notable]), shown)
    text = f"From measurements so far, {better} would be {gain:.2f} times as fast as the current {current}."
    stages = layout_of(found, best, layout).stages
    sentences = [text, *why(found, best), *doubted, *notable]
    return Rebalance(replace(layout, stages=stages), gain, " ".join(sentences), shown)


def _notable(live: LiveFigures) -> Iterator[str]:
    for name, times in live.times.items():
        if not 1 / _NOTABLE < times < _NOTABLE:
            again = "; --measure measures it again" if not 1 / _WRONG < times < _WRONG else ""
            yield f"{name} takes {times:.2g} times as long as it was measured to take{again}."


# -- advice that was followed ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Followed:
    """Advice that was followed. ``before``: the layout that it replaced; ``seconds``: what a step cost there, by its
    rows, each of which attended to ``positions``."""

    before: Layout
    aim: Aim
    seconds: Mapping[int, float]
    positions: int

    @classmethod
    def now(cls, layout: Layout, aim: Aim, costs: CostModel) -> "Followed":
        """Return the advice that will replace ``layout``, whose steps have the ``costs``."""
        positions = min(stage.most_decode for stage in costs.stages) // 2
        return cls(layout, aim, _steps(costs, aim, positions), positions)

    def gain(self, costs: CostModel) -> float | None:
        """Return how many times as fast the same steps are by the ``costs`` of the new cut. Return None if it has had
        too few of them."""
        after = _steps(costs, self.aim, self.positions)
        each = [self.seconds[rows] / after[rows] for rows in self.seconds.keys() & after.keys()]
        return median(each) if each else None


def _steps(costs: CostModel, aim: Aim, positions: int) -> dict[int, float]:
    """Return the seconds of steps by their rows: through all stages for a chat, on the slowest one for throughput.
    Nothing if a stage has had too few."""
    if min(stage.num_seen for stage in costs.stages) < _STEPS:
        return {}
    found, hops = dict[int, float](), costs.hop * len(costs.stages) * (len(costs.stages) > 1)
    for rows in set[int].intersection(*(set(stage.sizes) for stage in costs.stages)):
        each = [stage.at(Shape(rows, rows * positions)) for stage in costs.stages]
        found[rows] = max(each) if aim is Aim.THROUGHPUT else sum(each) + hops
    return found


# -- what steps have cost --------------------------------------------------------------------------


def live_figures(
    engine: Engine, checkpoint: Checkpoint, layout: Layout, settings: Settings, measured: Profiles | None
) -> LiveFigures:
    """Return what the cut in force and its machines do. ``measured``: what the machines were measured to do before, if
    so.

    Raises:
        RequestError: too few steps have been computed yet.
    """
    scheduler, watch = engine.scheduler, LoadWatch()
    time.sleep(_LOOK)
    load = watch.load()
    model, _ = engine.carry_out(lambda: profile_of(layout, checkpoint))
    speculation, draft, acceptance = scheduler.speculation, 0.0, None
    if speculation is not None and layout.draft is not None:
        draft = scheduler.costs.drafting(1)
        model = model if model.draft is not None else replace(model, draft=DraftProfile(layout.draft))
        tried, right = sum(speculation.counts.tried_at), sum(speculation.counts.accepted_at)
        acceptance = right / tried if tried >= _ENOUGH else ACCEPTANCE
    asked = Asked(
        context=settings.context_of(model.context_length),
        acceptance=acceptance,
        token_budget=scheduler.config.token_budget,
    )
    found = figures_of(model, layout, scheduler.costs, engine.pipeline.ready, asked, measured, draft)
    here = found.profiles.machines[0]
    machines = (replace(here, trials=replace(here.trials, load=load)), *found.profiles.machines[1:])
    return replace(found, profiles=replace(found.profiles, machines=machines))


def figures_of(
    model: ModelProfile,
    layout: Layout,
    costs: CostModel,
    ready: Sequence[Ready],
    asked: Asked,
    measured: Profiles | None,
    draft: float = 0.0,
) -> LiveFigures:
    """Return the figures of a running pipeline. ``costs``: what its steps have cost; ``ready``: what its stages said
    when they were loaded; ``measured``: what machines were measured to do before, if so; ``draft``: seconds of a draft,
    0 if unknown.

    Raises:
        RequestError: a stage has had too few steps yet.
    """
    if (seen := min(stage.num_seen for stage in costs.stages)) < _STEPS:
        raise RequestError(
            f"{seen} steps have been computed yet, and it takes {_STEPS} to know the machines; ask for a longer answer"
        )
    every = {machine.name: machine for machine in with_pairs(measured).machines} if measured is not None else {}
    stages = list(zip(layout.stages, costs.stages, ready, strict=True))
    if measured is None or not {spec.name for spec in layout.stages} <= set(every):
        machines = [_by_its_bytes(model, *stage) for stage in stages]
        # What hosts take is counted twice of the coordinator, which plans, too.
        machines[0] = replace(machines[0], host=costs.host / 2, draft=draft)
        names = [machine.name for machine in machines]
        links = tuple(LinkProfile(a, b, costs.hop) for a in names for b in names if a != b)
        asked = _within(asked, costs)
        return LiveFigures(Profiles(model, tuple(machines), links), layout, asked)
    times, known = dict[str, float](), {machine.name: machine for machine in measured.machines}
    for spec, own, said in stages:
        if across := every[spec.name].across:
            measured = with_sums(measured, across, _sums_of(measured, across, spec, own))
            known |= {name: _corrected(known[name], 1.0, said) for name in across}
            continue
        expected = costs_of(measured.model, known[spec.name], spec.start, spec.end)
        times[spec.name] = _relative(own, expected)
        known[spec.name] = _corrected(known[spec.name], times[spec.name], said)
    first, *others = known.values()
    drafter = model.draft if None in (model.draft, measured.model.draft) else measured.model.draft
    profiles = replace(
        measured,
        model=replace(measured.model, draft=drafter),
        machines=(replace(first, draft=draft or first.draft), *others),
    )
    return LiveFigures(profiles, layout, asked, times)


def _sums_of(measured: Profiles, across: tuple[str, ...], spec: StageSpec, own: StageCosts) -> Costs:
    """Return the seconds of a sum by rows: what the steps of two machines take longer than their halves of the
    layers."""
    silent = with_pairs(with_sums(measured, across, Costs()))
    pair = next(machine for machine in silent.machines if machine.across == across)
    halves = costs_of(silent.model, pair, spec.start, spec.end)
    count = sum(layer.sums for layer in silent.model.half.layers[spec.start : spec.end]) if silent.model.half else 1
    seconds, most = dict[int, float](), 0.0
    for rows in sorted(own.sizes or [1]):
        seconds[rows] = most = max(most, (own.at(Shape(rows)) - halves.rows(rows)) / max(1, count))
    return Costs.through(seconds)


def _corrected(machine: MachineProfile, times: float, said: Ready) -> MachineProfile:
    """Return the machine with all steps ``times`` as long. Drafts are not part of a stage's steps."""
    free = said.free_bytes + said.weight_bytes
    return replace(machine.slower(times), free_bytes=free, draft=machine.draft, draft_more=machine.draft_more)


def _relative(own: StageCosts, measured: Costs) -> float:
    """Return the ratio of a stage's actual step times to the measured ones, by the numbers of rows in its steps."""
    pairs = [(own.at(Shape(rows)), measured.rows(rows)) for rows in own.sizes or [1]]
    return median(a / b if a > 0 and b > 0 else 1.0 for a, b in pairs)


def _as_measured(own: StageCosts) -> Costs:
    """Return what a stage's steps have cost, as machines are measured: by rows, and for what single rows attend to. How
    a few steps over a few positions differ says nothing of what thousands cost."""
    says_nothing = own.most_decode < _POSITIONS
    seen = sorted({min(rows, own.most_rows) for rows in _ROWS})
    attending = max(0.0, own.at(Shape(1, min(_POSITIONS, own.most_decode))) - own.at(Shape(1)))
    seconds, most = dict[int, float](), 0.0
    for rows in seen:
        seconds[rows] = most = max(most, own.at(Shape(rows)) + says_nothing * attending)
    return Costs.through(seconds, 0.0 if says_nothing else attending / _POSITIONS)


def machine_of(spec: StageSpec, said: Ready, layers: Mapping[str, Costs], **more: Any) -> MachineProfile:
    """Return the machine of a stage, by what the stage said when it was loaded. ``layers``: its costs."""
    free, ahead = said.free_bytes + said.weight_bytes, said.device != "cpu"
    return MachineProfile(spec.name, layers, spec.address, spec.key, free_bytes=free, launches_ahead=ahead, **more)


def _by_its_bytes(model: ModelProfile, spec: StageSpec, learned: StageCosts, said: Ready) -> MachineProfile:
    """Return a stage's machine, each part of it by the bytes of its weights."""
    own = _as_measured(learned)
    whole = max(1, model.weights(spec.start, spec.end))
    layers = {layer.kind: own.scaled(layer.weights / whole) for layer in model.layers}
    trials = Trials(learned.spread, learned.spread, max(1, learned.most_decode, _read(learned)))
    return machine_of(spec, said, layers, head=own.scaled(model.head / whole), trials=trials)


def _read(own: StageCosts) -> int:
    """Return about how many positions the last row of the longest prompt attended to."""
    return max(own.most_chunk // max(1, own.most_rows), own.most_rows)


def _within(asked: Asked, costs: CostModel) -> Asked:
    """Return the demand, with prompts and chats limited to a multiple of those in the steps so far."""
    tokens = BEYOND * min(max(each.most_decode, _read(each)) for each in costs.stages)
    rows = BEYOND * min(each.most_rows for each in costs.stages)
    prompt, answer = min(asked.prompt, rows, tokens), min(asked.answer, tokens)
    return replace(asked, prompt=prompt, answer=answer, streams=min(asked.streams, rows))
