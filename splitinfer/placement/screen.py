"""Formulas: the figures of a cut in some ten microseconds, to find those that are worth simulating.

With t_s(r) the seconds of r rows on stage s, h the coordinator's own, l the hops together, n streams in G groups of
r = n / G rows, a draft's acceptance a and seconds d:

    one stream           1 / (h + sum of t_s(1) + l)
    with k drafts        (1 - a^(k+1)) / (1 - a) / (k d + h + sum of t_s(k+1) + l)        each block waits for the last
    in flight            1 / (1 - a) / (L + u a^(k+1) / (1 - a^k))     blocks follow each other, u apart, and a wrong
                         u = max(t_0(k) + k d, t_s(k))                 draft costs L, the line above for one block
    a prompt of c chunks sum of t_s(chunk) + (c - 1) longest t_s(chunk) + l
    many streams         n / max(G longest t_s(r), h + sum of t_s(r) + l)                 for the best G, and drafts

(``core.speculation.chooser`` derives these for one pipeline, and the live scheduler goes by them.) Seconds of a stage
are differences of sums over the layers, so a stage costs a look-up.
"""

from itertools import accumulate

from splitinfer.core.costs.shape import Shape
from splitinfer.core.scheduler.microbatches import even_share
from splitinfer.machine.profile import Profiles
from splitinfer.placement.asked import Asked
from splitinfer.placement.cuts import Cut
from splitinfer.placement.pipeline import HEAD_ROWS, at_end, at_once, drafting, hop_ends, hop_of

_ALONE = (1, 2, 3, 5, 7, 11)  # drafts of a block of one stream
_EACH = (1, 2, 3, 5)  # drafts of each of many
_CERTAIN = 0.995  # bound on acceptance, as in ``core.speculation.chooser``


class Screen:
    """The formulas for all cuts of ``profiles``."""

    def __init__(self, profiles: Profiles, asked: Asked) -> None:
        self._profiles, self._asked = profiles, asked
        self._model, self._first = profiles.model, profiles.machines[0]
        self._budget = asked.budget(profiles)
        self._at = min(asked.context, asked.prompt + asked.answer // 2)  # the usual position of a token
        self._sums: dict[tuple[int, Shape], tuple[list[float], float, float]] = {}
        count = len(profiles.machines)
        self._drafts = [drafting(profiles, machine) for machine in range(count)]
        self._at_end, self._at_once = at_end(profiles), at_once(profiles)
        self._hops = {(a, b): hop_of(profiles, a, b) for a in range(count) for b in range(count)}

    # -- one stream ----------------------------------------------------------------------------

    def turn(self, cut: Cut) -> float:
        """Seconds from a prompt of ``asked.prompt`` tokens until the last of ``asked.answer`` tokens."""
        return self.prompt(cut, self._asked.prompt) + (self._asked.answer - 1) / self.one(cut)

    def one(self, cut: Cut) -> float:
        """Tokens per second of one stream, with drafts where there are any and they pay."""
        plain = 1 / self._latency(cut, 1)
        if self._asked.acceptance is None:
            return plain
        return max(plain, *(self._drafted(cut, k) for k in _ALONE))

    def _drafted(self, cut: Cut, k: int) -> float:
        a, drafting = min(self._asked.acceptance or 0.0, _CERTAIN), self._drafting(cut, 1, k)
        once = drafting + self._latency(cut, k + 1)
        alone = (1 - a ** (k + 1)) / (1 - a) / once
        first, *others = self._seconds(cut, self._block(k, 1))
        apart = max(first + drafting, *others, 0.0)
        flies = others and a and not self._at_end
        return max(alone, 1 / (1 - a) / (once + apart * a ** (k + 1) / (1 - a**k)) if flies else 0.0)

    def _latency(self, cut: Cut, rows: int) -> float:
        """Seconds of a step of one sequence from stage to stage and back."""
        seconds = self._seconds(cut, self._block(rows, 1))
        return self._first.host + sum(seconds) + self._passing(cut, rows)

    def prompt(self, cut: Cut, num_tokens: int) -> float:
        """Seconds from a prompt until its first token."""
        rows = even_share(num_tokens, self._budget, len(cut.layers), rounds=False)
        chunks = -(-num_tokens // rows)
        shape = Shape(rows, 0, num_tokens * (num_tokens + 1) // 2 // chunks)  # the mean chunk
        seconds = self._seconds(cut, shape)
        return self._first.host + sum(seconds) + (chunks - 1) * max(seconds) + self._passing(cut, rows)

    # -- many ----------------------------------------------------------------------------------

    def many(self, cut: Cut) -> float:
        """Tokens per second of all streams together."""
        groups = range(1, min(len(cut.layers), self._asked.streams) + 1)
        drafts = (0,) if self._asked.acceptance is None else (0, *_EACH)
        return max(self._grouped(cut, g, k) for g in groups for k in drafts)

    def _grouped(self, cut: Cut, groups: int, k: int) -> float:
        streams, a = self._asked.streams, min(self._asked.acceptance or 0.0, _CERTAIN)
        members = -(-streams // groups)
        each = self._seconds(cut, self._block(k + 1, members))
        each[-1 if self._at_end else 0] += self._drafting(cut, members, k)
        passing = self._first.host + sum(each) + self._passing(cut, members * (k + 1))
        period = max(groups * max(each), passing)
        return streams * ((1 - a ** (k + 1)) / (1 - a) if k else 1.0) / period

    def _drafting(self, cut: Cut, members: int, k: int) -> float:
        """Seconds of ``k`` drafts of each of so many sequences."""
        one, more = self._drafts[cut.machines[-1]]
        return (min(k, 1) if self._at_once else k) * (one + more * (members - 1))

    # -- seconds -------------------------------------------------------------------------------

    def seconds(self, cut: Cut, streams: int) -> list[float]:
        """Seconds of each stage for a step of so many streams in as many groups as there are stages."""
        return self._seconds(cut, self._block(1, -(-streams // min(len(cut.layers), streams))))

    def _block(self, rows: int, members: int) -> Shape:
        """A step in which each of some sequences has so many rows."""
        if rows == 1:
            return Shape(members, members * self._at, 0)
        return Shape(members * rows, 0, members * (rows * self._at + rows * (rows + 1) // 2))

    def _seconds(self, cut: Cut, shape: Shape) -> list[float]:
        found, start, last = [], 0, self._model.num_layers
        for machine, count in zip(cut.machines, cut.layers, strict=True):
            sums, before, behind = self._sums.get((machine, shape)) or self._summed(machine, shape)
            end, own = start + count, self._profiles.machines[machine].step
            own += (before if start == 0 else 0.0) + (behind if start + count == last else 0.0)
            found.append(sums[end] - sums[start] + own)
            start = end
        return found

    def _summed(self, place: int, shape: Shape) -> tuple[list[float], float, float]:
        """Seconds of the first 0, 1, 2, ... layers on a machine, and of what comes before and behind all of them."""
        machine = self._profiles.machines[place]
        each = {kind: costs.at(shape) for kind, costs in machine.layers.items()}
        sums = list(accumulate((each[layer.kind] for layer in self._model.layers), initial=0.0))
        head = machine.head.at(Shape(min(shape.rows, HEAD_ROWS)))
        self._sums[place, shape] = found = sums, machine.embedding.at(shape), head
        return found

    def _passing(self, cut: Cut, rows: int) -> float:
        """Seconds of the hops, there and back, and of waiting for devices."""
        hops = [self._hops[pair] for pair in hop_ends(cut)]
        wait = self._first.device.wait if self._first.launches_ahead else 0.0
        if len(hops) == 1:
            return wait
        return len(hops) * wait + sum(hop.seconds(rows) for hop in hops[:-1]) + hops[-1].fixed
