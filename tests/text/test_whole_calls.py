"""Calls are whole or none: nothing that stands between their markers is lost."""

import importlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitinfer.text.answer import AnswerFormat, TextPart, ToolCallPart, call_of
from splitinfer.text.whole_calls import calls_in
from tests.text.test_answer import wrapper

STRING = {"type": "object", "properties": {"path": {"type": "string"}, "content": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": STRING}} for name in ("write", "read")]


def tags(call: str, argument: str) -> Any:
    """Writes calls: each of its name and its arguments."""

    def write(*calls: tuple[str, dict[str, str]]) -> str:
        return "\n".join(
            call.replace("NAME", name).replace("ARGS", "".join(
                argument.replace("KEY", key).replace("VALUE", value) for key, value in values.items()))
            for name, values in calls
        )  # fmt: skip

    return write


def in_json(call: str) -> Any:
    return lambda *calls: "\n".join(
        call.replace("NAME", name).replace("ARGS", json.dumps(values)) for name, values in calls
    )


SYNTAXES = {
    "json_tools": in_json('{"name": "NAME", "arguments": ARGS}'),
    "longcat": in_json('{"name": "NAME", "arguments": ARGS}'),
    "mistral": in_json("NAME[ARGS]ARGS".replace("[ARGS]", "[\0]")),
    "kimi_k2": in_json("<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>ARGS<|tool_call_end|>"),
    "qwen3_coder": tags("<function=NAME>\nARGS</function>", "<parameter=KEY>\nVALUE\n</parameter>\n"),
    "minimax_m2": tags('<invoke name="NAME">\nARGS</invoke>', '<parameter name="KEY">VALUE</parameter>\n'),
    "muse_spark": tags(
        '<atem:invoke name="NAME">ARGS</atem:invoke>', '<atem:parameter name="KEY">VALUE</atem:parameter>'
    ),
    "kimi_k3": tags(
        '<|open|>call tool="NAME" index="1"<|sep|>ARGS<|close|>call<|sep|>',
        '<|open|>argument key="KEY" type="string"<|sep|>VALUE<|close|>argument<|sep|>',
    ),
    "gemma4": tags("call:NAME{ARGS}", 'KEY:<|"|>VALUE<|"|>\1,'),
    "function_gemma": tags("call:NAME{ARGS}", "KEY:<escape>VALUE<escape>\1,"),
    "glm47": tags("NAMEARGS", "<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>"),
    "minicpm5": tags('"NAME">ARGS</function>', '<param name="KEY">VALUE</param>'),
    "pythonic": lambda *calls: "[" + ", ".join(
        f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})" for name, values in calls
    ) + "]",
}  # fmt: skip
ENDS = {  # words that end something in each; `test_growing_calls.py` has them in texts
    "qwen3_coder": ["</parameter>", "</function>", "<function=x>", "</parameter>\n</p>"],
    "minimax_m2": ["</parameter>", "</invoke>"],
    "muse_spark": ["</atem:parameter>", "</atem:invoke>"],
    "kimi_k3": ["<|close|>argument<|sep|>", "<|close|>call<|sep|>"],
    "glm47": ["</arg_value>", "<arg_key>"], "minicpm5": ["</param>", "</function>"],
    "gemma4": ["}", "{", "call:f{}"], "function_gemma": ["}", "{"],
    "json_tools": ["}", '{"name": "x"}', "]"], "longcat": ["}", "</longcat_arg_value>"],
    "mistral": ["[ARGS]", "x[ARGS]{}"],
    "kimi_k2": ["<|tool_call_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"], "pythonic": [")]", "["],
}  # fmt: skip


def found_in(syntax: str, text: str) -> list[tuple[str, Any]]:
    module = importlib.import_module(f"mlx_lm.tool_parsers.{syntax}")
    calls = map(call_of, calls_in(text, syntax, lambda one: module.parse_tool_call(one, TOOLS)))
    return [(one.name, json.loads(one.arguments)) for one in calls]


def written(syntax: str, *calls: tuple[str, dict[str, str]]) -> str:
    text = str(SYNTAXES[syntax](*calls)).replace("[\0]", "[ARGS]")
    return text.replace("\1,}", "}").replace("\1", "")


WITH_ONE = {"glm47"}  # whose calls have markers of their own


@pytest.mark.parametrize("syntax", sorted(SYNTAXES.keys() - WITH_ONE))
def test_a_second_function_is_a_second_call(syntax: str):
    calls = [("write", {"path": "a", "content": "x"}), ("read", {"path": "b"})]
    assert found_in(syntax, written(syntax, *calls)) == calls


@pytest.mark.parametrize("syntax", SYNTAXES)
@pytest.mark.parametrize("where", ["before", "behind", "between"])
def test_what_is_no_call_makes_it_text(syntax: str, where: str):
    calls = [written(syntax, ("write", {"path": "a", "content": "x"})), written(syntax, ("read", {"path": "b"}))]
    rest = " and here is the file: x <y> "
    if (syntax, where) == ("glm47", "between"):
        return  # its calls have markers of their own: all is the value of the first
    text = {"before": rest + calls[0], "behind": calls[0] + rest, "between": calls[0] + rest + calls[1]}[where]
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever a parser raises
        found_in(syntax, text)


@pytest.mark.parametrize("syntax", SYNTAXES)
@given(
    value=st.text(
        st.characters(codec="utf-8", exclude_characters="\\\"'\r\x00", exclude_categories=["Cc"]), max_size=30
    )
)
def test_any_text_comes_back_as_it_was(syntax: str, value: str):
    value = f"a{value}b"
    call = ("write", {"path": "p", "content": value})
    assert found_in(syntax, written(syntax, call)) == [call]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "f", "arguments": null}', "{}"),
        ('{"name": "f", "arguments": ""}', "{}"),
        ('{"name": "f", "parameters": {"a": 1}}', '{"a": 1}'),
        ('{"type": "function", "name": "f", "arguments": {"a": 1}}', '{"a": 1}'),
        ('{"name": "f", "args": {"a": 1}}', None),
        ('{"name": "f", "arguments": {}, "parameters": {"a": 1}}', None),
        ('{"name": "f", "arguments": [1]}', None),
    ],
)
def test_arguments_by_other_names(text: str, arguments: str | None):
    parser = AnswerFormat(wrapper(thinks=False)).parser([], TOOLS)
    text = f"<tool_call>{text}</tool_call>"
    expected = TextPart(text) if arguments is None else ToolCallPart("f", arguments)
    assert [*parser.feed(text), *parser.finish()] == [expected]
