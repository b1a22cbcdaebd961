"""Pictures in prompts: the tokens are mlx-vlm's own, whole and cut, in any chunks, beside others, and again."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("mlx_vlm") is None:
    pytest.skip("mlx-vlm is not installed", allow_module_level=True)

from processes import local_workers
from seeing import FAMILIES, answer, greedy, picture, prompt, sampled, save
from stages import lose, pipeline, shorten_blocks

from splitinfer import LLM, SamplingParams
from splitinfer.kvstore.store import Disk
from splitinfer.models.cut import pictures as models_pictures
from splitinfer.pictures.families import Prepared

NUM = 12


NIGHTLY = pytest.mark.nightly


@pytest.fixture(scope="module", params=[FAMILIES[0], *(pytest.param(name, marks=NIGHTLY) for name in FAMILIES[1:])])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp(request.param), request.param)


def told(llm: LLM, tokens: Sequence[int], pictures: Sequence[Prepared], **params: Any) -> list[int]:
    given = SamplingParams(max_tokens=NUM, ignore_eos=True, **params)
    return llm.submit(list(tokens), given, pictures=pictures).result().token_ids


@pytest.mark.parametrize("where", [{"cuts": [4], "across": [0]}, {"cuts": [3, 1], "across": [1]}], ids=str)
def test_layers_are_halved(folder: Path, where: dict[str, Any]) -> None:
    """Of the first stage, too: each of its two processes gets the pixels, and has the tower."""
    tokens, seen = prompt(5, 9, 7), [picture(folder), picture(folder, 2, 5, seed=2)]
    with pipeline(folder, token_budget=16, **where) as llm:
        assert told(llm, tokens, seen) == answer(folder, tokens, seen, NUM, greedy)


def sees_on(folder: Path, loses: Callable[[LLM], object], **where: Any) -> None:
    """Answers about pictures are whole though a part of the pipeline is lost in their middle."""
    kinds = [(prompt(5, 9), [picture(folder, 3, 4, seed=i)]) for i in range(3)]
    alone = [answer(folder, tokens, seen, 40, greedy) for tokens, seen in kinds]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    with pipeline(folder, **where) as llm:
        requests = [llm.submit(tokens, params, pictures=seen) for tokens, seen in kinds]
        next(iter_events := iter(requests[0]))
        loses(llm)
        list(iter_events)
        assert [requests[0].output.token_ids, *(one.result().token_ids for one in requests[1:])] == alone
        assert llm.stats()["rejoins"] == 1


def test_a_rank_that_is_lost_is_shown_the_pictures_again(folder: Path) -> None:
    sees_on(folder, lambda _: local_workers()["s0/1"].kill(), cuts=[4], across=[0], rejoin_timeout=60)


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


@pytest.fixture(scope="module", params=["qwen3_vl", pytest.param("gemma4", marks=NIGHTLY)])
def one_of_two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with positions in three dimensions, and one whose pictures are computed whole."""
    return save(tmp_path_factory.mktemp(request.param), request.param)


def test_a_picture_that_comes_again_is_not_computed_again(one_of_two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_blocks(monkeypatch, 16)
    first, other = picture(one_of_two, 4, 6), picture(one_of_two, 4, 6, seed=2)
    tokens = prompt(3, 20)
    question = [*prompt(3, 12), 7, 8, 9]
    expected = [answer(one_of_two, asked, [one], NUM, greedy) for one in (first, other) for asked in (tokens, question)]
    assert expected[1] != expected[3]
    with pipeline(one_of_two, [2, 2], token_budget=64) as llm:
        assert told(llm, tokens, [first]) == expected[0]
        again = llm.submit(question, SamplingParams(max_tokens=NUM, ignore_eos=True), pictures=[first])
        assert again.result().token_ids == expected[1]
        assert again.output.num_cached_tokens >= 4 + 24
        for asked, wanted in ((tokens, expected[2]), (question, expected[3])):
            request = llm.submit(asked, SamplingParams(max_tokens=NUM, ignore_eos=True), pictures=[other])
            assert request.result().token_ids == wanted
            assert asked is question or request.output.num_cached_tokens <= 5, "another picture's KV"


def test_beside_others_with_and_without_pictures(one_of_two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rows are kept, so that each chunk makes those that it needs."""
    monkeypatch.setattr(models_pictures, "_KEPT_ROWS", 0)
    kinds = [(prompt(5 + i, 9), [picture(one_of_two, 2 + i % 3, 4, seed=i)]) for i in range(4)]
    kinds += [(prompt(9 + 3 * i), []) for i in range(3)] + [(prompt(60, 2, 4), [picture(one_of_two)] * 2)]
    alone = [answer(one_of_two, tokens, seen, NUM, greedy) for tokens, seen in kinds]
    params = SamplingParams(max_tokens=NUM, ignore_eos=True)
    with pipeline(one_of_two, [2, 2], token_budget=24, micro_batches=2) as llm:
        outputs = llm.generate([tokens for tokens, _ in kinds], params, pictures=[seen for _, seen in kinds])
        assert [one.token_ids for one in outputs] == alone


def test_drafts_name_no_row_of_a_picture(one_of_two: Path) -> None:
    """What followed the prompt's last tokens before is a picture."""
    tokens, seen = [*prompt(6, 9), *prompt(6), 152], [picture(one_of_two)]
    expected = answer(one_of_two, tokens, seen, NUM, greedy)
    with pipeline(one_of_two, [2, 2], draft="ngram") as llm:
        assert told(llm, tokens, seen) == expected
        assert llm.stats()["speculation"]["drafted"] > 0


def test_who_loses_a_worker_sees_on(one_of_two: Path) -> None:
    sees_on(one_of_two, lose, cuts=[2, 2], prefix_cache=False)


def test_a_restart_finds_it_on_disk(one_of_two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_blocks(monkeypatch, 16)
    seen, tokens = picture(one_of_two, 4, 6), prompt(3, 20)
    expected = answer(one_of_two, tokens, [seen], NUM, greedy)
    cached = []
    for _ in range(2):
        disks = [Disk(tmp_path / str(i), 10**8) for i in range(2)]
        with pipeline(one_of_two, [2, 2], disks=disks) as llm:
            request = llm.submit(tokens, SamplingParams(max_tokens=NUM, ignore_eos=True), pictures=[seen])
            assert request.result().token_ids == expected
            cached.append(request.output.num_cached_tokens)
    assert cached[0] == 0
    assert cached[1] >= 32
