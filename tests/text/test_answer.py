"""Answers told apart into text, reasoning and calls, by mlx-lm's own machine and parsers, however they are cut."""

import importlib
import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitinfer.text.answer import AnswerFormat, AnswerPart, ReasoningPart, TextPart, ToolCallPart, joined

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
THINK, END_THINK = 7, 8  # the token ids of the markers
OSLO = ToolCallPart("weather", '{"city": "Oslo"}')


def wrapper(parser: str | None = "json_tools", *, thinks: bool = True, **changes: Any) -> SimpleNamespace:
    """What mlx-lm's ``TokenizerWrapper`` shows of a model with these calls, and with reasoning if it ``thinks``."""
    module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}") if parser else None

    def last(tokens: list[int], token: int) -> int:
        return max((i for i, each in enumerate(tokens) if each == token), default=-1)

    known = {
        "has_thinking": thinks,
        "think_start": "<think>" if thinks else None,
        "think_end": "</think>" if thinks else None,
        "rfind_think_start": lambda tokens: last(tokens, THINK),
        "rfind_think_end": lambda tokens: last(tokens, END_THINK),
        "has_tool_calling": module is not None,
        "tool_call_start": module and module.tool_call_start,
        "tool_call_end": module and module.tool_call_end,
        "tool_parser": module and module.parse_tool_call,
        "structural_markers": (),
        "response_transitions": {},
        "response_initial_state": None,
    }
    return SimpleNamespace(**{**known, **changes})


def parsed(
    text: str, model: SimpleNamespace | None = None, *, tools: Any = TOOLS, prompt: Any = (), cut: int = 0, **more: bool
) -> list[AnswerPart]:
    """The parts of a text that comes in pieces of ``cut`` characters (0: whole), neighbours joined."""
    parser = AnswerFormat(model or wrapper()).parser(prompt, tools, **more)
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
        ("<tool_call>no JSON</tool_call>!", [TextPart("<tool_call>no JSON</tool_call>!")]),
        ('<tool_call>{"name": "weather", "argu', [TextPart('<tool_call>{"name": "weather", "argu')]),
        ("<tool_call>[1]</tool_call>", [TextPart("<tool_call>[1]</tool_call>")]),
        ('<tool_call>{"name": 3}</tool_call>', [TextPart('<tool_call>{"name": 3}</tool_call>')]),
        ('<tool_call>{"name": "now"}</tool_call>', [ToolCallPart("now", "{}")]),
        ('<tool_call>{"name": "w", "arguments": "{\\"città\\": 1}"}</tool_call>', [ToolCallPart("w", '{"città": 1}')]),
        ('<tool_call>{"name": "w", "arguments": {"å": "a\\ud83d \\ude00"}}</tool_call>',
         [ToolCallPart("w", '{"å": "a\ufffd \ufffd"}')]),
    ],
)  # fmt: skip
def test_an_answer_is_told_apart_however_it_is_cut(text: str, parts: list[AnswerPart], cut: int):
    assert parsed(text, cut=cut) == parts


def test_calls_have_other_ids():
    def call(number: int) -> str:
        begin, end = "<|tool_calls_section_begin|><|tool_call_begin|>", "<|tool_call_end|><|tool_calls_section_end|>"
        return f'{begin}functions.weather:{number}<|tool_call_argument_begin|>{{"city": "Oslo"}}{end}'

    parts = parsed(call(0) + call(0) + call(1), wrapper("kimi_k2", thinks=False), cut=5)
    assert [part.call_id for part in parts if isinstance(part, ToolCallPart)] == [
        "functions.weather:0", None, "functions.weather:1"
    ]  # fmt: skip


def test_without_tools_a_call_is_text():
    assert parsed(CALL, tools=()) == [TextPart(CALL)]
    assert parsed(f"<think>Hm.</think>{CALL}", tools=()) == [ReasoningPart("Hm."), TextPart(CALL)]


def test_a_prompt_may_end_inside_reasoning():
    assert parsed("So.</think>Yes.", prompt=(1, THINK)) == [ReasoningPart("So."), TextPart("Yes.")]
    assert parsed("Yes.", prompt=(THINK, 1, END_THINK)) == [TextPart("Yes.")]
    far = (THINK, *range(100, 140))  # quoted by somebody, long before the answer
    assert parsed("Yes.", prompt=far) == [TextPart("Yes.")]


def test_a_model_that_marks_nothing():
    model = wrapper(None, thinks=False)
    assert AnswerFormat(model).markers == ()
    assert parsed("a <think> </think>\n", model) == [TextPart("a <think> </think>\n")]


def test_markers_are_all_that_text_must_show():
    model = wrapper(structural_markers=("<|eom|>",), response_transitions={"normal": [("<|eot|>", "normal")]})
    wanted = ("</think>", "</tool_call>", "<think>", "<tool_call>", "<|eom|>", "<|eot|>")
    assert AnswerFormat(model).markers == wanted


pieces = st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", "<", "tool", ">", " ", "\n", "x", CALL])


@given(st.lists(pieces, max_size=12).map("".join), st.integers(1, 9))
def test_whatever_comes_it_is_no_error_and_cutting_changes_nothing(text: str, cut: int):
    parts = parsed(text)
    assert parsed(text, cut=cut) == parts
    assert all(json.loads(part.arguments) == {"city": "Oslo"} for part in parts if isinstance(part, ToolCallPart))
    shown = "".join(part.text for part in parts if not isinstance(part, ToolCallPart))
    assert shown.count("x") == text.replace(CALL, "").count("x")


@pytest.mark.parametrize("cut", [0, 1, 3])
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('{"tag":"<think>a</think>"}', [TextPart('{"tag":"<think>a</think>"}')]),
        ('<think>Well.</think>\n["<think>"]', [ReasoningPart("Well."), TextPart('\n["<think>"]')]),
        (f"<<think>{CALL}", [TextPart(f"<<think>{CALL}")]),
        (f"{CALL}\n{CALL}", [OSLO, OSLO]),
        ("<thi", [TextPart("<thi")]),
    ],
)
def test_a_form_that_has_begun_has_no_markers(text: str, parts: list[AnswerPart], cut: int) -> None:
    assert parsed(text, cut=cut, has_form=True) == parts
