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

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from splitinfer.core.costs.by_rows import RowCosts

FIRSTS = (1, 2, 3, 5, 7, 11, 15)  # with the token before them 2, 3, 4, 6, 8, 12, 16 rows, which suit kernels
FURTHERS = (1, 2, 3, 4, 6, 8, 12, 16)
_CERTAIN = 0.995  # bound on acceptance: with 1, runs would be infinite
_RARE = 1e-3  # share of runs, the longest, that is summed as a geometric series
_MOST_BLOCKS = 100
_AS_GOOD = 0.99  # of the best tokens per second


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


def tokens_per_second(costs: RowCosts, flight: Flight, acceptance: float) -> float:
    """Tokens per second of a flight where each draft is right with probability ``acceptance``, independently."""
    if flight.is_off:
        return costs.sequential
    if flight.is_synchronous:
        return costs.synchronous(flight.first, acceptance)
    a = min(acceptance, _CERTAIN)
    goes_on = a ** (flight.first + 1)  # the probability that a run is longer than the blocks so far
    seconds, before = 0.0, 0.0
    for block, received in enumerate(resumed(costs, flight)):
        again = goes_on * (a**flight.further if block else 1.0)
        ends_here = (1 - goes_on) if block == 0 else goes_on - again
        if block and again < _RARE:
            # All further blocks are like this one, each at the same distance from the one before.
            seconds += goes_on * (received + (received - before) * again / max(goes_on - again, 1e-12))
            break
        seconds += ends_here * received
        goes_on, before = (goes_on if block == 0 else again), received
    return 1 / (1 - a) / seconds


def resumed(costs: RowCosts, flight: Flight) -> Iterator[float]:
    """Yields for each block when the coordinator continues if that block has a wrong draft, in seconds from the first
    draft of the run."""
    free = [0.0] * len(costs.stages)
    returned: list[float] = []
    work: list[tuple[float, float]] = []  # [start, end) in which the coordinator receives nothing
    now = 0.0
    for block in range(_MOST_BLOCKS + flight.in_flight):
        drafts, rows = (flight.first, flight.first + 1) if block == 0 else (flight.further, flight.further)
        if block >= flight.in_flight:
            yield _when_received(returned[block - flight.in_flight], work)
            now = max(now, returned[block - flight.in_flight])
        for _ in range(drafts):
            work.append((now, now := now + costs.draft))
        work.append((now, now := now + costs.at(0, rows)))
        free[0] = done = now
        for i in range(1, len(costs.stages)):
            free[i] = done = max(free[i], done + costs.link) + costs.at(i, rows)
        returned.append(done + (costs.link if costs.num_links else 0.0))


def run_seconds(costs: RowCosts, flight: Flight, right: int) -> float:
    """Seconds of one run with ``right`` right drafts, until the coordinator continues behind the wrong one. With
    synchronous blocks a run may be several blocks, each of which gives one token more than its drafts."""
    if flight.is_synchronous:
        blocks = 1 + right // (flight.first + 1)
        return blocks * (costs.drafting(flight.first) + costs.latency(flight.first + 1))
    times, covered = resumed(costs, flight), flight.first
    for received in times:
        if right <= covered:
            return received
        covered += flight.further
    return received


def _when_received(at: float, work: Iterable[tuple[float, float]]) -> float:
    return next((end for start, end in work if start < at < end), at)


def best_flight(costs: RowCosts, acceptance: float, most_in_flight: int) -> Flight:
    """The fastest flight, which may be ``OFF``. Of those that are nearly as fast it is the one with the fewest drafts
    under way, because discarded drafts cost power and delay the next request."""
    rates = {
        flight: tokens_per_second(costs, flight, acceptance) for flight in _flights(most_in_flight, costs.most_drafts)
    }
    enough = _AS_GOOD * max(rates.values())
    return min((flight for flight, rate in rates.items() if rate >= enough), key=lambda flight: flight.most_drafts)


def _flights(most_in_flight: int, most_drafts: int) -> Iterator[Flight]:
    yield OFF
    for first in sorted({min(first, most_drafts) for first in FIRSTS}):
        yield Flight(first)
        for further in FURTHERS:
            if further <= 2 * first + 2:  # where the first block is short, so are those behind it
                yield from (Flight(first, further, number) for number in range(2, most_in_flight + 1))
