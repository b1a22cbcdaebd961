"""Calls that must be made, and calls that keep their schema once they are begun, by a random model whose markers are
special tokens."""

import json
from collections.abc import Iterator

import jsonschema
import openai
import pytest
from constrained import save_with_markers
from stages import pipeline

from splitinfer import SamplingParams
from splitinfer.llm import LLM

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
_TEMPLATE = (
    "{{ tools | tojson if tools else '' }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    "{% if false %}<tool_call>{{ tool_call.name }}</tool_call>{% endif %}"
)
ASKED = {"model": "m", "messages": [{"role": "user", "content": "Hot?"}], "temperature": 1.0, "max_tokens": 120}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    made = tmp_path_factory.mktemp("calls")
    folder = save_with_markers(made, ("<tool_call>", "</tool_call>"), _TEMPLATE, special=True)
    with pipeline(folder, [2, 2]) as running:
        running.generate([[1]], SamplingParams(max_tokens=1), grammar={})  # begins what lasts longer than one test
        yield running


def test_a_call_is_made_and_keeps_its_schema(client: openai.OpenAI, llm: LLM) -> None:
    assert llm.tokenizer.encode("<tool_call>") == [2048]
    strict = {**TOOL, "function": {**TOOL["function"], "strict": True}}
    begins = {"logit_bias": {"2048": 100}, "parallel_tool_calls": False}
    for asked in ({"tools": [TOOL], "tool_choice": "required"}, {"tools": [strict], **begins}):
        (choice,) = client.chat.completions.create(**ASKED, **asked, seed=1).choices
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls or ()
        assert call.function.name == "weather"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    (choice,) = client.chat.completions.create(**ASKED, tools=[strict], seed=1).choices
    assert choice.message.content, "text was not free"


def test_a_name_may_have_characters_of_several_tokens(client: openai.OpenAI, llm: LLM) -> None:
    tool = {"type": "function", "function": {"name": "Ünï_日本", "parameters": SCHEMA}}
    (choice,) = client.chat.completions.create(**ASKED, tools=[tool], tool_choice="required", seed=1).choices
    assert [call.function.name for call in choice.message.tool_calls or ()] == ["Ünï_日本"]


def test_a_schema_that_cannot_be_enforced_is_refused_by_its_keyword(client: openai.OpenAI, llm: LLM) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"uniqueItems": True}}}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ASKED, tools=[tool], tool_choice="required")
    assert caught.value.body["message"] == 'the grammar cannot be enforced: Unimplemented keys: ["uniqueItems"]'
