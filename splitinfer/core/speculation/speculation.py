"""Who gets drafts, how many, and what became of them. The scheduler asks; nothing happens by itself.

Speculation takes what would stand idle. With as many requests as stages, each of them fills a stage while the others
wait, and drafts would only stand in their way; so only fewer than that get any, and one alone always does. Nor does
anybody while a prompt is being read: its chunks fill the stages.

A draft is worth nothing where the sequence would end before it, or where the stages could not go back over it, and it
never makes another give up memory.

Caches that are states cannot be cut. Stages keep those at the beginnings of blocks, so behind a wrong draft the whole
block is gone back over, and its right tokens are computed once more, with the token that was sampled instead and no
drafts: the next block has to begin where a state is kept. What such a sequence has computed is not kept for others
from its first draft on, for its states do not stand where blocks of KV end.
"""

from dataclasses import dataclass, field

from splitinfer.core.kv.rewind import PUT_BACK, UNLIMITED
from splitinfer.core.plan import Slice, StepPlan, StepResult
from splitinfer.core.sequence import Sequence
from splitinfer.core.speculation.acceptance import Counts, Sum
from splitinfer.core.speculation.controller import Controller
from splitinfer.core.speculation.flight import MAX_ROWS, OFF, Flight


@dataclass(frozen=True, slots=True)
class Draft:
    """A guess of the next token. ``confidence``: the drafter's own probability for it, if it has one."""

    token_id: int
    confidence: float | None = None


@dataclass(slots=True)
class Wish:
    """Drafts that the next plan could take: up to ``count``, to follow a sequence's stream, which ends before
    ``position``; a block ends where the probability that all of it is right falls below ``cutoff``. ``drafts``: those
    that have been made."""

    seq: Sequence
    count: int
    position: int
    num_misses: int
    cutoff: float | None = None  # computed when it is first needed
    drafts: list[Draft] = field(default_factory=list)
    sure: float = 1.0  # the probability that all of them are right

    @classmethod
    def of(cls, seq: Sequence, count: int) -> "Wish":
        """For what a sequence is now."""
        return cls(seq, count, len(seq.tokens) + len(seq.ahead), seq.num_misses)

    @property
    def stands(self) -> bool:
        """Whether no result has overtaken it: no draft before its own, or among them, was wrong."""
        seq = self.seq
        if seq.finish_reason is not None or not seq.is_known or seq.num_misses != self.num_misses:
            return False
        return all(d.token_id == t for d, t in zip(self.drafts, seq.tokens[self.position :], strict=False))

    @property
    def left(self) -> list[Draft]:
        """The drafts in whose places nothing has been sampled yet."""
        return self.drafts[max(0, len(self.seq.tokens) - self.position) :]


@dataclass(slots=True)
class Speculation:
    """For ``num_stages`` stages whose caches go back ``rewind`` tokens (``None``: any number); 0: they hold states,
    which go back to the beginnings of blocks."""

    num_stages: int
    rewind: int | None = UNLIMITED
    counts: Counts = field(default_factory=Counts)
    controller: Controller = field(init=False)
    _flights: dict[int, Flight] = field(default_factory=dict)  # of the run under way, by sequence
    _in_a_row: dict[int, int] = field(default_factory=dict)  # right drafts since the last wrong one
    _chosen_at: dict[int, int] = field(default_factory=dict)  # tokens it had then
    _confidences: dict[tuple[int, int], float] = field(default_factory=dict)  # by sequence and position

    def __post_init__(self) -> None:
        self.controller = Controller(self.num_stages, self.num_stages)

    @property
    def has_states(self) -> bool:
        """Whether the stages go back by whole blocks."""
        return self.rewind == PUT_BACK

    # -- before a plan -------------------------------------------------------------------------

    def has_room(self, num_runnable: int) -> bool:
        """Whether so many requests leave a stage idle."""
        return 0 < num_runnable <= max(1, self.num_stages - 1)

    def first(self, seq: Sequence, longest: int) -> Wish | None:
        """Drafts for a block that begins with a sampled token. ``longest``: tokens the sequence has at most."""
        if seq.drafted or seq.is_dry or seq.num_to_compute > 1:
            return None
        if self._chosen_at.get(seq.seq_id) != len(seq.tokens):
            self._chosen_at[seq.seq_id] = len(seq.tokens)
            self._flights[seq.seq_id] = seq.flight or self.controller.flight(seq.seq_id)
        return self._wish(seq, self._flights[seq.seq_id].first, longest)

    def further(self, seq: Sequence, longest: int) -> Wish | None:
        """Drafts for a block behind those under way."""
        if seq.drafted or seq.is_dry or not self.may_follow(seq):
            return None
        return self._wish(seq, self._flights[seq.seq_id].further, longest)

    def may_follow(self, seq: Sequence) -> bool:
        """Whether one more block may be under way behind the others."""
        flight = self._flights.get(seq.seq_id, OFF)
        return 0 < seq.num_awaited < flight.in_flight and not flight.is_synchronous

    def _wish(self, seq: Sequence, count: int, longest: int) -> Wish | None:
        known = len(seq.tokens) + len(seq.ahead)
        count = min(count, MAX_ROWS - 1 if not seq.ahead else MAX_ROWS, longest - 1 - known)
        if self.rewind:
            count = min(count, self.rewind - len(seq.ahead))
        return Wish.of(seq, count) if count > 0 else None

    def add(self, wish: Wish, draft: Draft) -> bool:
        """One more draft has been made; whether it is worth its place in the block."""
        if draft.confidence is not None:
            wish.sure *= self.controller.confidence.share(draft.confidence)
            if wish.drafts and wish.sure < self._cutoff(wish):
                return False
        wish.drafts.append(draft)
        return True

    def _cutoff(self, wish: Wish) -> float:
        if wish.cutoff is None:
            wish.cutoff = 0.0 if wish.seq.flight is not None else self.controller.cutoff(wish.seq.seq_id)
        return wish.cutoff

    def take(self, wish: Wish) -> None:
        """What came of a wish. Nothing is drafted behind an end; who got less than was wished for gets no more until
        its next token."""
        seq, drafts = wish.seq, wish.left
        self.counts.drafted += len(wish.drafts)
        if not wish.stands:
            return
        for draft in drafts:
            if draft.token_id in seq.end_tokens:
                break
            position = len(seq.tokens) + len(seq.ahead) + len(seq.drafted)
            if draft.confidence is not None:
                self._confidences[seq.seq_id, position] = draft.confidence
            seq.drafted.append(draft.token_id)
        seq.is_dry = len(wish.drafts) < wish.count or len(seq.drafted) < len(drafts)

    def go(self, seq: Sequence, count: int) -> tuple[int, ...]:
        """The first ``count`` drafts of those that wait are in a plan from now on."""
        drafts = tuple(seq.drafted[:count])
        del seq.drafted[:count]
        seq.ahead += drafts
        seq.is_stored &= not self.has_states
        self.counts.sent += len(drafts)
        self.counts.blocks += 1
        return drafts

    # -- after a result ------------------------------------------------------------------------

    def appended(self, seq: Sequence, part: Slice, row: int, misses_before: int) -> bool:
        """A token was taken from row ``row`` of those of ``part`` that have logits, in the place of a draft in a plan;
        whether the draft was right."""
        accepted = seq.num_misses == misses_before
        self._in_a_row[seq.seq_id] = self._in_a_row.get(seq.seq_id, 0) + 1
        if not accepted:
            right = self._in_a_row.pop(seq.seq_id) - 1
            self.counts.runs[right] = self.counts.runs.get(right, 0) + 1
        place = row + int(part.begins_with_draft)
        position = len(seq.tokens) - 1
        self.counts.add(place if position < part.end else 0, accepted=accepted)
        confidence = self._confidences.pop((seq.seq_id, position), None)
        if confidence is not None:
            self.controller.confidence.add(confidence, accepted=accepted)
        return accepted

    def measured(self, plan: StepPlan, result: StepResult, heard: float) -> None:
        """What a step of one sequence has cost. ``heard``: when its result came, on the first stage's clock."""
        figures = result.figures
        if (
            len(plan.slices) != 1
            or len(figures) != self.num_stages
            or plan.slices[0].num_logits < len(plan.slices[0].token_ids)
        ):
            return
        for each in figures:
            self.controller.computed(each.stage, each.rows, each.ended - each.started)
            if 0 < each.rows <= MAX_ROWS:
                self.counts.steps.setdefault((each.stage, each.rows), Sum()).add(1, each.ended - each.started)
        if all(each.rows for each in figures) and len(figures) > 1:
            beyond = heard - figures[0].ended - sum(each.ended - each.received for each in figures[1:])
            self.controller.returned(beyond)
            self.counts.links.add(1, beyond)

    def took(self, num_drafts: int, seconds: float) -> None:
        """So many drafts took so long."""
        self.controller.drafted(num_drafts, seconds)
        self.counts.drafting.add(num_drafts, seconds)

    def forget(self, seq: Sequence) -> None:
        """A sequence has ended, or its KV is gone."""
        self._flights.pop(seq.seq_id, None)
        self._chosen_at.pop(seq.seq_id, None)
        self._in_a_row.pop(seq.seq_id, None)
        if self._confidences:
            self._confidences = {key: c for key, c in self._confidences.items() if key[0] != seq.seq_id}
        if seq.finish_reason is not None:
            self.controller.forget(seq.seq_id)
