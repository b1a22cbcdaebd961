"""Pictures in prompts: the tokens are mlx-vlm's own, whole and cut, in any chunks, beside others, and again."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("mlx_vlm") is None:
    pytest.skip("mlx-vlm is not installed", allow_module_level=True)

from seeing import FAMILIES, answer, greedy, picture, prompt, sampled, save
from stages import pipeline

from splitinfer import LLM, SamplingParams
from splitinfer.pictures.families import Prepared

NUM = 12


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp(request.param), request.param)


def told(llm: LLM, tokens: Sequence[int], pictures: Sequence[Prepared], **params: Any) -> list[int]:
    given = SamplingParams(max_tokens=NUM, ignore_eos=True, **params)
    return llm.submit(list(tokens), given, pictures=pictures).result().token_ids


def test_it_answers_as_mlx_vlm(folder: Path) -> None:
    tokens, seen = prompt(5, 9, 7), [picture(folder), picture(folder, 2, 5, seed=2)]
    expected = answer(folder, tokens, seen, NUM, greedy)
    by_chance = answer(folder, tokens, seen, NUM, sampled)
    blind = answer(folder, tokens, [picture(folder, seed=9), seen[1]], NUM, greedy)
    assert len(set(expected)) > 4
    assert blind != expected, "the picture makes no difference"
    for cuts, chunk in (([4], 512), ([2, 2], 16), ([2, 1, 1], 16)):
        with pipeline(folder, cuts, token_budget=chunk) as llm:
            assert told(llm, tokens, seen) == expected, cuts
            assert told(llm, tokens, seen, temperature=0.8, seed=5) == by_chance, cuts
