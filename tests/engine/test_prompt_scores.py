"""Log probabilities of prompts: on every road those that plain mlx-lm gives for the prompt as a whole."""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from engine.door import Ask, Open, ask
from mlx_lm.utils import load_model
from stages import prompt
from tiny import Folder

from splitinfer import Flight, SamplingParams
from splitinfer.engine.loop.requests import RequestOutput

PARAMS = SamplingParams(
    max_tokens=20, prompt_logprobs=2, temperature=1.0, seed=1, logit_bias={4: 100.0}, ignore_eos=True
)
PROMPTS = [prompt(40), prompt(40)[:20] + prompt(9, seed=5), prompt(1), prompt(2, seed=3)]


@pytest.fixture(scope="module")
def folder(tiny_folder: Folder) -> Path:
    return tiny_folder("llama")


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[np.ndarray]:
    model, _ = load_model(folder)
    model.set_dtype(mx.float32)
    logits = [model(mx.array([tokens]))[0] for tokens in PROMPTS]
    return [np.array(one - mx.logsumexp(one, axis=-1, keepdims=True)) for one in logits]


def check(outputs: list[RequestOutput], expected: list[np.ndarray]) -> None:
    for tokens, output, lines in zip(PROMPTS[: len(outputs)], outputs, expected, strict=True):
        assert output.prompt_logprobs is not None
        assert [one.token_id for one in output.prompt_logprobs] == tokens[1:]
        for one, line in zip(output.prompt_logprobs, lines, strict=False):
            likely = np.argsort(-line)[:2]
            assert [token for token, _ in one.top] == likely.tolist()
            got = [one.logprob, *(value for _, value in one.top)]
            np.testing.assert_allclose(got, line[[one.token_id, *likely]], atol=2e-6)


ROADS = {
    "whole": ([4], {}),
    "chunks": ([2, 2], {"token_budget": 11}),
    "drafts": ([1, 3], {"draft": "ngram", "flight": Flight(2)}),
    "short of memory": ([2, 2], {"kv_bytes": 512 * 88}),
}


NIGHTLY = [pytest.param(road, marks=pytest.mark.nightly) for road in ("whole", "drafts", "short of memory")]


@pytest.mark.parametrize("road", ["chunks", *NIGHTLY])
def test_every_road_scores_a_prompt_alike(road: str, folder: Path, expected: list[np.ndarray], pipeline: Open) -> None:
    cuts, options = ROADS[road]
    with pipeline(folder, cuts, block=8, **options) as there:
        plain = there.llm.generate(PROMPTS, replace(PARAMS, prompt_logprobs=None))
        assert all(output.prompt_logprobs is None for output in plain)
        for _ in range(2):  # also where all of a prompt's KV is kept
            outputs = there.llm.generate(PROMPTS, PARAMS)
            check(outputs, expected)
            assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
        assert outputs[0].num_cached_tokens == 0
        assert (there.stats["preemptions"] > 0) == (road == "short of memory")


def test_a_lost_worker_loses_no_score(folder: Path, expected: list[np.ndarray], pipeline: Open) -> None:
    one = Ask(tuple(PROMPTS[0]), PARAMS)
    with pipeline(folder, [2, 2], rejoin_timeout=20, token_budget=8) as there:
        for moment in (0, 12):
            (request,) = there.submit(one)
            there.read(request, moment)
            there.cut()
            there.finish()
            check([request.output], expected[:1])


def test_a_long_prompt_is_scored_in_parts(pipeline: Open) -> None:
    """The logits of all rows of a long chunk would take more memory than its KV."""
    with pipeline("llama", [4], token_budget=512) as there:
        there.answers(ask(400, max_tokens=1))
        whole = there.stats["stages"][0]["steps"]
        there.answers(ask(400, prompt=3, max_tokens=1, prompt_logprobs=1))
        assert there.stats["stages"][0]["steps"] - whole > 400 / 100
