"""Compares the cut in force with the best one, by what the pipeline's own steps have cost.

Where the machines were measured before (a layout that was planned), the steps correct those profiles, and machines
without layers are compared, too (``placement.corrected``). Elsewhere a stage's steps say what all of its layers cost
together, the head among them; each part is taken to cost in proportion to the bytes of its weights: exactly so where
all layers are alike and decoding reads weights, roughly elsewhere. Then only machines that have layers are compared.

Pure: ``LiveFigures`` are taken from the running pipeline, and may be compared in another process.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from splitinfer.config import Layout as FileLayout
from splitinfer.core.layout import Layout
from splitinfer.core.scheduler.cost_model import CostModel, StageCosts
from splitinfer.errors import RequestError
from splitinfer.machine.profile import LinkProfile, MachineProfile, ModelProfile, Profiles
from splitinfer.placement.asked import Aim, Asked
from splitinfer.placement.corrected import corrected, times_in_words
from splitinfer.placement.cuts import Cut
from splitinfer.placement.document import as_mapping, layout_of
from splitinfer.placement.plan import Planner
from splitinfer.placement.words import name_in_words, why
from splitinfer.wire.messages import Ready

_WORTH = 1.03  # times as good: what is less may be an error of the costs


@dataclass(frozen=True, slots=True)
class Rebalance:
    """The best cut beside the one in force. ``gain``: how many times as good it would be for the aim; ``text``: all of
    it in one paragraph."""

    layout: Layout
    gain: float
    text: str

    @property
    def is_worth_it(self) -> bool:
        """Whether the gain is more than the costs may be wrong by."""
        return self.gain > _WORTH


@dataclass(frozen=True, slots=True)
class LiveFigures:
    """What a running pipeline's machines do, and its layout. ``times``: how many times as long each takes as it was
    measured to take, by its name; of none where nothing was measured before."""

    profiles: Profiles
    layout: Layout
    asked: Asked
    times: Mapping[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The figures as plain numbers and text, for ``from_dict``."""
        layout = {"name": self.layout.name, "layout": as_mapping(self.layout)}
        return {**layout, "profiles": self.profiles.as_dict(), "asked": asdict(self.asked), "times": dict(self.times)}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Self:
        """The figures that ``as_dict`` returned.

        Raises:
            ValueError, TypeError, KeyError, LayoutError: they are none.
        """
        layout = FileLayout.from_dict(found["layout"], found["name"])
        return cls(Profiles.from_dict(found["profiles"]), layout, Asked(**found["asked"]), dict(found["times"]))


@dataclass(frozen=True, slots=True)
class Running:
    """A running pipeline. ``costs``: what its steps have cost; ``ready``: what its stages said when they were loaded;
    ``draft``: seconds of a draft."""

    layout: Layout
    costs: CostModel
    ready: Sequence[Ready]
    draft: float = 0.0


def rebalance(live: LiveFigures, aim: Aim) -> Rebalance:
    """The best cut for an aim, compared with the one in force.

    Raises:
        RequestError: no cut meets the aim.
    """
    layout, places = live.layout, {machine.name: i for i, machine in enumerate(live.profiles.machines)}
    now = Cut(tuple(places[stage.name] for stage in layout.stages), tuple(stage.num_layers for stage in layout.stages))
    planner = Planner(live.profiles, live.asked)
    plan = planner.plan([aim])
    if aim not in plan.best:
        raise RequestError(f"no cut of these machines fits for {aim}")
    best = plan.best[aim]
    gain = 1.0 if best.cut == now else planner.value(aim, best.cut) / planner.value(aim, now)
    notable = times_in_words(live.times)
    if gain <= _WORTH:
        text = f"The cut in force, {name_in_words(plan, now)}, is the best for {aim} or within {_WORTH - 1:.0%} of it."
        return Rebalance(layout, 1.0, " ".join([text, *notable]))
    measure = "tokens a second of all streams" if aim is Aim.THROUGHPUT else "turns a second"
    text = (
        f"By what its own steps have cost, {name_in_words(plan, best.cut)} would give {gain:.2f} times the {measure} "
        f"of {name_in_words(plan, now)}."
    )
    stages = layout_of(plan, best, layout).stages
    return Rebalance(replace(layout, stages=stages), gain, " ".join([text, *why(plan, best), *notable]))


def figures_of(model: ModelProfile, running: Running, asked: Asked, measured: Profiles | None) -> LiveFigures:
    """The figures of a running pipeline. ``measured``: what machines were measured to do before, if so.

    Raises:
        RequestError: a stage has had no step yet.
    """
    layout = running.layout
    if not all(costs.num_seen for costs in running.costs.stages):
        raise RequestError("no step has been computed yet, so nothing is known of the machines; ask for an answer")
    names = {machine.name for machine in measured.machines} if measured is not None else set[str]()
    if measured is None or not {spec.name for spec in layout.stages} <= names:
        return LiveFigures(_by_bytes(model, running), layout, asked)
    draft = model.draft if None in (model.draft, measured.model.draft) else measured.model.draft
    measured = replace(measured, model=replace(measured.model, draft=draft))
    stages = zip(layout.stages, running.ready, strict=True)
    free = {spec.name: said.free_bytes + said.weight_bytes for spec, said in stages}
    found = corrected(measured, layout, running.costs, free)
    return LiveFigures(_with_draft(found.profiles, running.draft), layout, asked, found.times)


def _with_draft(profiles: Profiles, seconds: float) -> Profiles:
    """The same with what a draft takes by now, if that is known."""
    first, *others = profiles.machines
    return replace(profiles, machines=(replace(first, draft=seconds or first.draft), *others))


def _by_bytes(model: ModelProfile, running: Running) -> Profiles:
    """Profiles of the machines that have layers, by the bytes of these."""
    machines, layout = [], running.layout
    for i, (spec, own, said) in enumerate(zip(layout.stages, running.costs.stages, running.ready, strict=True)):
        weights = model.weights(spec.start, spec.end)
        machines.append(
            MachineProfile(
                name=spec.name,
                layers={layer.kind: _part(own, layer.weights, weights) for layer in model.layers},
                address=spec.address,
                key=spec.key,
                embedding=StageCosts.line(0.0, 0.0),
                head=_part(own, model.head, weights),
                draft=running.draft if i == 0 else 0.0,
                free_bytes=said.free_bytes + said.weight_bytes,
                launches_ahead=said.device != "cpu",
                device_name=said.device,
            )
        )
    names = [spec.name for spec in layout.stages]
    links = tuple(LinkProfile(a, b, running.costs.hop) for a in names for b in names if a != b)
    return Profiles(model, tuple(machines), links)


def _part(stage: StageCosts, part: int, whole: int) -> StageCosts:
    return StageCosts.from_dict(stage.scaled(part / max(1, whole)).as_dict())
