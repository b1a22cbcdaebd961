"""Texts to measure on: passages of a file, or what a model generates after the beginnings of tales."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from splitinfer.bench.shared.workload import made_up
from splitinfer.core.sequence import SamplingParams
from splitinfer.errors import ConfigError
from splitinfer.llm import LLM

_CHARACTERS = 8  # of a token, on average, at most
_TEMPERATURE = 0.8  # of text that the model generates

OPENINGS = (
    "Once upon a time there lived an old king who had three sons, and he did not know which of them should rule",
    "The fisherman went down to the sea in the morning, and when he drew in his net, there was a golden fish in it",
    "In the middle of the forest stood a little house, and an old woman looked out of its window and said",
)


def own_or_read(llm: LLM, path: Path | None, count: int, num_tokens: int, seed: int) -> list[list[int]]:
    """``count`` texts of ``num_tokens`` tokens: passages of the file, or what the model generates.

    Raises:
        ConfigError: the file cannot be read.
    """
    if path is not None:
        return [llm.tokenizer.encode(text)[:num_tokens] for text in passages(path, count, _CHARACTERS * num_tokens)]
    openings: Sequence[Any] = OPENINGS
    if not llm.has_tokenizer:
        openings = [made_up(f"{seed} kv {i}", 16, 100) for i in range(len(OPENINGS))]
    prompts = [openings[i % len(openings)] for i in range(count)]
    params = [SamplingParams(num_tokens, _TEMPERATURE, seed=seed + i, ignore_eos=True) for i in range(count)]
    return [output.token_ids for output in llm.generate(prompts, params)]


def passages(path: Path, count: int, num_characters: int) -> list[str]:
    """``count`` parts of a text, evenly spaced, each from the beginning of a paragraph.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    found = []
    for i in range(count):
        at = text.find("\n\n", (2 * i + 1) * len(text) // (2 * count))
        found.append(" ".join(text[max(at, 0) :].split())[:num_characters])
    return found
