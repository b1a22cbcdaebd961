"""How a request's tokens are chosen and when it ends."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from splitinfer.core.grammar import Grammar

MAX_WHOLE = 2**63 - 1  # the largest number that a plan can hold
MAX_BIAS = 100.0  # of a token's logit, either way, as in OpenAI's API
MAX_BIASED = 1024  # tokens with a bias; plans hold them
MAX_STOP_LENGTH = 4096  # characters of a stop string; as many may be held back
MAX_STOPS = 1024  # stop strings, and stop token ids


def as_biases(given: Mapping[int, float] | Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Pairs of token id and bias, as ``SamplingParams`` holds them: by id, so that equal biases are equal values."""
    pairs = given.items() if isinstance(given, Mapping) else given
    try:
        return tuple(sorted((token, float(bias)) for token, bias in pairs))
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"logit_bias must map token ids to numbers, not {given!r:.80}") from None


def as_carried(value: float) -> float:
    """A number as messages can carry it: whole ones have 64 bits there, and are fractions beyond."""
    if not isinstance(value, int) or abs(value) <= MAX_WHOLE:
        return value
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def bias_checks(biases: tuple[tuple[int, float], ...]) -> list[tuple[bool, str]]:
    """Whether biases may be used, with a sentence for what may not."""
    tokens = [token for token, _ in biases]
    if any(isinstance(token, bool) or not isinstance(token, int) for token in tokens):
        return [(False, f"logit_bias must map token ids to numbers, not {tokens!r:.80}")]
    wrong = next((bias for _, bias in biases if not within(bias, -MAX_BIAS, MAX_BIAS)), None)
    return [
        (len(tokens) <= MAX_BIASED, f"logit_bias may have {MAX_BIASED} tokens, not {len(tokens)}"),
        (len(set(tokens)) == len(tokens), "logit_bias must not have a token twice"),
        (all(0 <= token <= MAX_WHOLE for token in tokens), "the tokens of logit_bias must be from 0 to below 2**63"),
        (wrong is None, f"a bias must be between {-MAX_BIAS:g} and {MAX_BIAS:g}, not {wrong}"),
    ]


def stop_checks(stops: tuple[str, ...], token_ids: tuple[int, ...]) -> list[tuple[bool, str]]:
    """The same of stop strings and stop tokens."""
    longest = max(map(len, stops), default=0)
    return [
        (longest <= MAX_STOP_LENGTH, f"a stop string may have {MAX_STOP_LENGTH} characters, not {longest}"),
        (len(stops) <= MAX_STOPS, f"stop may have {MAX_STOPS} strings, not {len(stops)}"),
        (len(token_ids) <= MAX_STOPS, f"stop_token_ids may have {MAX_STOPS} ids, not {len(token_ids)}"),
    ]


def is_text(value: object) -> bool:
    """Whether a value is text without half characters (lone surrogates), which no message can carry."""
    try:
        return isinstance(value, str) and value.encode("utf-8") is not None
    except UnicodeEncodeError:
        return False


def within(value: float, low: float, high: float) -> bool:
    """Whether a number is finite and in a range."""
    return math.isfinite(value) and low <= value <= high


MAX_LOGPROBS = 20
REPETITION_CONTEXT = 20  # last tokens that a repetition penalty applies to, as in mlx-lm
MAX_PENALTY = 2.0  # of presence and frequency, either way, as in OpenAI's API
_TOPS = ("logprobs", "prompt_logprobs")
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    Filters act in mlx-lm's order (top_p, min_p, top_k, then temperature), each on the log
    probabilities of the whole vocabulary. The random key of a token is a function of ``seed`` and
    the token's position alone, so no batch, cut or chunking can change what is sampled.

    max_tokens: the most tokens of the answer.
    temperature: 0 to 2; 0 always takes the likeliest token.
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
                within(self.temperature, 0, 2),
                f"temperature must be from 0 to 2, not {self.temperature}",
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
