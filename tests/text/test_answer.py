"""Answers told apart into text, reasoning and calls, however they are cut."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitinfer.core.call_syntax import JSON_TOOLS, KIMI_K2, AnswerSyntax
from splitinfer.text.answer import AnswerFormat, AnswerPart, ReasoningPart, TextPart, ToolCallPart, joined

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
OSLO = ToolCallPart("weather", '{"city": "Oslo"}')
THINKING = ("<think>", "</think>")
QWEN = AnswerSyntax(JSON_TOOLS, THINKING)


def parsed(
    text: str, syntax: AnswerSyntax = QWEN, *, tools: Any = TOOLS, prompt: str = "", cut: int = 0, **more: bool
) -> list[AnswerPart]:
    """The parts of a text that comes in pieces of ``cut`` characters (0: whole), neighbours joined. ``prompt``: a
    letter is a token."""
    known = AnswerFormat(lambda _: syntax, lambda ids: "".join(map(chr, ids)))
    parser = known.parser([ord(letter) for letter in prompt], tools, **more)
    pieces = [text[i : i + cut] for i in range(0, len(text), cut)] if cut else [text]
    return joined([part for piece in pieces for part in parser.feed(piece)] + parser.finish())


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


@pytest.mark.parametrize("cut", [0, 1, 3, 7])
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Plain text.", [TextPart("Plain text.")]),
        ("  indented\n", [TextPart("  indented\n")]),
        (" \n", [TextPart(" \n")]),
        ("", []),
        ("<think>Well.</think>\n\nYes.", [ReasoningPart("Well."), TextPart("\n\nYes.")]),
        ("<think>Cut off", [ReasoningPart("Cut off")]),
        ("a < b and <thin", [TextPart("a < b and <thin")]),
        (CALL, [OSLO]),
        (f"I look.\n{CALL}", [TextPart("I look.\n"), OSLO]),
        (f"<think>Hm.</think>\n\n{CALL}\n{CALL}\n", [ReasoningPart("Hm."), OSLO, OSLO]),
        (f"{CALL}\nDone.", [OSLO, TextPart("\nDone.")]),
        (f"<think>Hm.{CALL} Yes.", [ReasoningPart("Hm."), OSLO, TextPart(" Yes.")]),
        ("<tool_call>no JSON</tool_call>!", [TextPart("<tool_call>no JSON</tool_call>!")]),
        ('<tool_call>{"name": "weather", "argu', [TextPart('<tool_call>{"name": "weather", "argu')]),
        ("<tool_call>[1]</tool_call>", [TextPart("<tool_call>[1]</tool_call>")]),
        ('<tool_call>{"name": 3}</tool_call>', [TextPart('<tool_call>{"name": 3}</tool_call>')]),
        ('<tool_call>{"name": "now"}</tool_call>', [ToolCallPart("now", "{}")]),
        ('<tool_call>{"name": "now", "arguments": "{\\"å\\": 1}"}</tool_call>', [ToolCallPart("now", '{"å": 1}')]),
        ('<tool_call>{"name": "now", "arguments": {"å": "a\\ud83d \\ude00"}}</tool_call>',
         [ToolCallPart("now", '{"å": "a\ufffd \ufffd"}')]),
    ],
)  # fmt: skip
def test_an_answer_is_told_apart_however_it_is_cut(text: str, parts: list[AnswerPart], cut: int):
    assert parsed(text, cut=cut) == parts


def test_calls_have_other_ids():
    def call(number: int) -> str:
        begin, end = "<|tool_calls_section_begin|><|tool_call_begin|>", "<|tool_call_end|><|tool_calls_section_end|>"
        return f'{begin}functions.weather:{number}<|tool_call_argument_begin|>{{"city": "Oslo"}}{end}'

    parts = parsed(call(0) + call(0) + call(1), AnswerSyntax(KIMI_K2), cut=5)
    assert [part.call_id for part in parts if isinstance(part, ToolCallPart)] == [
        "functions.weather:0", None, "functions.weather:1"
    ]  # fmt: skip


def test_a_model_that_marks_nothing():
    assert AnswerFormat(lambda _: AnswerSyntax(), lambda _: "").markers == ()


pieces = st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", "<", "tool", ">", " ", "\n", "x", CALL])


@given(st.lists(pieces, max_size=12).map("".join), st.integers(1, 9))
def test_without_tools_cutting_changes_nothing(text: str, cut: int):
    """Nor where marks begin with space, which a text also has."""
    for syntax in (QWEN, AnswerSyntax(None, ("\n<think>", "\n</think>"), (" \n<tool_call>",))):
        assert parsed(text, syntax, tools=(), cut=cut) == parsed(text, syntax, tools=())


@given(st.lists(pieces, max_size=12).map("".join), st.integers(1, 9))
def test_whatever_comes_it_is_no_error_and_cutting_changes_nothing(text: str, cut: int):
    parts = parsed(text)
    assert parsed(text, cut=cut) == parts
    assert all(json.loads(part.arguments) == {"city": "Oslo"} for part in parts if isinstance(part, ToolCallPart))
    shown = "".join(part.text for part in parts if not isinstance(part, ToolCallPart))
    assert shown.count("x") == text.replace(CALL, "").count("x")


FORM, NO_TOOLS = {"has_form": True}, {"tools": ()}  # a form that has begun has no markers


@pytest.mark.parametrize("cut", [0, 1, 3])
@pytest.mark.parametrize(
    ("text", "how", "parts"),
    [
        ('{"tag":"<think>a</think>"}', FORM, [TextPart('{"tag":"<think>a</think>"}')]),
        ('<think>Well.</think>\n["<think>"]', FORM, [ReasoningPart("Well."), TextPart('\n["<think>"]')]),
        (f"<<think>{CALL}", FORM, [TextPart(f"<<think>{CALL}")]),
        (f"{CALL}\n{CALL}", FORM, [OSLO, OSLO]),
        ("<thi", FORM, [TextPart("<thi")]),
        (CALL, NO_TOOLS, [TextPart(CALL)]),
        (f"<think>Hm.</think>{CALL}", NO_TOOLS, [ReasoningPart("Hm."), TextPart(CALL)]),
        ("So.</think>Yes.", {"prompt": "a<think>\n"}, [ReasoningPart("So."), TextPart("Yes.")]),
        ("Yes.", {"prompt": "<think>\n</think>\n"}, [TextPart("Yes.")]),
        ("Yes.", {"prompt": "what is <think>? Answer: "}, [TextPart("Yes.")]),  # somebody quoted it
        ("a <think> </think>\n", {"syntax": AnswerSyntax()}, [TextPart("a <think> </think>\n")]),
        (f"<think>Hm.</think><response>Yes.{CALL}", {"syntax": AnswerSyntax(JSON_TOOLS, THINKING, ("<response>",))},
         [ReasoningPart("Hm."), TextPart("Yes."), OSLO]),
    ],
)  # fmt: skip
def test_what_is_known_beforehand_decides(text: str, how: dict[str, Any], parts: list[AnswerPart], cut: int) -> None:
    assert parsed(text, cut=cut, **how) == parts
