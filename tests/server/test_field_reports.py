"""What users of other servers have reported, asked of this one over HTTP: texts whose characters are of several tokens,
and reasoning that is turned off in either way."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from constrained import save_with_markers
from stages import pipeline

from splitinfer import SamplingParams
from splitinfer.llm import LLM

_TURNS = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
_OFF = "{% if enable_thinking is defined and enable_thinking is false %}\n\n</think>\n\n{% else %}\n{% endif %}"
TEMPLATE = f"{_TURNS}{{% if add_generation_prompt %}}<think>{_OFF}{{% endif %}}"
ASKED: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hot?"}], "seed": 3}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["cold", "warm"]}}}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = save_with_markers(
        tmp_path_factory.mktemp("thinks"), ("<think>", "</think>", "<|im_start|>"), TEMPLATE, special=False
    )
    with pipeline(folder, [2, 2], context=192) as running:
        running.generate([[1]], SamplingParams(max_tokens=1), grammar={})
        yield running


@pytest.mark.parametrize("more", [{}, {"response_format": FORM}], ids=["free", "form"])
def test_reasoning_is_turned_off_in_either_way(client: openai.OpenAI, more: Any) -> None:
    asked = {**ASKED, **more, "max_tokens": 60}
    effort = client.chat.completions.create(**asked, reasoning_effort="none").choices[0].message.to_dict()
    switch = {"chat_template_kwargs": {"enable_thinking": False}}
    said = client.chat.completions.create(**asked, extra_body=switch).choices[0].message.to_dict()
    assert effort == said
    assert not effort.get("reasoning")


TEXT = "Ein 👩\u200d👩\u200d👧\u200d👦 und 🇩🇪 so ❤\ufe0f \u00e9 e\u0301 fin ok"  # several characters are seen as one


def _written(client: openai.OpenAI, *, stream: bool, **more: Any) -> tuple[str, str | None]:
    asked = {**ASKED, "max_tokens": 120, **more, "extra_body": {"structured_outputs": {"choice": [TEXT]}}}
    asked["extra_body"]["chat_template_kwargs"] = {"enable_thinking": False}
    if not stream:
        (choice,) = client.chat.completions.create(**asked).choices
        return choice.message.content or "", choice.finish_reason
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True) if chunk.choices]
    return "".join(chunk.delta.content or "" for chunk in chunks), chunks[-1].finish_reason


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_may_be_any_part_of_a_character_that_people_see(client: openai.OpenAI, stream: bool) -> None:
    assert _written(client, stream=stream) == (TEXT, "stop")
    for stop in ("👦", "\u200d", "🇪", "\ufe0f", "\u0301", "🇩🇪 so", "fin", "\u00e9 e"):
        assert _written(client, stream=stream, stop=[stop]) == (TEXT[: TEXT.index(stop)], "stop"), repr(stop)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_ends_with_a_whole_character(client: openai.OpenAI, llm: LLM, stream: bool) -> None:
    tokenizer = llm.tokenizer
    tokens = [tokenizer.token_bytes(token) for token in tokenizer.encode(TEXT)]
    assert len(tokens) > len(TEXT), "characters of several tokens"
    for most in range(1, 20):
        whole = b"".join(tokens[:most]).decode(errors="ignore")
        assert _written(client, stream=stream, max_tokens=most) == (whole, "length")
