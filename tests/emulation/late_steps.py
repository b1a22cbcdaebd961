"""How many steps of emulated accelerators were late: computing them took longer than the accelerator would have.

Figures mean nothing where more than one step in a thousand was. A pipeline has a process for each stage, so within
``counted`` each writes its numbers to a file of a folder that the environment names, and local workers inherit that.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "SPLITINFER_LATE_STEPS"
MOST_LATE = 0.001  # share of steps


@dataclass(slots=True)
class LateSteps:
    """The steps of this process's accelerators, and how many of them were late."""

    steps: int = 0
    late: int = 0

    def count(self, is_late: bool) -> None:
        """Count a step."""
        self.steps += 1
        self.late += is_late
        if folder := os.environ.get(VARIABLE):
            _write(folder, f"{self.steps:12} {self.late:12}")

    @property
    def share(self) -> float:
        """The share that was late."""
        return self.late / self.steps if self.steps else 0.0

    def since(self, before: "LateSteps") -> "LateSteps":
        """Those that came after a reading."""
        return LateSteps(self.steps - before.steps, self.late - before.late)


LATE_STEPS = LateSteps()
_written: dict[str, int] = {}  # the folder, and the open file there


def _write(folder: str, text: str) -> None:
    """Write this process's numbers: over those before them in one piece, so that nobody reads half of them."""
    if folder not in _written:
        _close()
        _written[folder] = os.open(Path(folder, str(os.getpid())), os.O_WRONLY | os.O_CREAT)
    os.pwrite(_written[folder], text.encode(), 0)


def _close() -> None:
    for file in _written.values():
        os.close(file)
    _written.clear()


@contextmanager
def counted() -> Iterator[Callable[[], LateSteps]]:
    """Count the steps of this process and of those that it starts; what is given reads how many there were so far."""
    with tempfile.TemporaryDirectory(prefix="late-steps-") as folder:
        before, os.environ[VARIABLE] = os.environ.get(VARIABLE), folder
        LATE_STEPS.steps = LATE_STEPS.late = 0

        def read() -> LateSteps:
            found = [list(map(int, each.read_text().split())) for each in Path(folder).iterdir()]
            whole = [each for each in found if each]  # an empty one is just being written for the first time
            return LateSteps(sum(steps for steps, _ in whole), sum(late for _, late in whole))

        try:
            yield read
        finally:
            _close()
            if before is None:
                del os.environ[VARIABLE]
            else:
                os.environ[VARIABLE] = before
