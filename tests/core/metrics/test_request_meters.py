"""Which phases of a request are counted, and when."""

import pytest

from splitinfer.core.metrics.requests import STEP_TOKENS, TOKENS, RequestMeters
from splitinfer.core.sampling_params import SamplingParams
from splitinfer.core.sequence import Sequence


def sequence(seq_id: int, num_prompt: int = 4) -> Sequence:
    return Sequence(seq_id, [1] * num_prompt, SamplingParams(max_tokens=9), 0)


def totals(meters: RequestMeters) -> dict[str, tuple[int, float]]:
    """Count and sum of all that was counted at all."""
    read = meters.read().histograms
    return {name: (each.count, pytest.approx(each.total)) for name, each in read.items() if each.count}


def test_the_life_of_a_request():
    """Submitted at 10, begun at 12, tokens at 13, two at 14 (a draft was right) and at 16, over at 16.5."""
    meters, seq = RequestMeters(), sequence(7)
    meters.submitted(seq, at=10.0)
    meters.planned(3)
    seq.begun_at, seq.num_cached = 12.0, 1
    for now, count in ((13.0, 1), (14.0, 2), (16.0, 1)):
        seq.tokens += [2] * count
        for _ in range(count):
            meters.token(meters.under_way[7], now)
    meters.ended(7, 16.5)
    assert totals(meters) == {
        "first_token": (1, 3.0),
        "between_tokens": (2, 3.0),
        "each_token": (1, 1.0),
        "whole": (1, 6.5),
        "queue": (1, 2.0),
        "prefill": (1, 1.0),
        "decode": (1, 3.0),
        "inference": (1, 4.0),
        "prompt": (1, 4),
        "computed_prompt": (1, 3),
        "generated": (1, 4),
        "max_tokens": (1, 9),
        "preemptions": (1, 0),
        "step_tokens": (1, 3),
    }
    assert (meters.read().prompt_tokens, meters.read().cached_tokens) == (4, 1)


def test_a_request_given_up_in_the_queue_has_no_phases():
    meters = RequestMeters()
    meters.submitted(sequence(1), at=0.0)
    meters.ended(1, 5.0)
    assert {"whole", "prompt", "generated"} <= totals(meters).keys()
    assert not {"queue", "prefill", "decode", "inference", "each_token", "first_token"} & totals(meters).keys()
    assert meters.read().prompt_tokens == 0, "its prompt was not read"


def test_a_request_given_up_while_its_prompt_is_read_has_waited():
    meters, seq = RequestMeters(), sequence(1)
    meters.submitted(seq, at=0.0)
    seq.begun_at = 2.0
    meters.ended(1, 5.0)
    assert totals(meters)["queue"] == (1, 2.0)
    assert "prefill" not in totals(meters)


def test_empty_steps_do_not_count():
    meters = RequestMeters()
    meters.planned(0)
    assert totals(meters) == {}


def test_one_token_has_no_time_for_each():
    meters, seq = RequestMeters(), sequence(1)
    meters.submitted(seq, at=0.0)
    seq.begun_at = 0.0
    seq.tokens.append(2)
    meters.token(meters.under_way[1], 1.0)
    meters.ended(1, 1.0)
    assert "each_token" not in totals(meters)
    assert totals(meters)["decode"] == (1, 0.0)


def test_bounds_of_tokens():
    assert TOKENS[:7] == (1, 2, 5, 10, 20, 50, 100)
    assert STEP_TOKENS[:3] == (1, 8, 16)
    assert STEP_TOKENS[-1] == 16_384
