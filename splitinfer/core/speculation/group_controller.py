"""Chooses groups and drafts for several sequences, from what steps, drafts and links have cost (``grouping``).

One sequence alone is ``controller.Controller``'s, which knows blocks in flight better; without a drafter the choice is
the number of groups alone. A choice is made again when sequences come or go, and now and then; another number of groups
costs a moved sequence its place among the KV of its group, and the pipeline a bubble, so it has to be clearly better.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from splitinfer.core.metrics.usual import Usual
from splitinfer.core.plan import StageFigures, StepPlan, StepResult
from splitinfer.core.speculation.flight import OFF, Flight, RowTimes
from splitinfer.core.speculation.grouping import Costs, Grouping, Member, best_grouping
from splitinfer.core.speculation.step_times import MOST, StepTimes

_BETTER = 1.05  # factor by which another number of groups has to be faster
_DWELL = 128  # steps for which their number stays while nobody comes or goes; fewer while little is known
_MARGIN = 1.03  # factor by which drafts have to be faster than none
_EVERY = 16  # steps after which the choice is made again
_MOST_HOST = 0.5  # of a step: what took longer was something else
_PROBES_DEARER = 2.0  # factor on the cost of a probe that delays others
_FIRST = 1  # drafts of each member while nothing is known of their cost


@dataclass(slots=True)
class GroupController:
    """Chooses for ``num_stages`` stages and at most ``most_groups`` groups. ``fixed``: there have to be so many."""

    num_stages: int
    most_groups: int
    fixed: bool = False
    stages: list[StepTimes] = field(init=False)
    drafts: RowTimes = field(default_factory=RowTimes)  # seconds of a round, by the number of sequences
    link: Usual = field(default_factory=Usual)  # one way
    host: Usual = field(default_factory=Usual)  # what a step takes beside drafts, computing and links
    last: Grouping | None = None  # the latest choice
    _returned_at: float = 0.0  # when the last result came
    choice: Grouping | None = None
    flights: dict[int, Flight] = field(default_factory=dict)  # of the members' next blocks
    _planned: dict[int, float] = field(default_factory=dict)  # by step: when a plan with drafts was made
    _since: int = 0  # steps since the last choice
    _steps: int = 0  # since the start
    _changed_at: int = 0  # the step at which the number of groups, or the members, changed
    _may_change: bool = True  # the number of groups
    _members: frozenset[int] = frozenset()
    _sizes: int = 0

    def __post_init__(self) -> None:
        self.stages = [StepTimes() for _ in range(self.num_stages)]

    # -- what was measured ---------------------------------------------------------------------

    def planned(self, step: int, now: float) -> None:
        """Note when a plan with new drafts was made, in seconds on the first stage's clock."""
        self._planned[step] = now

    def measured(self, plan: StepPlan, result: StepResult, returned_at: float) -> None:
        """Learn from a step of decodes and blocks. ``returned_at``: when its result came, on the first stage's
        clock."""
        self._since += 1
        self._steps += 1
        figures, planned = result.figures, self._planned.pop(plan.step, None)
        if not plan.slices or len(figures) != self.num_stages:
            return
        if any(part.num_logits < len(part.token_ids) for part in plan.slices):
            return
        for each in figures:
            if not each.notes and 0 <= each.stage < self.num_stages:
                self.stages[each.stage].took(each.rows, each.ended - each.started - each.copying)
        before, self._returned_at = self._returned_at, returned_at
        self._learn_host(plan, figures[0], planned, before)
        if len(figures) > 1 and all(each.rows for each in figures) and returned_at:
            beyond = returned_at - figures[0].ended - sum(each.ended - each.received for each in figures[1:])
            self.link.took(max(0.0, beyond) / self.num_stages)

    def _learn_host(self, plan: StepPlan, first: StageFigures, planned: float | None, before: float) -> None:
        """Learn what a step took beside drafts and computing, where that can be told: in one group all the time since
        the result ``before``, and else the time since it was ``planned``, where it was with new drafts."""
        if before and self.choice is not None and (self.choice.groups, self.choice.in_flight) == (1, 1):
            counts = [part.num_drafts for part in plan.slices if part.num_drafts]  # nothing else was under way
            host = first.started - before - max(counts, default=0) * self.drafts.at(len(counts))
        elif planned:
            host = first.started - planned
        else:
            return
        self.host.took(min(max(0.0, host), _MOST_HOST * (first.ended - first.started)))

    def drafted(self, sequences: int, rounds: float, seconds: float) -> None:
        """Learn from ``rounds`` of drafts for so many sequences at a time."""
        if sequences and rounds and seconds > 0:
            self.drafts.took(sequences, seconds / rounds)

    def costs(self, like: Callable[[int, int], float] = lambda _stage, _rows: 0.0) -> Costs | None:
        """What is known; ``None`` until every stage was measured. ``like``: what else is known of a stage's seconds by
        rows."""
        if not all(self.stages):
            return None
        most = min(stage.trusted_rows for stage in self.stages)
        tables = tuple(stage.table(min(MOST, most), partial(like, i)) for i, stage in enumerate(self.stages))
        rounds = tuple(self.drafts.at(n) for n in range(65)) if self.drafts else ()
        return Costs(tables, rounds, self.link.seconds, self.host.seconds, most)

    # -- what to choose ------------------------------------------------------------------------

    def is_due(self, seq_ids: frozenset[int]) -> bool:
        """Whether to choose again for these sequences."""
        return seq_ids != self._members or self._since >= _EVERY or self._sizes != self._num_sizes

    @property
    def _num_sizes(self) -> int:
        return sum(stage.num_sizes for stage in self.stages) + len(self.drafts.measured)

    def choose(
        self,
        members: Mapping[int, Member],
        objective: float | None,
        like: Callable[[int, int], float],
        *,
        has_drafter: bool,
    ) -> None:
        """Choose for these sequences, two or more. ``objective``: seconds between two tokens, at most; ``like``: see
        ``costs``."""
        has_stayed = self._steps - self._changed_at >= min(_DWELL, self._steps // 4)
        self._may_change = has_stayed or self._members != frozenset(members)
        before = None if self.choice is None else self.choice.groups
        self._choose(members, objective, like, has_drafter=has_drafter)
        if self.choice is not None and self.choice.groups != before:
            self._changed_at = self._steps

    def _choose(
        self,
        members: Mapping[int, Member],
        objective: float | None,
        like: Callable[[int, int], float],
        *,
        has_drafter: bool,
    ) -> None:
        self._members, self._since, self._sizes = frozenset(members), 0, self._num_sizes
        costs, seq_ids = self.costs(like), list(members)
        if costs is None:
            self.choice, self.flights = None, {}
            return
        if has_drafter and not self.drafts:
            self.choice = self._best(costs, [replace(one, most=0, fixed=True) for one in members.values()], objective)
            self.flights = {seq_id: Flight(_FIRST if one.most else 0) for seq_id, one in members.items()}
            return
        self.choice = self._best(costs, list(members.values()), objective)
        self.last, in_flight = self.choice, self.choice.in_flight
        self.flights = {
            seq_id: Flight(count, count if in_flight > 1 else 0, in_flight if count else 1)
            for seq_id, count in zip(seq_ids, self.choice.drafts, strict=True)
        }

    def is_synchronous(self, seq_id: int) -> bool:
        """Whether a sequence's blocks are to wait for each other."""
        return self.flights.get(seq_id, OFF).is_synchronous

    def as_dict(self) -> dict[str, object]:
        """The latest choice for several sequences, as plain numbers; ``None`` where there was none."""
        one = self.last
        if one is None:
            return {"groups": None, "in_flight": None, "drafts": None, "expected_tokens_per_second": None}
        return {
            "groups": one.groups,
            "in_flight": one.in_flight,
            "drafts": sorted(one.drafts),
            "expected_tokens_per_second": one.rate,
        }

    def forget(self) -> None:
        """There are fewer than two sequences."""
        self.choice, self.flights, self._members = None, {}, frozenset()
        self._planned = {}

    def _best(self, costs: Costs, members: list[Member], objective: float | None) -> Grouping:
        found = best_grouping(costs, members, self.most_groups, objective, fixed=self.fixed)
        nobody = [one if one.fixed else replace(one, most=0) for one in members]
        none = self._stays(
            best_grouping(replace(costs, drafts=()), nobody, self.most_groups, objective, fixed=self.fixed)
        )
        best = self._stays(found)
        return best if best.rate >= _MARGIN * none.rate else none

    def _stays(self, found: Mapping[tuple[int, int], Grouping]) -> Grouping:
        """The best, or that of the present shape if it is nearly as good."""
        best = max(found.values(), key=lambda one: one.rate)
        now = None if self.choice is None else found.get((self.choice.groups, self.choice.in_flight))
        if now is None or (self._may_change and best.rate > _BETTER * now.rate):
            return best
        return now

    def probe_cost(self) -> float:
        """What a single draft more in a step costs, in tokens of all members together: each of them probes."""
        if self.choice is None or not self.drafts:
            return 1.0
        return _PROBES_DEARER * (self.drafts.at(1) * self.choice.rate + self.choice.row)
