"""A form is kept whatever its text, or the request ends with an error: by a random model whose markers are added tokens
that are not special, as those of Qwen and GLM are."""

import json
from typing import Any

import openai
import pytest
from constrained import save_with_markers

from splitinfer import SamplingParams
from splitinfer.grammar.answer_rules import AnswerRules
from splitinfer.llm import LLM

MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<b>")
_TEMPLATE = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    "{% if false %}<tool_call>{{ tool_call.name }}</tool_call><think></think>{% endif %}"
)
_REASONED = "{% if add_generation_prompt %}<think>\n\n</think>\n{% endif %}"
ASKED: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hot?"}], "max_tokens": 90, "seed": 3}
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "additionalProperties": False},
    },
}
REFUSED = "keep the form"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = save_with_markers(tmp_path_factory.mktemp("forms"), MARKERS, _TEMPLATE + _REASONED, special=False)
    return {"model": folder, "cuts": [2, 2]}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_call_that_must_be_made_is_one(client: openai.OpenAI, choice: Any, temperature: float) -> None:
    asked = {**ASKED, "tools": [TOOL], "tool_choice": choice, "temperature": temperature}
    (answer,) = client.chat.completions.create(**asked).choices
    (call,) = answer.message.tool_calls or ()
    assert (call.function.name, answer.finish_reason) == ("f", "tool_calls")
    assert json.loads(call.function.arguments).keys() <= {"x"}


def test_a_strict_call_that_is_begun_keeps_its_schema_and_other_text_is_free(client: openai.OpenAI, llm: LLM) -> None:
    (marker,) = llm.tokenizer.encode("<tool_call>")
    function = {**TOOL["function"], "name": "Ünï_日本", "strict": True}  # characters of several tokens
    asked = {**ASKED, "tools": [{"type": "function", "function": function}], "temperature": 1.0}
    begun = client.chat.completions.create(**asked, logit_bias={marker: 100}, parallel_tool_calls=False).choices[0]
    (call,) = begun.message.tool_calls or ()
    assert call.function.name == "Ünï_日本"
    assert json.loads(call.function.arguments).keys() <= {"x"}
    assert client.chat.completions.create(**asked).choices[0].message.content


@pytest.mark.parametrize("name", MARKERS)
def test_a_schema_keeps_a_constant_that_names_a_marker(client: openai.OpenAI, name: str) -> None:
    """And what the answer's reader gets is the constant: none of it is taken for reasoning or a call."""
    schema = {"enum": [f"{name}x{name}", f"{name}y"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    for more in ({}, {"tools": [TOOL]}):
        (answer,) = client.chat.completions.create(**ASKED, **more, response_format=form).choices
        if not answer.message.tool_calls:
            assert json.loads(answer.message.content or "") in schema["enum"]


def test_an_answer_that_leaves_its_form_ends_with_an_error(
    client: openai.OpenAI, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["abcdefgh", "hgfedcba"]}}}
    asked = {**ASKED, "response_format": form}
    whole = llm.generate([[1, 2]], SamplingParams(max_tokens=30))[0]
    with monkeypatch.context() as patch:
        patch.setattr(AnswerRules, "refuses", lambda _self, answer: len(answer) > 2)
        other = llm.submit([1, 2], SamplingParams(max_tokens=30))
        with pytest.raises(openai.InternalServerError, match=REFUSED):
            client.chat.completions.create(**asked)
        with pytest.raises(openai.APIError, match=REFUSED):
            list(client.chat.completions.create(**asked, stream=True))
        assert other.result().token_ids == whole.token_ids
    assert client.chat.completions.create(**asked).choices[0].finish_reason == "stop"
