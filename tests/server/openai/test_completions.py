"""Completions: every field's fate, prompts of each kind, and documents that the official types accept."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
from openai.types import Completion

from splitinfer.core.sampling_defaults import Recommended
from splitinfer.engine.coordinator.requests import TokenLogprobs
from splitinfer.server.answer import Piece
from splitinfer.server.ask import Ask
from splitinfer.server.fields import read
from splitinfer.server.openai.chat_writer import Shape
from splitinfer.server.openai.completions import (
    CompletionRequest,
    Completions,
    CompletionWriter,
    completions_of,
)
from splitinfer.server.spans import Usage
from splitinfer.text.answer import TextPart


def asked(**fields: Any) -> Completions:
    return completions_of(read(CompletionRequest, {"model": "m", "prompt": "Once", **fields}))


# -- fields ----------------------------------------------------------------------------------------


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
    assert asked(max_tokens=7, max_completion_tokens=8).asks[0].max_tokens == 8


@pytest.mark.parametrize(
    ("fields", "num_top"),
    [
        ({"logprobs": 2}, 2),
        ({"logprobs": 0}, 0),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 3}, 3),
        ({"logprobs": False}, None),
        ({"logprobs": -1, "top_logprobs": 0}, None),
    ],
)
def test_log_probabilities_are_asked_for_as_in_openais_api_or_as_of_mlx_lm(fields: dict[str, Any], num_top: int | None):
    assert asked(**fields).shape.num_top == num_top


def test_a_penalty_of_zero_is_off_as_for_mlx_lm():
    recommended = Recommended({"repetition_penalty": 1.2})
    assert asked(repetition_penalty=0.0).asks[0].params(recommended, 10).repetition_penalty == 1.0


# -- answers ---------------------------------------------------------------------------------------

SPELLED = {1: b"Hi", 2: "€".encode()[:1], 3: "€".encode()[1:], 4: b"!", 5: b"<s>", 6: b" P"}
PIECES = [
    Piece(1, (TextPart("b"),)),
    Piece(0, (TextPart("Hi"),), (TokenLogprobs(1, -0.1, ((1, -0.1), (4, -2.0))), TokenLogprobs(2, -0.5, ((4, -0.4),)))),
    Piece(0, (TextPart("€!"),), (TokenLogprobs(3, -0.2, ()), TokenLogprobs(4, -0.3, ())), finish_reason="stop"),
    Piece(1, finish_reason="length"),
]


@dataclass(frozen=True)
class Asked:
    """A prompt of a special token and "P!"."""

    prompt: tuple[int, ...] = (5, 6, 4)
    prompt_logprobs: tuple[TokenLogprobs, ...] = (TokenLogprobs(6, -0.7, ((4, -0.6),)), TokenLogprobs(4, -0.8))


def writer(echoes: tuple[str, ...] = (), prompt_top: int | None = None, **shape: Any) -> CompletionWriter:
    wanted = Completions(tuple(Ask(echo, {}) for echo in echoes), Shape("m", **shape), bool(echoes), prompt_top)
    made = CompletionWriter("cmpl-1", 1_700_000_000, wanted, SPELLED.__getitem__)
    made.prompt_of = lambda _: Asked()
    return made


def checked(document: dict[str, Any]) -> Completion:
    """The official type has one form for documents and chunks, and no null for a reason that is not there yet, nor for
    the first token of a prompt, where OpenAI's models have one."""
    sent = json.loads(json.dumps(document))
    for choice in sent["choices"]:
        choice["finish_reason"] = choice["finish_reason"] or "stop"
        for name, empty in (("token_logprobs", 0.0), ("top_logprobs", {})):
            if choice["logprobs"]:
                choice["logprobs"][name] = [empty if one is None else one for one in choice["logprobs"][name]]
    return Completion.model_validate(sent, strict=True)


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
    stream = writer(("P!", "P!"), streams=True, includes_usage=True, num_top=1)
    usage = stream.usage_chunk(Usage(9, 4, 5))
    assert usage is not None
    chunks = [checked(chunk) for chunk in [*map(stream.chunk, PIECES), usage]]
    assert chunks[-1].choices == []
    assert [chunk.usage is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    document = checked(writer(("P!", "P!"), num_top=1).document(PIECES, Usage(9, 4, 5)))
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


def test_a_prompt_alone_has_no_tokens_of_an_answer():
    shape = Shape("m", streams=True, includes_usage=True, always_usage=True)
    wanted = Completions((Ask("P!", {}),), shape, True, answers=False)
    stream = CompletionWriter("cmpl-1", 0, wanted, SPELLED.__getitem__, usage_now=lambda: Usage(3, 0, 1))
    chunk, last = stream.chunk(Piece(0, (TextPart("x"),), finish_reason="length")), stream.usage_chunk(Usage(3, 0, 1))
    assert last is not None
    assert [one["usage"]["completion_tokens"] for one in (chunk, last)] == [0, 0]


@pytest.mark.parametrize(
    ("echo", "tokens", "offsets"),
    [
        ("P!", (5, 6, 4), [0, 0, 1]),
        ("Hi €!", (5, 1, 7, 4), [0, 0, 2, 4]),  # the tokenizer has written the € otherwise
        ("Hi<s>Hi", (5, 1, 5, 1), [0, 0, 2, 5]),
        ("Hi!", (1, 4, 5), [0, 2, 3]),
        ("?" * 40 + "!", (6, 4), [0, 0]),  # too far
    ],
)
def test_an_answers_offsets_begin_behind_its_prompt(echo: str, tokens: tuple[int, ...], offsets: list[int]):
    made, spelled = writer((echo,), num_top=0), {**SPELLED, 7: b" EUR"}
    made.token_text = spelled.__getitem__
    made.prompt_of = lambda _: Asked(tokens, tuple(TokenLogprobs(one, -0.1) for one in tokens[1:]))
    (choice,) = made.document([Piece(0, (TextPart("Hi"),), (TokenLogprobs(1, -0.1),))], Usage(1))["choices"]
    assert choice["logprobs"]["text_offset"] == [*offsets, len(echo)]


def test_what_is_not_wanted_is_not_there():
    chunk = writer(streams=True).chunk(PIECES[1])
    assert "usage" not in chunk
    assert chunk["choices"][0]["logprobs"] is None
    assert writer(streams=True).usage_chunk(Usage(1)) is None


def test_a_prompt_comes_with_its_log_probabilities_before_the_answers():
    document = writer(("P!", "P!"), prompt_top=1, num_top=1).document(PIECES, Usage(1))
    logprobs = document["choices"][0]["logprobs"]
    assert document["choices"][0]["text"] == "P!Hi€!"
    assert logprobs["tokens"][:4] == ["<s>", " P", "!", "Hi"]
    assert logprobs["token_logprobs"][:4] == [None, -0.7, -0.8, -0.1]
    assert logprobs["top_logprobs"][:3] == [None, {"!": -0.6, " P": -0.7}, {"!": -0.8}]
    assert logprobs["text_offset"] == [0, 0, 1, 2, 4, 4, 5]
    assert document["choices"][0]["prompt_logprobs"] == [
        None,
        {
            "6": {"logprob": -0.7, "rank": None, "decoded_token": " P"},
            "4": {"logprob": -0.6, "rank": 1, "decoded_token": "!"},
        },
        {"4": {"logprob": -0.8, "rank": None, "decoded_token": "!"}},
    ]


def test_a_prompt_as_the_text_that_answers_begin_with():
    asks = (Ask("One", {}, num_choices=2), Ask((1, 2, 3), {}, num_choices=2))
    made = CompletionWriter("cmpl-1", 0, Completions(asks, Shape("m"), echo=True), SPELLED.__getitem__)
    document = made.document([Piece(i, finish_reason="stop") for i in range(4)], Usage(1))
    assert [choice["text"] for choice in document["choices"]] == ["One", "One", "Hi€", "Hi€"]
