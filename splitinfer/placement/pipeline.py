"""A cut of profiled machines as a machine that can be simulated.

A stage's costs are those of its layers by kind, of the step itself, and of the embedding or the head where it has them.
Drafts and the coordinator's own time are those of the first machine. A simulated pipeline has devices of one kind: they
are taken to be like the coordinator's.

The head computes a prompt's chunk for one row, and answers and drafts for every row. The simulator's steps do not tell
which of their rows have logits, so rows beyond ``HEAD_ROWS`` cost the head nothing: steps of answers seldom have more,
and of a chunk it is little beside the layers.
"""

from splitinfer.core.costs.shape import Shape
from splitinfer.core.costs.stage import StageCosts
from splitinfer.machine.machine import Hop, Machine
from splitinfer.machine.profile import MachineProfile, ModelProfile, Profiles
from splitinfer.placement.cuts import Cut

HEAD_ROWS = 64
_SEVERAL = 8  # sequences in a round of drafts
_UNKNOWN_LATENCY, _UNKNOWN_BANDWIDTH = 0.001, 100e6  # of a link that nobody measured, where no other was either


def pipeline_of(profiles: Profiles, cut: Cut) -> Machine:
    stages = list(cut.stages())
    first, (draft, more) = profiles.machines[0], drafting(profiles, cut.machines[-1])
    return Machine(
        stages=tuple(costs_of(profiles.model, profiles.machines[m], start, end) for m, start, end in stages),
        hops=tuple(hop_of(profiles, a, b) for a, b in hop_ends(cut)),
        layers=cut.layers,
        host=first.host,
        draft=draft,
        launches_ahead=first.launches_ahead,
        buffers=tuple(max(1, round(profiles.machines[m].buffers * (end - start))) for m, start, end in stages),
        device=first.device,
        draft_buffers=first.draft_buffers,
        draft_more=more,
        drafts_at_end=at_end(profiles),
        drafts_at_once=at_once(profiles),
    )


def at_end(profiles: Profiles) -> bool:
    """Whether the last stage makes the drafts."""
    return profiles.model.draft is not None and profiles.model.draft.like is not None


def at_once(profiles: Profiles) -> int:
    """The most drafts that are made in a round; 0: one."""
    return 0 if profiles.model.draft is None else profiles.model.draft.at_once


def drafting(profiles: Profiles, last: int) -> tuple[float, float]:
    """Seconds of a round of drafts for one sequence, and for each further one, where the machine ``last`` has the last
    stage. A drafter there costs as much as layers of its bytes, and the head, for its rows."""
    first, machine, draft = profiles.machines[0], profiles.machines[last], profiles.model.draft
    if draft is None or draft.like is None:
        return first.draft, first.draft_more
    weights = next(layer.weights for layer in profiles.model.layers if layer.kind == draft.like)
    own, rows = machine.layers[draft.like].scaled(draft.weights / max(1, weights)), 1 + draft.at_once
    one, several = (own.at(Shape(n * rows)) + machine.head.at(Shape(n * rows)) for n in (1, _SEVERAL))
    return one, max(0.0, several - one) / (_SEVERAL - 1)


def costs_of(model: ModelProfile, machine: MachineProfile, start: int, end: int) -> StageCosts:
    """The costs of the layers [start, end) on a machine, with what comes before and behind them."""
    costs = StageCosts.line(machine.step, 0.0)
    for kind, count in model.kinds(start, end).items():
        costs = costs.plus(machine.layers[kind].scaled(count))
    if start == 0:
        costs = costs.plus(machine.embedding)
    return costs.plus(machine.head, HEAD_ROWS) if end == model.num_layers else costs


def hop_ends(cut: Cut) -> list[tuple[int, int]]:
    """The machines at both ends of the hop after each stage; the last one's leads back."""
    return [(a, b) for a, b in zip(cut.machines, (*cut.machines[1:], cut.machines[0]), strict=True)]


def hop_of(profiles: Profiles, source: int, target: int) -> Hop:
    """The hop from one machine to another, by their places. A link that was not measured is taken to be like the
    slowest that was."""
    if source == target:
        return Hop()
    link = profiles.link(profiles.machines[source].name, profiles.machines[target].name)
    known = profiles.links if link is None else (link,)
    latency = max((each.latency for each in known), default=_UNKNOWN_LATENCY)
    bandwidth = min((each.bytes_per_second for each in known), default=_UNKNOWN_BANDWIDTH)
    return Hop(latency, profiles.model.hidden_row / bandwidth)


def unmeasured(profiles: Profiles, cut: Cut) -> list[tuple[str, str]]:
    """The names at the ends of the hops of a cut whose links were not measured."""
    names = [(profiles.machines[a].name, profiles.machines[b].name) for a, b in hop_ends(cut) if a != b]
    return [pair for pair in names if profiles.link(*pair) is None]
