"""Chooses by cost how many groups decode in turn, how many drafts each member gets, and how many blocks fly.

Sequences on S stages can go in any number G of groups. Each step of a group holds a block of every member, and each
group may have F steps under way. One group of many pays for the weights once and leaves stages idle; S groups keep all
stages busy and read all weights S times. Drafts turn rows into tokens, and rows are nearly free where weights are read
anyway. Let t_s be the seconds of a step on stage s, D of drafting (a round gives each of its members a draft), l of a
link, and h of the coordinator's own work for a step. Then a round of all groups takes

    P = max( F * sum over groups of (D + h + t_0),       the first stage drafts and computes; h only with drafts
             F * sum over groups of t_s,                 any other stage
             max(1, G F / S) * longest (D + h + sum of t_s + S l) )        one step passes all stages

A member that gets k drafts in each step, each right with probability a, has the following tokens in a round:

    F = 1    1 + a + ... + a^k  =  (1 - a^(k+1)) / (1 - a)
    F > 1    F / (1 - a) / (F + a^(k+1) / (1 - a^k))      a run is b right blocks and F steps

A drafter that looks drafts up often has none: with probability q there are k more rows and these tokens, else one row
and one token. If the rules of an answer force tokens after a chosen one (``core.grammar``), the member gets them in
addition, each as one more row.

The choice maximises the tokens of all members divided by P. With several members, none may get its tokens more slowly
than without drafts in the largest allowed number of groups, and no gap between two tokens may be longer than a bound:
the objective, or ``LONGEST`` of the gap without drafts.

Which member gets the next draft? The k-th is worth a^k, and every row costs the same. So the choice is one depth k for
the member whose drafts are best, and the others get drafts that are worth as much. See Sadhukhan et al. (MagicDec,
arXiv 2408.11049) and Liu et al. (TurboSpec, arXiv 2406.14066) for speculation in batches.

A member without drafts gets a *trial* from time to time: one draft beside a token that must be computed anyway, because
texts change. Trials of all requests together may take a bounded part of the time, which shrinks with each wrong one in
a row. A draft model that is off does not read along, so a trial also costs its reading: for a new request, of the whole
text. A new request starts from the acceptance that earlier requests had.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Set
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from splitinfer.core.costs.model import CostModel
from splitinfer.core.costs.shape import Shape
from splitinfer.core.plan import StepPlan
from splitinfer.core.speculation.acceptance import Acceptance
from splitinfer.core.speculation.flight import MAX_ROWS, OFF, Flight

LONGEST = 1.6  # the longest gap without an objective, in gaps without drafts
_CERTAIN = 0.995  # bound on acceptance: with 1, runs would be infinite
_DEPTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, MAX_ROWS - 1)
_SLOWER = 0.98  # of the time without drafts, which a member's token may take; the rest is for unforeseen costs
_UNEVEN = 1.15  # factor by which gaps between blocks in flight exceed those of equal steps
_GIVE_UP = 0.75  # of the best rate: with even more drafts it only falls
_MARGIN = 1.03  # factor by which drafts must be faster than none
_AS_GOOD = 0.997  # of the best rate: rates this close are equal, and the fewest drafts win: discarded ones cost power
# Factors by which another number of groups must be faster, because moving a member costs its place. The second holds
# for _DWELL steps after a change that came from figures, not from members; for fewer steps at the beginning.
_BETTER, _MUCH_BETTER = 1.01, 1.1
_DWELL = 128
_EVERY = 8  # steps after which the choice is made again
_TRUSTED = 2  # times the most rows so far of a step of decodes and drafts may be tried
_FEW_ROWS = 4  # may be tried in any case
_UNKNOWN = 3  # drafts of a lone sequence while their cost is unknown; with several, each gets one
_TRIAL = Flight(1)
_TRIALS_TAKE = 0.03  # of the time, at most
_MOST_DOUBLED = 4  # times that wrong trials may double the time between trials
_MOST_REQUESTS = 256  # the acceptance of that many is stored


@dataclass(frozen=True, slots=True)
class Member:
    """A sequence that decodes. ``most``: the most drafts in a block; ``flight``: its fixed one, if any; ``jumps``: how
    many tokens its rules force after a chosen one; ``share``: how often its drafts are right; ``at_most``: a plausible
    upper bound of that; ``offered``: how often a drafter that is asked has drafts for it."""

    position: int = 0
    most: int = MAX_ROWS - 1
    flight: Flight | None = None
    jumps: float = 0.0
    share: float = 0.0
    at_most: float = 0.0
    offered: float = 1.0

    def tokens(self, drafts: int, in_flight: int, share: float) -> float:
        """Return the expected tokens in a round with ``drafts`` in each step. ``share``: how many of these are
        right."""
        return 1 + self.jumps + self.offered * (emitted(share, drafts, in_flight) - 1)


@dataclass(frozen=True, slots=True)
class GroupChoice:
    """How many ``groups`` take turns, how many steps of each are ``in_flight``, and the ``drafts`` of each member.

    rate: expected tokens per second of all members.
    gap: the longest expected seconds between two tokens of a member.
    slowest: tokens per second of the slowest member without a fixed flight, if it is a little lucky: no member loses
        its drafts because another had bad luck at first.
    rows: of the largest step.
    first: drafts of the first block, if their number differs from ``drafts``.
    """

    groups: int
    in_flight: int
    drafts: tuple[int, ...]
    rate: float
    gap: float
    slowest: float
    rows: int
    first: int | None = None

    @property
    def under_way(self) -> int:
        """Drafts under way at a time."""
        return self.in_flight * sum(self.drafts)

    def flight(self, drafts: int) -> Flight:
        """Return the flight of a member with ``drafts`` drafts."""
        if not drafts or self.in_flight == 1:
            return Flight(drafts)
        return Flight(drafts if self.first is None else self.first, drafts, self.in_flight)


def emitted(acceptance: float, drafts: int, in_flight: float = 1) -> float:
    """Return a member's expected tokens in a round of ``in_flight`` steps with ``drafts`` drafts each."""
    a = min(acceptance, _CERTAIN)
    if drafts == 0:
        return 1.0
    if in_flight == 1:
        return float((1 - a ** (drafts + 1)) / (1 - a))
    return float(in_flight / (1 - a) / (in_flight + a ** (drafts + 1) / (1 - a**drafts)))


def expected(costs: CostModel, members: Seq[Member], groups: int, in_flight: int, drafts: Seq[int]) -> GroupChoice:
    """Return a choice with its expected figures. Members are dealt to the groups like cards."""
    num_stages, busy, passing, most = len(costs.stages), [0.0] * len(costs.stages), 0.0, 0
    for group in range(groups):
        mine = list(zip(members[group::groups], drafts[group::groups], strict=True))
        rows = round(sum(1 + one.jumps + one.offered * count for one, count in mine))
        decode = sum(one.position for one, count in mine if not count)
        shape = Shape(rows, decode, sum((1 + count) * one.position for one, count in mine if count))
        times = [stage.at(shape) for stage in costs.stages]
        drafting = costs.drafting(sum(count > 0 for _, count in mine), max(count for _, count in mine))
        passing = max(passing, drafting + costs.host + sum(times))
        busy = [a + b for a, b in zip(busy, times, strict=True)]
        busy[-1 if costs.drafts_at_end else 0] += drafting
        busy[0] += costs.host if drafting and not costs.drafts_at_end else 0.0
        most = max(most, sum(1 + count for _, count in mine))
    passing += num_stages * costs.hop if num_stages > 1 else 0.0
    seconds = max(in_flight * max(busy), max(1.0, groups * in_flight / num_stages) * passing)
    tokens = [one.tokens(count, in_flight, one.share) for one, count in zip(members, drafts, strict=True)]
    free = [one.tokens(count, in_flight, one.at_most) for one, count in zip(members, drafts, strict=True)
            if one.flight is None]  # fmt: skip
    gap = seconds * (1 + 1 / in_flight) * _UNEVEN if in_flight > 1 else seconds
    rate, slowest = (x / seconds if seconds > 0 else 0.0 for x in (sum(tokens), min(free, default=math.inf)))
    return GroupChoice(groups, in_flight, tuple(drafts), rate, gap, slowest, most)


def drafts_of(members: Seq[Member], depth: int, least: int = 0) -> list[int]:
    """Return the drafts of each member: ``depth`` for the one whose drafts are best. The others get as many as are
    worth as much as its last one, but at least ``least``.

    >>> drafts_of([Member(share=0.9), Member(share=0.5), Member(flight=Flight(2))], 7)
    [7, 1, 2]
    """
    best = max((one.share for one in members if one.flight is None), default=0.0)
    worth = depth * math.log(max(min(best, _CERTAIN), 1e-9))

    def count(one: Member) -> int:
        if one.flight is not None:
            return min(one.flight.first, one.most)
        each = math.log(max(min(one.share, _CERTAIN), 1e-9))
        return min(one.most, max(least, round(worth / each)))

    return [count(one) for one in members]


def _more_and_more(members: Seq[Member]) -> Iterator[list[int]]:
    """Yield the numbers of drafts to try, from few to many: by their worth, the same with at least one for each member,
    and equally many for all, which costs the fewest rounds of drafting."""
    before = list[list[int]]()
    for depth in _DEPTHS:
        found = [drafts_of(members, depth, least) for least in (0, 1, depth)]
        yield from (drafts for i, drafts in enumerate(found) if drafts not in [*before, *found[:i]])
        before = found


def row_by_row(costs: CostModel, one: Member) -> GroupChoice:
    """Return the choice for a lone sequence whose every block is one row: a sampled token, and behind it drafts one by
    one while they are right. It is the best where each row costs a step as much as its first, as with experts on
    disk."""
    num_stages, a = len(costs.stages), one.offered * min(one.share, _CERTAIN)
    first, *others = (stage.at(Shape(1, one.position)) for stage in costs.stages)
    verdict = costs.host + first + sum(others) + num_stages * costs.hop
    right = max(costs.drafting(1) + costs.host + first, *others, verdict / num_stages)
    rate = 1 / ((1 - a) * verdict + a * right)
    return GroupChoice(1, num_stages, (1,), rate, verdict, rate, 1, first=0)


@dataclass(slots=True)
class _OfRequest:
    acceptance: Acceptance
    offered: Acceptance


@dataclass(slots=True)
class GroupChooser:
    """Chooses groups and drafts by ``costs``, for at most ``most_groups`` groups, or exactly as many if ``fixed``. It
    chooses again when sequences come or go, and every few steps."""

    costs: CostModel
    most_groups: int
    fixed: bool = False
    choice: GroupChoice | None = None
    flights: dict[int, Flight] = field(default_factory=dict)  # of the members' next blocks
    acceptance: Acceptance = field(default_factory=Acceptance)
    _offered: Acceptance = field(default_factory=lambda: Acceptance(usual=1.0))  # how often the drafter had drafts
    _requests: "OrderedDict[int, _OfRequest]" = field(default_factory=OrderedDict)
    _since: int = 0  # steps since the last choice
    _steps: int = 0
    _changed_at: int = 0  # the last step at which the number of groups changed but not the number of members
    _most_tried: int = 0  # rows of the largest step of decodes and drafts so far
    _sizes: int = 0  # sizes of steps that had been measured at the last choice
    _trial_cost: float = 1.0  # the cost of a trial, in tokens of all members
    _read_cost: float = 0.0  # the same, for reading before the next trial
    _has_paid: bool = True  # whether the last choice gave any member drafts; true before the first
    _waited: int = 0  # tokens without drafts since the last trial
    _failures: int = 0  # trials in a row that were wrong
    _on_trial: set[int] = field(default_factory=set)

    # -- what was seen -------------------------------------------------------------------------

    def returned(self, plan: StepPlan) -> None:
        """Count a step that has returned."""
        self._since += 1
        self._steps += 1
        if plan.num_tokens > self._most_tried and plan.has_only_logits:
            self._most_tried = plan.num_tokens

    def tried(self, seq_id: int, tried: int, accepted: int) -> None:
        """Learn from the verdict on a sequence's drafts."""
        self._of(seq_id).acceptance.add(tried, accepted)
        if seq_id in self._on_trial:
            self._on_trial.discard(seq_id)
            self._failures = 0 if accepted else self._failures + 1

    def asked(self, seq_id: int, *, has_drafts: bool) -> None:
        """Learn whether the drafter had drafts for a sequence."""
        self._of(seq_id).offered.add(1, int(has_drafts))

    def forget(self, seq_id: int) -> None:
        """Forget a sequence that has ended."""
        self._requests.pop(seq_id, None)
        self._on_trial.discard(seq_id)

    def read(self, seq_id: int, seconds: float) -> None:
        """Note how long the drafter read a sequence whose draft was asked for."""
        if self.choice is not None and self.flights.get(seq_id, OFF).is_off:
            self._read_cost += seconds * self.choice.rate

    # -- what to choose ------------------------------------------------------------------------

    def is_likely(self, seq_id: int) -> bool:
        """Return whether a sequence will probably get drafts next, so that the drafter should read it."""
        flight = self.flights.get(seq_id)
        return self._has_paid if flight is None else not flight.is_off

    def flight(self, seq_id: int) -> Flight:
        """Return the flight of a sequence's next drafts. Call it once for each block that begins with a sampled
        token."""
        flight = self.flights.get(seq_id, OFF)
        if not flight.is_off or self.choice is None or not self.costs.drafts.num_seen:
            return flight
        self._waited += 1
        doubled = 2 ** min(self._failures, _MOST_DOUBLED)
        if self._waited * _TRIALS_TAKE < (self._trial_cost + self._read_cost) * doubled:
            return OFF
        self._waited, self._read_cost = 0, 0.0
        self._on_trial.add(seq_id)
        return _TRIAL

    def is_due(self, seq_ids: Set[int], *, has_learned: bool = False) -> bool:
        """Return whether to choose again for these sequences. ``has_learned``: also if new costs make it due."""
        if seq_ids != self.flights.keys():
            return True
        return has_learned and (self._since >= _EVERY or self._sizes != self.costs.num_sizes)

    def choose(self, members: Mapping[int, Member], objective: float | None, *, has_drafter: bool) -> None:
        """Choose for these sequences. ``objective``: the most seconds between two tokens if there are several
        sequences."""
        self._since, self._sizes, self.flights = 0, self.costs.num_sizes, dict.fromkeys(members, OFF)
        if not members or not self._most_tried or not all(stage.num_seen for stage in self.costs.stages):
            self.choice = None
            return
        found = [self._with_shares(seq_id, one) for seq_id, one in members.items()]
        order = sorted(range(len(found)), key=lambda i: -found[i].share)
        ranked = [found[i] for i in order]
        if has_drafter and not self.costs.drafts.num_seen:
            self.choice = self._without_drafts(ranked)
            count = _UNKNOWN if len(found) == 1 else 1
            self.flights = {seq_id: Flight(min(count, one.most)) for seq_id, one in members.items()}
            return
        before = self.choice
        self.choice = best = self._best(ranked, objective, has_drafter=has_drafter)
        if before is not None and len(before.drafts) == len(members) and before.groups != best.groups:
            self._changed_at = self._steps
        self._has_paid = any(best.drafts)
        drafts = dict(zip(order, best.drafts, strict=True))
        self.flights = {seq_id: best.flight(drafts[i]) for i, seq_id in enumerate(members)}

    def _best(self, members: list[Member], objective: float | None, *, has_drafter: bool) -> GroupChoice:
        none = self._without_drafts(members)
        self._set_trial_cost(members, none)
        if not has_drafter:
            return none
        longest, floor = math.inf, 0.0
        if len(members) > 1:
            gap = expected(self.costs, members, self._most_groups(members), 1, drafts_of(members, 0)).gap
            longest = LONGEST * gap if objective is None else max(objective, gap)
            floor = 1 / (_SLOWER * gap)
        found = self._pick(list(self._with_drafts(members, longest, floor)))
        return none if found is None or found.rate < _MARGIN * none.rate else found

    def _without_drafts(self, members: list[Member]) -> GroupChoice:
        drafts = drafts_of(members, 0)
        found = [expected(self.costs, members, groups, 1, drafts) for groups in self._groups(members)]
        none = self._pick(found)
        assert none is not None, "there is at least one group"
        return none

    def _with_drafts(self, members: list[Member], longest: float, floor: float) -> Iterator[GroupChoice]:
        """Yield the choices within the bounds. ``longest``: of a gap in seconds; ``floor``: of a member's tokens per
        second."""
        costs, most = self.costs, max(_FEW_ROWS, _TRUSTED * self._most_tried)
        for groups in self._groups(members):
            fly = 1 if costs.drafts_at_end else -(-len(costs.stages) // groups)
            for in_flight in range(1, fly + 1):
                best = 0.0
                for drafts in _more_and_more(members):
                    one = expected(costs, members, groups, in_flight, drafts)
                    if one.rows > most or one.gap > longest or one.rate < _GIVE_UP * best:
                        break
                    best = max(best, one.rate)
                    if one.slowest >= floor:
                        yield one
        is_alone = len(members) == 1 < len(costs.stages) and members[0].flight is None and members[0].most > 0
        if is_alone and not (costs.drafts_at_end or costs.drafts_at_once):
            yield row_by_row(costs, members[0])

    def _pick(self, found: list[GroupChoice]) -> GroupChoice | None:
        """Return the best choice, but keep the present number of groups if that is nearly as good. Return None if
        ``found`` is empty."""
        best = max((one.rate for one in found), default=0.0)
        if self.choice is not None:
            has_stayed = self._steps - self._changed_at >= min(_DWELL, self._steps // 4)
            same = [one for one in found if one.groups == self.choice.groups]
            most = max((one.rate for one in same), default=0.0)
            if same and (_BETTER if has_stayed else _MUCH_BETTER) * most >= best:
                found, best = same, most
        return min((one for one in found if one.rate >= _AS_GOOD * best), key=lambda one: one.under_way, default=None)

    def _most_groups(self, members: list[Member]) -> int:
        return min(self.most_groups, len(members))

    def _groups(self, members: list[Member]) -> range:
        most = self._most_groups(members)
        return range(most if self.fixed else 1, most + 1)

    def _set_trial_cost(self, members: list[Member], none: GroupChoice) -> None:
        """Set the cost of one draft in a step, in tokens of all members."""
        more = [replace(one, jumps=one.jumps + 1) if not i else one for i, one in enumerate(members)]
        slower = expected(self.costs, more, none.groups, 1, drafts_of(members, 0))
        row = max(0.0, none.rate * slower.gap / none.gap - none.rate) * none.gap if none.gap else 0.0
        self._trial_cost = self.costs.drafting(1) * none.rate + row

    def _with_shares(self, seq_id: int, member: Member) -> Member:
        mine = self._of(seq_id)
        seen = mine.acceptance
        return replace(member, share=seen.share, at_most=seen.at_most, offered=mine.offered.share)

    def _of(self, seq_id: int) -> _OfRequest:
        found = self._requests.get(seq_id)
        if found is None:
            found = self._requests[seq_id] = _OfRequest(Acceptance(self.acceptance), Acceptance(self._offered))
            while len(self._requests) > _MOST_REQUESTS:
                self._requests.popitem(last=False)
        return found

    def as_dict(self) -> dict[str, object]:
        """Return the latest choice as plain values; each is None before the first choice."""
        one, names = self.choice, ("groups", "in_flight", "drafts", "expected_tokens_per_second")
        values = () if one is None else (one.groups, one.in_flight, sorted(one.drafts), one.rate)
        return dict(zip_longest(names, values))
