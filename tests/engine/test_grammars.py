"""Answers in a form, by every road: the tokens are those that plain mlx-lm samples under the same masks."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from constrained import PROMPT, SCHEMA, VOCABULARY, open_forms, plain, rules, save, schemas
from effort import thorough
from hypothesis import HealthCheck, given, settings
from stages import lose, pipeline, shorten_blocks
from trained import add_heads

from splitinfer import LLM, Flight, Grammar, SamplingParams
from splitinfer.core.speculation.speculation import Draft
from splitinfer.demo import TARGET
from splitinfer.engine.drafts.drafters import NGramDrafter

MOST = 60
PARAMS = SamplingParams(grammar=SCHEMA, temperature=1.0, seed=7, max_tokens=MOST)
SEVERAL = [replace(PARAMS, seed=seed) for seed in (7, 8)] + [
    SamplingParams(temperature=0.9, seed=3, max_tokens=20, ignore_eos=True),
    SamplingParams(grammar=Grammar.regex("(ab|cd){4,9}"), temperature=1.0, seed=9, max_tokens=MOST),
    SamplingParams(grammar=Grammar.choice(["the king", "the queen"]), max_tokens=MOST),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("constrained"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    found = [plain(folder, PROMPT, one, end=-1 if one.ignore_eos else 0) for one in SEVERAL]
    assert len({len(tokens) for tokens in found}) > 2
    return found


def tokens_of(llm: LLM, several: list[SamplingParams] = SEVERAL) -> list[list[int]]:
    return [output.token_ids for output in llm.generate([PROMPT] * len(several), several)]


class Half(NGramDrafter):
    """Drafts the tokens that come, but for some, whatever may come."""

    def __init__(self, answers: list[list[int]]) -> None:
        super().__init__()
        self._answers = answers

    def drafts(self, seq: Any, count: int) -> Iterator[Draft]:
        so_far = seq.stream[len(PROMPT) :]
        answer = next((one for one in self._answers if one[: len(so_far)] == so_far), [])
        for place, token in enumerate(answer[len(so_far) :][:count], len(so_far)):
            yield Draft(token if place % 3 else (token + 1) % VOCABULARY)


ROADS = {
    "whole": ([4], {}),
    "chunks": ([1, 2, 1], {"token_budget": 5}),
    "forced alone": ([2, 2], {"flight": Flight()}),
    "a draft": ([2, 2], {"flight": Flight(1)}),
    "eight drafts": ([2, 2], {"flight": Flight(8)}),
    "in flight": ([1, 2, 1], {"flight": Flight(2, 3, 3)}),
    "ngrams": ([2, 2], {"draft": "ngram"}),
}


@pytest.mark.parametrize("road", ROADS)
def test_every_road_gives_the_same_tokens(road: str, folder: Path, expected: list[list[int]]) -> None:
    cuts, options = ROADS[road]
    with pipeline(folder, cuts, drafter=(lambda: Half(expected)) if "flight" in options else None, **options) as llm:
        assert tokens_of(llm) == expected
        assert [tokens_of(llm, [one])[0] for one in SEVERAL[:2]] == expected[:2]


def test_heads_draft_without_the_mask(folder: Path, expected: list[list[int]], tmp_path: Path) -> None:
    with pipeline(add_heads(shutil.copytree(folder, tmp_path / "model")), [2, 2], draft="mtp") as llm:
        assert tokens_of(llm) == expected
        assert llm.stats()["speculation"]["sent"] > 0


def test_a_draft_model_draws_under_the_mask(expected: list[list[int]]) -> None:
    schema_only = [replace(PARAMS, seed=seed, max_tokens=40) for seed in (7, 8)]
    with pipeline(TARGET, [12]) as llm:
        without = tokens_of(llm, schema_only)
    with pipeline(TARGET, [6, 6], draft="demo-drafter") as llm:  # on the last stage, where it knows no masks
        assert tokens_of(llm, schema_only) == without
        assert llm.stats()["speculation"]["sent"] > 0
    for flight in thorough((Flight(4),), (Flight(2, 3, 2), Flight(8), Flight(15))):
        with pipeline(TARGET, [12], draft="demo-draft", flight=flight) as llm:
            assert tokens_of(llm, schema_only) == without
            assert llm.stats()["speculation"]["accepted"] > 0


def test_who_gives_up_its_kv_gets_the_same_tokens(
    folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_blocks(monkeypatch, 8)
    with pipeline(folder, [2, 2]) as llm:
        per_token = max(stage["kv_bytes_per_token"] for stage in llm.stats()["stages"])
    with pipeline(folder, [2, 2], kv_bytes=per_token * 120) as llm:
        assert tokens_of(llm) == expected
        assert llm.stats()["preemptions"] > 0


def test_another_cut_and_a_lost_worker_change_no_token(folder: Path) -> None:
    params = replace(PARAMS, grammar={**SCHEMA, "properties": {**SCHEMA["properties"], "name": {"type": "string"}}})
    params = replace(params, max_tokens=150)
    answer = plain(folder, PROMPT, params)
    with pipeline(folder, [2, 2], rejoin_timeout=20) as llm:
        for disturb in (lambda: llm.recut([1, 3]), lambda: lose(llm)):
            request = llm.submit(PROMPT, params)
            events = iter(request)
            while len(request.output.token_ids) < 20:
                next(events)
            disturb()
            for _ in events:
                pass
            assert request.output.token_ids == answer


@pytest.mark.long
def test_thirty_losses(folder: Path, expected: list[list[int]]) -> None:
    with pipeline(folder, [2, 2], drafter=lambda: Half(expected), flight=Flight(2), rejoin_timeout=20) as llm:
        for number in range(30):
            under_way = [llm.submit(PROMPT, one) for one in SEVERAL]
            events = iter(under_way[0])
            for _ in range(1 + 2 * number % 40):
                next(events)
            lose(llm)
            assert len(list(events)) > 0
            assert [under_way[0].output.token_ids, *(one.result().token_ids for one in under_way[1:])] == expected
        assert llm.stats()["rejoins"] >= 30


def test_log_probabilities_are_those_of_what_may_come(folder: Path) -> None:
    params = SamplingParams(grammar=Grammar.choice(["king", "queen"]), max_tokens=9, logprobs=20, seed=1)
    with pipeline(folder, [2, 2]) as llm:
        found = llm.generate([PROMPT], params)[0].logprobs
    assert found is not None
    for one in found:
        assert math.isclose(sum(math.exp(logprob) for _, logprob in one.top), 1.0, rel_tol=1e-4)
        assert one.logprob == dict(one.top)[one.token_id]
    assert any(one.logprob == 0.0 for one in found), "nothing was forced"


def test_forced_tokens_take_fewer_steps(folder: Path, expected: list[list[int]]) -> None:
    with pipeline(folder, [2, 2]) as llm:
        assert tokens_of(llm, [PARAMS]) == expected[:1]
        stats = llm.stats()
        assert stats["forced_tokens"] > len(expected[0]) / 3
        assert stats["stages"][0]["steps"] <= 3 + len(expected[0]) - stats["forced_tokens"]


def test_what_a_form_begins_with_goes_with_the_end_of_the_prompt(folder: Path, expected: list[list[int]]) -> None:
    params = SamplingParams(grammar=Grammar.regex("the king said [a-z]{40}"), temperature=1.0, seed=2, max_tokens=9)
    with open_forms() as made:
        forced = len(rules(made, params).forced([], 9))
    answer = plain(folder, PROMPT, params)
    assert forced > 1
    for options in ({}, {"token_budget": 9}, {"draft": "ngram"}):
        with pipeline(folder, [2, 2], **options) as llm:
            assert tokens_of(llm, [params]) == [answer]
            assert llm.stats()["forced_tokens"] == forced, "the first of them came without the others"
            assert tokens_of(llm, [params, SEVERAL[2]]) == [answer, expected[2]]


def test_stop_strings_length_and_min_tokens(folder: Path, expected: list[list[int]]) -> None:
    with pipeline(folder, [2, 2]) as llm:
        stopped = llm.generate([PROMPT], replace(PARAMS, stop=('"kind"',)))[0]
        assert (stopped.finish_reason, stopped.text.endswith(",")) == ("stop", True)
        cut = llm.generate([PROMPT], replace(PARAMS, max_tokens=11))[0]
        assert (cut.token_ids, cut.finish_reason) == (expected[0][:11], "length")
        biased = SamplingParams(max_tokens=9, logit_bias={0: 100.0}, min_tokens=4)
        assert len(llm.generate([PROMPT], biased)[0].token_ids) == 5
        ends = llm.generate([PROMPT], replace(PARAMS, ignore_eos=True))[0]
        assert (ends.token_ids, ends.finish_reason) == (expected[0], "stop")


def test_a_grammar_that_becomes_too_complex_ends_its_request_alone(
    folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from splitinfer.grammar.rules import AnswerRules

    check = AnswerRules._check
    monkeypatch.setattr(AnswerRules, "_check", lambda self: self._fail() if len(self._path) >= 30 else check(self))
    with pipeline(folder, [2, 2]) as llm:
        failed, other = llm.submit(PROMPT, PARAMS), llm.submit(PROMPT, SEVERAL[2])
        assert failed.result().finish_reason == "error"
        assert "too complex" in str(failed.output.error)
        assert other.result().token_ids == expected[2]


@pytest.fixture(scope="module")
def roads(folder: Path) -> Iterator[list[LLM]]:
    def half() -> Half:
        return Half([])

    with pipeline(folder, [2, 2]) as one, pipeline(folder, [1, 2, 1], drafter=half, flight=Flight(4, 4, 3)) as other:
        for llm in (one, other):
            llm.generate([PROMPT], SamplingParams(max_tokens=1), grammar={})  # begins what lasts longer than one test
        yield [one, other]


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(schemas)
def test_random_schemas(roads: list[LLM], schema: dict[str, Any]) -> None:
    several = [SamplingParams(grammar=schema, temperature=1.0, seed=seed, max_tokens=80) for seed in (1, 2)]
    outputs = [llm.generate([PROMPT] * 2, several) for llm in roads]
    assert [one.token_ids for one in outputs[0]] == [one.token_ids for one in outputs[1]]
    for output in outputs[0]:
        if output.finish_reason == "stop":
            jsonschema.validate(json.loads(output.text), schema)


def test_models_and_mappings_are_schemas() -> None:
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str

    closed = {**Person.model_json_schema(), "additionalProperties": False}
    found = SamplingParams(grammar=Person).grammar
    assert found is not None
    assert json.loads(found.text) == closed
    assert SamplingParams(grammar=SCHEMA).grammar == Grammar.json(json.dumps(SCHEMA))


def test_an_answer_without_a_tokenizer_has_no_form(tiny_folder: Callable[..., Path]) -> None:
    from splitinfer.errors import ModelError

    with pipeline(tiny_folder("llama"), [2, 2]) as llm:
        with pytest.raises(ModelError, match="no tokenizer"):
            llm.submit(PROMPT, SamplingParams(grammar=SCHEMA))
        assert len(llm.generate([[1, 2, 3]], SamplingParams(min_tokens=3, max_tokens=3))[0].token_ids) == 3
