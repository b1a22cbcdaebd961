"""The last steps as they were on the stages, for whoever looks at the pipeline while it works.

A trace is written for later; this is for now: a bounded number of steps, each with what its rows were, where they were
computed when, and why each stage had stood still before. It says nothing of whose requests they were.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from splitinfer.core.metrics.gaps import Cause, Visit

_MOST = 4096  # steps that nobody has taken; older ones are lost


@dataclass(frozen=True, slots=True)
class Rows:
    """What the rows of a step were: of prompts, tokens that had been chosen, and drafts."""

    prefill: int = 0
    decode: int = 0
    draft: int = 0

    @property
    def kind(self) -> str:
        """What the step was for, as traces call it.

        >>> Rows(8).kind, Rows(0, 1, 3).kind, Rows(8, 1).kind, Rows().kind
        ('prefill', 'decode', 'mixed', 'free')
        """
        decodes = self.decode + self.draft
        if self.prefill and decodes:
            return "mixed"
        return "prefill" if self.prefill else "decode" if decodes else "free"


@dataclass(frozen=True, slots=True)
class SeenStep:
    """A step that has come back; seconds on the coordinator's clock.

    useful: rows whose result was kept.
    visits: of each stage.
    gaps: the seconds before each of them, by cause.
    window: the number of the window that it is counted in (``LLM.stats``); another cut of the layers begins another.
    """

    number: int
    rows: Rows
    useful: int
    visits: Sequence[Visit]
    gaps: Sequence[Mapping[Cause, float]]
    window: int = 0

    @property
    def is_void(self) -> bool:
        """Whether nothing of it was kept, as it lay behind a wrong draft or its requests had ended."""
        return self.useful == 0 and self.rows != Rows()


class RecentSteps:
    """Steps until somebody takes them. One thread puts; another one may take."""

    def __init__(self, most: int = _MOST) -> None:
        self._steps: deque[SeenStep] = deque(maxlen=most)

    def put(self, step: SeenStep) -> None:
        """Add a step."""
        self._steps.append(step)

    def take(self) -> list[SeenStep]:
        """The steps since the last time, oldest first."""
        taken: list[SeenStep] = []
        while self._steps:
            taken.append(self._steps.popleft())
        return taken
