"""Which drafts the next plan could contain, and those that are handed in for it."""

from dataclasses import replace

from splitinfer.core.scheduler.planner import StepPlanner
from splitinfer.core.scheduler.state import SchedulerState
from splitinfer.core.sequence import Sequence
from splitinfer.core.speculation.speculation import Wish


class Drafts:
    """The drafts of a scheduler's next plan."""

    def __init__(self, state: SchedulerState, planner: StepPlanner) -> None:
        self._state, self._planner = state, planner

    def wishes(self) -> list[Wish]:
        """Return the drafts that the next plan could contain, one wish for each of its sequences that gets some; they
        are handed to ``take`` before the next ``schedule``. Asking twice is harmless."""
        if not self._state.config.speculates or self._state.speculation is None or self._state.is_full:
            return []
        self.force()
        order = self._planner.groups_in_turn()
        for group in order:
            members = self._state.batches.members(group)
            if members and not self._state.batches.is_in_flight(group):
                return [] if self._planner.keeps_decodes_waiting(group) else self._wishes_of(members)
        if self._state.reads_prompts:
            return []
        for group in order:
            if found := self._wishes_of(self._state.batches.going_on(group, self._state.speculation.may_follow)):
                return found
        return []

    def _wishes_of(self, members: list[Sequence]) -> list[Wish]:
        """Wishes for sequences of one step, as far as it has room: half of it is a prompt's while one is read."""
        assert self._state.speculation is not None
        room = self._state.config.token_budget - sum(seq.num_to_compute for seq in members)
        room = room // 2 if self._state.reads_prompts else room
        found = list[Wish]()
        for seq in members:
            ask = self._state.speculation.further if seq.num_awaited else self._state.speculation.first
            wish = ask(seq, self._state.config.longest(seq))
            if wish is not None and room > 0:
                found.append(wish if wish.count <= room else replace(wish, count=room))
                room -= found[-1].count
        return found

    def take(self, wish: Wish) -> None:
        """Take in the drafts made for a wish: all, fewer or none. Results may have come since the wish."""
        if self._state.speculation is not None and self._state.running.get(wish.seq.seq_id) is wish.seq:
            self._state.speculation.take(wish, self._state.config.longest(wish.seq))

    def next(self) -> list[Sequence]:
        """The sequences that are likely to get drafts next, so that a drafter can read their prompts."""
        if self._state.speculation is None or not self._state.config.speculates:
            return []
        return [seq for seq in self._state.running.values() if self._state.speculation.is_likely(seq)]

    def force(self) -> None:
        """Have the tokens that must come next go out as drafts."""
        if self._state.speculation is None:
            return
        for seq in self._state.running.values():
            if seq.rules is not None and seq in self._state.batches:
                self._state.speculation.force(seq, self._state.config.longest(seq))
