"""The tasks that are run: made from a seed, the same for all systems. Pure.

Three kinds. *decode*: a short prompt and many tokens, one stream. *prefill*: one long prompt and one token.
*throughput* at n: many prompts at once, and many tokens for each. A system that holds the model in one stage
decodes n sequences together, one of S stages S times n, because each stage then has n in every step; the first n
prompts are the same for both.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

DECODE_PROMPT = 32  # tokens; short, so that attention costs little
STEP_SIZES = (2048, 512, 128)  # prompt tokens at once in plain mlx-lm; the first is its default

Kind = Literal["decode", "prefill"]
KINDS: tuple[Kind, ...] = ("decode", "prefill")
Turn = Kind | int  # a kind with one stream, or the n of a throughput
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Task:
    """A task of one stream: ``max_tokens`` greedy tokens after ``prompt``, end tokens included."""

    kind: Kind
    trial: int
    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Batch:
    """A task of many sequences at once: ``max_tokens`` greedy tokens after each prompt, end tokens included."""

    streams: int
    trial: int
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """All tasks of a run. ``decode_tokens`` are generated, the first is not timed; at least 4, so that there is a rate.

    ``streams``: the n of each throughput; none leaves it out. ``stream_tokens``: the first two of every answer
    are not timed; at least 5.
    """

    trials: int
    prompt_tokens: int
    decode_tokens: int
    vocab_size: int
    seed: int = 1
    streams: tuple[int, ...] = ()
    stream_prompt_tokens: int = 128
    stream_tokens: int = 64

    @property
    def longest(self) -> int:
        """Tokens of KV that the longest task needs."""
        stream = self.stream_prompt_tokens + self.stream_tokens if self.streams else 0
        return max(self.prompt_tokens + 1, DECODE_PROMPT + self.decode_tokens, stream)

    def task(self, kind: Kind, trial: int) -> Task:
        """The task of one trial; no two trials share a prompt, so nothing can be reused."""
        length, max_tokens = (DECODE_PROMPT, self.decode_tokens) if kind == "decode" else (self.prompt_tokens, 1)
        return Task(kind, trial, self._prompt(f"{kind} {trial}", length), max_tokens)

    def batch(self, streams: int, trial: int, stages: int) -> Batch:
        """The throughput of one trial, for a system of ``stages`` stages."""
        prompts = (
            self._prompt(f"throughput {streams} {trial} {i}", self.stream_prompt_tokens)
            for i in range(streams * stages)
        )
        return Batch(streams, trial, tuple(prompts), self.stream_tokens)

    def warm_up(self, kind: Kind) -> Task:
        """A task that no trial has."""
        return self.task(kind, -1)

    def _prompt(self, name: str, length: int) -> tuple[int, ...]:
        return made_up(f"{self.seed} {name}", length, self.vocab_size)


def made_up(name: str, length: int, vocab_size: int) -> tuple[int, ...]:
    """Random token ids, always the same for a name."""
    rng = random.Random(name)
    return tuple(rng.randrange(vocab_size) for _ in range(length))


def turns(systems: Sequence[T], trials: int, streams: Sequence[int] = ()) -> Iterator[tuple[int, Turn, T]]:
    """The order of trials, kinds and systems: in every trial all systems do one kind in turn, then the next kind."""
    for trial in range(trials):
        for turn in (*KINDS, *streams):
            for system in systems:
                yield trial, turn, system


def alternating(systems: Sequence[T], trial: int) -> Sequence[T]:
    """The systems in the order of this trial: every other time in reverse, because machines drift."""
    return systems if trial % 2 == 0 else systems[::-1]


def step_sizes(prompt_tokens: int) -> list[int]:
    """The step sizes worth trying: all that are at least the prompt's length are the same."""
    return [STEP_SIZES[0], *(size for size in STEP_SIZES[1:] if size < prompt_tokens)]
