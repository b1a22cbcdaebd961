"""One request as the scheduler sees it: its parameters and its tokens.

A sequence is a growing list of token ids and one number, ``num_scheduled``: how many of them are in plans. Prefill, a
later chunk, a reused prefix and decode are then the same case: tokens still to compute.

    tokens      [ reused | prompt, in chunks ......... | generated ... ]
                         ^ first slice starts here      ^ num_prompt_tokens
    num_scheduled ------------------------> moves right with every plan

With speculation, drafts follow the tokens. The drafts ``ahead`` are in plans under way, the drafts ``waiting`` are not
yet. ``num_scheduled`` includes the drafts ahead. Sampled tokens replace drafts while they are equal. The first that
differs rejects all drafts after it, and ``num_scheduled`` is rolled back to its position.

    tokens ................. | ahead ......... | waiting ...
                             sampled next ^      num_scheduled is here

A preempted sequence starts again at ``num_scheduled = 0``; all its tokens are computed again like a prompt.
"""

import math
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import StrEnum

from splitinfer.core.grammar import Text, Texts, TokenRules, beginning_of
from splitinfer.core.kv.block_tree import Block, Key
from splitinfer.core.picture import Picture, with_placeholders
from splitinfer.core.plan import SampledToken, Slice
from splitinfer.core.sampling_params import SamplingParams as SamplingParams
from splitinfer.core.speculation.flight import Flight


class FinishReason(StrEnum):
    """Why a request ended. The values are public."""

    STOP = "stop"  # a stop string, a stop token or the end-of-sequence token
    LENGTH = "length"  # max_tokens, or the model's context is full
    ABORT = "abort"  # the caller cancelled it, or its deadline has passed
    ERROR = "error"  # the pipeline failed


@dataclass(slots=True)
class Extension:
    """The effect of sampled tokens on a sequence.

    first: the position of the first token.
    verdicts: for each draft of a drafter in plans, its row and whether it was right. num_right: how many were.
    reason: why the sequence ends with the last token, if it does.
    """

    first: int
    verdicts: list[tuple[int, bool]] = field(default_factory=list)
    num_right: int = 0
    reason: FinishReason | None = None


@dataclass(slots=True)
class CachedKV:
    """The prefix cache's notes about a sequence. They start again whenever the stages have none of its KV.

    num_reused: tokens whose KV came from cached blocks when it was admitted.
    blocks: cached blocks of its tokens, from the first on.
    is_stored: whether its next block can be cached, because all before it are.
    num_held: full blocks of its prompt that were in memory when they were last counted.
    awaits: blocks being read from disk that it waits for.
    has_fetched: whether it has requested blocks on disk.
    """

    num_reused: int = 0
    blocks: list[Block] = field(default_factory=list)
    is_stored: bool = True
    num_held: int = 0
    awaits: list[Block] = field(default_factory=list)
    has_fetched: bool = False


@dataclass(slots=True)
class DraftNotes:
    """A sequence's drafts, and how many earlier ones were right.

    ahead: drafts in plans under way.
    waiting: the drafts after them, for the next plan.
    is_dry: whether no more drafts come until the next token.
    were_planned: whether any draft was in a plan since the stages have the sequence's KV.
    jumps: positions of the drafts that its rules force; num_jumped: tokens that were such drafts.
    num_misses: how often a draft in a plan was wrong.
    num_tried, num_right: a drafter's drafts in plans that sampled tokens have decided, and how many of them were right.
    """

    ahead: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    is_dry: bool = False
    were_planned: bool = False
    jumps: set[int] = field(default_factory=set)
    num_jumped: int = 0
    num_misses: int = 0
    num_tried: int = 0
    num_right: int = 0

    def __iter__(self) -> Iterator[int]:
        yield from self.ahead
        yield from self.waiting

    def __len__(self) -> int:
        return len(self.ahead) + len(self.waiting)

    def go(self, count: int) -> tuple[int, ...]:
        """Move the first ``count`` waiting drafts into a plan and return them."""
        drafts = tuple(self.waiting[:count])
        del self.waiting[:count]
        self.ahead += drafts
        self.were_planned = True
        return drafts

    def missed(self, token_id: int) -> bool:
        """Compare the first draft with the token sampled in its place: drop this draft if they are equal, otherwise
        all. Return whether plans under way hold wrong drafts."""
        self.is_dry = False
        first = self.ahead or self.waiting
        if not first or first[0] == token_id:
            del first[:1]
            return False
        is_planned = bool(self.ahead)
        self.num_misses += is_planned
        self.drop()
        return is_planned

    def drop(self) -> None:
        """Drop all drafts."""
        self.ahead, self.waiting, self.is_dry = [], [], False
        self.jumps.clear()


@dataclass(slots=True)
class Ballot:
    """Texts of a grammar, from which the likeliest will come next. They go through the stages one after the other.

    scores: for the first ``alternatives``, the log probabilities of all their tokens together.

    A grammar's masks alone would choose the likeliest first token, which can begin an unlikely text. If other texts
    begin with a text, their probability is subtracted from its own: "car" must be likely not only as the beginning of
    "carrot".
    """

    alternatives: Texts
    scores: list[float] = field(default_factory=list)

    @property
    def next(self) -> Text:
        """The next alternative to score."""
        return self.alternatives[len(self.scores)]

    @property
    def winner(self) -> Text | None:
        """The likeliest alternative, or the first of equal ones; ``None`` while any has no score."""
        if len(self.scores) < len(self.alternatives):
            return None
        return max(self.alternatives, key=self._score)

    def _score(self, text: Text) -> float:
        """Return the log probability that a text comes and none of the texts that it begins."""
        score = dict(zip(self.alternatives, self.scores, strict=True))
        longer = [other for other in score if beginning_of(text, other)]
        nearest = [one for one in longer if not any(beginning_of(other, one) for other in longer)]
        rest = 1.0 - sum(math.exp(score[other] - score[text]) for other in nearest)
        return score[text] + math.log(rest) if rest > 0.0 else -math.inf


@dataclass(slots=True, eq=False)
class Sequence:
    """One request's tokens and how far they have been scheduled. The scheduler owns it. Equal only to itself.

    In the places of its ``pictures``, ``tokens`` has the ids of their rows (``core.picture``).
    """

    # the request
    seq_id: int  # counts requests: of equal priority, the one with the lowest id came first
    tokens: list[int]  # grow with ``extend``
    params: SamplingParams
    seed: int
    end_tokens: frozenset[int] = frozenset()  # end of sequence and stop_token_ids together
    session: str | None = None  # the name by which its blocks can be dropped
    priority: int = 0  # higher goes first
    pictures: tuple[Picture, ...] = ()  # in its prompt, in order
    pixels: tuple[object, ...] = ()  # the pictures' values, kept alive with the sequence
    deadline: float | None = None  # seconds on the caller's clock
    flight: Flight | None = None  # fixed sizes of its draft blocks; None: the chooser decides
    rules: TokenRules | None = None  # which tokens its answer may have; None: any
    # the scheduler's notes
    keys: tuple[Key, ...] = ()  # keys of the full blocks of its prompt
    keyed_by: tuple[Key, int] | None = None  # the root and the block size of these keys
    num_preemptions: int = 0  # times it was preempted
    finish_reason: FinishReason | None = None
    # notes of the prefix cache and of speculation
    comes_back: bool = False  # whether it begins with all that an earlier request has left: its conversation goes on
    kv: CachedKV = field(default_factory=CachedKV)
    drafts: DraftNotes = field(default_factory=DraftNotes)
    ballot: Ballot | None = None  # the vote on its next text, while one is open
    # notes of its own methods about its life; times are seconds on the scheduler's clock
    begun_at: float | None = None  # when its first slice was planned
    num_cached: int | None = None  # tokens whose KV came from cached blocks at its first admission
    read: tuple[int, float] = (0, 0.0)  # tokens whose KV the last stage has, and since when
    token_at: float = 0.0  # when its last token came
    scores: list[SampledToken] = field(default_factory=list)  # its prompt's tokens from the second on, if wanted
    # notes of its own methods about its KV on the stages, now and after the plans under way
    num_scheduled: int = 0
    num_in_flight: int = 0  # plans under way that hold a slice of this sequence
    num_awaited: int = 0  # how many of these the next token depends on; 0 after a wrong draft
    kv_floor: int = 0  # tokens that its KV had room for at the last rollback, or when it took the arrays over
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)

    @property
    def num_to_compute(self) -> int:
        """Known tokens that are in no plan yet. Steps are planned in this quantity."""
        return max(0, len(self.tokens) - self.num_scheduled)

    @property
    def num_rows(self) -> int:
        """Rows of its next decode, without drafts: one, or the rows of the alternative that is scored next."""
        return 1 if self.ballot is None else len(self.ballot.next)

    @property
    def num_to_score(self) -> int:
        """Prompt rows whose log probabilities are wanted but have not come. Stored KV cannot replace these rows."""
        return 0 if self.params.prompt_logprobs is None else self.num_prompt_tokens - 1 - len(self.scores)

    @property
    def num_sure(self) -> int:
        """Known tokens whose KV the stages have, or will have after the plans under way."""
        return min(self.num_scheduled, len(self.tokens))

    def sent(self, start: int, end: int) -> tuple[int, ...]:
        """Return the tokens [start, end) as stages get them."""
        tokens = self.tokens[start:end]
        return with_placeholders(tokens, start, self.pictures) if self.pictures else tuple(tokens)

    def streamed(self, start: int, end: int | None = None) -> list[int]:
        """Return the positions [start, end) of its *stream*, or all from ``start`` on. The stream is its tokens as
        stages get them, then all drafts; the next draft follows it. The cost is proportional to the result's length."""
        known, end = len(self.tokens), self.num_streamed if end is None else end
        drafts = [*self.drafts][max(0, start - known) : max(0, end - known)]
        return [*self.sent(start, min(end, known)), *drafts]

    @property
    def num_streamed(self) -> int:
        """The length of its stream."""
        return len(self.tokens) + len(self.drafts)

    @property
    def has_guesses(self) -> bool:
        """Whether any of a drafter's drafts wait, not only tokens that its rules force."""
        first = len(self.tokens) + len(self.drafts.ahead)
        return any(position not in self.drafts.jumps for position in range(first, self.num_streamed))

    @property
    def answer_stream(self) -> list[int]:
        """The part of its stream after the prompt."""
        return self.streamed(self.num_prompt_tokens)

    @property
    def answer(self) -> list[int]:
        """The tokens sampled so far."""
        return self.tokens[self.num_prompt_tokens :]

    @property
    def num_generated(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def is_known(self) -> bool:
        """Whether the stages have its static data, because it runs."""
        return self.num_scheduled > 0

    @property
    def kv_tokens(self) -> int:
        """Tokens that its KV has room for. Caches do not shrink when they are rolled back."""
        return max(self.num_scheduled, self.kv_floor)

    @property
    def precedence(self) -> tuple[int, int]:
        """The sort key of its rank, highest rank first: higher priority, then earlier arrival."""
        return -self.priority, self.seq_id

    def begin(self, num_stored: int, room: int) -> None:
        """Start to run with the stored KV of its first ``num_stored`` tokens, in arrays with room for at least ``room``
        tokens."""
        self.num_scheduled, self.read, self.kv_floor = num_stored, (num_stored, self.read[1]), room
        self.num_cached = num_stored if self.num_cached is None else self.num_cached

    def go(self, size: int, num_drafts: int, now: float) -> tuple[int, ...]:
        """Move the next ``size`` known tokens and the first waiting drafts after them into a plan, and return them."""
        token_ids = self.sent(self.num_scheduled, self.num_scheduled + size)
        if num_drafts:
            token_ids += self.drafts.go(num_drafts)
        self.num_scheduled += len(token_ids)
        self.num_in_flight += 1
        self.num_awaited += 1
        self.begun_at = now if self.begun_at is None else self.begun_at
        return token_ids

    def put_to_vote(self, alternatives: Texts) -> None:
        """Make the likeliest alternative come next, whatever was sampled. No plan under way may hold tokens after its
        own."""
        self.ballot = Ballot(alternatives) if self.ballot is None else self.ballot
        self.drafts.drop()
        self._take_back_last()

    def go_scoring(self, now: float) -> tuple[int, ...]:
        """Move its last token and the next alternative into a plan. Return them without the alternative's last
        token."""
        assert self.ballot is not None
        token_ids = (*self.go(1, 0, now), *self.ballot.next[:-1])
        self.kv_floor = max(self.kv_floor, self.num_scheduled - 1 + len(token_ids))
        return token_ids

    def scored(self, tokens: Seq[SampledToken]) -> None:
        """Take in the log probabilities of an alternative's tokens."""
        assert self.ballot is not None
        assert self.rules is not None
        self.num_awaited -= 1
        self._take_back_last()
        self.ballot.scores.append(sum(token.logprob or 0.0 for token in tokens))
        if (winner := self.ballot.winner) is not None:
            self.rules.decide(self.answer, winner)
            self.ballot = None

    def _take_back_last(self) -> None:
        """Make its last token the next one to compute, even if it was computed."""
        self.kv_floor = self.kv_tokens
        self.num_scheduled = len(self.tokens) - 1

    def is_ballot(self, part: Slice) -> bool:
        """Return whether a slice scores an alternative, not the prompt."""
        return bool(part.scored) and part.start >= self.num_prompt_tokens - 1

    def hold(self, drafts: Seq[int], are_jumps: Iterable[bool]) -> None:
        """Queue drafts for the next plan. ``are_jumps``: for each draft, whether the rules force it."""
        first = self.num_streamed
        self.drafts.jumps.update(first + i for i, is_jump in enumerate(are_jumps) if is_jump)
        self.drafts.waiting += drafts

    def jump_forward(self, token_ids: Seq[int]) -> None:
        """Queue tokens that its rules force after its stream for the next plan."""
        self.hold(token_ids, [True] * len(token_ids))

    def returned(self, start: int, scored: Seq[SampledToken] = ()) -> None:
        """Note that a slice from ``start`` on has come back or was left out. ``scored``: log probabilities of its
        prompt tokens; some may be known already."""
        self.num_in_flight -= 1
        if scored:
            self.scores += scored[len(self.scores) - start :]

    def extend(self, sampled: Iterable[int], max_len: int, now: float) -> Extension:
        """Append sampled tokens up to one that ends the sequence. Return their effect. ``max_len``: the model's context
        in tokens."""
        self.num_awaited -= 1
        found, notes = Extension(len(self.tokens)), self.drafts
        for row, token_id in enumerate(sampled):
            is_tried, is_jump = bool(notes.ahead), len(self.tokens) in notes.jumps
            notes.jumps.discard(len(self.tokens))
            self.tokens.append(token_id)
            self.token_at = now
            is_right = not notes.missed(token_id)
            if not is_right:
                self._take_back_last()
                self.num_awaited = 0
            notes.num_jumped += is_tried and is_jump
            if is_tried and not is_jump:
                found.verdicts.append((row, is_right))
                found.num_right += is_right
            if token_id in self.end_tokens:
                found.reason = FinishReason.STOP
                break
            if self.num_generated >= self.params.max_tokens or len(self.tokens) >= max_len:
                found.reason = FinishReason.LENGTH
                break
        notes.num_tried += len(found.verdicts)
        notes.num_right += found.num_right
        return found

    def forget_stages(self) -> None:
        """Reset all but the tokens, because the stages have none of its KV."""
        self.num_scheduled, self.num_in_flight, self.num_awaited = 0, 0, 0
        self.drafts.drop()
        self.drafts.were_planned = False
        self.kv_floor = 0
        self.kv = CachedKV()
