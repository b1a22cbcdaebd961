"""What a request's sampling parameters are checked for, and the forms in which they are kept."""

import math
from collections.abc import Iterable, Mapping

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
