"""Log probabilities of prompts: on every road those that plain mlx-lm gives for the prompt as a whole."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from effort import long
from mlx_lm.utils import load_model
from stages import pipeline, prompt, shorten_blocks

from splitinfer import Flight, SamplingParams
from splitinfer.core.plan import Slice
from splitinfer.core.scheduler import planner
from splitinfer.engine.coordinator.requests import RequestOutput
from splitinfer.engine.stage import runner, scores

PARAMS = SamplingParams(
    max_tokens=20, prompt_logprobs=2, temperature=1.0, seed=1, logit_bias={4: 100.0}, ignore_eos=True
)
PROMPTS = [prompt(40), prompt(40)[:20] + prompt(9, seed=5), prompt(1), prompt(2, seed=3)]


@pytest.fixture(scope="module")
def folder(tiny_folder: Callable[..., Path]) -> Path:
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


@pytest.mark.parametrize("road", ["chunks", "short of memory", *map(long, ("whole", "drafts"))])
def test_every_road_scores_a_prompt_alike(
    road: str, folder: Path, expected: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_blocks(monkeypatch, 8)
    monkeypatch.setattr(planner, "_MOST_SCORED", 16)
    most = _most_rows(monkeypatch)
    cuts, options = ROADS[road]
    with pipeline(folder, cuts, **options) as llm:
        plain = llm.generate(PROMPTS, replace(PARAMS, prompt_logprobs=None))
        assert all(output.prompt_logprobs is None for output in plain)
        for _ in range(2):  # also where all of a prompt's KV is kept
            outputs = llm.generate(PROMPTS, PARAMS)
            check(outputs, expected)
            assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
        assert outputs[0].num_cached_tokens == 0
        assert (llm.stats()["preemptions"] > 0) == (road == "short of memory")
    assert 8 < max(most) <= 16


def _most_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each step that scores, how many rows' logits are computed for that."""
    found, plain = list[int](), scores.scored

    def noting(logits: mx.array, slices: tuple[Slice, ...], *more: Any) -> object:
        found.append(sum(len(part.scored) for part in slices))
        return plain(logits, slices, *more)

    monkeypatch.setattr(runner, "scored", noting)
    return found


def test_a_lost_worker_loses_no_score(folder: Path, expected: list[np.ndarray]) -> None:
    with pipeline(folder, [2, 2], rejoin_timeout=20, token_budget=8) as llm:
        for moment in (0, 12):
            request = llm.submit(PROMPTS[0], PARAMS)
            events = iter(request)
            for _ in range(moment):
                next(events)
            llm._engine.pipeline._worker_group.workers[0].link.abort("it went away")
            for _ in events:
                pass
            check([request.output], expected[:1])
