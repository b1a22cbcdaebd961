"""How many groups decode in turn, how many drafts each of their members gets, and how many blocks fly: by cost.

Several sequences on S stages can go in any number G of groups, each of whose steps holds a block of every member, and
each group may have F steps under way. One group of many pays the weights once and leaves stages idle; S groups keep all
stages busy and read all weights S times. Drafts make tokens of rows, and rows are nearly free where weights are read
anyway. With t_s(r) the seconds of a step of r rows on stage s, D = rounds * d(n) those of drafting (one round gives
each of n members a draft), l a link's and h the coordinator's own for a step, a round of all groups takes

    P = max( F * sum over groups of (D + h + t_0),       the first stage drafts and computes; h only behind drafts
             F * sum over groups of t_s,                 any other stage
             max(1, G F / S) * longest (D + h + sum of t_s + S l) )        one step passes all stages

and a member with acceptance a and k drafts gets in it

    F = 1    1 + a + ... + a^k  =  (1 - a^(k+1)) / (1 - a)
    F > 1    F / (1 - a) / (F + a^(k+1) / (1 - a^k))      a run is b right blocks and F steps; see ``flight``

where it gets those drafts. A drafter that looks them up often has none: with probability q there are k rows more and
these tokens, else one row and one token. So a member counts with 1 + q k rows and the mean of both. And it gets as many
more, each of them a row, as the form of its answer forces behind a token (``core.grammar``).

The tokens of all members together, divided by P, are to be as many as possible; but no member is to get its tokens more
slowly than without drafts in as many groups as there may be, and no gap between two tokens is to be longer than a
bound: the objective, or ``LONGEST`` of the gap without drafts.

Which member gets the next draft: the k-th is worth a^k, and every row costs the same, so drafts go in the order of a^k
(greedy is optimal for a number of rows; further rounds of drafting are bounded one by one, ``_CAPS``). See Sadhukhan et
al. (MagicDec, arXiv 2408.11049) and Liu et al. (TurboSpec, arXiv 2406.14066) for speculation in batches, which choose
one length for all.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

from splitinfer.core.costs.by_rows import MAX_ROWS, RowCosts

LONGEST = 1.58  # the longest gap without an objective, in gaps without drafts
_CERTAIN = 0.995  # bound on acceptance
_SLOWER = 0.98  # of the time without drafts: what a token of a member may take, a little less for what is not foreseen
_CAPS = (1, 2, 3, 4, 6, 8, MAX_ROWS - 1)  # rounds of drafting that are tried
_ALIKE = 0.05  # difference of acceptances below which one cap is enough
_UNEVEN = 1.15  # factor by which gaps between blocks in flight are longer than steps of one length make them
_GIVE_UP = 0.75  # of the best rate: with more drafts it only falls


@dataclass(frozen=True, slots=True)
class Member:
    """A sequence that decodes. ``acceptance``: how often its drafts are right; ``most``: drafts in a block, at most;
    ``fixed``: whether it gets just so many; ``at_most``: how often its drafts may well be right: nobody goes without
    drafts because one was unlucky; ``forced``: how many tokens its rules force behind one that is chosen; ``offered``:
    how often a drafter that is asked has any drafts for it."""

    acceptance: float
    most: int = MAX_ROWS - 1
    fixed: bool = False
    at_most: float = 0.0
    forced: float = 0.0
    offered: float = 1.0

    def tokens(self, drafts: int, in_flight: int, acceptance: float | None = None) -> float:
        """Expected tokens in a period, with ``drafts`` in each of its steps."""
        a = self.acceptance if acceptance is None else acceptance
        return 1 + self.offered * (emitted(a, drafts, in_flight) - 1)

    def tokens_at_most(self, drafts: int, in_flight: int) -> float:
        """The same for what its acceptance may well be."""
        return self.tokens(drafts, in_flight, max(self.acceptance, self.at_most))


@dataclass(frozen=True, slots=True)
class Grouping:
    """A choice: ``groups`` that take turns, ``in_flight`` steps of each under way, and the ``drafts`` of each member.

    rate: expected tokens per second of all members.
    gap: expected seconds between two tokens of a member, at most.
    row: what a further row in a step costs, in tokens.
    """

    groups: int
    in_flight: int = 1
    drafts: tuple[int, ...] = ()
    rate: float = 0.0
    gap: float = 0.0
    row: float = 0.0

    @property
    def has_drafts(self) -> bool:
        """Whether anybody gets drafts."""
        return any(self.drafts)


def period(costs: RowCosts, rows: Sequence[int], drafting: Sequence[float], in_flight: int = 1) -> float:
    """Seconds in which every group has ``in_flight`` steps. ``rows``, ``drafting``: of a step of each group, and the
    seconds in which its drafts are made."""
    num_stages = len(costs.stages)
    passing, first = 0.0, 0.0
    others = [0.0] * num_stages
    for count, seconds in zip(rows, drafting, strict=True):
        times = [costs.at(stage, count) for stage in range(num_stages)]
        at_first = 0.0 if costs.at_end else seconds
        first += at_first + (costs.host if at_first else 0.0) + times[0]
        passing = max(passing, seconds + costs.host + sum(times))
        others = [a + b for a, b in zip(others, times, strict=True)]
        others[-1] += seconds - at_first
    if num_stages > 1:
        passing += num_stages * costs.link
    crowded = max(1.0, len(rows) * in_flight / num_stages)
    return max(in_flight * first, in_flight * max(others), crowded * passing)


def emitted(acceptance: float, drafts: int, in_flight: int = 1) -> float:
    """Expected tokens of a member in a period, in which it has ``in_flight`` steps with ``drafts`` drafts each."""
    a = min(acceptance, _CERTAIN)
    if drafts == 0:
        return 1.0
    if in_flight == 1:
        return float((1 - a ** (drafts + 1)) / (1 - a))
    return float(in_flight / (1 - a) / (in_flight + a ** (drafts + 1) / (1 - a**drafts)))


@dataclass(slots=True)
class _Filling:
    """Blocks that grow draft by draft."""

    costs: RowCosts
    members: Sequence[Member]
    groups: int
    in_flight: int
    drafts: list[int] = field(init=False)
    tokens: list[float] = field(init=False)
    at_most: list[float] = field(init=False)  # tokens
    rows: list[int] = field(init=False)  # of each group's step, where all drafts are offered
    mean_rows: list[float] = field(init=False)
    rounds: list[int] = field(init=False)
    drafting: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.drafts = [0] * len(self.members)
        self.tokens, self.at_most = [1.0 + one.forced for one in self.members], [1.0] * len(self.members)
        self.rows = [_rows(self.members[group :: self.groups]) for group in range(self.groups)]
        self.mean_rows = [float(rows) for rows in self.rows]
        self.rounds, self.drafting = [0] * self.groups, [0] * self.groups
        for i, member in enumerate(self.members):
            for _ in range(member.most if member.fixed else 0):
                self.add(i)

    def add(self, i: int) -> None:
        """Give a member one draft more. Members are dealt to the groups like cards."""
        group = i % self.groups
        self.drafting[group] += self.drafts[i] == 0
        self.drafts[i] += 1
        self.rows[group] += 1
        self.mean_rows[group] += self.members[i].offered
        self.rounds[group] = max(self.rounds[group], self.drafts[i])
        self.tokens[i] = self.members[i].forced + self.members[i].tokens(self.drafts[i], self.in_flight)
        self.at_most[i] = self.members[i].tokens_at_most(self.drafts[i], self.in_flight)

    def period(self, rows: Sequence[float]) -> float:
        """Seconds of a period in which the groups' steps have so many rows."""
        seconds = [
            self.costs.drafting(count, sequences) for count, sequences in zip(self.rounds, self.drafting, strict=True)
        ]
        return period(self.costs, [round(count) for count in rows], seconds, self.in_flight)

    def gap(self, period: float) -> float:
        """Seconds between two tokens of a member, at most: all drafts may be offered, and behind a wrong one a step may
        have to pass first. ``period``: with the mean rows."""
        longest = period if self.rows == self.mean_rows else self.period(self.rows)
        return longest * (1 + 1 / self.in_flight) * _UNEVEN if self.in_flight > 1 else longest

    def choice(self, period: float, gap: float) -> Grouping:
        more = max(0.0, self.period([count + 1 for count in self.mean_rows]) - period) / self.groups
        rate = sum(self.tokens) / period
        return Grouping(self.groups, self.in_flight, tuple(self.drafts), rate, gap, rate * more)


def _rows(members: Sequence[Member]) -> int:
    """The rows of a step without drafts."""
    return round(sum(1 + one.forced for one in members))


def without_drafts(costs: RowCosts, members: Sequence[Member], groups: int) -> float:
    """Seconds between two steps of each member in so many groups, without drafts."""
    rows = [_rows(members[group::groups]) for group in range(min(groups, len(members)))]
    return period(costs, rows, [0.0] * len(rows))


def best_with(
    costs: RowCosts, members: Sequence[Member], groups: int, in_flight: int, longest: float, floor: float
) -> Grouping | None:
    """The best drafts for so many groups and steps under way; ``None`` where even none are too slow.

    longest: seconds between two tokens, at most.
    floor: tokens per second of each member, at least.
    """
    best: Grouping | None = None
    caps = _caps(costs, members)
    for cap, all_first in product(caps, (False, True) if len(caps) > 1 else (False,)):
        filling = _Filling(costs, members, groups, in_flight)
        found = _best_filled(filling, _order(members, cap, all_first=all_first), longest, floor)
        if found is not None and (best is None or found.rate > best.rate):
            best = found
    return best


def _best_filled(filling: _Filling, order: Iterable[int], longest: float, floor: float) -> Grouping | None:
    best, best_rate = None, 0.0
    for i in (-1, *order):
        if i >= 0:
            filling.add(i)
        seconds = filling.period(filling.mean_rows)
        gap = filling.gap(seconds)
        is_wide = max(filling.rows) > filling.costs.most_rows
        if i >= 0 and (is_wide or gap > longest):
            break
        rate = sum(filling.tokens) / seconds
        if rate < _GIVE_UP * best_rate:
            break
        if rate > best_rate and gap <= longest and min(filling.at_most) >= floor * seconds:
            best, best_rate = filling.choice(seconds, gap), rate
    return best


def _order(members: Sequence[Member], cap: int, *, all_first: bool) -> Iterator[int]:
    """Whose draft is the next one: the one most likely to be right with all before it. ``all_first``: first everybody
    gets one, so that nobody is slowed down by others' drafts without having its own."""
    worth = [
        (not all_first or k > 1, -(min(one.acceptance, _CERTAIN) ** k), k, i)
        for i, one in enumerate(members)
        for k in range(1, min(one.most, cap) + 1)
        if not one.fixed
    ]
    return (i for _, _, _, i in sorted(worth))


def _caps(costs: RowCosts, members: Sequence[Member]) -> tuple[int, ...]:
    free = [one.acceptance for one in members if not one.fixed]
    if not costs.drafts or not free:
        return (0,)
    return _CAPS if max(free) - min(free) > _ALIKE else _CAPS[-1:]


def shapes(num_members: int, num_stages: int, most_groups: int, *, flies: bool) -> Iterator[tuple[int, int]]:
    """The numbers of groups and of steps under way that may be chosen."""
    for groups in range(1, min(most_groups, num_members) + 1):
        most = -(-num_stages // groups) if flies else 1
        yield from ((groups, in_flight) for in_flight in range(1, most + 1))


def best_grouping(
    costs: RowCosts, members: Sequence[Member], most_groups: int, objective: float | None = None, *, fixed: bool = False
) -> dict[tuple[int, int], Grouping]:
    """The best choice for each number of groups and steps under way; those that break a bound are left out, unless all
    do, and then all groups without drafts are the only one. ``objective``: seconds between two tokens, at most;
    ``fixed``: there have to be ``most_groups``."""
    most_groups = min(most_groups, len(members))
    gap = without_drafts(costs, members, most_groups)
    longest = LONGEST * gap if objective is None else max(objective, gap)
    floor = 1 / (_SLOWER * gap)
    ranked = sorted(members, key=lambda one: -one.acceptance)
    places = sorted(range(len(members)), key=lambda i: -members[i].acceptance)
    found = dict[tuple[int, int], Grouping]()
    flies = bool(costs.drafts) and not costs.at_end
    for groups, in_flight in shapes(len(members), len(costs.stages), most_groups, flies=flies):
        if fixed and groups != most_groups:
            continue
        best = best_with(costs, ranked, groups, in_flight, longest, floor)
        if best is None or (in_flight > 1 and not best.has_drafts):
            continue
        drafts = [0] * len(members)
        for place, count in zip(places, best.drafts, strict=True):
            drafts[place] = count
        found[groups, in_flight] = Grouping(groups, in_flight, tuple(drafts), best.rate, best.gap, best.row)
    if not found:
        none = tuple(one.most if one.fixed else 0 for one in members)
        found[most_groups, 1] = Grouping(most_groups, 1, none, sum(1 + one.forced for one in members) / gap, gap)
    return found
