"""Decides what every stage does next: events in, plans out.

The life of a sequence: ``add`` queues it; ``schedule`` admits it when there is room and cuts its
tokens still to compute into slices; ``update`` takes what the last stage sampled and appends it, so
there is one more token to compute; ``finish`` (or an end token, or a full length) ends it; its KV is
freed by the next plan, or held for the session's next request.

Two rules keep the stages busy without any of them knowing the others. At most ``max_in_flight``
plans are under way: one for each stage to compute and one received and waiting (double buffering).
And chunks of one prompt need no result of each other, so they follow each other through the stages;
only decode waits for the token it needs.

A plan holds one slice today. Mixing many sequences in one step changes ``_next_slices`` and nothing
else here.
"""

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from splitinfer.core.kv import reusable
from splitinfer.core.plan import NewSequence, SampledToken, Slice, StepPlan, StepResult
from splitinfer.core.sequence import FinishReason, Sequence, common_prefix


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The scheduler's bounds.

    ``max_in_flight`` plans under way; ``chunk_size`` tokens at most in a slice; ``max_running``
    sequences with KV that is growing; ``max_len`` tokens in a sequence (the model's context);
    ``rewind`` tokens the caches go back (``None``: any number); ``max_held`` sessions kept.
    """

    max_in_flight: int
    chunk_size: int
    max_running: int
    max_len: int
    rewind: int | None = None
    max_held: int = 4

    def __post_init__(self) -> None:
        for name in ("max_in_flight", "chunk_size", "max_running", "max_len", "max_held"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One token of one sequence, and whether the sequence ends with it."""

    seq_id: int
    token: SampledToken
    finish_reason: FinishReason | None


class Scheduler:
    """Pure: no clock, no threads, no arrays. ``check`` states what must always hold."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.waiting: deque[Sequence] = deque()
        self.running: deque[Sequence] = deque()  # least recently scheduled first
        self.held: OrderedDict[str, Sequence] = OrderedDict()  # session -> finished sequence, oldest first
        self._freed: list[int] = []
        self._plans: deque[StepPlan] = deque()  # under way, oldest first
        self._next_step = 0

    # -- events in ---------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Queue a sequence, first come first served."""
        self.waiting.append(seq)

    def finish(self, seq_id: int, reason: FinishReason) -> bool:
        """End a sequence from outside (abort, a stop string). False if it is not here any more.

        What is under way for it still runs and is ignored; its KV goes with the next plan.
        """
        seq = self._find(seq_id)
        if seq is None:
            return False
        self._end(seq, reason)
        return True

    def update(self, result: StepResult) -> list[TokenEvent]:
        """Learn what came of the oldest plan under way.

        Raises:
            ValueError: a result that does not answer that plan; the pipeline keeps order, so this
                is a broken peer.
        """
        plan = self._take_plan(result)
        sampled = {s.seq_id: s.tokens for s in result.sampled}
        events: list[TokenEvent] = []
        for part in plan.slices:
            seq = self._find(part.seq_id)
            if seq is not None:  # else it ended while this step was under way
                seq.num_in_flight -= 1
                events += self._append(seq, sampled.get(part.seq_id, ()))
        return events

    def replay(self) -> None:
        """The stages have forgotten everything: compute every running sequence again from its tokens.

        Nothing that was sampled is lost or sampled twice: tokens are here, and those still to come depend
        on nothing else. Sessions that nobody uses lose their KV and nothing more.
        """
        self._plans.clear()
        self._freed.clear()
        self.held.clear()
        for seq in self.running:
            seq.forget_stages()

    def drop(self, session: str) -> None:
        """Forget a session: its KV is freed by the next plan."""
        seq = self.held.pop(session, None)
        if seq is not None:
            self._freed.append(seq.seq_id)

    # -- plans out ---------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """The next plan, or ``None`` when there is nothing to do or no stage could take it."""
        if len(self._plans) >= self.config.max_in_flight:
            return None
        self._admit()
        parts = list(self._next_slices())
        if not parts and not self._freed:
            return None
        new = tuple(self._introduce(seq) for seq, _ in parts if not seq.is_known)
        plan = StepPlan(self._next_step, new, tuple(part for _, part in parts), tuple(self._freed))
        self._freed.clear()
        self._next_step += 1
        self._plans.append(plan)
        return plan

    @property
    def can_schedule(self) -> bool:
        """Whether ``schedule`` would return a plan now."""
        if len(self._plans) >= self.config.max_in_flight:
            return False
        has_room = bool(self.waiting) and len(self.running) < self.config.max_running
        return has_room or bool(self._freed) or any(seq.num_to_compute > 0 for seq in self.running)

    @property
    def num_in_flight(self) -> int:
        """Plans under way."""
        return len(self._plans)

    @property
    def is_idle(self) -> bool:
        """Nothing runs, waits, or is still to be freed."""
        return not (self.waiting or self.running or self._plans or self._freed)

    # -- inside ------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.config.max_running:
            seq = self.waiting.popleft()
            self._reuse(seq)
            self.running.append(seq)

    def _reuse(self, seq: Sequence) -> None:
        """Take over the KV that the session's last request left, as far as the tokens agree."""
        held = self.held.pop(seq.session, None) if seq.session is not None else None
        if held is None:
            return
        computed = held.tokens[: held.num_scheduled]
        furthest = max(held.furthest, len(computed))
        kept = reusable(furthest, common_prefix(computed, seq.tokens), len(seq.tokens), self.config.rewind)
        if kept == 0:
            self._freed.append(held.seq_id)
            return
        seq.parent, seq.num_reused, seq.num_scheduled = held.seq_id, kept, kept
        seq.furthest = furthest

    def _next_slices(self) -> Iterator[tuple[Sequence, Slice]]:
        for seq in self.running:
            if seq.num_to_compute > 0:
                self.running.remove(seq)
                self.running.append(seq)
                yield seq, self._slice(seq)
                return

    def _slice(self, seq: Sequence) -> Slice:
        start = seq.num_scheduled
        end = min(start + self.config.chunk_size, len(seq.tokens))
        seq.num_scheduled = end
        seq.num_in_flight += 1
        return Slice(seq.seq_id, start, tuple(seq.tokens[start:end]), int(end == len(seq.tokens)))

    def _introduce(self, seq: Sequence) -> NewSequence:
        seq.is_known = True
        return NewSequence(seq.seq_id, seq.params, seq.seed, seq.parent, tuple(seq.tokens[: seq.num_reused]))

    def _take_plan(self, result: StepResult) -> StepPlan:
        expected = self._plans[0].step if self._plans else None
        if result.step != expected:
            raise ValueError(f"the result of step {result.step} came where that of step {expected} was due")
        plan = self._plans[0]
        rows = {p.seq_id: p.num_logits for p in plan.slices if p.num_logits}
        got = {s.seq_id: len(s.tokens) for s in result.sampled}
        if rows != got:
            raise ValueError(f"step {result.step} asked for {rows} tokens by sequence and got {got}")
        self._plans.popleft()
        return plan

    def _append(self, seq: Sequence, tokens: tuple[SampledToken, ...]) -> Iterator[TokenEvent]:
        for token in tokens:
            reason = seq.append(token.token_id, self.config.max_len)
            yield TokenEvent(seq.seq_id, token, reason)
            if reason is not None:
                self._end(seq, reason)
                return

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        seq.finish_reason = reason
        if seq in self.waiting:
            self.waiting.remove(seq)
            return
        self.running.remove(seq)
        if seq.session is not None and seq.is_known and reason is not FinishReason.ERROR:
            self._hold(seq.session, seq)
        else:
            self._release(seq)

    def _hold(self, session: str, seq: Sequence) -> None:
        self.drop(session)
        self.held[session] = seq
        while len(self.held) > self.config.max_held:
            self.drop(next(iter(self.held)))

    def _release(self, seq: Sequence) -> None:
        if seq.is_known:
            self._freed.append(seq.seq_id)
        elif seq.parent is not None:  # admitted, never introduced: the stages still know the parent
            self._freed.append(seq.parent)

    def _find(self, seq_id: int) -> Sequence | None:
        return next((s for s in (*self.running, *self.waiting) if s.seq_id == seq_id), None)

    def check(self) -> None:
        """Assert what must hold between any two events; tests call it after each."""
        ids = [s.seq_id for s in (*self.waiting, *self.running, *self.held.values())]
        assert len(ids) == len(set(ids)), "a sequence is in two places"
        assert len(self._plans) <= self.config.max_in_flight
        assert len(self.running) <= self.config.max_running
        assert len(self.held) <= self.config.max_held
        assert not set(self._freed) & set(ids), "a living sequence is to be freed"
        for seq in self.running:
            assert 0 <= seq.num_reused <= seq.num_scheduled <= len(seq.tokens)
            assert seq.finish_reason is None
            in_plans = sum(part.seq_id == seq.seq_id for plan in self._plans for part in plan.slices)
            assert seq.num_in_flight == in_plans
