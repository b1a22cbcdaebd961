"""How long a prompt and its answer may be: as asked, or what the stages have room for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stages import pipeline

from splitinfer.core.kv.budget import BLOCK, KVBudget, StageKV
from splitinfer.core.sequence import SamplingParams
from splitinfer.demo import TARGET
from splitinfer.errors import ConfigError, RequestError
from splitinfer.llm import Settings

stages = st.lists(st.builds(StageKV, st.integers(0, 10**9), st.integers(0, 2000), st.integers(0, 10**6)), max_size=3)


@given(stages, st.integers(1, 10**6))
def test_the_longest_fits_and_a_block_more_does_not(memory: list[StageKV], most: int):
    budget = KVBudget(tuple(memory))
    longest = budget.longest(most)
    assert longest == most or longest % BLOCK == 0
    assert budget.fits(KVBudget().use_of(longest)) or longest <= BLOCK
    assert longest >= most or not budget.fits(KVBudget().use_of(min(longest + BLOCK, most)))


@pytest.mark.parametrize(
    ("settings", "of_draft", "least", "most"),
    [
        (Settings(), None, 8192, 8192),
        (Settings(grows_context=True), None, 8192, 100_000),
        (Settings(grows_context=True, context=20_000), None, 20_000, 20_000),
        (Settings(context=200_000), None, 100_000, 100_000),
        (Settings(grows_context=True), 30_000, 8192, 30_000),
        (Settings(grows_context=True, context=50_000), 30_000, 50_000, 50_000),
    ],
)
def test_what_was_asked_and_what_is_given(settings: Settings, of_draft: int | None, least: int, most: int):
    """A draft model is not asked beyond its own context."""
    assert settings.context_of(100_000) == least
    assert settings.most_context_of(100_000, of_draft) == most


def test_memory_decides_and_the_refusal_has_the_numbers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("splitinfer.settings.DEFAULT_CONTEXT", 100)
    with pipeline(TARGET, [6, 6], grows_context=True, kv_bytes=1_000_000) as llm:
        assert 100 < llm.context_length < llm.model_context_length == 4096
        assert llm.context_length % BLOCK == 0
        llm.kv_budget.check(llm.context_length)
        answer = llm.generate([[5] * (llm.context_length - 2)], SamplingParams(max_tokens=8, ignore_eos=True))
        assert (len(answer[0].token_ids), answer[0].finish_reason) == (2, "length")
        with pytest.raises(RequestError, match=rf"at most {llm.context_length - 1:,} fit"):
            llm.generate([[5] * llm.context_length])


def test_memory_for_kv_that_was_asked_for_bounds_the_context(caplog: pytest.LogCaptureFixture):
    """A chat greets with what its answers can have; what holds no answer, or more than there is, is said."""
    with pipeline(TARGET, [6, 6], kv_bytes=4_000_000) as llm:
        assert BLOCK < llm.context_length < 4096
        llm.kv_budget.check(llm.context_length)
    with pytest.raises(ConfigError, match=r"--kv-gb 0.0005 holds 162 tokens on stage s0, .* at least --kv-gb 0.00087$"):
        pipeline(TARGET, [6, 6], kv_bytes=500_000).__enter__()
    assert "free on stage" not in caplog.text
    with pipeline(TARGET, [6, 6], kv_bytes=10**15):
        assert "--kv-gb 1e+06 is more than the " in caplog.text
