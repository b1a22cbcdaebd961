"""A toy pipeline whose answers depend on every token of KV it was told to keep, and a house to run it in.

The toy's KV of a sequence is simply the list of tokens that the plans put there, and its next token is a
number made of that whole list and the seed. A slice that starts at the wrong place, a rollback that was
forgotten or a block of other tokens changes every token after it. The toy also obeys like the real stages: it
refuses to open a sequence twice, to leave gaps, to go back, and to begin with a block that is not there; where its
caches are states (``whole_blocks``), it only goes on from where a block ends. Where prompts are packed on their way
(``prompts_only``), nothing but a prompt may be kept, and nothing but a prompt begin with what is.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from random import Random

from splitinfer.core.kv import budget
from splitinfer.core.kv.block_tree import Block, DiskBlock, Key, chained
from splitinfer.core.kv.budget import KVBudget, KVUse, StageKV
from splitinfer.core.kv.prefix_cache import WORTH, PrefixCacheConfig
from splitinfer.core.plan import (
    NewSequence,
    SampledSlice,
    SampledToken,
    Save,
    Slice,
    StageFigures,
    StepPlan,
    StepResult,
)
from splitinfer.core.sampling_params import SamplingParams
from splitinfer.core.scheduler.config import SchedulerConfig
from splitinfer.core.scheduler.in_flight import TokenEvent
from splitinfer.core.scheduler.microbatches import MIN_CHUNK
from splitinfer.core.scheduler.policy import PolicyConfig, PolicyName
from splitinfer.core.scheduler.scheduler import Scheduler
from splitinfer.core.sequence import FinishReason, Sequence
from splitinfer.core.speculation.speculation import Draft, Proposal
from tests.core import invariants

VOCAB = 5  # few, so that different prompts often begin alike


@dataclass(frozen=True)
class Sizes:
    """Tokens of a block of KV, of the least chunk, and that a fetch must save."""

    block: int = budget.BLOCK
    min_chunk: int = MIN_CHUNK
    worth: int = WORTH


_sizes = [Sizes()]  # the last one holds


@contextmanager
def small(block: int = 4, min_chunk: int = 2) -> Iterator[None]:
    """Schedulers made meanwhile have blocks and chunks so small that short sequences meet their borders."""
    _sizes.append(Sizes(block, min_chunk, worth=1))
    try:
        yield
    finally:
        _sizes.pop()


def next_token(tokens: Iterable[int], seed: int) -> int:
    """A polynomial of all tokens: none can change, move or be missing without changing it."""
    value = seed + 1
    for token in tokens:
        value = (value * 1_000_003 + token + 1) % (2**61 - 1)
    return value // 7 % VOCAB


def alone(seq: Sequence, prompt: list[int], max_len: int) -> tuple[list[int], FinishReason]:
    """What a sequence generates with nobody else there: the definition of right."""
    tokens = list(prompt)
    while True:
        tokens.append(next_token(tokens, seq.seed))
        if tokens[-1] in seq.end_tokens:
            return tokens[len(prompt) :], FinishReason.STOP
        if len(tokens) - len(prompt) >= seq.params.max_tokens or len(tokens) >= max_len:
            return tokens[len(prompt) :], FinishReason.LENGTH


@dataclass
class Cache:
    """One sequence on the toy."""

    seed: int
    tokens: list[int] = field(default_factory=list)
    sure: int = 0  # of the tokens, those that are no drafts or were right
    next: int | None = None  # what was sampled last
    drafted: list[range] | None = None  # where caches are states: blocks of drafts without a verdict
    num_prompt: int = 0

    def run(self, part: Slice) -> tuple[int, ...]:
        """The tokens sampled; none if the slice is void."""
        if part.is_rejected(self.sure, self.next):
            assert part.start >= self.sure, "a void slice that goes back"
            return ()
        assert part.start == self.sure, "a gap in the KV, or tokens computed twice"
        if self.drafted is not None:
            can = part.start == len(self.tokens) or any(part.start in block for block in self.drafted)
            assert can, "a state cannot go back there"
            self.drafted = [] if not part.begins_with_draft else self.drafted
            self.drafted += [range(part.start, part.end + 1)] if part.num_drafts else []
        self.tokens[part.start :] = part.token_ids
        ends = range(part.end - part.num_logits + 1, part.end + 1)
        sampled = tuple(next_token(self.tokens[:end], self.seed) for end in ends)
        if not sampled:
            self.sure = part.end
            return ()
        sampled = sampled[: part.num_accepted(sampled)]
        self.sure, self.next = ends[len(sampled) - 1], sampled[-1]
        return sampled


@dataclass(frozen=True)
class StoredBlock:
    """KV of the tokens from ``start`` on, which is right only after those in ``before``."""

    before: tuple[int, ...]
    tokens: tuple[int, ...]


@dataclass
class ToyDisk:
    """The files of one stage. What is to be written is there, and told of, only after ``catch_up``."""

    files: dict[Key, tuple[DiskBlock, StoredBlock]] = field(default_factory=dict)
    behind: deque[tuple[Key, DiskBlock, StoredBlock]] = field(default_factory=deque)
    unsaid: list[Key] = field(default_factory=list)

    def catch_up(self, most: int = 1000) -> None:
        for _ in range(min(most, len(self.behind))):
            key, kept, block = self.behind.popleft()
            self.files[key] = kept, block
            self.unsaid.append(key)

    def told(self) -> tuple[Key, ...]:
        said, self.unsaid = tuple(self.unsaid), []
        return said


_WRONG = StoredBlock((-1,), (-1,))  # what a block holds that could not be read


class ToyStage:
    """Carries out plans in order, and obeys like the real stages: what a wrong plan asks for fails.

    It stands for as many stages as there are ``disks``: their memory is the same, their files need not be.
    """

    def __init__(
        self, *, whole_blocks: bool = False, disks: Iterable[ToyDisk] = (), prompts_only: bool = False
    ) -> None:
        self.block = _sizes[-1].block
        self.whole_blocks, self.prompts_only = whole_blocks, prompts_only
        self.disks = list(disks)
        self.num_fetched = 0
        self.caches: dict[int, Cache] = {}
        self.left: dict[int, Cache] = {}
        self.num_taken_over = 0
        self.blocks: dict[int, StoredBlock] = {}
        self.under_way: deque[StepResult] = deque()  # results wait until they are asked for
        self.num_computed: dict[int, int] = {}
        self._next_step: int | None = None

    def forget(self) -> None:
        """What a stage that has started again knows: nothing."""
        for held in (self.caches, self.left, self.blocks, self.under_way):
            held.clear()
        self._next_step = None

    def run(self, plan: StepPlan) -> StepResult:
        assert self._next_step is None or plan.step == self._next_step
        self._next_step = plan.step + 1
        assert len(plan.freed) == len(set(plan.freed))
        for save in plan.saves:
            self._save(save)
        self.left |= {seq_id: self.caches.pop(seq_id) for seq_id in plan.retained}
        for seq_id in plan.freed:
            assert seq_id in self.caches or seq_id in self.left, f"freed {seq_id}, which is not here"
            self.caches.pop(seq_id, None)
            self.left.pop(seq_id, None)
        for new in plan.new:
            assert new.seq_id not in self.caches, "opened twice"
            drafted = list[range]() if self.whole_blocks else None
            cache = Cache(new.seed, self._begin(new), len(new.prefix), drafted=drafted, num_prompt=new.num_prompt)
            self.caches[new.seq_id] = cache
            assert tuple(cache.tokens) == new.prefix, "the KV it begins with is of other tokens"
            first = next((part for part in plan.slices if part.seq_id == new.seq_id), None)
            assert len(new.prefix) == first.start if first is not None else len(plan.slices) == 0
        for block_id in plan.dropped:
            assert block_id in self.blocks, f"dropped {block_id}, which is not here"
            del self.blocks[block_id]
        lacking = [self._fetch(plan, disk) for disk in self.disks]
        for disk in self.disks:
            for key in plan.erased:
                disk.files.pop(key, None)
        figures = (
            StageFigures(i, 0.0, 0.0, lacking=tuple(lacking[i]), written=disk.told())
            for i, disk in enumerate(self.disks)
        )
        return StepResult(plan.step, tuple(self._run(plan.slices)), tuple(figures))

    def _fetch(self, plan: StepPlan, disk: ToyDisk) -> list[int]:
        """Read a plan's blocks; those that are not there. What one stage lacks is there, and wrong, on this toy."""
        lacking = []
        for fetch in plan.fetches:
            found = disk.files.get(fetch.key)
            if found is None:
                lacking.append(fetch.block_id)
            is_wrong = found is None or (self.blocks.get(fetch.block_id) is _WRONG)
            self.blocks[fetch.block_id] = _WRONG if is_wrong or found is None else found[1]
            self.num_fetched += found is not None
        return lacking

    def _save(self, save: Save) -> None:
        tokens = self.caches[save.seq_id].tokens
        assert save.block_id not in self.blocks, "two blocks of one id"
        assert save.end <= self.caches[save.seq_id].sure, "saved before it was computed and verified"
        assert not self.whole_blocks or save.end == len(tokens), "the state has gone on"
        assert save.end - save.start <= self.block
        assert not self.prompts_only or save.end <= self.caches[save.seq_id].num_prompt, "an answer is kept"
        block = StoredBlock(tuple(tokens[: save.start]), tuple(tokens[save.start : save.end]))
        self.blocks[save.block_id] = block
        assert self.disks or not (save.is_for_disk or save.tokens), "written where there is no disk"
        if save.is_for_disk:
            assert save.tokens == block.tokens, "a file of other tokens"
            kept = DiskBlock(save.parent, save.tokens)
            for disk in self.disks:
                disk.behind.append((chained(save.parent, save.tokens), kept, block))

    def _begin(self, new: NewSequence) -> list[int]:
        if new.takes_over is not None:
            self.num_taken_over += 1
            cache = self.left.pop(new.takes_over)
            assert not self.whole_blocks or len(cache.tokens) == len(new.prefix), "a state cannot go back"
            assert len(new.prefix) <= cache.sure
            return cache.tokens[: len(new.prefix)]
        tokens: list[int] = []
        for block_id in new.blocks:
            block = self.blocks[block_id]
            assert tuple(tokens) == block.before, "a block after other tokens than its own"
            tokens += block.tokens
        assert len(new.prefix) <= len(tokens)
        assert not self.whole_blocks or len(new.prefix) == len(tokens), "a state cannot be cut"
        assert not self.prompts_only or len(new.prefix) <= new.num_prompt, "an answer begins with a prompt's KV"
        return tokens[: len(new.prefix)]

    def _run(self, slices: Iterable[Slice]) -> Iterable[SampledSlice]:
        for part in slices:
            assert part.seq_id in self.caches, "an unknown sequence"
            cache = self.caches[part.seq_id]
            before = cache.sure
            sampled = cache.run(part)
            self.num_computed[part.seq_id] = self.num_computed.get(part.seq_id, 0) + cache.sure - before
            if part.num_logits:
                yield SampledSlice(part.seq_id, tuple(map(SampledToken, sampled)))

    def use(self) -> KVUse:
        """What the caches take, as the stages see it."""
        use = KVUse(stored=len(self.blocks))
        for cache in (*self.caches.values(), *self.left.values()):
            use += KVBudget(block=self.block).use_of(len(cache.tokens))
        return use


def config_of(**config: int | bool | KVBudget | PolicyConfig | tuple[DiskBlock, ...] | None) -> SchedulerConfig:
    """The scheduler's bounds, with what is said of blocks in its place."""
    of_blocks = {name: config.pop(name) for name in [each.name for each in fields(PrefixCacheConfig)] if name in config}
    bounds = {"num_groups": 2, "max_in_flight": 2, "token_budget": 4, "max_running": 2, "max_len": 1000, **config}
    sizes = _sizes[-1]
    bounds |= {"kv": bounds.get("kv") or KVBudget(block=sizes.block), "min_chunk": sizes.min_chunk}
    return SchedulerConfig(**bounds, blocks=PrefixCacheConfig(**{"worth": sizes.worth, **of_blocks}))  # type: ignore[arg-type]


def kept_by_all(disks: list[ToyDisk]) -> tuple[DiskBlock, ...]:
    """What is on every disk, as the first stage offers it."""
    first, *others = disks or [ToyDisk()]
    return tuple(kept for key, (kept, _) in first.files.items() if all(key in disk.files for disk in others))


@dataclass
class Guesser:
    """Drafts that are right with probability ``right`` each; now and then fewer than were proposed."""

    random: Random
    right: float

    def __call__(self, proposal: Proposal) -> list[Draft]:
        stream, drafts = proposal.seq.streamed(0), list[Draft]()
        for _ in range(proposal.count if self.random.random() < 0.9 else self.random.randint(0, proposal.count)):
            token = next_token(stream, proposal.seq.seed)
            if self.random.random() >= self.right:
                token = (token + self.random.randrange(1, VOCAB)) % VOCAB
            drafts.append(Draft(token, self.random.choice([None, self.random.random()])))
            stream.append(token)
        return drafts


class House:
    """A scheduler and a toy, and the account of what each sequence got."""

    def __init__(self, *, disks: Iterable[ToyDisk] = (), **config: int | bool | KVBudget | PolicyConfig | None) -> None:
        self.disks = list(disks)
        self.scheduler = Scheduler(config_of(**config, on_disk=bool(self.disks), kept=kept_by_all(self.disks)))
        kept = self.scheduler.config.blocks
        self.toy = ToyStage(whole_blocks=kept.whole_blocks, disks=self.disks, prompts_only=kept.prompts_only)
        self.sequences: dict[int, Sequence] = {}
        self.prompts: dict[int, list[int]] = {}
        self.generated: dict[int, list[int]] = {}
        self.reasons: dict[int, FinishReason] = {}
        self.cancelled: set[int] = set()
        self.was_lost = False  # the stages forgot everything once
        self.guess: Callable[[Proposal], list[Draft]] | None = None  # where there is a drafter
        self.now = 0.0
        self.learns = True  # from each result, once what follows on it is planned
        self.overtake: Callable[[], bool] | None = None  # whether a result comes while the first stage computes

    def add(
        self,
        prompt: list[int],
        max_tokens: int = 4,
        session: str | None = None,
        end_tokens: Iterable[int] = (),
        seed: int = 0,
        **more: int | float | None,
    ) -> int:
        seq_id = len(self.sequences)
        params = SamplingParams(max_tokens=max_tokens)
        seq = Sequence(seq_id, list(prompt), params, seed, frozenset(end_tokens), session, **more)
        self.scheduler.add(seq)
        self.sequences[seq_id], self.prompts[seq_id], self.generated[seq_id] = seq, list(prompt), []
        return seq_id

    def step(self) -> StepPlan | None:
        self.draft()
        before = {seq.seq_id: i for i, group in enumerate(self.scheduler.batches._groups) for seq in group}
        in_flight = {seq_id for seq_id in before if self.sequences[seq_id].num_awaited}
        num_plans = len(self.scheduler.in_flight)
        self.now += 1.0
        asks = self.scheduler.prefix_cache.files.is_asking
        plan = self.scheduler.schedule(self.now)
        if self.learns:
            self.scheduler.learn()
        if plan is not None:
            assert asks or plan.slices or plan.has_commands
            assert plan.num_tokens <= self.scheduler.config.token_budget
            if self.overtake is not None and self.overtake() and self.toy.under_way:
                self.deliver()
            assert num_plans < self.limit(bool(before))
            self.check_group(plan, before, in_flight)
            self.scheduler.in_flight[-1].is_sent = True
            self.toy.under_way.append(self.toy.run(plan))
            if self.scheduler.config.kv is not None:
                assert self.scheduler.config.kv.fits(self.toy.use()), "the stages hold more than they can"
        assert len(self.toy.under_way) == len(self.scheduler.in_flight)
        return plan

    def draft(self) -> None:
        """What the scheduler proposes, by a drafter that is sometimes wrong and sometimes has less."""
        proposals = self.scheduler.proposals() if self.guess is not None else []
        assert sum(proposal.count for proposal in proposals) <= self.scheduler.config.token_budget
        assert len({proposal.seq.seq_id for proposal in proposals}) == len(proposals)
        for proposal in proposals:
            assert self.guess is not None
            for draft in self.guess(proposal) if proposal.stands else ():
                proposal.drafts.append(draft)
                if self.overtake is not None and self.overtake() and self.toy.under_way:
                    self.deliver()
                if not proposal.stands:
                    break
            assert len(proposal.drafts) <= proposal.count
        for proposal in proposals:
            self.scheduler.take_drafts(proposal)

    def limit(self, anybody_decodes: bool) -> int:
        config = self.scheduler.config
        return min(config.num_groups, config.max_in_flight) if anybody_decodes else config.max_in_flight

    def check_group(self, plan: StepPlan, before: dict[int, int], in_flight: set[int]) -> None:
        """The step is of one group, whole, and its decodes come first, one token each."""
        decodes = [part for part in plan.slices if part.seq_id in before]
        assert list(plan.slices[: len(decodes)]) == decodes
        assert all(part.num_logits == 1 or part.num_drafts for part in decodes)
        assert all(len(part.token_ids) == 1 or part.num_drafts for part in decodes)
        keeps_waiting = self.scheduler.config.policy_config.policy in (PolicyName.PREFILL_FIRST, PolicyName.WATERMARK)
        if plan.slices and before and not decodes and not keeps_waiting and self.scheduler.config.kv is None:
            # A chunk alone is the step of an empty group, or of one whose results are still to come.
            full = {before[seq_id] for seq_id in before}
            assert len(full) < self.scheduler.config.num_groups or in_flight, "decodes were kept waiting"
        groups = {before[part.seq_id] for part in decodes}
        assert len(groups) <= 1
        for group in groups:
            members = [seq_id for seq_id in before if before[seq_id] == group]
            if plan.slices[0].num_drafts:
                continue
            assert not in_flight & set(members), "a group that waits for results"
            if self.scheduler.config.kv is None and decodes:
                assert len(decodes) == min(len(members), self.scheduler.config.token_budget), "a decode was skipped"

    def deliver(self) -> list[TokenEvent]:
        events = self.scheduler.update(self.toy.under_way.popleft(), self.now)
        for event in events:
            assert event.seq_id not in self.reasons, "a token after the end"
            self.generated[event.seq_id].append(event.token.token_id)
            if event.finish_reason is not None:
                self.reasons[event.seq_id] = event.finish_reason
        return events

    def finish(self, seq_id: int, reason: FinishReason = FinishReason.ABORT) -> None:
        was_live = seq_id not in self.reasons
        assert self.scheduler.finish(seq_id, reason) == was_live
        if was_live:
            self.reasons[seq_id] = reason
            self.cancelled.add(seq_id)

    def run(self) -> None:
        for _ in range(10_000):
            if self.step() is None:
                if not self.toy.under_way:
                    return
                self.deliver()
            invariants.check(self.scheduler)
        raise AssertionError("it never ends")

    def check(self) -> None:
        """Run to the end: every answer is right, and no KV is lost."""
        self.run()
        self.check_answers()
        self.check_kv()

    def until(self, happened: Callable[[], object]) -> None:
        """Run until it happened."""
        while not happened():
            self.step() or self.deliver()

    def plan(self) -> StepPlan:
        """A step, of which there must be one."""
        plan = self.step()
        assert plan is not None
        return plan

    def expire(self, now: float) -> list[int]:
        seq_ids = self.scheduler.expire(now)
        for seq_id in seq_ids:
            assert seq_id not in self.reasons
            self.reasons[seq_id] = FinishReason.ABORT
            self.cancelled.add(seq_id)
        return seq_ids

    def tokens(self, seq_id: int) -> list[int]:
        return self.prompts[seq_id] + self.generated[seq_id]

    def check_answers(self) -> None:
        for seq_id, seq in self.sequences.items():
            tokens, reason = alone(seq, self.prompts[seq_id], self.scheduler.config.max_len)
            if seq_id in self.cancelled:
                assert self.generated[seq_id] == tokens[: len(self.generated[seq_id])]
            else:
                assert (self.generated[seq_id], self.reasons[seq_id]) == (tokens, reason)
            assert seq.finish_reason == self.reasons[seq_id]
            if seq.is_known and not seq.num_preemptions and not self.was_lost:
                num_computed = self.toy.num_computed.get(seq_id, 0)  # 0: it ended when it was just opened
                assert num_computed >= seq.num_sure - seq.kv.num_reused, "not computed"
                if self.guess is None:
                    assert num_computed == seq.num_scheduled - seq.kv.num_reused, "computed twice"

    def check_kv(self) -> None:
        """Nothing is lost: what the toy still has is what the index knows."""
        assert self.scheduler.is_idle
        assert not self.toy.caches
        left = self.scheduler.kv.retained
        assert list(self.toy.left) == ([] if left is None else [left.seq_id])
        found = {
            block.block_id: StoredBlock(_before(block), block.tokens) for block in self.scheduler.prefix_cache.tree
        }
        assert self.toy.blocks == found
        assert self.scheduler.config.blocks.keeps_blocks or not found
        assert not any(block.is_coming for block in self.scheduler.prefix_cache.tree)


def _before(block: Block) -> tuple[int, ...]:
    return () if block.parent is None else (*_before(block.parent), *block.parent.tokens)


def drain(house: House) -> list[Slice]:
    """Run to the end; every slice that was planned."""
    parts: list[Slice] = []
    while True:
        plan = house.step()
        if plan is not None:
            parts += plan.slices
        elif house.toy.under_way:
            house.deliver()
        else:
            return parts


def blocks(*counts: int, per_token: int = 1, stored: int = 1) -> KVBudget:
    """Stages with room for so many blocks of KV; one that is kept for later takes as much as ``stored`` of them."""
    block = _sizes[-1].block
    size = block * per_token
    return KVBudget(tuple(StageKV(count * size, per_token, stored=stored * size) for count in counts), block)
