"""What is run: tasks made from a seed, the same for all contenders. Pure.

Two kinds. *decode*: a short prompt and many tokens, one stream. *prefill*: one long prompt and one token.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

DECODE_PROMPT = 32  # tokens; short, so that KV is no part of the matter
STEP_SIZES = (2048, 512, 128)  # prompt tokens at once in plain mlx-lm; the first is its default

Kind = Literal["decode", "prefill"]
KINDS: tuple[Kind, ...] = ("decode", "prefill")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to do: ``max_tokens`` greedy tokens after ``prompt``, whatever they are."""

    kind: Kind
    trial: int
    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """All of it. ``decode_tokens`` are generated, the first is not timed; at least 4, so that there is a rate."""

    trials: int
    prompt_tokens: int
    decode_tokens: int
    vocab_size: int
    seed: int = 1

    def __post_init__(self) -> None:
        least = {"trials": 1, "prompt_tokens": 1, "decode_tokens": 4, "vocab_size": 2}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name} must be at least {bound}, not {getattr(self, name)}")

    @property
    def longest(self) -> int:
        """Tokens of KV that the longest task needs."""
        return max(self.prompt_tokens + 1, DECODE_PROMPT + self.decode_tokens)

    def task(self, kind: Kind, trial: int) -> Task:
        """The task of one trial; no two trials share a prompt, so nothing can be reused."""
        length, max_tokens = (DECODE_PROMPT, self.decode_tokens) if kind == "decode" else (self.prompt_tokens, 1)
        chance = random.Random(f"{self.seed} {kind} {trial}")
        return Task(kind, trial, tuple(chance.randrange(self.vocab_size) for _ in range(length)), max_tokens)

    def warm_up(self, kind: Kind) -> Task:
        """A task that no trial has."""
        return self.task(kind, -1)


def turns(contenders: Sequence[T], trials: int) -> Iterator[tuple[int, Kind, T]]:
    """Who does what when: in every trial everybody does one kind, one after the other, then the next kind."""
    for trial in range(trials):
        for kind in KINDS:
            for contender in contenders:
                yield trial, kind, contender


def step_sizes(prompt_tokens: int) -> list[int]:
    """The step sizes worth trying: all that are at least the prompt's length are the same."""
    return [STEP_SIZES[0], *(size for size in STEP_SIZES[1:] if size < prompt_tokens)]
