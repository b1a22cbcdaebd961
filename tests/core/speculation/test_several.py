"""Drafts for several, chosen as the costs have it: the tokens stay the same, and the stages do less."""

from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pipeline_sim import PipelineSim, config, sequence
from toy import blocks, small

from splitinfer.core.scheduler.policy import PolicyConfig, PolicyName
from splitinfer.core.sequence import FinishReason, Sequence
from splitinfer.core.speculation.flight import Flight


@given(seed=st.integers(0, 2**32), num_stages=st.integers(1, 3), right=st.sampled_from([0.0, 0.5, 0.9, 1.0]))
@example(seed=134217729, num_stages=3, right=0.9)  # beside steps under way one gives its KV to another of its group
@example(seed=2637513177, num_stages=2, right=0.0)  # an unsent step loses a rejected slice, and its sequence may move
def test_everybody_gets_the_tokens_it_gets_alone(seed: int, num_stages: int, right: float) -> None:
    """Whatever the arrivals, aborts, priorities, deadlines, policies, costs and memory."""
    pick = Random(seed)
    has_states = pick.random() < 0.2
    with small(block=pick.randint(1, 6), min_chunk=pick.randint(1, 4)):
        least = [pick.choice([10, 20, 60]) for _ in range(num_stages)]
        policy = PolicyConfig(
            pick.choice([*PolicyName]), itl_slo=pick.choice([None, 0.5, 5.0]), max_decode_gap=pick.choice([None, 1.0])
        )
        limits = {
            "token_budget": pick.choice([3, 8, 40]), "max_running": pick.randint(1, 10), "policy_config": policy,
            "kv": pick.choice([None, blocks(*least)]), "rewind": 0 if has_states else None,
        }  # fmt: skip
        sim = PipelineSim(
            config(num_stages, speculates=True, whole_blocks=has_states, **limits),
            [(pick.random(), pick.random() / 20, pick.random() / 10) for _ in range(num_stages)],
            draft=pick.random() / 20, acceptance=right, seed=seed,
        )  # fmt: skip
        prompts, sequences = dict[int, list[int]](), dict[int, Sequence]()
        for seq_id in range(pick.randint(2, 10)):
            deadline = pick.choice([None, None, None, pick.random() * 100])
            flight = pick.choice([None, None, None, Flight(2), Flight(2, 3, 2)])
            seq = sequence(
                seq_id, pick.randint(1, 30), pick.randint(1, 40), priority=pick.randint(-1, 1), deadline=deadline,
                flight=flight,
            )  # fmt: skip
            at = pick.choice([0.0, pick.random() * 40])
            try:
                sim.scheduler.config.check_fits(seq)
            except ValueError:
                continue
            prompts[seq_id], sequences[seq_id] = list(seq.tokens), seq
            sim.submit(at, seq)
            if pick.random() < 0.1:
                sim.at(at + pick.random() * 20, lambda i=seq_id: sim.scheduler.finish(i, FinishReason.ABORT))
            if deadline is not None:
                sim.at(at + deadline, lambda: sim.scheduler.expire(sim.now))
        sim.run()
        sim.check_tokens(prompts, sequences)


@pytest.mark.parametrize("offered", [0.0, 0.1])
def test_a_drafter_that_seldom_has_drafts_costs_next_to_nothing(offered: float) -> None:
    """Of uneven stages, whose groups depend on how many drafts come. The request before had drafts."""
    seconds = []
    for flight in (Flight(), None):
        stages = [(0.05, 0.003, 0.001), (0.11, 0.0066, 0.001)]
        sim = PipelineSim(
            config(2, token_budget=64, max_running=16, speculates=True), stages, draft=0.001, acceptance=0.9
        )
        sim.submit(0.0, sequence(99, 5, 60, flight=flight))
        sim.run()
        began, sim.offered = sim.now, offered
        for seq_id in range(8):
            sim.submit(began, sequence(seq_id, 5, 200, flight=flight))
        sim.run()
        seconds.append(sim.now - began)
    none, drafts = seconds
    assert drafts < 1.03 * none
