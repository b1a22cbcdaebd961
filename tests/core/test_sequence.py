"""Parameters are right once they exist; a sequence knows what is to compute and when it ends; what a plan may say."""

import math
from dataclasses import replace
from typing import Any

import pytest

from splitinfer.core.plan import Slice, StepPlan
from splitinfer.core.sampling_params import SamplingParams
from splitinfer.core.sequence import FinishReason, Sequence


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
        ({"temperature": -0.1}, "temperature must be from 0 to 100, not -0.1"),
        ({"temperature": math.nan}, "temperature must be from 0 to 100, not nan"),
        ({"temperature": math.inf}, "temperature must be from 0 to 100, not inf"),
        ({"top_p": 0.0}, "top_p must be over 0 and at most 1, not 0.0"),
        ({"top_p": 1.01}, "top_p must be over 0 and at most 1, not 1.01"),
        ({"top_p": math.nan}, "top_p must be over 0 and at most 1, not nan"),
        ({"top_k": -1}, "top_k must be 0 (off) or more, not -1"),
        ({"top_k": 2**63}, f"top_k must be below 2**63, not {2**63}"),
        ({"max_tokens": 2**63}, f"max_tokens must be below 2**63, not {2**63}"),
        ({"stop_token_ids": (2**63,)}, "stop_token_ids must be below 2**63"),
        ({"min_p": -0.5}, "min_p must be between 0 and 1, not -0.5"),
        ({"min_p": 1.5}, "min_p must be between 0 and 1, not 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be over 0, not 0.0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty must be over 0, not inf"),
        ({"seed": -1}, "seed must be in [0, 2**64), not -1"),
        ({"seed": 2**64}, f"seed must be in [0, 2**64), not {2**64}"),
        ({"stop": ("a", "")}, "a stop string must not be empty"),
        ({"stop": ""}, "a stop string must not be empty"),
        ({"stop": ("a", "b\ud800")}, "a stop string must be text that UTF-8 can hold, not 'b\\ud800'"),
        ({"stop": ("a", 5)}, "a stop string must be text that UTF-8 can hold, not 5"),
        ({"stop": "a" * 4097}, "a stop string may have 4096 characters, not 4097"),
        ({"stop": ("a",) * 1025}, "stop may have 1024 strings, not 1025"),
        ({"stop_token_ids": tuple(range(1025))}, "stop_token_ids may have 1024 ids, not 1025"),
        ({"stop_token_ids": (3, -1)}, "stop_token_ids must not be negative"),
        ({"logprobs": -1}, "logprobs must be between 0 and 20, not -1"),
        ({"logprobs": 21}, "logprobs must be between 0 and 20, not 21"),
        ({"presence_penalty": -2.01}, "presence_penalty must be between -2 and 2, not -2.01"),
        ({"frequency_penalty": math.nan}, "frequency_penalty must be between -2 and 2, not nan"),
        ({"logit_bias": {3: 100.5}}, "a bias must be between -100 and 100, not 100.5"),
        ({"temperature": 10**400}, "temperature is too large"),
        ({"min_p": -(10**400)}, "min_p is too large"),
        ({"logit_bias": {3: 10**400}}, "logit_bias must map token ids to numbers, not {3: " + "1".ljust(76, "0")),
        ({"logit_bias": {-3: 1.0}}, "the tokens of logit_bias must be from 0 to below 2**63"),
        ({"logit_bias": {"3": 1.0}}, "logit_bias must map token ids to numbers, not ['3']"),
        ({"logit_bias": {3: "much"}}, "logit_bias must map token ids to numbers, not {3: 'much'}"),
        ({"logit_bias": 3}, "logit_bias must map token ids to numbers, not 3"),
        ({"logit_bias": ((3, 1.0), (3, 2.0))}, "logit_bias must not have a token twice"),
        ({"logit_bias": dict.fromkeys(range(1025), 1)}, "logit_bias may have 1024 tokens, not 1025"),
    ],
)
def test_a_value_out_of_range_is_named_with_the_range(wrong: dict[str, Any], sentence: str):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole sentence is compared
        SamplingParams(**wrong)
    assert str(caught.value) == sentence


def test_a_whole_number_that_no_message_can_carry_becomes_another():
    params = SamplingParams(repetition_penalty=2**64)
    assert (type(params.repetition_penalty), params.repetition_penalty) == (float, 2**64)


@pytest.mark.parametrize(
    "right",
    [
        {"max_tokens": 1, "temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 0.01},
        {"top_p": 1e-9, "min_p": 1, "seed": 0, "logprobs": 0},
        {"seed": 2**64 - 1, "logprobs": 20, "stop": (), "stop_token_ids": (0,)},
        {"presence_penalty": -2, "frequency_penalty": 2, "logit_bias": {0: -100, 2**63 - 1: 100}},
    ],
)
def test_the_ends_of_the_ranges_are_inside(right: dict[str, Any]):
    SamplingParams(**right)


def test_equal_lists_and_biases_are_equal_values():
    params = SamplingParams(stop=["a", "b"], stop_token_ids=[1, 2], logit_bias={9: 1, 2: -3.5})  # type: ignore[arg-type]
    assert params.logit_bias == ((2, -3.5), (9, 1.0))
    assert params == SamplingParams(stop=("a", "b"), stop_token_ids=(1, 2), logit_bias=((9, 1.0), (2, -3.5)))
    assert hash(params) == hash(replace(params))


@pytest.mark.parametrize(
    ("given", "depends"),
    [
        ({}, False),
        ({"logit_bias": {1: 1.0}}, False),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 0.1}, True),
    ],
)
def test_what_depends_on_earlier_tokens(given: dict[str, Any], depends: bool):
    assert SamplingParams(**given).depends_on_tokens == depends


LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


@pytest.mark.parametrize(
    ("max_tokens", "max_len", "tokens", "reasons"),
    [
        (2, 100, [7, 7], [None, LENGTH]),
        (100, 5, [7, 7], [None, LENGTH]),  # the context is full
        (1, 4, [9], [STOP]),  # where the length is reached, too
        (4, 100, [1, 7], [None, None]),  # an end token in the prompt ends nothing
    ],
)
def test_how_an_answer_ends(max_tokens: int, max_len: int, tokens: list[int], reasons: list[FinishReason | None]):
    seq = Sequence(0, [0, 1, 8], SamplingParams(max_tokens=max_tokens), 0, frozenset({8, 9}))
    assert [seq.extend([token], max_len, now=0.0).reason for token in tokens] == reasons
    assert seq.tokens[3:] == tokens


@pytest.mark.parametrize(
    ("start", "size", "logits", "drafts"),
    [
        *((0, 0, 0, 0), (-1, 1, 0, 0), (0, 1, 2, 0), (0, 1, -1, 0)),
        *((0, 2, 1, 5), (0, 2, 1, 2), (0, 3, 1, 1), (0, 2, 1, 3), (0, 1, 0, -1)),
    ],
)
def test_a_slice_has_rows_and_wants_logits_of_those_and_of_its_drafts(start: int, size: int, logits: int, drafts: int):
    assert Slice(1, 4, (7, 8, 9), 1).end == 7
    assert Slice(1, 0, (7, 8), 2, 1).num_drafts == 1
    with pytest.raises(ValueError, match=r"slice of .* wants"):
        Slice(1, start, (7,) * size, logits, drafts)


def test_a_step_has_one_slice_of_a_sequence():
    """Two would share caches, and neither would know what the other stores."""
    assert StepPlan(3, slices=(Slice(1, 0, (5, 6), 0), Slice(2, 9, (5,), 1))).num_tokens == 3
    with pytest.raises(ValueError, match="step 3 has two slices of one sequence"):
        StepPlan(3, slices=(Slice(1, 0, (5, 6), 0), Slice(1, 2, (5,), 1)))
