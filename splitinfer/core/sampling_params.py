"""How a request's tokens are chosen and when it ends."""

import math
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from splitinfer.core.grammar import Grammar

MAX_WHOLE = 2**63 - 1  # the largest number that a plan can hold
MAX_BIAS = 100.0  # of a token's logit, either way, as in OpenAI's API
MAX_BIASED = 1024  # tokens with a bias; plans hold them
MAX_STOP_LENGTH = 4096  # characters of a stop string, so of held-back text, too
MAX_STOPS = 1024  # stop strings, and stop token ids
_HALF = re.compile("[\ud800-\udfff]")  # a lone surrogate: no message can carry it


MAX_LOGPROBS = 20
REPETITION_CONTEXT = 20  # last tokens that a repetition penalty applies to, as in mlx-lm
MAX_PENALTY = 2.0  # of presence and frequency, either way, as in OpenAI's API
_OVER_0 = math.nextafter(0.0, 1.0)
_NUMBERS: Mapping[str, tuple[float, float, str]] = {
    "temperature": (0, 100, "from 0 to 100"),
    "top_p": (_OVER_0, 1, "over 0 and at most 1"),
    "min_p": (0, 1, "between 0 and 1"),
    "repetition_penalty": (_OVER_0, sys.float_info.max, "over 0"),
    "presence_penalty": (-MAX_PENALTY, MAX_PENALTY, "between -2 and 2"),
    "frequency_penalty": (-MAX_PENALTY, MAX_PENALTY, "between -2 and 2"),
}
"""The fractional fields: the least, the most, and both in words."""
_WHOLE: Mapping[str, tuple[int, int, str]] = {
    "max_tokens": (1, MAX_WHOLE, "at least 1"),
    "top_k": (0, MAX_WHOLE, "0 (off) or more"),
    "seed": (0, 2**64 - 1, "in [0, 2**64)"),
    "logprobs": (0, MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}"),
    "prompt_logprobs": (0, MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}"),
    "min_tokens": (0, MAX_WHOLE, "0 or more"),
    "thinking_budget": (0, MAX_WHOLE, "0 or more"),
}
"""The same for the whole-number fields."""


def as_number(name: str, value: object) -> float:
    """Return the value of a fractional field. Raise ValueError if it is not a number, or too large for one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number, not {value!r:.40}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is too large") from None


def _as_biases(given: Mapping[int, float] | Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Return pairs of token id and bias, sorted, so that equal biases are equal values. Raise ValueError if they are
    invalid."""
    pairs = given.items() if isinstance(given, Mapping) else given
    try:
        biases = tuple(sorted((token, float(bias)) for token, bias in pairs))
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"logit_bias must map token ids to numbers, not {given!r:.80}") from None
    tokens = [token for token, _ in biases]
    if any(isinstance(token, bool) or not isinstance(token, int) for token in tokens):
        raise ValueError(f"logit_bias must map token ids to numbers, not {tokens!r:.80}")
    if len(tokens) > MAX_BIASED:
        raise ValueError(f"logit_bias may have {MAX_BIASED} tokens, not {len(tokens)}")
    if len(set(tokens)) < len(tokens):
        raise ValueError("logit_bias must not have a token twice")
    if not all(0 <= token <= MAX_WHOLE for token in tokens):
        raise ValueError("the tokens of logit_bias must be from 0 to below 2**63")
    for _, bias in biases:
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise ValueError(f"a bias must be between {-MAX_BIAS:g} and {MAX_BIAS:g}, not {bias}")
    return biases


def _check_stops(stops: tuple[str, ...]) -> None:
    if len(stops) > MAX_STOPS:
        raise ValueError(f"stop may have {MAX_STOPS} strings, not {len(stops)}")
    for stop in stops:
        if not isinstance(stop, str) or _HALF.search(stop):
            raise ValueError(f"a stop string must be text that UTF-8 can hold, not {stop!r}")
        if not 0 < len(stop) <= MAX_STOP_LENGTH:
            sentence = f"may have {MAX_STOP_LENGTH} characters, not {len(stop)}" if stop else "must not be empty"
            raise ValueError(f"a stop string {sentence}")


def _check_stop_tokens(tokens: tuple[int, ...]) -> None:
    if len(tokens) > MAX_STOPS:
        raise ValueError(f"stop_token_ids may have {MAX_STOPS} ids, not {len(tokens)}")
    if not all(isinstance(token, int) for token in tokens):
        raise ValueError(f"stop_token_ids must be whole numbers, not {tokens!r}")
    if tokens and not 0 <= min(tokens) <= max(tokens) <= MAX_WHOLE:
        raise ValueError(f"stop_token_ids must {'not be negative' if min(tokens) < 0 else 'be below 2**63'}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    Filters act in mlx-lm's order (top_p, min_p, top_k, then temperature), each on the log probabilities of the whole
    vocabulary. The random key of a token is a function of ``seed`` and the token's position alone, so no batch, cut or
    chunking can change the sampled tokens.

    max_tokens: the most tokens of the answer.
    temperature: 0 to 100; 0 always takes the likeliest token.
    top_p: sample from the likeliest tokens that hold this probability; 1 is off.
    top_k: sample from the k likeliest tokens; 0 is off.
    min_p: leave out tokens less likely than this share of the likeliest; 0 is off.
    repetition_penalty: over 1 discourages the last 20 tokens.
    presence_penalty: subtracted from the logit of each token that the answer already has.
    frequency_penalty: the same, times how often the answer has the token.
    logit_bias: added to the logits of tokens; pairs or a mapping of token ids.
    seed: the same seed gives the same answer; ``None``: drawn when the request is submitted.
    stop: texts that end the answer, which does not contain them.
    stop_token_ids: tokens that end the answer.
    ignore_eos: go on after the model's own end, to the token limit.
    logprobs: log probabilities of the chosen token and of the n likeliest; ``None``: off.
    prompt_logprobs: the same for the prompt's tokens, as the model gives them: without filters, penalties or biases.
    grammar: the form of the answer: a ``Grammar``, a JSON schema as a mapping, or a pydantic model.
    min_tokens: the least tokens of the answer.
    thinking_budget: the most tokens of reasoning before the answer begins; ``None`` is off.

    Raises:
        ValueError: a value is out of its range; the error names the range.
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
        object.__setattr__(self, "logit_bias", _as_biases(self.logit_bias))
        if self.grammar is not None:
            object.__setattr__(self, "grammar", Grammar.of(self.grammar))
        for name in _NUMBERS:
            object.__setattr__(self, name, as_number(name, getattr(self, name)))
        for name in _WHOLE:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise ValueError(f"{name} must be a whole number, not {value!r}")
        for name, (least, most, words) in {**_NUMBERS, **_WHOLE}.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ValueError(f"{name} must be {'below 2**63' if value > most == MAX_WHOLE else words}, not {value}")
        if self.min_tokens > self.max_tokens:
            most = self.max_tokens
            raise ValueError(f"min_tokens must be between 0 and max_tokens ({most}), not {self.min_tokens}")
        _check_stops(self.stop)
        _check_stop_tokens(self.stop_token_ids)

    @property
    def for_stages(self) -> "SamplingParams":
        """The parameters that stages need. What ends an answer is left out, because the coordinator decides that from
        the text, and so are the rules, whose masks the stages get."""
        if not (self.stop or self.stop_token_ids or self.has_rules):
            return self
        return replace(self, stop=(), stop_token_ids=(), grammar=None, min_tokens=0, thinking_budget=None)

    @property
    def has_rules(self) -> bool:
        """Whether rules forbid some tokens in some places."""
        return self.grammar is not None or self.min_tokens > 0 or self.thinking_budget is not None

    @property
    def depends_on_tokens(self) -> bool:
        """Whether earlier tokens change the logits, so that a row cannot be computed before they are known."""
        return self.repetition_penalty != 1.0 or self.has_answer_penalty

    @property
    def changes_logits(self) -> bool:
        """Whether logits are changed before a token is chosen."""
        return self.depends_on_tokens or bool(self.logit_bias)

    @property
    def has_answer_penalty(self) -> bool:
        """Whether tokens that the answer already has are penalised."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
