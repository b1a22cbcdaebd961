"""A screen for chats that nobody sees."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Script:
    """A screen that types what it was given and writes everything down."""

    def __init__(self, *inputs: str, stop_after: int | None = None) -> None:
        self.inputs = list(inputs)
        self.answers: list[str] = []
        self.said: list[str] = []
        self.waits: list[str] = []
        self.drafts: list[str] = []
        self._stop_after = stop_after

    def read(self, draft: str) -> str | None:
        self.drafts.append(draft)
        return self.inputs.pop(0) if self.inputs else None

    @contextmanager
    def answering(self, abort: Callable[[], None]) -> Iterator[Callable[[str], None]]:
        self.answers.append("")
        count = 0

        def write(text: str) -> None:
            nonlocal count
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

    def greet(self, text: str) -> None:
        pass
