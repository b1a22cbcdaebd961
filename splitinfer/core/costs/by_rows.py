"""The costs of steps, drafts and links as tables, by which drafts and groups are chosen: what the model knows, at the
positions where the sequences are now."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_CERTAIN = 0.995  # bound on acceptance: with 1, runs would be infinite
MOST_ROWS = 256  # of a step of blocks
MAX_ROWS = 16  # of a block; verifying more is nearly free on no machine


@dataclass(frozen=True, slots=True)
class RowCosts:
    """Seconds. ``stages``: of a step, by stage and number of rows (from 0); ``drafts``: of a round of drafts by the
    number of sequences, empty without a drafter; ``link``: one way; ``host``: what a step takes besides. ``most_rows``:
    up to which a step's time is known well enough to be tried; ``at_end``: whether the last stage makes the drafts, not
    the first; ``at_once``: the most drafts that a round makes, 0: one."""

    stages: tuple[tuple[float, ...], ...]
    drafts: tuple[float, ...] = ()
    link: float = 0.0
    host: float = 0.0
    most_rows: int = MOST_ROWS
    at_end: bool = False
    at_once: int = 0

    @classmethod
    def through(cls, stages: Iterable[Mapping[int, float]], draft: float, link: float, at_once: int = 0) -> "RowCosts":
        """The costs for one sequence, from each stage's seconds for some numbers of rows. Between them they are
        interpolated; outside they are those of the nearest, so that sizes nobody tried get tried."""
        return cls(tuple(_nearest(seconds) for seconds in stages), (0.0, draft), link, at_once=at_once)

    def at(self, stage: int, rows: int) -> float:
        """Seconds of a step on a stage."""
        times = self.stages[stage]
        return times[rows] if rows < len(times) else times[-1] * rows / (len(times) - 1)

    def round(self, sequences: int) -> float:
        """Seconds of a round of drafts for so many sequences."""
        return self.drafts[min(sequences, len(self.drafts) - 1)] if self.drafts and sequences else 0.0

    def drafting(self, drafts: int, sequences: int = 1) -> float:
        """Seconds of so many drafts of each of some sequences."""
        return (min(drafts, 1) if self.at_once else drafts) * self.round(sequences)

    @property
    def most_drafts(self) -> int:
        """Of a block."""
        return self.at_once or MAX_ROWS - 1

    # -- one sequence alone --------------------------------------------------------------------

    @property
    def draft(self) -> float:
        """Seconds of a draft."""
        return self.round(1)

    @property
    def num_links(self) -> int:
        """Links that a step and its result pass."""
        return len(self.stages) if len(self.stages) > 1 else 0

    def computing(self, rows: int) -> float:
        """Seconds of a step on all stages together."""
        return sum(self.at(stage, rows) for stage in range(len(self.stages)))

    def latency(self, rows: int) -> float:
        """Seconds from the start of a step until its result is back, with nothing else under way."""
        return self.computing(rows) + self.num_links * self.link

    @property
    def sequential(self) -> float:
        """Tokens per second without drafts."""
        return 1 / self.latency(1)

    def bound(self, acceptance: float) -> float:
        """The upper bound of tokens per second with one chain of drafts."""
        return self.sequential / (1 - min(acceptance, _CERTAIN))

    def synchronous(self, num_drafts: int, acceptance: float) -> float:
        """Tokens per second with synchronous blocks."""
        a = min(acceptance, _CERTAIN)
        tokens = (1 - a ** (num_drafts + 1)) / (1 - a)
        return tokens / (self.drafting(num_drafts) + self.latency(num_drafts + 1))


def _nearest(seconds: Mapping[int, float]) -> tuple[float, ...]:
    """Seconds for 0 to ``MAX_ROWS`` rows, from those of some."""
    known = sorted(seconds.items())

    def at(rows: int) -> float:
        below, above = [one for one in known if one[0] <= rows], [one for one in known if one[0] >= rows]
        (low, a), (high, b) = below[-1] if below else above[0], above[0] if above else below[-1]
        return a if high <= low else a + (b - a) * (rows - low) / (high - low)

    return (0.0, *(at(rows) for rows in range(1, MAX_ROWS + 1))) if known else (0.0,) * (MAX_ROWS + 1)
