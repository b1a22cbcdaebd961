"""Chooses the sizes of draft blocks, from the measured cost of drafting and verifying and from acceptance.

What steps, drafts and links cost is learned while they run (``core.costs``). From that ``core.speculation.flight``
computes the tokens per second of each choice. A size that was never tried is assumed to be as fast as its neighbour, so
it is tried once.

Where drafts do not pay they are off, and from time to time a single draft probes whether that is still so: as often as
costs a thirtieth of the time, and less and less often until one is right. It goes with a token that has to be computed
anyway, so it costs one draft and one row.

Drafts that are off where they would pay cost much, and drafts that are on where they do not cost little. So they are
off only if even the acceptance that the few tries do not exclude (``Acceptance.at_most``) is too low. And a new request
is tried whatever the requests before it had, because texts differ.

A block does not end early where the draft model is unsure. The draft is made by then, and in flight there is nothing
better to do: the coordinator would only wait for a verdict. Replayed on recorded drafts, a
cut-off was never worth more than a hundredth, and cost a tenth in flight (``scripts/README.md``).
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from splitinfer.core.costs.by_rows import RowCosts
from splitinfer.core.costs.model import CostModel
from splitinfer.core.speculation.acceptance import Acceptance
from splitinfer.core.speculation.flight import OFF, Flight, best_flight, tokens_per_second

_MARGIN = 1.03  # factor by which drafts have to be faster than none
_PROBE = Flight(first=1)
_PROBES_TAKE = 0.03  # of the time, at most
_PROBE_EVERY = 64  # tokens without drafts, at most, before the next probe
_CHOOSE_AFTER = 0.03  # change of acceptance after which to choose again: choosing takes milliseconds
_MOST_REQUESTS = 256  # number of requests whose acceptance is stored


@dataclass(slots=True)
class _OfRequest:
    acceptance: Acceptance
    offered: Acceptance
    flight: Flight = OFF
    share: float = -1.0  # acceptance when the flight was chosen
    sizes: int = 0  # number of sizes that had been measured then
    probe_cost: float = 1.0  # of a single draft, in tokens, as it was then
    failures: int = 0  # probes in a row that were wrong
    waited: int = 0  # tokens without drafts


@dataclass(slots=True)
class Controller:
    """Chooses flights by ``costs``, with at most ``most_in_flight`` blocks of a request."""

    costs: CostModel
    most_in_flight: int
    acceptance: Acceptance = field(default_factory=Acceptance)
    _offered: Acceptance = field(default_factory=lambda: Acceptance(usual=1.0))  # how often the drafter had drafts
    _requests: "OrderedDict[int, _OfRequest]" = field(default_factory=OrderedDict)
    last: Flight = OFF  # the latest choice

    def tried(self, seq_id: int, tried: int, accepted: int) -> None:
        """Learn from the verdict on a request's drafts."""
        mine = self._of(seq_id)
        mine.acceptance.add(tried, accepted)
        self.acceptance.add(tried, accepted)
        mine.waited = 0
        mine.failures = 0 if accepted else mine.failures + 1

    def asked(self, seq_id: int, *, has_drafts: bool) -> None:
        """Learn whether the drafter had drafts for a request."""
        for each in (self._of(seq_id).offered, self._offered):
            each.add(1, int(has_drafts))

    def forget(self, seq_id: int) -> None:
        """Forget a request that has ended."""
        self._requests.pop(seq_id, None)

    # -- what to choose ------------------------------------------------------------------------

    def flight(self, seq_id: int, position: int = 0) -> Flight:
        """The flight of the next drafts of a request of ``position`` tokens. Call it once for each block that begins
        with a sampled token."""
        mine, stages = self._of(seq_id), self.costs.stages
        if not all(1 in stage.sizes for stage in stages):
            return OFF  # one row is measured first, because all else is compared with it
        if not self.costs.drafts.num_seen:
            return Flight(first=3)
        share, sizes = mine.acceptance.share, sum(len(stage.sizes) for stage in stages)
        if mine.sizes != sizes or abs(share - mine.share) > _CHOOSE_AFTER:
            self._choose(mine, position)
            mine.share, mine.sizes = share, sizes
        if not mine.flight.is_off:
            return mine.flight
        if not mine.failures and mine.probe_cost < mine.acceptance.at_most:
            return _PROBE  # the last one was right: another is worth more than waiting
        return self.probe(seq_id, mine.probe_cost)

    def share(self, seq_id: int) -> float:
        """How often a request's drafts are right."""
        return self._of(seq_id).acceptance.share

    def share_at_most(self, seq_id: int) -> float:
        """How often they may well be right."""
        return self._of(seq_id).acceptance.seen_at_most

    def offered(self, seq_id: int) -> float:
        """How often the drafter has drafts for a request."""
        return self._of(seq_id).offered.share

    def probe(self, seq_id: int, cost: float) -> Flight:
        """A single draft, if it is time to try one, else none. ``cost``: of that draft, in tokens. Call it once for
        each block without drafts."""
        mine = self._of(seq_id)
        mine.waited += 1
        patience = min(_PROBE_EVERY, cost / _PROBES_TAKE * 2 ** min(mine.failures, 6))
        return _PROBE if mine.waited >= max(patience, cost / _PROBES_TAKE) else OFF

    def _choose(self, mine: _OfRequest, position: int) -> None:
        costs = self.costs.for_one(position)
        if costs is None:
            return
        mine.probe_cost = (costs.draft + max(0.0, costs.latency(2) - costs.latency(1))) * costs.sequential
        self.last = mine.flight = self._best(costs, mine.acceptance)

    def _best(self, costs: RowCosts, acceptance: Acceptance) -> Flight:
        for share in (acceptance.share, acceptance.at_most):
            best = best_flight(costs, share, self.most_in_flight)
            if tokens_per_second(costs, best, share) > _MARGIN * costs.sequential:
                return best
        return OFF

    def _of(self, seq_id: int) -> _OfRequest:
        found = self._requests.get(seq_id)
        if found is None:
            found = self._requests[seq_id] = _OfRequest(
                Acceptance(self.acceptance), Acceptance(self._offered, usual=1.0)
            )
            while len(self._requests) > _MOST_REQUESTS:
                self._requests.popitem(last=False)
        return found
