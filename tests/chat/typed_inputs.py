"""A screen for chats that nobody sees, and how they sample."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from splitinfer.chat.screens import Write
from splitinfer.core.sampling_defaults import NOTHING, ResolvedSampling, SamplingChoice
from splitinfer.core.sequence import SamplingParams


def sampled(**params: Any) -> ResolvedSampling:
    """Parameters that neither a command line nor a model names."""
    return SamplingChoice({}, SamplingParams(**params)).over(NOTHING)


class Script:
    """A screen that types what it was given and writes everything down."""

    def __init__(self, *inputs: str, stop_after: int | None = None) -> None:
        self.inputs = list(inputs)
        self.answers: list[str] = []
        self.thoughts: list[str] = []
        self.said: list[str] = []
        self.waits: list[str] = []
        self.drafts: list[str] = []
        self._stop_after = stop_after

    def read(self, draft: str) -> str | None:
        self.drafts.append(draft)
        return self.inputs.pop(0) if self.inputs else None

    @contextmanager
    def answering(self, abort: Callable[[], None]) -> Iterator[Write]:
        self.answers.append("")
        count = 0

        def write(text: str, *, is_reasoning: bool = False) -> None:
            nonlocal count
            if is_reasoning:
                self.thoughts.append(text)
            else:
                self.answers[-1] += text
            count += 1
            if count == self._stop_after:
                abort()

        yield write

    def wait(self, text: str) -> None:
        self.waits.append(text)

    def say(self, text: str) -> None:
        self.said.append(text)

    def set_status(self, phrases: list[str]) -> None:
        pass
