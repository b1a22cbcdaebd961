"""One request as the scheduler sees it: its parameters and its tokens.

A sequence is a growing list of token ids and one number, ``num_scheduled``: how many of them are in
plans. Prefill, a later chunk, a reused prefix and decode are then the same case: tokens still to compute.

    tokens      [ reused | prompt, in chunks ......... | generated ... ]
                         ^ first slice starts here      ^ num_prompt_tokens
    num_scheduled ------------------------> moves right with every plan

With speculation, drafts follow the tokens: those ``ahead`` are in plans under way, and those ``drafted`` wait for one.
``num_scheduled`` includes those ahead. Sampled tokens take the drafts' places as long as they are equal; the first
that differs voids all drafts after it, and ``num_scheduled`` goes back to its position.

    tokens ................. | ahead ......... | drafted ...
                             sampled next ^      num_scheduled is here

A preempted sequence goes back to ``num_scheduled = 0`` and keeps its tokens, also the generated ones: they are
computed again like a prompt.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from splitinfer.core.grammar import Grammar, TokenRules
from splitinfer.core.kv.block_tree import Block, Key
from splitinfer.core.picture import Picture, with_placeholders
from splitinfer.core.sampling_checks import (
    MAX_WHOLE,
    as_biases,
    as_carried,
    bias_checks,
    is_text,
    stop_checks,
    within,
)
from splitinfer.core.speculation.flight import Flight

if TYPE_CHECKING:
    from splitinfer.core.plan import SampledToken

MAX_LOGPROBS = 20
REPETITION_CONTEXT = 20  # last tokens that a repetition penalty applies to, as in mlx-lm
MAX_PENALTY = 2.0  # of presence and frequency, either way, as in OpenAI's API


class FinishReason(StrEnum):
    """Why a request ended. The values are public."""

    STOP = "stop"  # a stop string, a stop token or the end-of-sequence token
    LENGTH = "length"  # max_tokens, or the model's context is full
    ABORT = "abort"  # the caller cancelled it, or its deadline is over
    ERROR = "error"  # the pipeline failed


_TOPS = ("logprobs", "prompt_logprobs")
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    Filters act in mlx-lm's order (top_p, min_p, top_k, then temperature), each on the log
    probabilities of the whole vocabulary. The random key of a token is a function of ``seed`` and
    the token's position alone, so no batch, cut or chunking can change what is sampled.

    max_tokens: the most tokens of the answer.
    temperature: 0 always takes the likeliest token.
    top_p: sample from the likeliest tokens that hold this probability; 1 is off.
    top_k: sample from the k likeliest tokens; 0 is off.
    min_p: leave out tokens less likely than this share of the likeliest; 0 is off.
    repetition_penalty: over 1 discourages the last 20 tokens.
    presence_penalty: taken from the logit of each token that the answer has so far.
    frequency_penalty: the same, times how often the answer has it.
    logit_bias: added to the logits of tokens; pairs or a mapping of token ids.
    seed: the same seed gives the same answer; ``None``: drawn when the request is submitted.
    stop: texts that end the answer, which does not contain them.
    stop_token_ids: tokens that end the answer.
    ignore_eos: go on after the model's own end, to the token limit.
    logprobs: log probabilities of the chosen token and of the n likeliest; ``None``: off.
    prompt_logprobs: the same of the prompt's tokens, as the model gives them: no filter, penalty or bias changes them.
    grammar: the form of the answer: a ``Grammar``, a JSON schema as a mapping, or a pydantic model.
    min_tokens: the answer does not end before it has so many tokens.
    thinking_budget: the most tokens of reasoning before the answer begins; ``None`` is off.

    Raises:
        ValueError: a value out of its range, named with the range.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None
    min_tokens: int = 0
    thinking_budget: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        # A caller may pass a single string; iterating over it would stop at every letter.
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stops)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", as_biases(self.logit_bias))
        if self.grammar is not None:
            object.__setattr__(self, "grammar", Grammar.of(self.grammar))
        for name in _NUMBERS:
            object.__setattr__(self, name, as_carried(getattr(self, name)))
        for ok, sentence in self._checks():
            if not ok:
                raise ValueError(sentence)

    def _checks(self) -> list[tuple[bool, str]]:
        for name in ("max_tokens", "top_k", "seed", *_TOPS, "min_tokens", "thinking_budget"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise ValueError(f"{name} must be a whole number, not {value!r}")
        if not all(isinstance(token, int) for token in self.stop_token_ids):
            raise ValueError(f"stop_token_ids must be whole numbers, not {self.stop_token_ids!r}")
        for stop in self.stop:
            if not is_text(stop):
                raise ValueError(f"a stop string must be text that UTF-8 can hold, not {stop!r}")
        return [
            *(
                (getattr(self, name) <= MAX_WHOLE, f"{name} must be below 2**63, not {getattr(self, name)}")
                for name in ("max_tokens", "top_k")
            ),
            (self.max_tokens >= 1, f"max_tokens must be at least 1, not {self.max_tokens}"),
            (
                within(self.temperature, 0, math.inf),
                f"temperature must be 0 or more and finite, not {self.temperature}",
            ),
            (within(self.top_p, 0, 1) and self.top_p > 0, f"top_p must be over 0 and at most 1, not {self.top_p}"),
            (self.top_k >= 0, f"top_k must be 0 (off) or more, not {self.top_k}"),
            (within(self.min_p, 0, 1), f"min_p must be between 0 and 1, not {self.min_p}"),
            (
                within(self.repetition_penalty, 0, math.inf) and self.repetition_penalty > 0,
                f"repetition_penalty must be over 0, not {self.repetition_penalty}",
            ),
            (self.seed is None or 0 <= self.seed < 2**64, f"seed must be in [0, 2**64), not {self.seed}"),
            (all(self.stop), "a stop string must not be empty"),
            *stop_checks(self.stop, self.stop_token_ids),
            (all(t >= 0 for t in self.stop_token_ids), "stop_token_ids must not be negative"),
            (all(t <= MAX_WHOLE for t in self.stop_token_ids), "stop_token_ids must be below 2**63"),
            *(
                (top is None or 0 <= top <= MAX_LOGPROBS, f"{name} must be between 0 and {MAX_LOGPROBS}, not {top}")
                for name, top in ((name, getattr(self, name)) for name in _TOPS)
            ),
            *(
                (within(value, -MAX_PENALTY, MAX_PENALTY), f"{name} must be between -2 and 2, not {value}")
                for name, value in (
                    ("presence_penalty", self.presence_penalty),
                    ("frequency_penalty", self.frequency_penalty),
                )
            ),
            *bias_checks(self.logit_bias),
            (
                0 <= self.min_tokens <= self.max_tokens,
                f"min_tokens must be between 0 and max_tokens ({self.max_tokens}), not {self.min_tokens}",
            ),
            (
                self.thinking_budget is None or 0 <= self.thinking_budget <= MAX_WHOLE,
                f"thinking_budget must be 0 or more, not {self.thinking_budget}",
            ),
        ]

    @property
    def for_stages(self) -> "SamplingParams":
        """The parameters without those that end an answer, which is decided where its text is, and without its rules,
        of which stages get masks."""
        if not (self.stop or self.stop_token_ids or self.has_rules):
            return self
        return replace(self, stop=(), stop_token_ids=(), grammar=None, min_tokens=0, thinking_budget=None)

    @property
    def has_rules(self) -> bool:
        """Whether not every token may come at every place."""
        return self.grammar is not None or self.min_tokens > 0 or self.thinking_budget is not None

    @property
    def depends_on_tokens(self) -> bool:
        """Whether logits are changed by what came before, so that a row cannot be computed before that is known."""
        return self.repetition_penalty != 1.0 or self.has_answer_penalty

    @property
    def changes_logits(self) -> bool:
        """Whether logits are changed before a token is chosen."""
        return self.depends_on_tokens or bool(self.logit_bias)

    @property
    def has_answer_penalty(self) -> bool:
        """Whether tokens that the answer has already are penalized."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(slots=True, eq=False)
class Sequence:
    """One request's tokens and how far they have been scheduled. Owned by the scheduler; equal only to itself.

    Where it has ``pictures``, ``tokens`` are the ids of their rows (``core.picture``).
    """

    seq_id: int
    tokens: list[int]
    params: SamplingParams
    seed: int
    end_tokens: frozenset[int] = frozenset()  # end of sequence and stop_token_ids together
    session: str | None = None  # the name by which its blocks can be dropped
    comes_back: bool = False  # whether it begins with all that an earlier request has left: its conversation goes on
    num_reused: int = 0  # tokens whose KV came from stored blocks when it was admitted
    num_cached: int | None = None  # the same, at its first admission
    blocks: list[Block] = field(default_factory=list)  # stored blocks of its tokens, from the first on
    is_stored: bool = True  # whether its next block can be stored, because all before it are
    awaits: list[Block] = field(default_factory=list)  # blocks being read from disk that it waits for
    has_fetched: bool = False  # whether it has requested blocks on disk
    keys: tuple[Key, ...] = ()  # keys of the full blocks of its prompt; filled by the scheduler
    priority: int = 0  # higher goes first
    pictures: tuple[Picture, ...] = ()  # in its prompt, in their order
    pixels: tuple[object, ...] = ()  # their values, which are held as long as it is
    deadline: float | None = None  # seconds on the caller's clock
    arrival: int = 0  # counts submissions; filled by the scheduler
    num_scheduled: int = 0
    num_preemptions: int = 0  # times it was preempted
    num_in_flight: int = 0  # plans under way that hold a slice of this sequence
    num_awaited: int = 0  # how many of them are not void
    ahead: list[int] = field(default_factory=list)  # drafts that plans under way hold
    drafted: list[int] = field(default_factory=list)  # drafts after those, for the next plan
    is_dry: bool = False  # whether there are no more drafts until the next token
    has_drafted: bool = False  # whether a draft of it was in a plan since the stages have its KV
    num_misses: int = 0  # times a draft in a plan was wrong
    num_tried: int = 0  # drafts in plans that came to a verdict
    num_right: int = 0  # of them, those that were right
    kv_floor: int = 0  # tokens its KV had room for at the last wrong draft
    flight: Flight | None = None  # fixed sizes of its draft blocks; None: the controller chooses
    rules: TokenRules | None = None  # which tokens its answer may have; None: any
    forced: set[int] = field(default_factory=set)  # positions of drafts that its rules forced
    num_forced: int = 0  # tokens that were forced drafts
    begun_at: float | None = None  # when its first slice was planned, in seconds on the scheduler's clock
    scores: list["SampledToken"] = field(default_factory=list)  # of its prompt's tokens from the second on, if wanted
    token_at: float = 0.0  # when its last token came, in seconds on the scheduler's clock
    is_known: bool = False  # whether the stages have its static data
    finish_reason: FinishReason | None = None
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)
        self.num_scheduled = self.num_reused

    @property
    def num_to_compute(self) -> int:
        """Known tokens that are in no plan yet; the quantity that steps are planned in."""
        return max(0, len(self.tokens) - self.num_scheduled)

    @property
    def num_to_score(self) -> int:
        """Rows of its prompt whose log probabilities are wanted and have not come. No stored KV can stand for them."""
        return 0 if self.params.prompt_logprobs is None else self.num_prompt_tokens - 1 - len(self.scores)

    @property
    def num_sure(self) -> int:
        """Known tokens whose KV the stages have, or will have after the plans under way."""
        return min(self.num_scheduled, len(self.tokens))

    def sent(self, start: int, end: int) -> tuple[int, ...]:
        """The tokens [start, end) as stages are sent them."""
        tokens = self.tokens[start:end]
        return with_placeholders(tokens, start, self.pictures) if self.pictures else tuple(tokens)

    @property
    def stream(self) -> list[int]:
        """Its tokens as they are sent and all drafts, which the next draft follows."""
        return [*self.sent(0, len(self.tokens)), *self.ahead, *self.drafted]

    @property
    def num_streamed(self) -> int:
        """The length of ``stream``."""
        return len(self.tokens) + len(self.ahead) + len(self.drafted)

    @property
    def has_guesses(self) -> bool:
        """Whether a drafter's drafts wait, and not only those that its rules force."""
        first = len(self.tokens) + len(self.ahead)
        return any(position not in self.forced for position in range(first, first + len(self.drafted)))

    @property
    def answer_stream(self) -> list[int]:
        """The part of ``stream`` behind the prompt."""
        return self.stream[self.num_prompt_tokens :]

    @property
    def num_generated(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def kv_tokens(self) -> int:
        """Tokens its KV has room for; caches do not shrink when they are rolled back."""
        return max(self.num_scheduled, self.kv_floor)

    @property
    def rank(self) -> tuple[int, int]:
        """The order in which memory is granted, smaller first: higher priority, then earlier arrival."""
        return -self.priority, self.arrival

    def forget_stages(self) -> None:
        """Reset all but the tokens, for stages that have nothing of this sequence."""
        self.num_reused, self.num_scheduled, self.num_in_flight, self.num_awaited = 0, 0, 0, 0
        self.forget_drafts()
        self.has_drafted = False
        self.kv_floor = 0
        self.blocks, self.is_stored = [], True
        self.awaits, self.has_fetched = [], False
        self.is_known = False

    def append(self, token_id: int, max_len: int) -> FinishReason | None:
        """Append one sampled token; returns the reason if the sequence ends with it.

        ``max_len`` is the model's context in tokens.
        """
        self.forced.discard(len(self.tokens))
        self.tokens.append(token_id)
        self._verify_draft(token_id)
        if token_id in self.end_tokens:
            return FinishReason.STOP
        if self.num_generated >= self.params.max_tokens or len(self.tokens) >= max_len:
            return FinishReason.LENGTH
        return None

    def _verify_draft(self, token_id: int) -> None:
        """Drop the first draft if it equals the token sampled in its place, else all drafts."""
        self.is_dry = False
        drafts = self.ahead or self.drafted
        if drafts and drafts[0] == token_id:
            del drafts[0]
        elif drafts:
            self.num_misses += bool(self.ahead)
            if self.ahead:
                self.kv_floor = self.kv_tokens
                self.num_scheduled = len(self.tokens) - 1
                self.num_awaited = 0
            self.forget_drafts()

    def force(self, token_ids: Iterable[int]) -> None:
        """Have tokens that its rules force behind its stream wait for its next plan."""
        first = self.num_streamed
        self.drafted += token_ids
        self.forced.update(range(first, self.num_streamed))

    def forget_drafts(self) -> None:
        """Drop all drafts."""
        self.ahead, self.drafted, self.is_dry = [], [], False
        self.forced.clear()
