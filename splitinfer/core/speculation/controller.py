"""Chooses the sizes of draft blocks, from the measured cost of drafting and verifying and from acceptance.

Everything is measured while it runs: each stage's seconds by rows (from the figures in every result), the drafter's
seconds per token, and what a round trip takes beyond computing. From these ``core.speculation.flight`` computes the
tokens per second of each choice. A size that was never tried is assumed to be as fast as its neighbour, so it is tried
once.

Where drafts do not pay they are off, and from time to time a single draft probes whether that is still so: as often as
costs a thirtieth of the time, and less and less often until one is right. It goes with a token that has to be computed
anyway, so it costs one draft and one row.

Drafts that are off where they would pay cost much, and drafts that are on where they do not cost little. So they are
off only if even the acceptance that the few tries do not exclude (``Acceptance.at_most``) is too low. And a new request
is tried whatever the requests before it had, because texts differ.

A block does not end early where the draft model is unsure. The draft is made by then, and in flight there is nothing
better to do: what is not drafted is time in which the coordinator waits for a verdict. Replayed on recorded drafts, a
cut-off was never worth more than a hundredth, and cost a tenth in flight (``scripts/README.md``).
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from splitinfer.core.speculation.acceptance import Acceptance
from splitinfer.core.speculation.flight import MAX_ROWS, OFF, Flight, Rig, RowTimes, best_flight, tokens_per_second

_MARGIN = 1.03  # factor by which drafts have to be faster than none
_PROBE = Flight(first=1)
_PROBES_TAKE = 0.03  # of the time, at most
_PROBE_EVERY = 64  # tokens without drafts, at most, before the next probe
_CHOOSE_AFTER = 0.03  # change of acceptance after which to choose again: choosing takes milliseconds
_SMOOTHING = 0.2  # weight of the newest draft, and of a round trip
_MOST_REQUESTS = 256  # number of requests whose acceptance is stored


@dataclass(slots=True)
class _OfRequest:
    acceptance: Acceptance
    flight: Flight = OFF
    share: float = -1.0  # acceptance when the flight was chosen
    sizes: int = 0  # number of sizes that had been measured then
    failures: int = 0  # probes in a row that were wrong
    waited: int = 0  # tokens without drafts


@dataclass(slots=True)
class Controller:
    """Chooses flights for a pipeline of ``num_stages``, with at most ``most_in_flight`` blocks of a request."""

    num_stages: int
    most_in_flight: int
    acceptance: Acceptance = field(default_factory=Acceptance)
    draft: float | None = None  # seconds per token
    link: float = 0.0  # seconds one way
    stages: list[RowTimes] = field(init=False)
    _requests: "OrderedDict[int, _OfRequest]" = field(default_factory=OrderedDict)
    last: Flight = OFF  # the latest choice
    _sizes: int = 0  # number of sizes measured, all stages together

    def __post_init__(self) -> None:
        self.stages = [RowTimes() for _ in range(self.num_stages)]

    # -- what was measured ---------------------------------------------------------------------

    def computed(self, stage: int, rows: int, seconds: float) -> None:
        """Learn from a step of one sequence on a stage."""
        if 0 < rows <= MAX_ROWS and 0 <= stage < self.num_stages and seconds > 0:
            self._sizes += rows not in self.stages[stage]
            self.stages[stage].took(rows, seconds)

    def drafted(self, tokens: int, seconds: float) -> None:
        """Learn from ``tokens`` drafts that took ``seconds``."""
        if tokens:
            each = seconds / tokens
            self.draft = each if self.draft is None else self.draft + _SMOOTHING * (each - self.draft)

    def returned(self, seconds: float) -> None:
        """Learn from the round trip of a step that waited for no other: its ``seconds`` on all links together."""
        one_way = max(0.0, seconds) / max(1, self.num_stages)
        self.link = one_way if self.link == 0.0 else self.link + _SMOOTHING * (one_way - self.link)

    def tried(self, seq_id: int, tried: int, accepted: int) -> None:
        """Learn from the verdict on a request's drafts."""
        mine = self._of(seq_id)
        mine.acceptance.add(tried, accepted)
        self.acceptance.add(tried, accepted)
        mine.waited = 0
        mine.failures = 0 if accepted else mine.failures + 1

    def forget(self, seq_id: int) -> None:
        """Forget a request that has ended."""
        self._requests.pop(seq_id, None)

    # -- what to choose ------------------------------------------------------------------------

    @property
    def rig(self) -> Rig | None:
        """The costs of drafting and verifying; ``None`` until each was measured once."""
        if self.draft is None or not all(self.stages):
            return None
        return Rig(tuple(self.stages), self.draft, self.link)

    def flight(self, seq_id: int) -> Flight:
        """The flight of this request's next drafts. Call it once for each block that begins with a sampled token."""
        mine, rig = self._of(seq_id), self.rig
        if not all(1 in stage for stage in self.stages):
            return OFF  # one row is measured first, because all else is compared with it
        if rig is None:
            return Flight(first=3)
        share = mine.acceptance.share
        if mine.sizes != self._sizes or abs(share - mine.share) > _CHOOSE_AFTER:
            self.last = mine.flight = self._choose(rig, mine.acceptance)
            mine.share, mine.sizes = share, self._sizes
        if not mine.flight.is_off:
            return mine.flight
        cost = (rig.draft + max(0.0, rig.latency(2) - rig.latency(1))) * rig.sequential
        if not mine.failures and cost < mine.acceptance.at_most:
            return _PROBE  # the last one was right: another is worth more than waiting
        return self.probe(seq_id, cost)

    def share(self, seq_id: int) -> float:
        """How often a request's drafts are right."""
        return self._of(seq_id).acceptance.share

    def share_at_most(self, seq_id: int) -> float:
        """How often they may well be right."""
        return self._of(seq_id).acceptance.seen_at_most

    def probe(self, seq_id: int, cost: float) -> Flight:
        """A single draft, if it is time to try one, else none. ``cost``: of that draft, in tokens. Call it once for
        each block without drafts."""
        mine = self._of(seq_id)
        mine.waited += 1
        patience = min(_PROBE_EVERY, cost / _PROBES_TAKE * 2 ** min(mine.failures, 6))
        return _PROBE if mine.waited >= max(patience, cost / _PROBES_TAKE) else OFF

    def _choose(self, rig: Rig, acceptance: Acceptance) -> Flight:
        for share in (acceptance.share, acceptance.at_most):
            best = best_flight(rig, share, self.most_in_flight)
            if tokens_per_second(rig, best, share) > _MARGIN * rig.sequential:
                return best
        return OFF

    def _of(self, seq_id: int) -> _OfRequest:
        found = self._requests.get(seq_id)
        if found is None:
            found = self._requests[seq_id] = _OfRequest(Acceptance(self.acceptance))
            while len(self._requests) > _MOST_REQUESTS:
                self._requests.popitem(last=False)
        return found
