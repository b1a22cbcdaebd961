"""Harmony: what a gpt-oss model writes, and how its template is told of conversations."""

import json
from typing import Any

import pytest

from splitinfer.demo import TARGET
from splitinfer.text import harmony
from splitinfer.text.answer import AnswerPart, BrokenCall, ReasoningPart, TextPart, ToolCallPart, joined
from splitinfer.text.tokenizer import Tokenizer
from tests.text.templates import folder_with

MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CHAT = [{"role": "user", "content": "Weather?"}]
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}'
IN_ROLE = '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Oslo"}'
THOUGHT = "<|channel|>analysis<|message|>Hm \U0001f914.<|end|>"
OSLO = ToolCallPart("weather", '{"city": "Oslo"}')
# What the template of the model does and refuses, without its words about tools.
TEMPLATE = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort | default('medium') }}<|end|>"
    "{% for t in tools or [] %}{{ '// ' + t.function.description + t.function.name }}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if '<|channel|>analysis<|message|>' in m.content %}{{ raise_exception('tags') }}{% endif %}"
    "{% if m.tool_calls %}"
    "{% if m.content and m.thinking %}{{ raise_exception('not both') }}{% endif %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% set f = m.tool_calls[0].function %}"
    "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>"
    "{{ f.arguments | tojson }}<|call|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}"
    "{% elif m.role == 'tool' %}<|start|>functions to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = folder_with(tmp_path_factory.mktemp("gpt-oss"), TEMPLATE, MARKERS, special=True)
    return Tokenizer.from_folder(folder, 0, "gpt_oss")


def test_a_model_without_the_markers_is_read_as_any_other():
    assert "<|channel|>analysis" not in Tokenizer.from_folder(TARGET, 0, "gpt_oss").answer_format.markers


def test_a_conversation(tokenizer: Tokenizer):
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Weather? <|end|>"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
    ]
    ids, text = tokenizer.write_chat(messages, tools=[WEATHER], options={"reasoning_effort": "minimal"})
    assert text == (
        "<|start|>system<|message|>Reasoning: low<|end|>// weather<|start|>user<|message|>Weather? <|end|><|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>Hm.\n\nI look.<|end|>"
        '<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>'
        "<|start|>functions to=assistant<|channel|>commentary<|message|>sun<|end|><|start|>assistant"
    )
    assert ids.count(tokenizer.token_id("<|end|>")) == text.count("<|end|>") - 1  # what the user says is no marker


def test_an_answer_that_has_markers_in_it_is_text(tokenizer: Tokenizer):
    turn = {"role": "assistant", "content": THOUGHT}
    ids, text = tokenizer.write_chat([*CHAT, turn, *CHAT])
    assert f"<|channel|>final<|message|>{THOUGHT}<|end|>" in text
    assert ids.count(tokenizer.token_id("<|channel|>")) == 1


def test_what_ends_an_answer_and_its_reasoning(tokenizer: Tokenizer):
    ends = {tokenizer.token_id(name) for name in ("<|call|>", "<|return|>")}
    assert ends < tokenizer.eos_token_ids
    assert tokenizer.thinking == tuple(tuple(tokenizer.encode(text)) for text in harmony.THINKING)
    assert tokenizer.has_opened([]) is True


ANSWERS = [
    (
        f"{THOUGHT}<|start|>assistant<|channel|>final<|message|>é 1 < 2",
        [ReasoningPart("Hm \U0001f914."), TextPart("é 1 < 2")],
    ),
    (CALL, [OSLO]),
    (f"{THOUGHT}{IN_ROLE}", [ReasoningPart("Hm \U0001f914."), OSLO]),
    (IN_ROLE.removeprefix("<|start|>assistant"), [OSLO]),
    (f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{CALL}<|call|>", [TextPart("I look."), OSLO]),
    (f"{CALL}<|end|>{IN_ROLE}", [OSLO, OSLO]),
    (CALL[:-3], [TextPart(CALL[:-3])]),
    ("<|channel|>final <|constrain|>json<|message|>{}", [TextPart("{}")]),
    ("No Harmony at all", [TextPart("No Harmony at all")]),
    (f"{THOUGHT}No header", [ReasoningPart("Hm \U0001f914."), TextPart("No header")]),
    ("<|channel|>final<|message|>a<|start|>b to=functions.c", [TextPart("a<|start|>b to=functions.c")]),
    ("<|channel|>final<|message|>a <|chan", [TextPart("a <|chan")]),
    (f"{THOUGHT}<|start|>assistant<|channel|>fin", [ReasoningPart("Hm \U0001f914."), TextPart("<|channel|>fin")]),
    ("", []),
]


@pytest.mark.parametrize(("answer", "parts"), ANSWERS)
@pytest.mark.parametrize("step", [1, 7, 1000])
def test_an_answer(tokenizer: Tokenizer, answer: str, parts: list[AnswerPart], step: int):
    parser = tokenizer.answer_format.parser([], [WEATHER])
    found = [part for i in range(0, len(answer), step) for part in parser.feed(answer[i : i + step])]
    assert joined([*found, *parser.finish()]) == parts


def test_all_marks_of_an_answer_are_shown_to_its_parser(tokenizer: Tokenizer):
    text = f"{THOUGHT}{IN_ROLE}"
    shown = tokenizer.detokenizer(shows_markers=True)
    assert "".join(map(shown.add, tokenizer.encode(text))) + shown.flush() == text


def test_without_tools_a_call_is_text(tokenizer: Tokenizer):
    parser = tokenizer.answer_format.parser([])
    assert joined([*parser.feed(CALL), *parser.finish()]) == [TextPart(' to=functions.weather {"city": "Oslo"}')]


def fed(tokenizer: Tokenizer, text: str, **how: Any) -> tuple[Any, list[AnswerPart]]:
    parser = tokenizer.answer_format.parser([], [WEATHER], **how)
    return parser, [part for i in range(0, len(text), 5) for part in parser.feed(text[i : i + 5])]


@pytest.mark.parametrize("call", [CALL, IN_ROLE])
def test_calls_come_in_pieces(tokenizer: Tokenizer, call: str):
    arguments = {"city": "Oslo " * 200, "days": [1, None], "note": "é \U0001f914"}
    text = call.replace('{"city": "Oslo"}', json.dumps(arguments, indent=1)) + "<|call|>"
    parser, pieces = fed(tokenizer, text, grows=True)
    assert joined([*pieces, *parser.finish()]) == fed(tokenizer, text)[1]
    assert sum(isinstance(one, ToolCallPart) for one in pieces) > 100
    parser, pieces = fed(tokenizer, text[:300], grows=True)
    assert '{"city": "Oslo Oslo' in joined(pieces)[0].arguments  # type: ignore[union-attr]
    assert parser.finish(is_cut=True) == []
    assert fed(tokenizer, text[:300], grows=True)[0].finish() == [BrokenCall()]
    assert fed(tokenizer, text.replace('"days":', '"days"'), grows=True)[1][-1] == BrokenCall()


def test_an_answer_goes_on_inside_its_message(tokenizer: Tokenizer):
    turns = [*CHAT, {"role": "assistant", "content": "The sun", "reasoning_content": "Hm."}]
    ids, text = tokenizer.write_chat(turns, continues=True)
    assert text.endswith("<|start|>assistant<|channel|>final<|message|>The sun")
    assert tokenizer.codec.decode(ids) == text
    parser, parts = fed(tokenizer, " shines.<|end|>", begun="The sun")
    assert joined([*parts, *parser.finish()]) == [TextPart(" shines.")]
