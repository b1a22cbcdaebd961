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
import stages
from constrained import PROMPT, SCHEMA, open_forms, plain, rules, save, schemas
from engine.door import SECONDS, Ask, Fault, Guesses, Open, alone, link_cut, recut, some_wrong, streams_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from processes import until
from tiny import Folder
from trained import add_heads

from splitinfer import LLM, Flight, Grammar, SamplingParams
from splitinfer.demo import TARGET
from splitinfer.errors import ModelError
from splitinfer.grammar.answer_rules import AnswerRules

MOST = 40
NIGHTLY = pytest.mark.nightly
LONG = [f"{who} and the king of all that lives" for who in ("a cat", "my dog", "no man", "you", "old wives", "he")]
KINDS = {
    "type": "object",
    "properties": {name: {"enum": ["hat", *LONG, "hat and coat"]} for name in ("is", "has")},
    "required": ["is", "has"],
    "additionalProperties": False,
}
PARAMS = SamplingParams(grammar=SCHEMA, temperature=1.0, seed=7, max_tokens=MOST)


def asks(*several: SamplingParams) -> list[Ask]:
    return [Ask(tuple(PROMPT), one) for one in several]


SEVERAL = asks(
    PARAMS,
    replace(PARAMS, seed=8),
    SamplingParams(temperature=0.9, seed=3, max_tokens=20, ignore_eos=True),
    SamplingParams(grammar=Grammar.regex("(ab|cd){4,9}"), temperature=1.0, seed=9, max_tokens=MOST),
    SamplingParams(grammar=Grammar.choice(["the king", "the king of the sea", *LONG]), max_tokens=MOST),
    SamplingParams(grammar=KINDS, max_tokens=MOST),
    SamplingParams(grammar=Grammar.choice([f"once upon {text}" for text in (LONG[0], "a time", "us")]), max_tokens=30),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("constrained"))


def test_one_stage_gives_what_mlx_lm_samples_under_the_masks(folder: Path) -> None:
    """And all other tests compare with one stage."""
    found = [plain(folder, PROMPT, one.params, end=-1 if one.params.ignore_eos else 0) for one in SEVERAL]
    assert len({len(tokens) for tokens in found}) > 2
    assert alone(folder, SEVERAL) == found


ROADS: dict[str, tuple[list[int], Fault | None, dict[str, Any]]] = {
    "chunks": ([1, 2, 1], None, {"token_budget": 5}),
    "in flight": ([1, 2, 1], None, {"flight": Flight(2, 3, 3)}),
    "a lost worker": ([2, 2], link_cut(), {"flight": Flight(2)}),
    "short of memory": ([2, 2], None, {"block": 8, "kv_bytes": 512 * 120}),
}
MORE: dict[str, tuple[list[int], Fault | None, dict[str, Any]]] = {
    "another cut": ([2, 2], recut([1, 3]), {}),
    "n-grams": ([2, 2], None, {"draft": "ngram"}),
    "halves on two machines": ([4], None, {"across": [0], "flight": Flight(2)}),
    "forced alone": ([2, 2], None, {"flight": Flight()}),
    "eight drafts": ([2, 2], None, {"flight": Flight(8)}),
    **{f"a worker lost at token {n}": ([2, 2], link_cut(at=n), {"flight": Flight(2)}) for n in range(1, 40, 2)},
}


@pytest.mark.parametrize("road", [*ROADS, *(pytest.param(road, marks=NIGHTLY) for road in MORE)])
def test_every_road_gives_the_same_tokens(road: str, folder: Path, pipeline: Open) -> None:
    cuts, fault, options = {**ROADS, **MORE}[road]
    if fault is not None:
        options = {**options, "fault": fault}
    if "flight" in options:
        streams = streams_of(folder, SEVERAL)
        options = {**options, "drafter": lambda: Guesses(streams, some_wrong)}
    with pipeline(folder, cuts, **options) as there:
        there.answers(*SEVERAL)
        assert (there.stats["preemptions"] > 0) == (road == "short of memory")


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "cut", "weighs"), [("gemma3_text", [2, 4], True), ("qwen3_next", [2, 2], False)])
def test_windows_and_states(name: str, cut: list[int], weighs: bool, tmp_path: Path, pipeline: Open) -> None:
    folder = save(tmp_path, name)
    several = [Ask(tuple(PROMPT * 6), one.params) for one in SEVERAL[-3:]]
    found = [plain(folder, PROMPT * 6, one.params, weighs=weighs) for one in several]
    with pipeline(folder, cut, draft="ngram") as there:
        assert there.answers(*several) == found


def test_heads_draft_without_the_mask(folder: Path, tmp_path: Path, pipeline: Open) -> None:
    with pipeline(add_heads(shutil.copytree(folder, tmp_path / "model")), [2, 2], draft="mtp") as there:
        there.answers(*SEVERAL)
        assert there.stats["speculation"]["sent"] > 0


@pytest.mark.parametrize(
    ("cuts", "options"),
    [
        ([12], {"draft": "demo-draft", "flight": Flight(4)}),
        # On the last stage, where it knows no masks.
        pytest.param([6, 6], {"draft": "demo-drafter"}, marks=NIGHTLY),
        pytest.param([12], {"draft": "demo-draft", "flight": Flight(2, 3, 2)}, marks=NIGHTLY),
    ],
)
def test_the_demos_drafters_draw_under_the_mask(cuts: list[int], options: dict[str, Any], pipeline: Open) -> None:
    with pipeline(TARGET, cuts, **options) as there:
        there.answers(*asks(replace(PARAMS, max_tokens=24)))
        assert there.stats["speculation"]["sent"] > 0


def test_log_probabilities_are_those_of_what_may_come(folder: Path, pipeline: Open) -> None:
    params = SamplingParams(grammar=Grammar.choice(["king", "queen"]), max_tokens=9, logprobs=20, seed=1)
    with pipeline(folder, [2, 2]) as there:
        found = there.outputs(*asks(params))[0].logprobs
    assert found is not None
    for one in found:
        assert math.isclose(sum(math.exp(logprob) for _, logprob in one.top), 1.0, rel_tol=1e-4)
        assert one.logprob == dict(one.top)[one.token_id]
    assert any(one.logprob == 0.0 for one in found), "nothing was forced"


def test_forced_tokens_take_fewer_steps(folder: Path, pipeline: Open) -> None:
    with pipeline(folder, [2, 2]) as there:
        (tokens,) = there.answers(*asks(PARAMS))
        stats = there.stats
        assert stats["forced_tokens"] > len(tokens) / 3
        assert stats["stages"][0]["steps"] <= 3 + len(tokens) - stats["forced_tokens"]


@pytest.mark.parametrize("options", [{}, {"token_budget": 9}, pytest.param({"draft": "ngram"}, marks=NIGHTLY)])
def test_what_a_form_begins_with_goes_with_the_end_of_the_prompt(
    options: dict[str, Any], folder: Path, pipeline: Open
) -> None:
    params = SamplingParams(grammar=Grammar.regex("the king said [a-z]{40}"), temperature=1.0, seed=2, max_tokens=9)
    with open_forms() as made:
        forced = len(rules(made, params).jump_forward([], 9))
    assert forced > 1
    with pipeline(folder, [2, 2], **options) as there:
        there.answers(*asks(params))
        assert there.stats["forced_tokens"] == forced, "the first of them came without the others"
        there.answers(*asks(params), SEVERAL[2])


def test_stop_strings_length_and_min_tokens(folder: Path, pipeline: Open) -> None:
    biased = SamplingParams(max_tokens=9, logit_bias={0: 100.0}, min_tokens=4)
    several = [
        replace(PARAMS, **each)
        for each in ({"stop": ('"kind"',)}, {"max_tokens": 11}, {"ignore_eos": True, "max_tokens": 60})
    ]
    with pipeline(folder, [2, 2]) as there:
        stopped, cut, ends, ended = there.outputs(*asks(*several, biased))
        assert (stopped.finish_reason, stopped.text.endswith(",")) == ("stop", True)
        assert (len(cut.token_ids), cut.finish_reason) == (11, "length")
        assert len(ended.token_ids) == 5
        assert ends.finish_reason == "stop"


def test_a_grammar_that_fails_ends_its_request_alone(
    folder: Path, pipeline: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It became too complex, or raises on whatever thread it is asked."""

    def failing(name: str) -> Callable[..., Any]:
        asked = getattr(AnswerRules, name)

        def limited(self: AnswerRules, answer: Any, *more: Any) -> Any:
            if len(answer) >= 30 and self.failure is None:
                if name == "masks":
                    self.failure = "the grammar became too complex"
                else:
                    raise IndexError("of the grammar")
            return asked(self, answer, *more)

        return limited

    alone(folder, SEVERAL)
    with pipeline(folder, [2, 2]) as there:
        for name in ("masks", "refuses", "jump_forward", "alternatives"):
            with monkeypatch.context() as patch:
                patch.setattr(AnswerRules, name, failing(name))
                failed, other = there.outputs(SEVERAL[0], SEVERAL[2])
            said = "became too complex" if name == "masks" else "the answer's form failed (IndexError: of the grammar)"
            assert failed.finish_reason == "error"
            assert said in str(failed.error)
            assert other.finish_reason == "length"


@pytest.fixture(scope="module")
def roads(folder: Path) -> Iterator[list[LLM]]:
    cuts, options = [1, 2, 1], {"drafter": lambda: Guesses([], some_wrong), "flight": Flight(4, 4, 3)}
    with stages.pipeline(folder, [2, 2]) as one, stages.pipeline(folder, cuts, **options) as other:
        for llm in (one, other):
            llm.generate([PROMPT], SamplingParams(max_tokens=1), grammar={})  # begins what lasts longer than one test
        yield [one, other]


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(schemas, st.booleans())
def test_random_schemas(roads: list[LLM], schema: dict[str, Any], samples: bool) -> None:
    params = SamplingParams(grammar=schema, temperature=float(samples), seed=1, max_tokens=24)
    output, other = (llm.generate([PROMPT], params)[0] for llm in roads)
    assert output.token_ids == other.token_ids
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


def test_an_answer_without_a_tokenizer_has_no_form(tiny_folder: Folder, pipeline: Open) -> None:
    with pipeline(tiny_folder("llama"), [2, 2]) as there:
        with pytest.raises(ModelError, match="no tokenizer"):
            there.submit(Ask((1, 2, 3), PARAMS))
        outputs = there.outputs(Ask((1, 2, 3), SamplingParams(min_tokens=3, max_tokens=3)))
        assert len(outputs[0].token_ids) == 3
        until(there.is_idle, "the end", SECONDS)
