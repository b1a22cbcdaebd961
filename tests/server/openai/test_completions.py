"""Completions: prompts of each kind, and documents that the official types accept."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from splitinfer.core.sampling_defaults import Recommended
from splitinfer.engine.loop.requests import TokenLogprobs
from splitinfer.server.answer import Piece, Usage
from splitinfer.server.ask import Ask
from splitinfer.server.fields import read
from splitinfer.server.openai.completions import CompletionRequest, CompletionWriter
from splitinfer.text.answer import TextPart


def request(**fields: Any) -> CompletionRequest:
    return read(CompletionRequest, {"prompt": "Once", **fields})


def asked(**fields: Any) -> tuple[Ask, ...]:
    return request(**fields).asks()


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [(1, 2)]),
        ([[1, 2], [3]], [(1, 2), (3,)]),
        ([[1], "b"], [(1,), "b"]),
    ],
)
def test_prompts(prompt: Any, prompts: list[Any]):
    assert [ask.prompt for ask in asked(prompt=prompt)] == prompts


def test_sampling():
    given = {"n": 2, "best_of": 2, "temperature": 0.5, "seed": 3, "stop": "END", "logit_bias": {"5": -100}}
    asks = asked(**given, logprobs=2, prompt=["a", "b"])
    assert sum(ask.num_choices for ask in asks) == 4
    for ask in asks:
        got = ask.params(Recommended({}), 100)
        assert (got.max_tokens, got.temperature, got.seed, got.stop) == (16, 0.5, 3, ("END",))
        assert (got.logprobs, got.logit_bias) == (2, ((5, -100.0),))
    assert [asked(max_tokens=7, **more)[0].max_tokens for more in ({}, {"max_completion_tokens": 8})] == [7, 8]
    assert asked(max_tokens=-1)[0].params(Recommended({}), 100).max_tokens == 100
    off = asked(repetition_penalty=0.0)[0].params(Recommended({"repetition_penalty": 1.2}), 10)
    assert off.repetition_penalty == 1.0, "as for mlx-lm"


@pytest.mark.parametrize(
    ("fields", "num_top"),
    [
        ({}, None),
        ({"logprobs": 0}, 0),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 3}, 3),
        ({"logprobs": False}, None),
        ({"logprobs": -1, "top_logprobs": 0}, None),
    ],
)
def test_log_probabilities_are_asked_for_as_in_openais_api_or_as_of_mlx_lm(fields: dict[str, Any], num_top: int | None):
    assert request(**fields).num_top == num_top


SPELLED = {1: b"Hi", 2: "€".encode()[:1], 3: "€".encode()[1:], 4: b"!", 5: b"<s>", 6: b" P", 7: b" EUR"}
PIECES = [
    Piece(1, (TextPart("b"),)),
    Piece(0, (TextPart("Hi"),), (TokenLogprobs(1, -0.1, ((1, -0.1), (4, -2.0))), TokenLogprobs(2, -0.5, ((4, -0.4),)))),
    Piece(0, (TextPart("€!"),), (TokenLogprobs(3, -0.2, ()), TokenLogprobs(4, -0.3, ())), finish_reason="stop"),
    Piece(1, finish_reason="length"),
]


def asked_of(prompt: tuple[int, ...], *scores: TokenLogprobs) -> Any:
    """An answer to several prompts, all of them the same."""
    request = SimpleNamespace(prompt=prompt, output=SimpleNamespace(prompt_logprobs=scores))
    return SimpleNamespace(choices=[SimpleNamespace(request=request)] * 2)


PROMPT = asked_of((5, 6, 4), TokenLogprobs(6, -0.7, ((4, -0.6),)), TokenLogprobs(4, -0.8))  # a special token and "P!"


SCORED: dict[str, Any] = {"prompt": ["P!", "P!"], "echo": True, "logprobs": 1}


def writer(**fields: Any) -> CompletionWriter:
    head = "cmpl-1", 1_700_000_000, "m", request(**fields)
    return CompletionWriter(*head, SPELLED.__getitem__, PROMPT)


def read_events(raw: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in raw.decode().splitlines() if line and line != "data: [DONE]"]


def test_a_prompt_and_its_answer_have_log_probabilities_in_the_old_form():
    document = writer(**SCORED, prompt_logprobs=1).document(PIECES, Usage(1))
    choice, answer = document["choices"][0], ["Hi", "bytes:\\xe2", "bytes:\\x82\\xac", "!"]
    assert choice["text"] == "P!Hi€!"
    assert choice["logprobs"] == {
        "tokens": ["<s>", " P", "!", *answer],
        "token_logprobs": [None, -0.7, -0.8, -0.1, -0.5, -0.2, -0.3],
        "top_logprobs": [None, {"!": -0.6, " P": -0.7}, {"!": -0.8}, {"Hi": -0.1}, {"!": -0.4, "bytes:\\xe2": -0.5},
                         {"bytes:\\x82\\xac": -0.2}, {"!": -0.3}],
        "text_offset": [0, 0, 1, 2, 4, 4, 5],
    }  # fmt: skip
    second, third = choice["prompt_logprobs"][1:]
    assert (second["6"]["decoded_token"], second["4"]["rank"], third["4"]["logprob"]) == (" P", 1, -0.8)


@pytest.mark.parametrize("usage", [{}, {"stream_options": {"include_usage": True}}])
def test_chunks_of_text_differ_in_their_text_only(usage: dict[str, Any]):
    head = "cmpl-1", 1_700_000_000, '"text":""', request(stream=True, prompt=["a", "b"], **usage)
    texts, stream = ["first", '"text":"" é\n', "", "\ud83d"], CompletionWriter(*head, SPELLED.__getitem__, PROMPT)
    for choice in (0, 1):
        chunks = [stream.written(Piece(choice, (TextPart(text),))) for text in texts]
        first, *others = read_events(b"".join(chunks))
        expected = [{**first, "choices": [{**first["choices"][0], "text": text}]} for text in (*texts[1:3], "?")]
        assert others == expected
        assert first["choices"][0]["index"] == choice


def test_chunks_make_the_same_document():
    stream = writer(**SCORED, stream=True)
    sent = read_events(b"".join(map(stream.written, PIECES)) + stream.end(PIECES[-1], Usage(1)))
    chunks = [choice for one in sent for choice in one["choices"]]
    assert [choice["finish_reason"] for choice in chunks][-4:] == [None, None, "stop", "length"]
    assert "usage" not in sent[1]
    for whole in writer(**SCORED).document(PIECES, Usage(1))["choices"]:
        own = [choice for choice in chunks if choice["index"] == whole["index"]]
        assert "".join(one["text"] for one in own) == whole["text"]
        offsets = [offset for one in own for offset in (one["logprobs"] or {"text_offset": []})["text_offset"]]
        assert offsets == whole["logprobs"]["text_offset"]


@pytest.mark.parametrize(
    ("echo", "tokens", "offsets"),
    [
        ("Hi €!", (5, 1, 7, 4), [0, 0, 2, 4]),  # the tokenizer has written the € otherwise
        ("Hi<s>Hi", (5, 1, 5, 1), [0, 0, 2, 5]),
        ("Hi!", (1, 4, 5), [0, 2, 3]),
        ("?" * 40 + "!", (6, 4), [0, 0]),  # too far
    ],
)
def test_an_answers_offsets_begin_behind_its_prompt(echo: str, tokens: tuple[int, ...], offsets: list[int]):
    made = writer(prompt=echo, echo=True, logprobs=0)
    made.answer = asked_of(tokens, *(TokenLogprobs(one, -0.1) for one in tokens[1:]))
    (choice,) = made.document([Piece(0, (TextPart("Hi"),), (TokenLogprobs(1, -0.1),))], Usage(1))["choices"]
    assert choice["logprobs"]["text_offset"] == [*offsets, len(echo)]


def test_a_prompt_as_the_text_that_answers_begin_with():
    made = writer(prompt=["One", [1, 2, 3]], n=2, echo=True)
    document = made.document([Piece(i, finish_reason="stop") for i in range(4)], Usage(1))
    assert [choice["text"] for choice in document["choices"]] == ["One", "One", "Hi€", "Hi€"]
