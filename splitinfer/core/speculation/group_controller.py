"""Chooses groups and drafts for several sequences (``grouping``), by what steps, drafts and links cost.

One sequence alone is ``controller.Controller``'s, which knows blocks in flight better; without a drafter the choice is
the number of groups alone. A choice is made again when sequences come or go, and now and then; another number of groups
costs a moved sequence its place among the KV of its group, and the pipeline a bubble, so it has to be clearly better.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from splitinfer.core.costs.by_rows import RowCosts
from splitinfer.core.costs.model import CostModel
from splitinfer.core.plan import StepPlan
from splitinfer.core.speculation.flight import OFF, Flight
from splitinfer.core.speculation.grouping import Grouping, Member, best_grouping

_BETTER = 1.05  # factor by which another number of groups has to be faster
_DWELL = 128  # steps for which their number stays while nobody comes or goes; fewer while little is known
_MARGIN = 1.03  # factor by which drafts have to be faster than none
_EVERY = 16  # steps after which the choice is made again
_TRUSTED = 2  # times the most rows of a step of decodes and drafts so far: what may be tried
_PROBES_DEARER = 2.0  # factor on the cost of a probe that delays others
_FIRST = 1  # drafts of each member while nothing is known of their cost


@dataclass(slots=True)
class GroupController:
    """Chooses for at most ``most_groups`` groups, by ``costs``. ``fixed``: there have to be so many."""

    costs: CostModel
    most_groups: int
    fixed: bool = False
    last: Grouping | None = None  # the latest choice
    choice: Grouping | None = None
    flights: dict[int, Flight] = field(default_factory=dict)  # of the members' next blocks
    _since: int = 0  # steps since the last choice
    _steps: int = 0  # since the start
    _changed_at: int = 0  # the step at which the number of groups, or the members, changed
    _may_change: bool = True  # the number of groups
    _most_tried: int = 0  # rows of a step of decodes and drafts
    _members: frozenset[int] = frozenset()
    _sizes: int = 0

    def returned(self, plan: StepPlan) -> None:
        """Count a step that has returned."""
        self._since += 1
        self._steps += 1
        if plan.has_only_logits:
            self._most_tried = max(self._most_tried, plan.num_tokens)

    # -- what to choose ------------------------------------------------------------------------

    def is_due(self, seq_ids: frozenset[int], *, has_learned: bool = False) -> bool:
        """Whether to choose again for these sequences. ``has_learned``: also because of what steps have cost since."""
        if seq_ids != self._members:
            return True
        return has_learned and (self._since >= _EVERY or self._sizes != self.costs.num_sizes)

    def choose(
        self,
        members: Mapping[int, Member],
        objective: float | None,
        position: int = 0,
        *,
        has_drafter: bool,
    ) -> None:
        """Choose for these sequences, two or more, of ``position`` tokens on average. ``objective``: seconds between
        two tokens, at most."""
        has_stayed = self._steps - self._changed_at >= min(_DWELL, self._steps // 4)
        self._may_change = has_stayed or self._members != frozenset(members)
        before = None if self.choice is None else self.choice.groups
        self._choose(members, objective, position, has_drafter=has_drafter)
        if self.choice is not None and self.choice.groups != before:
            self._changed_at = self._steps

    def _choose(
        self, members: Mapping[int, Member], objective: float | None, position: int, *, has_drafter: bool
    ) -> None:
        self._members, self._since, self._sizes = frozenset(members), 0, self.costs.num_sizes
        if not self._most_tried or not all(stage.num_seen for stage in self.costs.stages):
            self.choice, self.flights = None, {}
            return
        costs, seq_ids = self.costs.for_several(position, _TRUSTED * self._most_tried), list(members)
        if has_drafter and not costs.drafts:
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

    def _best(self, costs: RowCosts, members: list[Member], objective: float | None) -> Grouping:
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
        if self.choice is None or not self.costs.drafts.num_seen:
            return 1.0
        return _PROBES_DEARER * (self.costs.drafting(1) * self.choice.rate + self.choice.row)
