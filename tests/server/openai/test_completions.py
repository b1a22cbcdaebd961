"""Completions: every field's fate, prompts of each kind, and documents that the official types accept."""

import json
import typing
from typing import Any

import pytest
from openai.types import Completion, completion_create_params

from splitinfer.core.sampling_defaults import Recommended
from splitinfer.engine.coordinator.requests import TokenLogprobs
from splitinfer.server.answer import Piece, Usage
from splitinfer.server.ask import Ask
from splitinfer.server.fields import Refused
from splitinfer.server.openai.chat import Shape
from splitinfer.server.openai.completions import FIELDS, Completions, completions_of
from splitinfer.server.openai.completions_writer import CompletionWriter, echoed
from splitinfer.server.problem import Problem
from splitinfer.text.answer import TextPart


def asked(**fields: Any) -> Completions:
    return completions_of({"model": "m", "prompt": "Once", **fields})


def refusal(**fields: Any) -> Problem:
    with pytest.raises(Problem) as caught:
        asked(**fields)
    assert caught.value.status == 400
    return caught.value


# -- fields ----------------------------------------------------------------------------------------


def test_every_field_of_the_official_client_has_a_fate():
    known = set()
    for kind in (
        completion_create_params.CompletionCreateParamsNonStreaming,
        completion_create_params.CompletionCreateParamsStreaming,
    ):
        known |= set(typing.get_type_hints(kind))
    assert known - FIELDS.keys() == set()


@pytest.mark.parametrize("name", [name for name, fate in FIELDS.items() if isinstance(fate, Refused)])
def test_what_is_refused_is_named_and_null_asks_for_nothing(name: str):
    assert refusal(**{name: "something"}).param == name
    assert asked(**{name: None}) == asked()


def test_values_that_ask_for_nothing_may_be_there():
    defaults = {"suffix": "", "min_tokens": 0, "length_penalty": 1.0, "skip_special_tokens": True, "priority": 0}
    assert asked(**defaults) == asked()


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"prompt": None}, "prompt must be given"),
        ({"prompt": []}, "prompt must have at least one text or token id"),
        ({"prompt": 5}, "prompt must be a list, not 5"),
        ({"prompt": [True]}, "prompt[0] must be text or a list of token ids, not True"),
        ({"prompt": ["a", 5]}, "prompt[1] must be text or a list of token ids, not 5"),
        ({"prompt": [[1, "a"]]}, "prompt[0] must be text or a list of token ids, not [1, 'a']"),
        ({"prompt": ["a"] * 65, "n": 2}, "65 prompts by 2 choices are over 128 answers"),
        ({"n": 0}, "n must be a whole number from 1 to 16, not 0"),
        ({"best_of": 3, "n": 2}, "best_of 3 is not supported: answers are not ranked"),
        ({"max_tokens": 0}, "max_tokens must be a whole number from 1"),
        ({"logprobs": True}, "logprobs must be a whole number from 0 to 20, not True"),
        ({"logprobs": 21}, "logprobs must be a whole number from 0 to 20, not 21"),
        ({"logprobs": 0, "echo": True}, "echo is not supported: the log probabilities of a prompt are not"),
        ({"echo": 1}, "echo must be true or false, not 1"),
        ({"stream_options": {"include_usage": True}}, "stream_options is for streams only"),
        ({"messages": []}, "there is no field 'messages' here"),
    ],
)
def test_what_is_wrong_is_said(fields: dict[str, Any], sentence: str):
    assert str(refusal(**fields)).startswith(sentence)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [(1, 2)]),
        ([[1, 2], [3]], [(1, 2), (3,)]),
        ([[1], "b"], [(1,), "b"]),
        ("", [""]),
    ],
)
def test_prompts(prompt: Any, prompts: list[Any]):
    assert [ask.prompt for ask in asked(prompt=prompt).asks] == prompts


def test_sampling():
    wanted = asked(
        n=2, best_of=2, temperature=0.5, seed=3, stop="END", logprobs=2, logit_bias={"5": -100}, prompt=["a", "b"]
    )
    assert (sum(ask.num_choices for ask in wanted.asks), wanted.shape.num_top) == (4, 2)
    for ask in wanted.asks:
        got = ask.params(Recommended({}), 100)
        assert (got.max_tokens, got.temperature, got.seed, got.stop) == (16, 0.5, 3, ("END",))
        assert (got.logprobs, got.logit_bias) == (2, ((5, -100.0),))
    assert asked(max_tokens=7).asks[0].max_tokens == 7
    assert asked().shape.num_top is None


# -- answers ---------------------------------------------------------------------------------------

SPELLED = {1: b"Hi", 2: "€".encode()[:1], 3: "€".encode()[1:], 4: b"!"}
PIECES = [
    Piece(1, (TextPart("b"),)),
    Piece(0, (TextPart("Hi"),), (TokenLogprobs(1, -0.1, ((1, -0.1), (4, -2.0))), TokenLogprobs(2, -0.5, ((4, -0.4),)))),
    Piece(0, (TextPart("€!"),), (TokenLogprobs(3, -0.2, ()), TokenLogprobs(4, -0.3, ())), finish_reason="stop"),
    Piece(1, finish_reason="length"),
]


def writer(echoes: tuple[str, ...] = (), **shape: Any) -> CompletionWriter:
    return CompletionWriter("cmpl-1", 1_700_000_000, Shape("m", **shape), SPELLED.__getitem__, echoes)


def checked(document: dict[str, Any]) -> Completion:
    """The official type has one form for documents and chunks, and no null for a reason that is not there yet."""
    sent = json.loads(json.dumps(document))
    for choice in sent["choices"]:
        choice["finish_reason"] = choice["finish_reason"] or "stop"
    return Completion.model_validate(sent, strict=True)


def test_a_document_is_that_of_the_official_type():
    whole = checked(writer(("P", "Q"), num_top=1).document(PIECES, Usage(9, 4, 5)))
    assert [(one.index, one.text, one.finish_reason) for one in whole.choices] == [
        (0, "PHi€!", "stop"),
        (1, "Qb", "length"),
    ]
    assert whole.usage is not None
    assert whole.usage.prompt_tokens_details is not None
    assert (whole.usage.total_tokens, whole.usage.prompt_tokens_details.cached_tokens) == (14, 4)


def test_logprobs_have_the_old_form():
    (choice, _) = checked(writer(num_top=1).document(PIECES, Usage(1))).choices
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["Hi", "bytes:\\xe2", "bytes:\\x82\\xac", "!"]
    assert choice.logprobs.token_logprobs == [-0.1, -0.5, -0.2, -0.3]
    assert choice.logprobs.top_logprobs == [
        {"Hi": -0.1},
        {"!": -0.4, "bytes:\\xe2": -0.5},
        {"bytes:\\x82\\xac": -0.2},
        {"!": -0.3},
    ]
    assert choice.logprobs.text_offset == [0, 2, 2, 3]


def test_chunks_make_the_same_document():
    stream = writer(("P", "Q"), streams=True, includes_usage=True, num_top=1)
    usage = stream.usage_chunk(Usage(9, 4, 5))
    assert usage is not None
    chunks = [checked(chunk) for chunk in [*stream.first(), *map(stream.chunk, PIECES), usage]]
    assert chunks[-1].choices == []
    assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    document = checked(writer(("P", "Q"), num_top=1).document(PIECES, Usage(9, 4, 5)))
    for whole in document.choices:
        own = [choice for chunk in chunks for choice in chunk.choices if choice.index == whole.index]
        assert "".join(one.text for one in own) == whole.text
        offsets = [offset for one in own if one.logprobs for offset in one.logprobs.text_offset or ()]
        assert whole.logprobs is not None
        assert offsets == whole.logprobs.text_offset
    assert [chunk["choices"][0]["finish_reason"] for chunk in map(stream.chunk, PIECES)] == [
        None,
        None,
        "stop",
        "length",
    ]


def test_what_is_not_wanted_is_not_there():
    chunk = writer(streams=True).chunk(PIECES[1])
    assert "usage" not in chunk
    assert chunk["choices"][0]["logprobs"] is None
    assert writer(streams=True).usage_chunk(Usage(1)) is None
    assert writer(streams=True).first() == []


def test_a_prompt_as_the_text_that_answers_begin_with():
    asks = [Ask("One", {}, num_choices=2), Ask((1, 2, 3), {}, num_choices=2)]
    assert echoed(asks, SPELLED.__getitem__) == ("One", "One", "Hi€", "Hi€")
