"""Compares the cut in force with the best one, by what the pipeline's own steps have cost.

A stage's steps say what all of its layers cost together, the head among them. Each part is taken to cost in proportion
to the bytes of its weights: exactly so where all layers are alike and decoding reads weights, roughly elsewhere. Only
machines that have layers now can be compared; others have no steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from splitinfer.core.layout import Layout
from splitinfer.core.scheduler.cost_model import CostModel, StageCosts
from splitinfer.errors import RequestError
from splitinfer.machine.profile import LinkProfile, MachineProfile, ModelProfile, Profiles
from splitinfer.placement.asked import Aim, Asked
from splitinfer.placement.cuts import Cut
from splitinfer.placement.document import layout_of
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


def rebalance(profiles: Profiles, layout: Layout, asked: Asked, aim: Aim) -> Rebalance:
    """The best cut for an aim, compared with ``layout``, whose stages are the machines of ``profiles`` in their order.
    Pure.

    Raises:
        RequestError: no cut meets the aim.
    """
    now = Cut(tuple(range(layout.num_stages)), tuple(stage.num_layers for stage in layout.stages))
    planner = Planner(profiles, asked)
    plan = planner.plan([aim])
    if aim not in plan.best:
        raise RequestError(f"no cut of these machines fits for {aim}")
    best = plan.best[aim]
    gain = 1.0 if best.cut == now else planner.value(aim, best.cut) / planner.value(aim, now)
    if gain <= _WORTH:
        text = f"The cut in force, {name_in_words(plan, now)}, is the best for {aim} or within {_WORTH - 1:.0%} of it."
        return Rebalance(layout, 1.0, text)
    measure = "tokens a second of all streams" if aim is Aim.THROUGHPUT else "turns a second"
    text = (
        f"By what its own steps have cost, {name_in_words(plan, best.cut)} would give {gain:.2f} times the {measure} "
        f"of {name_in_words(plan, now)}. {' '.join(why(plan, best))}"
    )
    return Rebalance(replace(layout, stages=layout_of(plan, best, layout).stages), gain, text)


def profiles_of(
    model: ModelProfile, layout: Layout, costs: CostModel, ready: Sequence[Ready], draft: float
) -> Profiles:
    """Profiles of the machines of a running pipeline. ``ready``: what its stages have said; ``draft``: seconds of one.

    Raises:
        RequestError: a stage has had no step yet.
    """
    machines = []
    for i, (spec, own, said) in enumerate(zip(layout.stages, costs.stages, ready, strict=True)):
        if not own.num_seen:
            raise RequestError("no step has been computed yet, so nothing is known of the machines; ask for an answer")
        weights = model.weights(spec.start, spec.end)
        machines.append(
            MachineProfile(
                name=spec.name,
                layers={layer.kind: _part(own, layer.weights, weights) for layer in model.layers},
                address=spec.address,
                key=spec.key,
                embedding=StageCosts.line(0.0, 0.0),
                head=_part(own, model.head, weights),
                draft=draft if i == 0 else 0.0,
                free_bytes=said.free_bytes + said.weight_bytes,
                launches_ahead=said.device != "cpu",
                device_name=said.device,
            )
        )
    names = [spec.name for spec in layout.stages]
    links = tuple(LinkProfile(a, b, costs.hop) for a in names for b in names if a != b)
    return Profiles(model, tuple(machines), links)


def _part(stage: StageCosts, part: int, whole: int) -> StageCosts:
    return StageCosts.from_dict(stage.scaled(part / max(1, whole)).as_dict())
