"""What every campaign has: its time, its seed, what was wrong, its figures, and the one document with which it ends."""

import itertools
import math
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MOST_SHOWN = 50  # troubles in the document


class Missing(Exception):
    """The machine lacks something that the campaign needs: it is skipped, for this reason."""


@dataclass
class Report:
    """A campaign under way. ``minutes``: how long it goes on. ``folder``: for its files. ``figures``: what it found, by
    name."""

    name: str
    seed: int
    minutes: float
    folder: Path
    troubles: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    skipped: str = ""
    _began: float = field(default_factory=time.monotonic)
    _until: float = math.inf

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def begin(self, share: float = 1.0) -> None:
        """All is set up: from now on the minutes count, or this share of them."""
        self._until = time.monotonic() + 60 * self.minutes * share

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._until

    def numbers(self) -> Iterator[int]:
        """0, 1, 2 and so on: as many as there is time for, and at least one."""
        return itertools.takewhile(lambda number: number == 0 or not self.is_over, itertools.count())

    def chance(self, *what: object) -> random.Random:
        return random.Random(" ".join(map(str, (self.name, self.seed, *what))))

    def say(self, text: str) -> None:
        print(f"{self.seconds:7.1f} s  {text}", flush=True)

    def wrong(self, *troubles: str) -> None:
        for trouble in troubles:
            self.troubles.append(trouble)
            self.say(f"WRONG: {trouble}")

    def check(self, is_so: object, what: str) -> None:
        if not is_so:
            self.wrong(what)

    def expect_none(self, troubles: Iterable[str], where: str = "") -> None:
        self.wrong(*(f"{where}: {trouble}" if where else trouble for trouble in troubles))

    def document(self) -> dict[str, Any]:
        skipped = {"skipped": self.skipped} if self.skipped else {}
        return {
            "campaign": self.name, "seed": self.seed, "minutes": self.minutes, "seconds": round(self.seconds, 1),
            **skipped, **self.figures, "num_troubles": len(self.troubles), "troubles": self.troubles[:MOST_SHOWN],
        }  # fmt: skip
