"""Describes the measured tasks. Pure.

A *part* is one row of the table.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ANSWER = 16  # tokens of the answer to a long prompt
NEW_TOKENS = 32  # of a second turn
SHORT, _STREAM = 32, 64  # tokens of the prompt of one stream, and of each of many

_OPENINGS = (
    "Once upon a time there lived an old king who had three sons, and he did not know which of them should rule",
    "The fisherman went down to the sea in the morning, and when he drew in his net, there was a golden fish in it",
    "In the middle of the forest stood a little house, and an old woman looked out of its window and said",
)
_TITLE = "{} of the book of the harbour. "  # no two prompts begin alike, so no prompt uses another's KV
_FILLER = "The boats lay in the harbour, the nets hung in the wind, and nobody had anything to tell that day. "
_NEEDLE = "The harbour master wrote the secret number {} into his book. "
_QUESTION = "What secret number did the harbour master write into his book? It was the number"


def made_up(name: str, length: int, vocab_size: int) -> tuple[int, ...]:
    """Return random token ids, always the same ones for a name."""
    rng = random.Random(name)
    return tuple(rng.randrange(vocab_size) for _ in range(length))


STREAM = "stream"  # one answer: tokens a second
DRAFTS = "drafts"  # the same with drafts
STREAMS = "streams"  # many answers at once: tokens a second of all
PROMPT = "prompt"  # seconds to the first token after a long prompt with a needle in it
TURN = "turn"  # seconds to the first token of a second turn


@dataclass(frozen=True, slots=True)
class Part:
    """One row: prompts of ``prompt`` tokens, each with an answer of ``tokens``, ``sequences`` at once. ``kind``: its
    task; ``label``: its name in the table; ``is_turn``: it goes on after an answer to a prompt with a needle."""

    kind: str
    label: str
    prompt: int
    tokens: int
    sequences: int = 1
    is_turn: bool = False

    @property
    def name(self) -> str:
        """The part's key in the document."""
        size = {PROMPT: f"_{self.prompt}", STREAMS: f"_{self.sequences}"}
        return f"{self.kind}{size.get(self.kind, '')}"

    @property
    def unit(self) -> str:
        """The unit of its figure."""
        return "tokens/s" if self.kind in (STREAM, DRAFTS, STREAMS) else "s"

    @property
    def context(self) -> int:
        """The tokens of KV that one of its sequences needs."""
        return self.prompt + self.tokens + (NEW_TOKENS + ANSWER if self.is_turn else 0)


@dataclass(frozen=True, slots=True)
class Tasks:
    """The prompts, the same for all systems. ``prompts``: token ids by part. ``needles``: what an answer should say."""

    seed: int
    vocab_size: int
    prompts: Mapping[str, Sequence[int]]
    needles: Mapping[str, str]

    def batch(self, part: Part, trial: int) -> list[tuple[int, ...]]:
        """Return the prompts for a part's simultaneous answers, of random tokens."""
        names = (f"{self.seed} {trial} {i}" for i in range(part.sequences))
        return [made_up(name, part.prompt, self.vocab_size) for name in names]

    def second(self, which: str) -> tuple[int, ...]:
        """Return the new tokens of a second turn."""
        return made_up(f"{self.seed} {which}", NEW_TOKENS, self.vocab_size)


def tasks_of(parts: Iterable[Part], vocab_size: int, tokenizer: Any | None, seed: int) -> Tasks:
    """Return the prompts of some parts: text if there is a tokenizer, because drafts fail on random tokens.

    A long prompt has a *needle* in it, a number that it asks for at its end. No two seeds have a beginning in common.
    """
    prompts, needles = dict[str, Sequence[int]](), dict[str, str]()
    for part in parts:
        if tokenizer is None:
            prompts[part.name] = made_up(f"{seed} {part.prompt}", part.prompt, vocab_size)
        elif part.kind == PROMPT or part.is_turn:
            number = str(random.Random(f"{seed} {part.prompt}").randrange(10000, 99999))
            prompts[part.name], needles[part.name] = _needle(tokenizer, part.prompt, seed, number), number
        else:
            prompts[part.name] = tokenizer.encode(_OPENINGS[seed % len(_OPENINGS)])[: part.prompt]
    return Tasks(seed, vocab_size, prompts, needles)


def _needle(tokenizer: Any, length: int, seed: int, number: str) -> list[int]:
    """Return a prompt of ``length`` tokens with a number in its first third, which it asks for at its end. If it is too
    short for that, it has its title and the end of the question."""
    title = tokenizer.encode(_TITLE.format(f"{seed}, page {length}"))[:length]
    needle, question, filler = (
        tokenizer.encode(text, adds_special=False) for text in (_NEEDLE.format(number), _QUESTION, _FILLER)
    )
    room = max(0, length - len(title) - len(needle) - len(question))
    text = (filler * (room // len(filler) + 1))[:room]
    told = [*text[: room // 3], *needle, *text[room // 3 :], *question]
    return [*title, *told[len(title) - length :]] if length > len(title) else title


@dataclass(slots=True)
class Cell:
    """The result of a part on one system: the value of each trial and the best possible value, or why it was not
    measured. ``said``: a remark."""

    values: list[float] = field(default_factory=list)
    limit: float | None = None
    why_not: str = ""
    said: str = ""

    def add(self, trial: "Cell") -> None:
        """Add the result of one more trial."""
        self.values += trial.values
        self.limit, self.why_not, self.said = trial.limit, trial.why_not, trial.said


def prompt_part(length: int) -> Part:
    """Return the part of a long prompt."""
    return Part(PROMPT, f"prompt of {length:,} tokens, to the first token", length, ANSWER)


def speed_parts(decode_tokens: int, prompt: int, streams: Sequence[int]) -> list[Part]:
    """Return the parts of ``splitinfer bench``. ``streams``: numbers of answers at once, each a part."""
    turn = f"second turn after {prompt:,} tokens, to the first token"
    return [
        Part(STREAM, "one stream", SHORT, decode_tokens),
        Part(DRAFTS, "one stream, with drafts", SHORT, decode_tokens),
        *(Part(STREAMS, f"{count} streams", _STREAM, decode_tokens, count) for count in streams),
        prompt_part(prompt),
        Part(TURN, turn, prompt, ANSWER, is_turn=True),
    ]
