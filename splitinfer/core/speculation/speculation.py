"""Which sequences get drafts, how many, and how many were right. The scheduler calls it; it does nothing by itself.

The number of a sequence's drafts, and of their blocks under way, is chosen together with the number of groups
(``chooser``), unless the request has a fixed flight. While a prompt is computed, blocks do not follow each other: the
prompt's chunks fill the stages.

A draft is useless if the sequence would end before it, or if the stages could not be rolled back over it. A draft never
causes a preemption or an eviction.

Caches that are states cannot be truncated, but stages can roll them back to any row of undecided blocks of drafts. To
cache such a sequence's blocks of KV, the state must once be exact at their ends. So no block of drafts crosses the end
of a block of KV, and if one reaches it, the next waits for its verdict.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from splitinfer.core.costs.model import CostModel
from splitinfer.core.kv.budget import BLOCK
from splitinfer.core.kv.rewind import UNLIMITED, WITHIN_DRAFTS
from splitinfer.core.plan import Slice
from splitinfer.core.sequence import Extension, Sequence
from splitinfer.core.speculation.acceptance import Counts
from splitinfer.core.speculation.chooser import GroupChooser
from splitinfer.core.speculation.drafter_choice import Choosers
from splitinfer.core.speculation.flight import MAX_ROWS, OFF, Flight


@dataclass(frozen=True, slots=True)
class Draft:
    """A draft of the next token. ``seconds``: the time its device took, if known, without waiting behind a step. 0: it
    cost nothing and says nothing about the cost of drafts."""

    token_id: int
    seconds: float | None = None


@dataclass(slots=True)
class Proposal:
    """Drafts that the next plan could contain: up to ``count``, from ``position`` on, where the sequence's stream ends.
    ``num_misses``: the sequence's wrong drafts when it was made; ``drafts``: the ones made so far."""

    seq: Sequence
    count: int
    position: int
    num_misses: int
    drafts: list[Draft] = field(default_factory=list)

    @property
    def stands(self) -> bool:
        """Whether it is still valid: the sequence goes on, and no draft before or among its own was wrong."""
        seq = self.seq
        if seq.finish_reason is not None or not seq.is_known or seq.drafts.num_misses != self.num_misses:
            return False
        return all(d.token_id == t for d, t in zip(self.drafts, seq.tokens[self.position :], strict=False))

    @property
    def unsampled(self) -> list[Draft]:
        """The drafts in whose positions no token has been sampled yet."""
        return self.drafts[max(0, len(self.seq.tokens) - self.position) :]


@dataclass(slots=True)
class Speculation:
    """Speculation on stages with these ``costs``. ``chooser``: chooses the sequences' drafts. ``longest``: returns the
    most tokens that a sequence may have. ``rewind``: how many tokens the stages' caches can be rolled back; ``None``:
    any number; 0: they hold states, which can be rolled back within blocks of drafts."""

    costs: CostModel
    chooser: GroupChooser
    longest: Callable[[Sequence], int]
    rewind: int | None = UNLIMITED
    keeps_blocks: bool = False  # whether blocks of KV are cached
    block: int = BLOCK  # tokens of such a block
    counts: Counts = field(default_factory=Counts)
    has_states: bool = field(init=False)  # whether the stages hold states
    choosers: Choosers | None = None  # n-grams beside the last stage's drafts
    _flights: dict[int, Flight] = field(default_factory=dict)  # by sequence: the flight of its blocks under way
    _chosen_at: dict[int, int] = field(default_factory=dict)  # by sequence: its number of tokens at that choice

    def __post_init__(self) -> None:
        self.has_states = self.rewind == WITHIN_DRAFTS

    # -- before a plan -------------------------------------------------------------------------

    def is_likely(self, seq: Sequence) -> bool:
        """Return whether a sequence will probably get drafts."""
        return self.chooser.is_likely(seq.seq_id) if seq.flight is None else not seq.flight.is_off

    @property
    def most_drafts(self) -> int:
        """The most drafts in a block."""
        most = min(MAX_ROWS - 1, self.costs.drafts_at_once or MAX_ROWS)
        return min(most, self.rewind or most)

    def _next_flight(self, seq: Sequence) -> Flight:
        """Return the flight of a sequence's next blocks."""
        return self.chooser.flight(seq.seq_id) if seq.flight is None else seq.flight

    def proposals(self, members: Seq[Sequence], room: int) -> list[Proposal]:
        """Return proposals for sequences of one step with room for ``room`` drafts."""
        found = list[Proposal]()
        for seq in members:
            proposal = self.further(seq) if seq.num_awaited else self.first(seq)
            if proposal is not None and room > 0:
                found.append(replace(proposal, count=min(proposal.count, room)))
                room -= found[-1].count
        return found

    def first(self, seq: Sequence) -> Proposal | None:
        """Return a proposal for a block that begins with a sampled token."""
        if seq.has_guesses or seq.drafts.is_dry or seq.num_to_compute > 1 or seq.ballot is not None:
            return None
        if self._chosen_at.get(seq.seq_id) != len(seq.tokens):
            self._chosen_at[seq.seq_id] = len(seq.tokens)
            self._flights[seq.seq_id] = self._next_flight(seq)
        return self._proposal(seq, self._flights[seq.seq_id].first)

    def num_next(self, seq: Sequence) -> int:
        """Return how many drafts the last stage makes after a step's tokens."""
        return max(0, min(self._next_flight(seq).first, self.most_drafts, self.longest(seq) - 2 - seq.num_streamed))

    def propose(self, seq: Sequence, drafts: Seq[int]) -> None:
        """Take in the last stage's drafts after a sequence's last token."""
        proposal = None if seq.has_guesses else self._proposal(seq, len(drafts))
        if proposal is not None:
            if self.choosers is not None:
                drafts = self.choosers.chosen(seq.seq_id, seq.tokens, drafts)
            proposal.drafts = [Draft(token_id, seconds=0.0) for token_id in drafts[: proposal.count]]
            self.take(proposal)

    def further(self, seq: Sequence) -> Proposal | None:
        """Return a proposal for a block after the blocks under way."""
        if seq.has_guesses or seq.drafts.is_dry or not self.may_follow(seq):
            return None
        return self._proposal(seq, self._flights[seq.seq_id].further)

    def may_follow(self, seq: Sequence) -> bool:
        """Return whether one more block may be under way after the others."""
        flight = self._flights.get(seq.seq_id, OFF)
        if seq.flight is None and self.chooser.flights.get(seq.seq_id, OFF).is_synchronous:
            return False  # it was chosen again since its blocks began to follow each other
        return 0 < seq.num_awaited < flight.in_flight and not flight.is_synchronous

    def _proposal(self, seq: Sequence, count: int) -> Proposal | None:
        known = seq.num_streamed
        rows = (MAX_ROWS - 1 if not seq.drafts.ahead else MAX_ROWS) - len(seq.drafts.waiting)
        count = min(count, rows, self.longest(seq) - 1 - known)
        if self.rewind:
            count = min(count, self.rewind - len(seq.drafts))
        if self.has_states and self.keeps_blocks and seq.kv.is_stored:
            before = known - len(seq.drafts.waiting)
            start = before if seq.drafts.ahead else before - 1
            reaches_end = bool(seq.drafts.ahead) and before % self.block == 0
            count = 0 if reaches_end else min(count, (start // self.block + 1) * self.block - known)
        return Proposal(seq, count, known, seq.drafts.num_misses) if count > 0 else None

    def jump_forward(self, seq: Sequence) -> None:
        """Queue the tokens that the rules force after a sequence's stream, if they may be its next block. They cost no
        drafter anything and say nothing about one."""
        may_go = self.may_follow(seq) if seq.num_awaited else seq.num_to_compute <= 1
        proposal = self._proposal(seq, MAX_ROWS) if may_go else None
        if proposal is None or seq.rules is None:
            return
        seq.jump_forward(seq.rules.jump_forward(seq.answer_stream, proposal.count))

    def opening(self, seq: Sequence) -> tuple[int, ...]:
        """Return the tokens that the rules force after a prompt whose last chunk goes now. Empty if caches cannot be
        truncated: a rollback would need data of the whole chunk."""
        proposal = self._proposal(seq, MAX_ROWS)
        if seq.rules is None or proposal is None or self.rewind is not UNLIMITED or self.costs.drafts_at_end:
            return ()
        return seq.rules.jump_forward(seq.answer_stream, proposal.count)

    def take(self, proposal: Proposal) -> None:
        """Take in a proposal's drafts, up to an end token or one that cannot follow. A sequence that got fewer than it
        could have gets no more until its next token."""
        seq, drafts = proposal.seq, proposal.unsampled
        self.counts.drafted += len(proposal.drafts)
        if not proposal.stands:
            return
        token_ids = [draft.token_id for draft in drafts]
        end = next((i for i, token in enumerate(token_ids) if token in seq.end_tokens), len(token_ids))
        are_jumps = [False] * end if seq.rules is None else seq.rules.admitted(seq.answer_stream, token_ids[:end])
        seq.hold(token_ids[: len(are_jumps)], are_jumps)
        seq.drafts.is_dry = len(proposal.drafts) < proposal.count or len(are_jumps) < len(drafts)
        self.jump_forward(seq)

    # -- after a result ------------------------------------------------------------------------

    def judged(self, seq_id: int, part: Slice, found: Extension) -> None:
        """Learn from the verdicts on a sequence's drafts, which came with the rows of ``part``."""
        begins, end, first = int(part.begins_with_draft), part.end, found.first
        for row, is_right in found.verdicts:
            self.counts.add(row + begins if first + row < end else 0, accepted=is_right)
        if found.reason is None:
            self.chooser.tried(seq_id, len(found.verdicts), found.num_right)

    def asked(self, proposals: Seq[Proposal]) -> None:
        """Learn for which of the proposals the drafter had drafts."""
        for proposal in proposals:
            self.chooser.asked(proposal.seq.seq_id, has_drafts=bool(proposal.drafts))

    def forget(self, seq: Sequence) -> None:
        """Forget a sequence that has ended or was preempted."""
        self._flights.pop(seq.seq_id, None)
        self._chosen_at.pop(seq.seq_id, None)
        if seq.finish_reason is not None:
            self.chooser.forget(seq.seq_id)
        if self.choosers is not None:
            self.choosers.forget(seq.seq_id)
