"""Drafts for several, chosen as the costs have it: the tokens stay the same, and the stages do less."""

from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pipeline_sim import PipelineSim, Stage
from toy import blocks, config_of, small

from splitinfer.core.sampling_params import SamplingParams
from splitinfer.core.scheduler.config import SchedulerConfig
from splitinfer.core.scheduler.policy import PolicyConfig, PolicyName
from splitinfer.core.sequence import FinishReason, Sequence
from splitinfer.core.speculation.flight import Flight


def config(num_stages: int, **more: object) -> SchedulerConfig:
    limits = {"token_budget": 64, "max_running": 16, "max_len": 100_000, "speculates": True, "num_stages": num_stages}
    return config_of(num_groups=num_stages, max_in_flight=num_stages + 1, **{**limits, **more})  # type: ignore[arg-type]


def sequence(seq_id: int, prompt: int, answer: int, **more: object) -> Sequence:
    tokens = [(seq_id * 7 + i) % 5 for i in range(prompt)]
    return Sequence(seq_id, tokens, SamplingParams(max_tokens=answer), 0, **more)  # type: ignore[arg-type]


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
        made = config_of(
            num_groups=num_stages, max_in_flight=num_stages + 1, max_len=100_000, speculates=True,
            num_stages=num_stages, whole_blocks=has_states, **limits,
        )  # fmt: skip
        sim = PipelineSim(
            made,
            [Stage(pick.random(), pick.random() / 20, pick.random() / 10) for _ in range(num_stages)],
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


@pytest.mark.parametrize(
    ("offered", "num_streams"), [(0.1, 8), *(pytest.param(0.0, many, marks=pytest.mark.nightly) for many in (4, 8))]
)
def test_a_drafter_that_seldom_has_drafts_costs_next_to_nothing(offered: float, num_streams: int) -> None:
    """Of uneven stages, whose groups depend on how many drafts come. The request before had drafts."""
    seconds = []
    for flight in (Flight(), None):
        stages = [Stage(0.05, 0.003, 0.001), Stage(0.11, 0.0066, 0.001)]
        sim = PipelineSim(config(2), stages, draft=0.001, acceptance=0.9)
        sim.submit(0.0, sequence(99, 5, 60, flight=flight))
        sim.run()
        began, sim.offered = sim.now, offered
        for seq_id in range(num_streams):
            sim.submit(began, sequence(seq_id, 5, 200, flight=flight))
        sim.run()
        seconds.append(sim.now - began)
    none, drafts = seconds
    assert drafts < 1.03 * none
