"""Workloads: the arrival times of requests and the lengths of prompts and answers, recorded or random.

Real lengths vary more than any formula, and percentiles depend on that: a long prompt that keeps decodes waiting stalls
each of them once, so the share of stalled tokens is about (sequences that decode) / (tokens in an answer). With much
shorter answers every policy would look bad at the 99th percentile, which is why ``fitted`` keeps their mean at
``LEAST_ANSWER`` tokens.
"""

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from splitinfer.errors import ConfigError

PROMPT, ANSWER, ARRIVED = "num_prompt_tokens", "num_output_tokens", "arrived_at"
LEAST_ANSWER = 100  # tokens, on average


@dataclass(frozen=True, slots=True)
class Lengths:
    """One request's tokens; ``arrived_at``: in seconds, where that was recorded.

    Raises:
        ValueError: no token of prompt or answer, or a negative time.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    arrived_at: float | None = None

    def __post_init__(self) -> None:
        if self.num_prompt_tokens < 1 or self.num_output_tokens < 1:
            raise ValueError("a request has at least one token of prompt and one of answer")
        if self.arrived_at is not None and not 0 <= self.arrived_at < math.inf:
            raise ValueError("a request arrives at a time from 0 on")


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that arrives ``at`` so many seconds."""

    at: float
    num_prompt_tokens: int
    num_output_tokens: int


def read_lengths(path: Path) -> tuple[Lengths, ...]:
    """The requests in a CSV file with the columns num_prompt_tokens, num_output_tokens and, if recorded, arrived_at.

    Raises:
        ConfigError: the file cannot be read, or has a line that is not a request.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if not {PROMPT, ANSWER} <= set(reader.fieldnames or ()):
                raise ConfigError(f"{path} is no trace: its first line must name {PROMPT} and {ANSWER}")
            found = tuple(_lengths(row, path, number) for number, row in enumerate(reader, 2))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"trace {path} cannot be read: {error}") from error
    if not found:
        raise ConfigError(f"trace {path} has no requests")
    return found


def _lengths(row: dict[str, str], path: Path, number: int) -> Lengths:
    try:
        at = row.get(ARRIVED)
        return Lengths(int(row[PROMPT]), int(row[ANSWER]), None if at in (None, "") else float(at or 0))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"line {number} of trace {path} is not a request: {error}") from error


def made_up_lengths(count: int = 2000, seed: int = 1) -> tuple[Lengths, ...]:
    """Random lengths like those of recorded chats: log-normal, prompts with a median of 1,700 tokens and a tail to
    8,000, answers of 400 with a tail to 1,000."""
    random = Random(seed)
    return tuple(
        Lengths(
            max(1, min(8000, round(random.lognormvariate(math.log(1700), 0.9)))),
            max(1, min(1000, round(random.lognormvariate(math.log(400), 0.6)))),
        )
        for _ in range(count)
    )


def fitted(lengths: Sequence[Lengths], scale: float, most_tokens: int) -> tuple[Lengths, ...]:
    """The requests scaled for a smaller model: prompts times ``scale``, answers too as far as their mean stays at
    ``LEAST_ANSWER`` or more; none longer than ``most_tokens`` in all.

    >>> fitted([Lengths(1000, 400), Lengths(2000, 800)], 0.1, 10_000)
    (Lengths(num_prompt_tokens=100, num_output_tokens=67, arrived_at=None), \
Lengths(num_prompt_tokens=200, num_output_tokens=133, arrived_at=None))
    """
    mean = sum(one.num_output_tokens for one in lengths) / len(lengths)
    of_answers = min(1.0, max(scale, LEAST_ANSWER / mean)) if scale < 1 else scale
    found = []
    for one in lengths:
        answer = min(max(1, round(one.num_output_tokens * of_answers)), most_tokens - 1)
        prompt = min(max(1, round(one.num_prompt_tokens * scale)), most_tokens - answer)
        found.append(Lengths(prompt, answer, one.arrived_at))
    return tuple(found)


def poisson(lengths: Sequence[Lengths], count: int, rate: float, seed: int) -> tuple[Arrival, ...]:
    """``count`` requests drawn from ``lengths``, with Poisson arrivals of ``rate`` per second. The same seed gives the
    same requests in the same order at any rate."""
    random, at, found = Random(seed), 0.0, list[Arrival]()
    for _ in range(count):
        one = random.choice(lengths)
        at += random.expovariate(1.0) / rate
        found.append(Arrival(at, one.num_prompt_tokens, one.num_output_tokens))
    return tuple(found)


def recorded(lengths: Iterable[Lengths], count: int) -> tuple[Arrival, ...]:
    """The first ``count`` requests at the times when they arrived.

    Raises:
        ConfigError: no times were recorded.
    """
    timed = (one for one in lengths if one.arrived_at is not None)
    first = sorted(timed, key=lambda one: one.arrived_at or 0.0)[:count]
    if not first:
        raise ConfigError(f"the trace does not say when requests came (column {ARRIVED}); give a rate")
    begin = first[0].arrived_at or 0.0
    return tuple(
        Arrival((one.arrived_at or 0.0) - begin, one.num_prompt_tokens, one.num_output_tokens) for one in first
    )
