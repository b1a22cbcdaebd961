"""Whose sampling value counts: the command line's, the model's, or the default."""

import math
from typing import Any

import pytest

from splitinfer.core.sampling_defaults import NOTHING, RECOMMENDABLE, Origin, Recommended, SamplingChoice, recommended
from splitinfer.core.sampling_params import SamplingParams

DEFAULTS = SamplingParams()


def test_every_recommendable_value_is_taken():
    said = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
    found = recommended({"do_sample": True, "eos_token_id": 7, "max_new_tokens": 9, **said})
    assert found == Recommended(said)
    assert list(said) == list(RECOMMENDABLE)


@pytest.mark.parametrize(
    ("config", "values"),
    [
        ({}, {}),
        ({"temperature": None, "top_p": None}, {}),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.9}, {"temperature": 0.0, "top_p": 0.9}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": None}, {}),
        ({"do_sample": True, "temperature": 0}, {"temperature": 0.0}),
        ({"temperature": 1, "top_k": 20.0}, {"temperature": 1.0, "top_k": 20}),
    ],
)
def test_what_a_file_means(config: dict[str, Any], values: dict[str, Any]):
    assert recommended(config) == Recommended(values)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("temperature", -1, "temperature must be from 0 to 100, not -1.0"),
        ("temperature", math.nan, "temperature must be from 0 to 100, not nan"),
        ("temperature", "hot", "temperature must be a number, not 'hot'"),
        ("temperature", True, "temperature must be a number, not True"),
        ("temperature", 10**400, "temperature is too large"),
        ("top_p", 1.5, "top_p must be over 0 and at most 1, not 1.5"),
        ("top_p", [0.9], "top_p must be a number, not [0.9]"),
        ("top_k", -1, "top_k must be 0 (off) or more, not -1"),
        ("top_k", 2.5, "top_k must be a whole number up to 2,147,483,647, not 2.5"),
        ("top_k", math.inf, "top_k must be a whole number up to 2,147,483,647, not inf"),
        ("top_k", 10**30, f"top_k must be a whole number up to 2,147,483,647, not {10**30}"),
        ("min_p", 2, "min_p must be between 0 and 1, not 2.0"),
        ("repetition_penalty", 0, "repetition_penalty must be over 0, not 0.0"),
    ],
)
def test_a_value_out_of_its_range_is_left_out_and_named(name: str, value: Any, problem: str):
    other = "top_p" if name == "temperature" else "temperature"
    assert recommended({name: value, other: 0.5}) == Recommended({other: 0.5}, (problem,))


def test_the_command_line_goes_before_the_file_and_the_file_before_the_default():
    base = SamplingParams(max_tokens=9, temperature=0.3, seed=4)
    choice = SamplingChoice({"temperature": 0.0, "top_k": 5}, base)
    found = choice.over(Recommended({"temperature": 0.6, "top_p": 0.9}))
    assert found.params == SamplingParams(max_tokens=9, temperature=0.0, top_p=0.9, top_k=5, seed=4)
    assert found.origins == {
        "temperature": Origin.OPTION,
        "top_p": Origin.MODEL,
        "top_k": Origin.OPTION,
        "min_p": Origin.DEFAULT,
        "repetition_penalty": Origin.DEFAULT,
    }
    assert SamplingChoice({}, base).over(NOTHING).params == base


def test_a_choice_out_of_its_range_is_refused_before_the_model_is_known():
    with pytest.raises(ValueError, match="top_p must be over 0"):
        SamplingChoice({"top_p": 0.0}, DEFAULTS)
