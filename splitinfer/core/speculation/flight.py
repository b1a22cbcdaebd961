"""Speculation in flight: how blocks of drafts pass the pipeline, and how fast that can be.

One stream of tokens leaves a pipeline idle: the next token needs the last one to have passed all stages. Drafts
predict the next tokens, so that there is something to compute meanwhile. The first block after a sampled token is that
token with ``first`` drafts; blocks of ``further`` drafts follow, as many ``in_flight`` at a time as pay:

    stage 0   | draft | A | draft | B | draft | C |          A: t d d d    B: d d d d    C: d d d d
    stage 1                   |  A  |    |  B  |             A's last row verifies B's first draft

The last stage samples the target at every position and accepts drafts while they are equal (``Slice.num_accepted``). A
wrong one voids everything behind it, and the next first block begins with the token that was sampled instead.

With drafts that are right with probability a, independently of each other, a *run* from one sampled token to the
next wrong draft has 1 / (1 - a) tokens on average, and ends in block b with probability

    b = 0:  1 - a^(first + 1)        b > 0:  a^(first + 1 + (b - 1) further) (1 - a^further)

When it ends in block b, everything up to its verdict is the same every time; so ``tokens_per_second`` adds up the
verdicts' times, weighted by probability, and needs no random numbers. The coordinator receives a verdict between two
drafts or after its own layers, not before. Limits, with T the time of one row through all stages and l a link's:

    sequential     1 / (T + S l)
    any chain      1 / ((1 - a) (T + S l)), because every wrong draft costs one latency
    synchronous K  (1 - a^(K + 1)) / (1 - a) / (K d + T(K + 1) + S l)

(S is the number of links, there and back. The gain of blocks in flight over synchronous ones, with K tuned, is that
drafting, verifying and links overlap, and no more.) See PipeInfer (Butler et al., arXiv 2407.11798) for
speculation in a pipeline, and Leviathan et al. (arXiv 2211.17192) for the expectation.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

MAX_ROWS = 16  # of a block; verifying more is nearly free on no machine
FIRSTS = (1, 2, 3, 5, 7, 11, 15)  # with the token before them 2, 3, 4, 6, 8, 12, 16 rows, which suit kernels
FURTHERS = (1, 2, 3, 4, 6, 8, 12, 16)
_CERTAIN = 0.995  # bound on acceptance: with 1, runs would be infinite
_RARE = 1e-3  # share of runs, the longest, that is summed as a geometric series
_MOST_BLOCKS = 100
_AS_GOOD = 0.99  # of the best tokens per second
_DRIFT_WEIGHT, _LEAST_WEIGHT = 0.25, 0.05  # of one measurement, in the common factor and in its own size


@dataclass(frozen=True, slots=True)
class Flight:
    """The sizes of a sequence's draft blocks: ``first`` drafts behind a sampled token, then blocks of ``further``, at
    most ``in_flight`` blocks at a time. With one in flight, every block begins with a sampled token (synchronous)."""

    first: int = 0
    further: int = 0
    in_flight: int = 1

    def __post_init__(self) -> None:
        if self.first < 0 or self.further < 0 or self.in_flight < 1:
            raise ValueError(f"blocks of {self.first} and {self.further} drafts, {self.in_flight} in flight, cannot be")

    @property
    def most_drafts(self) -> int:
        """The most drafts under way at a time."""
        return self.first if self.is_synchronous else self.first + (self.in_flight - 1) * self.further

    @property
    def is_off(self) -> bool:
        """Whether there are no drafts at all."""
        return self.first == 0 and (self.further == 0 or self.in_flight == 1)

    @property
    def is_synchronous(self) -> bool:
        """Whether a block waits for the verdict on the one before it."""
        return self.in_flight == 1 or self.further == 0


OFF = Flight()


class RowTimes:
    """Seconds of a step by its number of rows: as measured where it was, because kernels change with the number of
    rows; else interpolated between its neighbours.

    Machines drift, by heat and by what else they do, all sizes together; and sizes are not measured at the same time.
    So a common factor is learned fast, and the ratios between sizes slowly.
    """

    def __init__(self, seconds: Mapping[int, float] | None = None) -> None:
        self._shape = dict(seconds or {})
        self._count = dict.fromkeys(self._shape, 1)
        self._factor = 1.0

    def __contains__(self, rows: int) -> bool:
        return rows in self._shape

    def __bool__(self) -> bool:
        return bool(self._shape)

    @property
    def measured(self) -> dict[int, float]:
        """Seconds for each size that was measured."""
        return {rows: self._factor * shape for rows, shape in sorted(self._shape.items())}

    def took(self, rows: int, seconds: float) -> None:
        """Learn from one step of so many rows."""
        if rows not in self._shape:
            self._shape[rows], self._count[rows] = seconds / self._factor, 1
            return
        off = seconds / self.at(rows)
        self._count[rows] += 1
        self._shape[rows] *= off ** max(_LEAST_WEIGHT, 1 / self._count[rows])
        self._factor *= off**_DRIFT_WEIGHT

    def at(self, rows: int) -> float:
        """Seconds for so many rows; outside the measured sizes those of the nearest, so that new sizes get tried."""
        return self._factor * self._shape_at(rows)

    def _shape_at(self, rows: int) -> float:
        shape = self._shape
        if rows in shape or not shape:
            return shape.get(rows, 0.0)
        below = max((n for n in shape if n < rows), default=None)
        above = min((n for n in shape if n > rows), default=None)
        if below is None or above is None:
            return shape[below if below is not None else above]  # type: ignore[index]
        share = (rows - below) / (above - below)
        return shape[below] + share * (shape[above] - shape[below])

    def scaled(self, factor: float) -> "RowTimes":
        """The times of ``factor`` times as many layers."""
        return RowTimes({rows: factor * seconds for rows, seconds in self.measured.items()})


@dataclass(frozen=True, slots=True)
class Rig:
    """The costs of drafting and verifying in seconds: ``stages`` for a step by its rows, ``draft`` for a token on the
    coordinator, ``link`` for one way."""

    stages: tuple[RowTimes, ...]
    draft: float
    link: float

    @property
    def num_links(self) -> int:
        """Links that a step and its result pass."""
        return len(self.stages) if len(self.stages) > 1 else 0

    def latency(self, rows: int) -> float:
        """Seconds from the start of a step until its result is back, with nothing else under way."""
        return sum(stage.at(rows) for stage in self.stages) + self.num_links * self.link

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
        return tokens / (num_drafts * self.draft + self.latency(num_drafts + 1))

    def with_link(self, link: float) -> "Rig":
        """The same costs with links of ``link`` seconds."""
        return replace(self, link=link)


def tokens_per_second(rig: Rig, flight: Flight, acceptance: float) -> float:
    """Tokens per second of a flight where each draft is right with probability ``acceptance``, independently."""
    if flight.is_off:
        return rig.sequential
    if flight.is_synchronous:
        return rig.synchronous(flight.first, acceptance)
    a = min(acceptance, _CERTAIN)
    goes_on = a ** (flight.first + 1)  # the probability that a run is longer than the blocks so far
    seconds, before = 0.0, 0.0
    for block, received in enumerate(resumed(rig, flight)):
        again = goes_on * (a**flight.further if block else 1.0)
        ends_here = (1 - goes_on) if block == 0 else goes_on - again
        if block and again < _RARE:
            # All further blocks are like this one, each at the same distance from the one before.
            seconds += goes_on * (received + (received - before) * again / max(goes_on - again, 1e-12))
            break
        seconds += ends_here * received
        goes_on, before = (goes_on if block == 0 else again), received
    return 1 / (1 - a) / seconds


def resumed(rig: Rig, flight: Flight) -> Iterator[float]:
    """Yields for each block when the coordinator continues if that block has a wrong draft, in seconds from the first
    draft of the run."""
    free = [0.0] * len(rig.stages)
    returned: list[float] = []
    work: list[tuple[float, float]] = []  # [start, end) in which the coordinator receives nothing
    now = 0.0
    for block in range(_MOST_BLOCKS + flight.in_flight):
        drafts, rows = (flight.first, flight.first + 1) if block == 0 else (flight.further, flight.further)
        if block >= flight.in_flight:
            yield _when_received(returned[block - flight.in_flight], work)
            now = max(now, returned[block - flight.in_flight])
        for _ in range(drafts):
            work.append((now, now := now + rig.draft))
        work.append((now, now := now + rig.stages[0].at(rows)))
        free[0] = done = now
        for i, stage in enumerate(rig.stages[1:], 1):
            free[i] = done = max(free[i], done + rig.link) + stage.at(rows)
        returned.append(done + (rig.link if rig.num_links else 0.0))


def run_seconds(rig: Rig, flight: Flight, right: int) -> float:
    """Seconds of one run with ``right`` right drafts, until the coordinator continues behind the wrong one. With
    synchronous blocks a run may be several blocks, each of which gives one token more than its drafts."""
    if flight.is_synchronous:
        blocks = 1 + right // (flight.first + 1)
        return blocks * (flight.first * rig.draft + rig.latency(flight.first + 1))
    times, covered = resumed(rig, flight), flight.first
    for received in times:
        if right <= covered:
            return received
        covered += flight.further
    return received


def _when_received(at: float, work: Iterable[tuple[float, float]]) -> float:
    return next((end for start, end in work if start < at < end), at)


def best_flight(rig: Rig, acceptance: float, most_in_flight: int) -> Flight:
    """The fastest flight, which may be ``OFF``. Of those that are nearly as fast it is the one with the fewest drafts
    under way, because discarded drafts cost power and delay the next request."""
    rates = {flight: tokens_per_second(rig, flight, acceptance) for flight in _flights(most_in_flight)}
    enough = _AS_GOOD * max(rates.values())
    return min((flight for flight, rate in rates.items() if rate >= enough), key=lambda flight: flight.most_drafts)


def _flights(most_in_flight: int) -> Iterator[Flight]:
    yield OFF
    for first in FIRSTS:
        yield Flight(first)
        for further in FURTHERS:
            if further <= 2 * first + 2:  # where the first block is short, so are those behind it
                yield from (Flight(first, further, number) for number in range(2, most_in_flight + 1))
