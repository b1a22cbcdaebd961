"""What has not left the first stage may still be rejected; what has left may not."""

import pytest

from splitinfer.core.speculation.flight import Flight
from splitinfer.core.speculation.speculation import Draft, Proposal
from tests.core import invariants
from tests.core.toy import VOCAB, House, next_token


def wrong(proposal: Proposal) -> list[Draft]:
    """Drafts none of which is right."""
    token = (next_token(proposal.seq.stream, proposal.seq.seed) + 1) % VOCAB
    return [Draft(token)] * proposal.count


@pytest.mark.parametrize("is_sent", [True, False])
def test_only_what_has_not_left_is_reduced(is_sent: bool) -> None:
    house = House(max_running=1, token_budget=32, speculates=True)
    house.guess = wrong
    house.add([1, 2, 3], max_tokens=20, flight=Flight(2, 2, 2))
    house.step()
    house.deliver()
    first, second = house.step(), house.step()
    assert first is not None
    assert second is not None
    assert second.slices[0].begins_with_draft
    step = house.scheduler.in_flight[-1]
    step.is_sent = is_sent
    house.scheduler.leave_out_rejected()
    assert step.plan is second, "no result has rejected it yet"
    house.deliver()
    house.scheduler.leave_out_rejected()
    assert step.plan.slices == (second.slices if is_sent else ())
    assert step.planned is second
    house.scheduler.leave_out_rejected()
    assert house.sequences[0].num_in_flight == int(is_sent)
    assert house.scheduler.speculation.counts.unsent == int(not is_sent)
    invariants.check(house.scheduler)
