"""Drafts are made in rounds for all sequences that may have some; who has not been read yet is read between steps."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq

from toy import VOCAB, House, next_token

from splitinfer.core.sequence import Sequence
from splitinfer.core.speculation.flight import Flight
from splitinfer.core.speculation.speculation import Draft
from splitinfer.engine.coordinator.drafting import Drafting
from splitinfer.engine.device.device import Device


class Known:
    """A drafter that is always right, or always wrong. ``unread``: chunks still to be read, by sequence."""

    name = "known"

    def __init__(self) -> None:
        self.unread: dict[int, int] = {}
        self.is_right = True
        self.rounds: list[int] = []  # drafts in each
        self.forgotten: list[int] = []

    def use_device(self, device: Device) -> None:
        """Nothing to do."""

    def prepare(self, seq: Sequence) -> bool:
        left = self.unread.get(seq.seq_id, 0)
        self.unread[seq.seq_id] = max(0, left - 1)
        return left > 0

    def drafts(self, seq: Sequence, count: int) -> Iterator[Draft]:
        raise AssertionError("drafts are made together")

    def draft_together(self, seqs: Seq[Sequence], counts: Seq[int]) -> Iterator[list[Draft | None]]:
        streams, number = [seq.stream for seq in seqs], 0
        while any(count > number for count in counts):
            found: list[Draft | None] = []
            for seq, stream, count in zip(seqs, streams, counts, strict=True):
                if count > number:
                    stream.append((next_token(stream, seq.seed) + (not self.is_right)) % VOCAB)
                found.append(Draft(stream[-1], seconds=0.001) if count > number else None)
            self.rounds.append(sum(draft is not None for draft in found))
            yield found
            number += 1

    def forget(self, seq_id: int) -> None:
        self.forgotten.append(seq_id)


def decoding(*flights: Flight, num_groups: int = 1) -> tuple[House, Known, Drafting]:
    """Sequences that have their first tokens, and nothing under way."""
    found = House(num_groups=num_groups, max_in_flight=num_groups + 1, token_budget=50, max_running=8, speculates=True)
    for i, flight in enumerate(flights):
        found.add([i] * 3, 30, flight=flight)
    while len(found.scheduler.batches) < len(flights) or found.toy.under_way:
        found.deliver() if found.toy.under_way else found.step()
    drafter = Known()
    return found, drafter, Drafting(drafter, found.scheduler, lambda: None)


def test_a_round_is_a_draft_of_each() -> None:
    found, drafter, drafting = decoding(Flight(2), Flight(4), Flight())
    assert drafting.has_proposals
    drafting.make()
    assert drafter.rounds == [2, 2, 1, 1]
    assert not drafting.has_proposals
    plan = found.step()
    assert plan is not None
    assert [part.num_drafts for part in plan.slices] == [2, 4, 0]
    found.deliver()
    assert [len(found.generated[i]) for i in range(3)] == [4, 6, 2], "all were right"
    speculation = found.scheduler.speculation
    assert speculation is not None
    assert set(speculation.costs.drafts.measured) == {1, 2}, "rounds of one and of two sequences"


def test_who_was_not_read_gets_no_drafts_beside_others() -> None:
    found, drafter, drafting = decoding(Flight(2), Flight(2), Flight(2))
    drafter.unread = {1: 2, 2: 1}
    counts = []
    for _ in range(4):
        drafting.make()
        plan = found.step()
        assert plan is not None
        counts.append([part.num_drafts for part in plan.slices])
        found.deliver()
    assert counts == [[2, 0, 0], [2, 0, 0], [2, 2, 0], [2, 2, 2]], "a chunk between two steps"
    found.guess = None
    found.run()
    found.check_answers()


def test_who_is_alone_waits_for_its_reading() -> None:
    found, drafter, drafting = decoding(Flight(3))
    drafter.unread = {0: 5}
    drafting.make()
    assert drafter.unread == {0: 0}
    plan = found.step()
    assert plan is not None
    assert plan.slices[0].num_drafts == 3


def test_a_result_that_voids_a_proposal_ends_its_drafts_alone() -> None:
    found, drafter, _ = decoding(Flight(4), Flight(4))

    def receive() -> None:
        if len(drafter.rounds) == 1:
            found.finish(0)

    drafting = Drafting(drafter, found.scheduler, receive)
    drafting.make()
    assert drafter.rounds == [2, 1, 1, 1]
    plan = found.step()
    assert plan is not None
    assert [(part.seq_id, part.num_drafts) for part in plan.slices] == [(1, 4)]
    drafting.forget(0)
    assert drafter.forgotten == [0]


def test_a_correction_goes_with_the_drafts_of_a_first_block() -> None:
    """Its block before is void while a block behind it is drafted. Alone it would be followed by further blocks only,
    and nothing would be chosen again."""
    found, drafter, _ = decoding(Flight(2, 9, 2), num_groups=2)
    drafter.is_right = False

    def receive() -> None:
        if len(drafter.rounds) == 5:
            found.deliver()

    drafting = Drafting(drafter, found.scheduler, receive)
    drafting.make()
    assert found.step() is not None
    drafting.make()
    assert len(drafter.rounds) == 2 + 3 + 2
    plan = found.step()
    assert plan is not None
    assert [(part.num_drafts, part.begins_with_draft) for part in plan.slices] == [(2, False)]
    found.guess = None
    found.run()
    found.check_answers()
