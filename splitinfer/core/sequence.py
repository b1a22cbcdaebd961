"""One request as the scheduler sees it: its parameters and its tokens.

A sequence is a growing list of token ids and one number, ``num_scheduled``: how many of them are in
plans. Prefill, a later chunk, a reused prefix and decode are then the same case: tokens still to compute.

    tokens      [ reused | prompt, in chunks ......... | generated ... ]
                         ^ first slice starts here      ^ num_prompt_tokens
    num_scheduled ------------------------> moves right with every plan

With speculation, drafts follow the tokens: those ``ahead`` are in plans under way, and those ``waiting`` are not yet.
``num_scheduled`` includes those ahead. Sampled tokens take the drafts' places as long as they are equal; the first
that differs rejects all drafts after it, and ``num_scheduled`` is rolled back to its position.

    tokens ................. | ahead ......... | waiting ...
                             sampled next ^      num_scheduled is here

A preempted sequence begins again at ``num_scheduled = 0``; all its tokens are computed again like a prompt.
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
    ABORT = "abort"  # the caller cancelled it, or its deadline is over
    ERROR = "error"  # the pipeline failed


@dataclass(slots=True)
class Extension:
    """What sampled tokens did to a sequence.

    first: the position of the first of them.
    verdicts, num_right: of a drafter's drafts in plans: by token, whether the draft in its place was right, and how
        many were.
    reason: why the sequence ends with the last of them.
    """

    first: int
    verdicts: list[tuple[int, bool]] = field(default_factory=list)
    num_right: int = 0
    reason: FinishReason | None = None


@dataclass(slots=True)
class CachedKV:
    """What the prefix cache notes of a sequence. New whenever the stages have nothing of it.

    num_reused: tokens whose KV came from cached blocks when it was admitted.
    blocks: cached blocks of its tokens, from the first on.
    is_stored: whether its next block can be cached, because all before it are.
    awaits: blocks being read from disk that it waits for.
    has_fetched: whether it has requested blocks on disk.
    """

    num_reused: int = 0
    blocks: list[Block] = field(default_factory=list)
    is_stored: bool = True
    awaits: list[Block] = field(default_factory=list)
    has_fetched: bool = False


@dataclass(slots=True)
class DraftNotes:
    """A sequence's drafts, and how its earlier ones fared.

    ahead: those that plans under way hold.
    waiting: those after them, for the next plan.
    is_dry: whether there are no more until the next token.
    were_planned: whether any was in a plan since the stages have the sequence's KV.
    jumps: positions of those of which its rules leave no choice; num_jumped: tokens that were such drafts.
    num_misses: times one in a plan was wrong.
    num_tried, num_right: a drafter's own in plans that came to a verdict, and those of them that were right.
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
        """Move the first waiting ones into a plan; return them."""
        drafts = tuple(self.waiting[:count])
        del self.waiting[:count]
        self.ahead += drafts
        self.were_planned |= bool(drafts)
        return drafts

    def missed(self, token_id: int) -> bool:
        """Take in the token sampled in the first one's place: drop that one if it is equal, else all. Whether plans
        under way hold wrong ones."""
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
        """Drop all."""
        self.ahead, self.waiting, self.is_dry = [], [], False
        self.jumps.clear()


@dataclass(slots=True)
class Ballot:
    """Texts of a form, of which the likeliest is to come next. They go through the stages one after the other.

    scores: of the first ``alternatives``: log probabilities of all their tokens together.

    A form's masks alone would choose the likeliest first token, which can begin an unlikely text. What is likely of a
    text that others go on from is not its own: "car" is to be more than the beginning of "carrot".
    """

    alternatives: Texts
    scores: list[float] = field(default_factory=list)

    @property
    def next(self) -> Text:
        """The one to be scored next."""
        return self.alternatives[len(self.scores)]

    @property
    def winner(self) -> Text | None:
        """The likeliest, the first of equals; ``None`` while some have no score."""
        if len(self.scores) < len(self.alternatives):
            return None
        return max(self.alternatives, key=self._score)

    def _score(self, text: Text) -> float:
        """Return the log probability that a text comes, and none that it begins."""
        score = dict(zip(self.alternatives, self.scores, strict=True))
        longer = [other for other in score if beginning_of(text, other)]
        nearest = [one for one in longer if not any(beginning_of(other, one) for other in longer)]
        rest = 1.0 - sum(math.exp(score[other] - score[text]) for other in nearest)
        return score[text] + math.log(rest) if rest > 0.0 else -math.inf


@dataclass(slots=True, eq=False)
class Sequence:
    """One request's tokens and how far they have been scheduled. Owned by the scheduler; equal only to itself.

    Where it has ``pictures``, ``tokens`` are the ids of their rows (``core.picture``).
    """

    # what it is
    seq_id: int  # counts requests: of equal priority, who came first has the lowest
    tokens: list[int]  # grow with ``extend``
    params: SamplingParams
    seed: int
    end_tokens: frozenset[int] = frozenset()  # end of sequence and stop_token_ids together
    session: str | None = None  # the name by which its blocks can be dropped
    priority: int = 0  # higher goes first
    pictures: tuple[Picture, ...] = ()  # in its prompt, in their order
    pixels: tuple[object, ...] = ()  # their values, which are held as long as it is
    deadline: float | None = None  # seconds on the caller's clock
    flight: Flight | None = None  # fixed sizes of its draft blocks; None: the controller chooses
    rules: TokenRules | None = None  # which tokens its answer may have; None: any
    # what the scheduler notes
    keys: tuple[Key, ...] = ()  # keys of the full blocks of its prompt
    keyed_by: tuple[Key, int] | None = None  # the root and the size of a block that they are for
    num_preemptions: int = 0  # times it was preempted
    finish_reason: FinishReason | None = None
    # what the prefix cache and speculation note
    comes_back: bool = False  # whether it begins with all that an earlier request has left: its conversation goes on
    kv: CachedKV = field(default_factory=CachedKV)
    drafts: DraftNotes = field(default_factory=DraftNotes)
    ballot: Ballot | None = None  # what decides how it goes on
    # what its own methods note, with times in seconds on the scheduler's clock: of its life
    begun_at: float | None = None  # when its first slice was planned
    num_cached: int | None = None  # tokens whose KV came from cached blocks at its first admission
    read: tuple[int, float] = (0, 0.0)  # tokens whose KV the last stage has, and since when
    token_at: float = 0.0  # when its last token came
    scores: list[SampledToken] = field(default_factory=list)  # of its prompt's tokens from the second on, if wanted
    # and of what the stages have of it, and are to have by plans under way
    num_scheduled: int = 0
    num_in_flight: int = 0  # plans under way that hold a slice of this sequence
    num_awaited: int = 0  # of these, those that the next token depends on: a wrong draft ends the waiting for all
    kv_floor: int = 0  # tokens its KV had room for at the last wrong draft, or when it took it over
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)

    @property
    def num_to_compute(self) -> int:
        """Known tokens that are in no plan yet; the quantity that steps are planned in."""
        return max(0, len(self.tokens) - self.num_scheduled)

    @property
    def num_rows(self) -> int:
        """Rows of its next decode, without drafts: one, or those of the alternative that is scored next."""
        return 1 if self.ballot is None else len(self.ballot.next)

    @property
    def num_to_score(self) -> int:
        """Rows of its prompt whose log probabilities are wanted and have not come. No stored KV can stand for them."""
        return 0 if self.params.prompt_logprobs is None else self.num_prompt_tokens - 1 - len(self.scores)

    @property
    def num_sure(self) -> int:
        """Known tokens whose KV the stages have, or will have after the plans under way."""
        return min(self.num_scheduled, len(self.tokens))

    def sent(self, start: int, end: int) -> tuple[int, ...]:
        """Return the tokens [start, end) as stages are sent them."""
        tokens = self.tokens[start:end]
        return with_placeholders(tokens, start, self.pictures) if self.pictures else tuple(tokens)

    def streamed(self, start: int, end: int | None = None) -> list[int]:
        """Return its *stream* in the positions [start, end), or to its end: its tokens as they are sent, then all
        drafts, which the next draft follows. Costs what it returns."""
        known, end = len(self.tokens), self.num_streamed if end is None else end
        drafts = [*self.drafts][max(0, start - known) : max(0, end - known)]
        return [*self.sent(start, min(end, known)), *drafts]

    @property
    def num_streamed(self) -> int:
        """The length of its stream."""
        return len(self.tokens) + len(self.drafts)

    @property
    def has_guesses(self) -> bool:
        """Whether a drafter's drafts wait, and not only those of which its rules leave no choice."""
        first = len(self.tokens) + len(self.drafts.ahead)
        return any(position not in self.drafts.jumps for position in range(first, self.num_streamed))

    @property
    def answer_stream(self) -> list[int]:
        """The part of its stream behind the prompt."""
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
        """Whether the stages have its static data: it runs."""
        return self.num_scheduled > 0

    @property
    def kv_tokens(self) -> int:
        """Tokens its KV has room for; caches do not shrink when they are rolled back."""
        return max(self.num_scheduled, self.kv_floor)

    @property
    def precedence(self) -> tuple[int, int]:
        """The order in which memory is granted, smaller first: higher priority, then who came first."""
        return -self.priority, self.seq_id

    def begin(self, num_stored: int, room: int) -> None:
        """Run, with the KV of its first tokens, which is stored, in arrays with room for as many tokens as ``room``."""
        self.num_scheduled, self.read, self.kv_floor = num_stored, (num_stored, self.read[1]), room
        self.num_cached = num_stored if self.num_cached is None else self.num_cached

    def go(self, size: int, num_drafts: int, now: float) -> tuple[int, ...]:
        """Move the next ``size`` known tokens, and the first waiting drafts behind them, into a plan; return them."""
        token_ids = (*self.sent(self.num_scheduled, self.num_scheduled + size), *self.drafts.go(num_drafts))
        self.num_scheduled += len(token_ids)
        self.num_in_flight += 1
        self.num_awaited += 1
        self.begun_at = now if self.begun_at is None else self.begun_at
        return token_ids

    def put_to_vote(self, alternatives: Texts) -> None:
        """Go on with the likeliest of these, whatever was sampled; plans under way hold nothing behind its tokens."""
        self.ballot = Ballot(alternatives) if self.ballot is None else self.ballot
        self.drafts.drop()
        self._take_back_last()

    def go_scoring(self, now: float) -> tuple[int, ...]:
        """Move its last token, with the next alternative behind it, into a plan; return all but the last of them."""
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
        """Have the last token computed next, again if it was."""
        self.kv_floor = self.kv_tokens
        self.num_scheduled = len(self.tokens) - 1

    def is_ballot(self, part: Slice) -> bool:
        """Return whether a slice scores an alternative, and not its prompt."""
        return bool(part.scored) and part.start >= self.num_prompt_tokens - 1

    def hold(self, drafts: Seq[int], are_jumps: Iterable[bool]) -> None:
        """Have drafts wait for the next plan; of each, whether its rules leave no choice of it."""
        first = self.num_streamed
        self.drafts.jumps.update(first + i for i, is_jump in enumerate(are_jumps) if is_jump)
        self.drafts.waiting += drafts

    def jump_forward(self, token_ids: Seq[int]) -> None:
        """Have tokens that must follow its stream by its rules wait for its next plan."""
        self.hold(token_ids, [True] * len(token_ids))

    def returned(self, start: int, scored: Seq[SampledToken] = ()) -> None:
        """Take in that a slice from ``start`` on has come back, or is left out. ``scored``: the log probabilities of
        its prompt's tokens; it may have begun before the first that is missing."""
        self.num_in_flight -= 1
        if scored:
            self.scores += scored[len(self.scores) - start :]

    def extend(self, sampled: Iterable[int], max_len: int, now: float) -> Extension:
        """Append sampled tokens, up to one that ends the sequence. ``max_len``: the model's context in tokens."""
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
        """Reset all but the tokens, for stages that have nothing of this sequence."""
        self.num_scheduled, self.num_in_flight, self.num_awaited = 0, 0, 0
        self.drafts.drop()
        self.drafts.were_planned = False
        self.kv_floor = 0
        self.kv = CachedKV()
