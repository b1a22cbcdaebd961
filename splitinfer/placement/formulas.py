"""Estimates a cut's figures by formulas from the measurements of its machines and links, in some 10 µs a figure.

Let t_s(r) be the seconds of r rows on stage s, l the seconds of all hops and of the hosts while nothing computes, n the
streams in G groups of r = n / G rows, a a draft's acceptance, d its seconds, and h the seconds of the coordinator's
host for a step:

    one stream           1 / (sum of t_s(1) + l)
    with k drafts        (1 - a^(k+1)) / (1 - a) / (k d + sum of t_s(k+1) + l)            each block waits for the last
    in flight            1 / (1 - a) / (L + u a^(k+1) / (1 - a^k))     blocks follow each other, u apart, and a wrong
                         u = max(t_0(k) + k d + h, t_s(k))             draft costs L, the line above for one block
    a prompt of c chunks sum of t_s(chunk) + (c - 1) longest t_s(chunk) + l
    many streams         n / max(G longest t_s(r), sum of t_s(r) + l)                     for the best G, and drafts:
                         t_0 is longer by theirs and by h, as a stage waits for the work that follows on drafts

A stage whose experts have no room in memory takes longer by the time in which its disk gives those that the rows need.
Stages on one device, the coordinator's and those at ``local``, compute one after the other: "longest" is all of them.
`tests/placement/test_plan_choices.py` shows, by the scheduler in virtual time, how near the best by formula is to the
best of all. Seconds of a stage are differences of sums over the layers.
"""

from functools import cache
from itertools import accumulate, pairwise

from splitinfer.core.costs.shape import Shape
from splitinfer.core.layout import LOCAL
from splitinfer.core.scheduler.microbatches import even_share
from splitinfer.core.speculation.chooser import emitted
from splitinfer.machine.costs import Costs
from splitinfer.machine.profile import MachineProfile, ModelProfile, Profiles
from splitinfer.placement.asked import Asked
from splitinfer.placement.cuts import Cut
from splitinfer.placement.memory import Memory

HEAD_ROWS = 64  # the most rows of the head in a step: it computes one of a chunk, and steps do not show which
_ALONE = (1, 2, 3, 5, 7, 11)  # drafts of a block of one stream
_EACH = (1, 2, 3, 5)  # drafts of each of many
MOST_ALONE, MOST_EACH = _ALONE[-1], _EACH[-1]
_SEVERAL = 8  # sequences in a round of drafts
_UNKNOWN = (0.001, 100e6)  # seconds and bytes a second of a link, if no link was measured


class Formulas:
    """The figures of all cuts of ``profiles``."""

    def __init__(self, profiles: Profiles, asked: Asked) -> None:
        self._profiles, self._asked, self._model = profiles, asked, profiles.model
        self._budget = asked.budget(profiles)
        self.usual_position = min(asked.context, asked.prompt + asked.answer // 2)
        self._sums: dict[tuple[int, Shape], tuple[list[float], float]] = {}
        places = range(len(profiles.machines))
        self._drafts = [drafting(profiles, machine) for machine in places]
        draft = self._model.draft
        self._at_end, self._at_once = draft is not None and draft.like is not None, draft is not None and draft.at_once
        self._coordinating = 2 * profiles.machines[0].host  # planning a step and reading its result take as long again
        here = {each.name for i, each in enumerate(profiles.machines) if i == 0 or each.address == LOCAL}
        self._has_disks = any(each.disk for each in profiles.machines) and any(
            layer.experts for layer in self._model.layers
        )
        self._in_memory = cache(Memory(profiles, asked).in_memory)
        self._is_here = [not here.isdisjoint(machine.ranks) for machine in profiles.machines]
        self._hops = {(a, b): hop_of(profiles, a, b) for a in places for b in places}

    # -- one stream ----------------------------------------------------------------------------

    def turn(self, cut: Cut) -> float:
        """Return the seconds from a prompt of ``asked.prompt`` tokens until the last of ``asked.answer`` tokens."""
        return self.prompt(cut, self._asked.prompt) + (self._asked.answer - 1) / self.one(cut, self._asked.acceptance)

    def one(self, cut: Cut, acceptance: float | None) -> float:
        """Return the tokens per second of one stream, with drafts if there are any (``acceptance``) and they pay."""
        plain = 1 / self._latency(cut, 1)
        return plain if acceptance is None else max(plain, *(self._drafted(cut, k, acceptance) for k in _ALONE))

    def _drafted(self, cut: Cut, k: int, acceptance: float) -> float:
        drafting = self._drafting(cut, 1, k)
        once = drafting + self._latency(cut, k + 1)
        first, *others = self._seconds(cut, self._block(k, 1))
        apart = self._longest(cut, [first + drafting + self._coordinating, *others])
        in_flight = once / apart if others and apart and not self._at_end else 1
        return max(emitted(acceptance, k), emitted(acceptance, k, in_flight)) / once

    def _latency(self, cut: Cut, rows: int) -> float:
        """Return the seconds of a step of one sequence from stage to stage and back."""
        return sum(self._seconds(cut, self._block(rows, 1))) + self._passing(cut, rows)

    def chunk(self, cut: Cut, num_tokens: int) -> int:
        """Return the number of tokens of a prompt that one step reads."""
        return even_share(num_tokens, self._budget, len(cut.layers), rounds=False)

    def prompt(self, cut: Cut, num_tokens: int) -> float:
        """Return the seconds from a prompt until its first token."""
        rows = self.chunk(cut, num_tokens)
        chunks = -(-num_tokens // rows)
        shape = Shape(rows, 0, num_tokens * (num_tokens + 1) // 2 // chunks)  # the mean chunk
        seconds = self._seconds(cut, shape)
        return sum(seconds) + (chunks - 1) * self._longest(cut, seconds) + self._passing(cut, rows)

    # -- many ----------------------------------------------------------------------------------

    def many(self, cut: Cut, acceptance: float | None) -> float:
        """Return the tokens per second of all streams together."""
        groups = range(1, min(len(cut.layers), self._asked.streams) + 1)
        drafts = (0,) if acceptance is None else (0, *_EACH)
        return max(self._grouped(cut, g, k, acceptance or 0.0) for g in groups for k in drafts)

    def _grouped(self, cut: Cut, groups: int, k: int, acceptance: float) -> float:
        streams = self._asked.streams
        members = -(-streams // groups)
        each = self._seconds(cut, self._block(k + 1, members))
        each[-1 if self._at_end else 0] += self._drafting(cut, members, k)
        passing = sum(each) + self._passing(cut, members * (k + 1))
        if k and not self._at_end:
            each[0] += self._coordinating  # the first stage waits for the coordinator after its drafts
        period = max(groups * self._longest(cut, each), passing)
        return streams * emitted(acceptance, k) / period

    def _drafting(self, cut: Cut, members: int, k: int) -> float:
        """Return the seconds of ``k`` drafts for each of ``members`` sequences."""
        one, more = self._drafts[cut.machines[-1]]
        return (min(k, 1) if self._at_once else k) * (one + more * (members - 1))

    # -- bounds --------------------------------------------------------------------------------

    def machines_of(self, cut: Cut) -> list[MachineProfile]:
        """Return the machines of a cut's stages; a pair counts as one machine."""
        return [self._profiles.machines[place] for place in cut.machines]

    def num_machines(self, cut: Cut) -> int:
        """Return the number of machines that have layers of a cut; a pair counts as two."""
        return sum(len(machine.ranks) for machine in self.machines_of(cut))

    def most_alone(self, cut: Cut, streams: int | None) -> float:
        """Return the most tokens a second of any one machine of a cut with all layers, regardless of its memory, if it
        waits only for computing. ``streams``: at once; None: any number up to all."""
        names = {name for machine in self.machines_of(cut) for name in machine.ranks}
        places = [i for i, machine in enumerate(self._profiles.machines) if machine.name in names]
        every = range(1, self._asked.streams + 1) if streams is None else (streams,)
        whole = [Cut((place,), (self._model.num_layers,)) for place in places]
        return max(n / sum(self._computing(one, self._block(1, n))) for one in whole for n in every)

    # -- seconds -------------------------------------------------------------------------------

    def seconds(self, cut: Cut, streams: int) -> list[float]:
        """Return the seconds of each stage for a step, with ``streams`` in as many groups as there are stages."""
        return self._seconds(cut, self._block(1, -(-streams // min(len(cut.layers), streams))))

    def _block(self, rows: int, members: int) -> Shape:
        """Return the shape of a step with ``rows`` rows for each of ``members`` sequences."""
        if rows == 1:
            return Shape(members, members * self.usual_position, 0)
        return Shape(members * rows, 0, members * (rows * self.usual_position + rows * (rows + 1) // 2))

    def _seconds(self, cut: Cut, shape: Shape) -> list[float]:
        """Return the seconds of each stage for a step, with those of reading experts."""
        found = self._computing(cut, shape)
        for at, (machine, start, end) in enumerate(cut.stages() if self._has_disks else ()):
            disk, (experts, chosen) = self._profiles.machines[machine].disk, self._model.experts(start, end)
            if disk:
                found[at] += (1 - self._in_memory(cut)[at]) * min(experts, shape.rows * chosen) / disk
        return found

    def _computing(self, cut: Cut, shape: Shape) -> list[float]:
        found, last = [], self._model.num_layers
        for machine, start, end in cut.stages():
            sums, head = self._sums.get((machine, shape)) or self._summed(machine, shape)
            found.append(sums[end] - sums[start] + self._profiles.machines[machine].step + head * (end == last))
        return found

    def _longest(self, cut: Cut, seconds: list[float]) -> float:
        """Return the seconds of the device that computes longest, given the seconds of each stage."""
        return max(*seconds, sum(each for m, each in zip(cut.machines, seconds, strict=True) if self._is_here[m]))

    def _summed(self, place: int, shape: Shape) -> tuple[list[float], float]:
        """Return the seconds of the first 0, 1, 2, ... layers on a machine, and of the head."""
        machine = self._profiles.machines[place]
        each = {kind: costs.at(shape) for kind, costs in machine.layers.items()}
        sums = list(accumulate((each[layer.kind] for layer in self._model.layers), initial=0.0))
        self._sums[place, shape] = found = sums, machine.head.rows(min(shape.rows, HEAD_ROWS))
        return found

    def _passing(self, cut: Cut, rows: int) -> float:
        """Return the seconds of a step's hops and hosts. The hops carry hidden states from stage to stage, and little
        from the last to the first. The hosts launch a step and read its result; the coordinator's also plans it."""
        *forward, back = [self._hops[pair] for pair in hop_ends(cut)]
        hosts = sum(self._profiles.machines[place].host for place in (0, *cut.machines))
        return sum(latency + per_row * rows for latency, per_row in forward) + back[0] + hosts


def drafting(profiles: Profiles, last: int) -> tuple[float, float]:
    """Return the seconds of a round of drafts for one sequence, and for each further one, if the machine ``last`` has
    the last stage. A drafter there costs as much as layers of its bytes, and the head, for its rows. In a pair, each
    machine has the whole drafter."""
    of_rank = profiles.machines[last].ranks[0]
    machine = next(machine for machine in profiles.machines if machine.name == of_rank)
    first, draft = profiles.machines[0], profiles.model.draft
    if draft is None or draft.like is None:
        return first.draft, first.draft_more
    weights = next(layer.weights for layer in profiles.model.layers if layer.kind == draft.like)
    own, rows = machine.layers[draft.like].scaled(draft.weights / max(1, weights)), 1 + draft.at_once
    one, several = (own.rows(n * rows) + machine.head.rows(n * rows) for n in (1, _SEVERAL))
    return one, max(0.0, several - one) / (_SEVERAL - 1)


def costs_of(model: ModelProfile, machine: MachineProfile, start: int, end: int) -> Costs:
    """Return the costs of a stage of the layers [start, end) on a machine."""
    costs = Costs(((1, machine.step),))
    for kind, count in model.kinds(start, end).items():
        costs = costs.plus(machine.layers[kind].scaled(count))
    return costs.plus(machine.head, HEAD_ROWS) if end == model.num_layers else costs


def hop_ends(cut: Cut) -> list[tuple[int, int]]:
    """Return the machines at both ends of the hop after each stage; the last hop leads back to the first stage."""
    return [(a, b) for a, b in zip(cut.machines, (*cut.machines[1:], cut.machines[0]), strict=True)]


def hop_of(profiles: Profiles, source: int, target: int) -> tuple[float, float]:
    """Return the seconds of the hop from one machine to another, and for each row of hidden states. In a pair, the
    first machine receives and passes on to the second, which sends. If a pair is the first stage, the coordinator is
    another process beside its first machine, and the way to that is taken to be no quicker than to the second."""
    here, way = profiles.machines[0].name, (profiles.machines[source].ranks[-1], *profiles.machines[target].ranks)
    links = [link_of(profiles, a, b) for a, b in pairwise(way) if a != b]
    beside = links[-1][0] if profiles.machines[target].across[:1] == (here,) else 0.0
    return beside + sum(latency for latency, _ in links), sum(
        profiles.model.hidden_row / bandwidth for _, bandwidth in links
    )


def link_of(profiles: Profiles, source: str, target: str) -> tuple[float, float]:
    """Return the seconds of latency one way, and bytes a second. A link that was not measured counts as the slowest
    measured one."""
    link = profiles.link(source, target)
    known = profiles.links if link is None else (link,)
    latency = max((each.latency for each in known), default=_UNKNOWN[0])
    return latency, min((each.bytes_per_second for each in known), default=_UNKNOWN[1])
