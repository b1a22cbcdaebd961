"""Drafts in plans: whatever is guessed, and whatever happens meanwhile, the tokens are the same."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy import VOCAB, Guesser, House, blocks, next_token, small

from splitinfer.core.plan import SampledSlice, SampledToken, Slice, StepResult
from splitinfer.core.speculation.flight import Flight
from splitinfer.core.speculation.speculation import Draft, Proposal


def house(right: float = 1.0, seed: int = 1, overtaken: float = 0.0, **config: object) -> House:
    """A pipeline of two stages, and a drafter that is right that often."""
    found = House(**{"speculates": True, "token_budget": 50, "max_running": 4, **config})  # type: ignore[arg-type]
    dice = Random(seed)
    found.guess = Guesser(dice, right)
    found.overtake = lambda: dice.random() < overtaken
    return found


def prompted(found: House, *lengths: int, **more: object) -> list[int]:
    return [found.add([i % VOCAB] * n, **{"max_tokens": 20, **more}) for i, n in enumerate(lengths)]  # type: ignore[arg-type]


def decoding(found: House, flight: Flight, **more: object) -> int:
    """A request that has its first token, and nothing under way."""
    (seq_id,) = prompted(found, 3, flight=flight, **more)
    found.until(lambda: found.sequences[seq_id] in found.scheduler.batches)
    return seq_id


def right_guesses(proposal: Proposal, count: int | None = None) -> list[Draft]:
    stream, drafts = proposal.seq.streamed(0), []
    for _ in range(proposal.count if count is None else count):
        drafts.append(Draft(next_token(stream, proposal.seq.seed)))
        stream.append(drafts[-1].token_id)
    return drafts


def test_as_many_blocks_are_under_way_as_the_flight_says() -> None:
    found = house(num_groups=3, max_in_flight=4)
    found.guess = right_guesses
    decoding(found, Flight(2, 3, 3))
    sizes = []
    while len(found.scheduler.in_flight) < 3:
        plan = found.plan()
        sizes.append((len(plan.slices[0].token_ids), plan.slices[0].num_drafts, plan.slices[0].num_logits))
    assert sizes == [(3, 2, 3), (3, 3, 3), (3, 3, 3)]
    assert found.step() is None, "a fourth block would only stand in the way"


def test_the_correction_goes_out_while_rejected_blocks_are_under_way() -> None:
    found = house(num_groups=3, max_in_flight=4)
    seq_id = decoding(found, Flight(2, 3, 3))
    found.guess = lambda proposal: [Draft((d.token_id + 1) % VOCAB) for d in right_guesses(proposal)]
    assert found.step()
    assert found.step()
    found.deliver()
    found.guess = right_guesses
    plan = found.plan()
    (part,) = plan.slices
    seq = found.sequences[seq_id]
    assert not part.begins_with_draft
    assert (part.token_ids[0], part.start) == (seq.tokens[-1], len(seq.tokens) - 1)
    assert found.deliver() == [], "the rejected block says nothing"
    assert found.scheduler.speculation.counts.rejected == 1
    found.check()


def test_each_member_gets_its_own_number_of_drafts() -> None:
    found = house(num_groups=1, max_in_flight=2)
    found.guess = right_guesses
    for count in (0, 2, 5):
        prompted(found, 3, max_tokens=40, flight=Flight(count))
    while len(found.scheduler.batches) < 3 or found.toy.under_way:
        found.deliver() if found.toy.under_way else found.step()
    plan = found.plan()
    assert [(part.num_drafts, part.num_logits) for part in plan.slices] == [(0, 1), (2, 3), (5, 6)]
    found.check()


def test_prompts_are_read_beside_drafts() -> None:
    found = house(num_groups=2, max_in_flight=3, token_budget=8)
    found.guess = right_guesses
    decoding(found, Flight(5, 3, 2), max_tokens=60)
    prompted(found, 60)
    plans = []
    while found.sequences[1] not in found.scheduler.batches:
        plan = found.step()
        if plan is None:
            found.deliver()
        else:
            plans.append(plan)
    both = [plan for plan in plans if {part.seq_id for part in plan.slices} == {0, 1}]
    drafts = [part.num_drafts for plan in both for part in plan.slices if part.seq_id == 0]
    assert len(both) > 3
    assert max(drafts[1:]) == 3, "half of what the decode leaves is the prompt's"
    read = [i for i, plan in enumerate(plans) if any(part.seq_id == 1 for part in plan.slices)]
    meanwhile = [part for plan in plans[read[0] + 1 : read[-1]] for part in plan.slices]
    assert not any(part.begins_with_draft for part in meanwhile), "blocks do not follow each other"
    found.check()


def test_nothing_is_drafted_behind_an_end_token() -> None:
    found = house()
    prompt = [1, 2, 3]
    for seed in range(1000):
        tokens = list(prompt)
        while len(tokens) < 9:
            tokens.append(next_token(tokens, seed))
        end = tokens[-1]
        if end not in tokens[3:-1]:
            break
    seq_id = found.add(prompt, 30, end_tokens=[end], seed=seed, flight=Flight(8, 8, 2))
    found.guess = right_guesses
    parts: list[Slice] = []
    while (plan := found.step()) or found.toy.under_way:
        parts += plan.slices if plan else ()
        if plan is None:
            found.deliver()
    drafts = [t for p in parts for t in p.token_ids[len(p.token_ids) - p.num_drafts :]]
    assert drafts
    assert end not in drafts
    found.check_answers()
    assert found.generated[seq_id][-1] == end


def test_drafts_never_cost_another_its_memory() -> None:
    with small(block=4):
        found = house(kv=blocks(4, 4))
        found.guess = right_guesses
        prompted(found, 3, max_tokens=10, flight=Flight(8, 8, 2))
        found.check()
        assert found.scheduler.num_preemptions == 0


def test_caches_that_go_back_a_little_are_not_asked_for_more() -> None:
    found = house(rewind=3)
    most = []

    def guess(proposal: Proposal) -> list[Draft]:
        most.append(len(proposal.seq.drafts.ahead) + proposal.count)
        return right_guesses(proposal)

    found.guess = guess
    prompted(found, 3, flight=Flight(8, 8, 2))
    found.check()
    assert max(most) == 3


def test_a_wrong_draft_costs_a_state_neither_a_step_nor_a_row() -> None:
    found = house(rewind=0, whole_blocks=True)
    seq_id = decoding(found, Flight(5, 3, 2))
    seq = found.sequences[seq_id]

    def two_right(proposal: Proposal) -> list[Draft]:
        drafts = right_guesses(proposal)
        return [*drafts[:2], *(Draft((d.token_id + 1) % VOCAB) for d in drafts[2:])]

    found.guess = two_right
    plan = found.plan()
    start = plan.slices[0].start
    found.deliver()
    assert len(seq.tokens) == start + 4, "the token before, two drafts that were right, and a correction"
    block = found.plan()
    assert (block.slices[0].start, block.slices[0].num_drafts) == (start + 3, 5)
    found.check()


@pytest.mark.parametrize("flight", [Flight(5), Flight(5, 6, 2), Flight(2, 3, 2)])
def test_states_are_kept_at_the_ends_of_blocks_of_kv(flight: Flight) -> None:
    with small(block=4):
        found = house(right=0.7, overtaken=0.3, rewind=0, whole_blocks=True)
        prompted(found, 5, max_tokens=40, flight=flight)
        found.check()
        assert len(found.scheduler.prefix_cache.tree) >= 10, "of 45 tokens"
        assert found.scheduler.speculation.counts.sent > 10


def test_an_answer_that_no_verdict_can_be_is_refused() -> None:
    found = house()
    seq_id = decoding(found, Flight(2, 3, 2))
    found.guess = right_guesses
    plan = found.plan()
    (part,) = plan.slices
    first = SampledToken(part.token_ids[1])
    other = SampledToken((part.token_ids[1] + 1) % VOCAB)
    for tokens in ((), (first,), (other, other), (first,) * 4):
        with pytest.raises(ValueError, match="asked for"):
            found.scheduler.update(StepResult(plan.step, (SampledSlice(seq_id, tokens),)))
    with pytest.raises(ValueError, match="asked for"):
        found.scheduler.update(StepResult(plan.step))


def test_what_is_rejected_may_be_missing_in_a_result_and_must_not_be_answered() -> None:
    found = house(num_groups=3, max_in_flight=4)
    seq_id = decoding(found, Flight(2, 3, 3))
    found.guess = lambda proposal: [Draft((d.token_id + 1) % VOCAB) for d in right_guesses(proposal)]
    found.step()
    plan = found.plan()
    found.deliver()
    found.toy.under_way.popleft()
    with pytest.raises(ValueError, match="asked for"):
        found.scheduler.update(StepResult(plan.step, (SampledSlice(seq_id, (SampledToken(1),)),)))
    assert found.scheduler.update(StepResult(plan.step)) == []
    found.check()


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.booleans(), st.data())
def test_a_verdict_ends_at_the_first_wrong_draft(tokens: list[int], starts_sure: bool, data: st.DataObject) -> None:
    drafts = len(tokens) - starts_sure
    if drafts == 0:
        return
    part = Slice(1, 5, tuple(tokens), min(drafts + 1, len(tokens)), drafts)
    sampled = data.draw(st.lists(st.integers(0, 3), min_size=part.num_logits, max_size=part.num_logits))
    count = part.num_accepted(sampled)
    verified = tokens[len(tokens) - part.num_logits + 1 :]
    assert sampled[: count - 1] == verified[: count - 1]
    assert count == len(sampled) or sampled[count - 1] != verified[count - 1]
