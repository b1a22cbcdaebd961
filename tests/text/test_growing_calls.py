"""Calls that come in pieces are the calls that come whole, however their text is cut, and come as they are written."""

import importlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitinfer.text.answer import AnswerFormat, AnswerPart, BrokenCall, TextPart, ToolCallPart, joined
from splitinfer.text.growing_calls import GrowingCalls
from tests.text.test_answer import wrapper
from tests.text.test_whole_calls import ENDS, SYNTAXES, WITH_ONE, found_in, written

PROPERTIES = {
    "path": {"type": "string"}, "content": {"type": "string"}, "lines": {"type": "integer"},
    "deep": {"type": "object"}, "sure": {"type": "boolean"}, "any": {},
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": PROPERTIES}}}
    for name in ("write", "read")
]
BY_VALUES = {"muse_spark", "minicpm5"}  # whose arguments come one by one, each whole
FILE = "".join(f"def function_{i}(value):  # line {i}\n    return value < {i}\n" for i in range(200))  # 400 lines


def answered(
    syntax: str, text: str, cuts: Sequence[int] = (), *, grows: bool = True, is_cut: bool = False
) -> tuple[list[AnswerPart], list[int]]:
    """The parts of an answer, and how much had come for each. ``cuts``: lengths of its pieces, again and again."""
    parser = AnswerFormat(wrapper(syntax, thinks=False)).parser((), TOOLS, grows=grows)
    parts, came, at, i = list[AnswerPart](), list[int](), 0, 0
    while at < len(text):
        end = at + (cuts[i % len(cuts)] if cuts else len(text))
        found = parser.feed(text[at:end])
        parts, came, at, i = [*parts, *found], [*came, *[end] * len(found)], end, i + 1
    last = parser.finish(is_cut=is_cut)
    return [*parts, *last], [*came, *[at] * len(last)]


def wrapped(syntax: str, text: str) -> str:
    module = importlib.import_module(f"mlx_lm.tool_parsers.{syntax}")
    return f"So: {module.tool_call_start}{text.removesuffix(module.tool_call_end)}{module.tool_call_end}"


def same(syntax: str, text: str, cuts: Sequence[int]) -> None:
    whole, _ = answered(syntax, text, grows=False)
    parts, _ = answered(syntax, text, cuts)
    assert [*map(without_id, joined(parts))] == [*map(without_id, whole)]
    assert any(isinstance(part, ToolCallPart) for part in whole)


def without_id(part: AnswerPart) -> AnswerPart:
    return replace(part, call_id=None) if isinstance(part, ToolCallPart) else part  # it may come behind the arguments


lengths = st.lists(st.integers(1, 12), min_size=1, max_size=6)
texts = st.text(st.characters(codec="utf-8", exclude_characters="\r\x00", exclude_categories=["Cc"]), max_size=40)


@pytest.mark.parametrize("syntax", sorted(SYNTAXES))
@given(value=texts, ends=st.sampled_from(["", "a", "null", " x \n y", "<", "tr\\ue", '"', "1", "[2]"]), cuts=lengths)
def test_pieces_are_the_whole(syntax: str, value: str, ends: str, cuts: list[int]) -> None:
    if syntax in ("gemma4", "function_gemma") and ("<|" in value or "<es" in value):
        return
    calls = [("write", {"path": f"{ends}{value}", "content": f"{value}{ends}"}), ("read", {"path": "b"})]
    text = wrapped(syntax, written(syntax, *calls[: 1 if syntax in WITH_ONE else 2]))
    whole, _ = answered(syntax, text, grows=False)
    if isinstance(whole[-1], ToolCallPart):
        same(syntax, text, cuts)


@pytest.mark.parametrize(("syntax", "word"), [(syntax, word) for syntax, words in ENDS.items() for word in words])
def test_a_word_that_ends_something_is_a_part_of_a_text(syntax: str, word: str) -> None:
    arguments = {"path": "a.py", "content": f"x = 1\n{word}\nREST of the file"}
    assert found_in(syntax, written(syntax, ("write", arguments))) == [("write", arguments)]
    for cuts in [(1,), (3, 8)] if (syntax, word) != ("minicpm5", "</function>") else []:
        same(syntax, wrapped(syntax, written(syntax, ("write", arguments))), cuts)


_P, _V = "<arg_key>{}</arg_key><arg_value>", "</arg_value>"
FORMS = {
    "json_tools": [
        '\n{"name": "f", "arguments": {"a": [1, -0.0, 1e5, {}, {"b" : null}], "c":"\\u00e9\\ud83d\\ude00\\/"}}\n',
        '{"arguments": {"a": 1}, "name": "f"}',
        '{"name": "f", "arguments": "{\\"a\\": 1}"}',
        '{"id": "x", "type": "function", "name": "f", "parameters": {"a": "\\ud83d"}}',
        '[{"name": "f", "arguments": {}}, {"name": "g"}]',
    ],
    "mistral": [
        '[{"name": "f", "arguments": {"a": 1}, "id": "x"}, {"name": "g", "arguments": {}}]',
        'f[ARGS]{"a": 1}\ng[ARGS]{}',
    ],
    "qwen3_coder": [
        "<function=write><parameter=lines>\n3\n</parameter><parameter=deep>{'a': 1}</parameter></function>",
        "<function=write><parameter=sure>True</parameter><parameter=any>[1]</parameter></function>",
        "<function=write></function>\n<function=read>\n<parameter=path>\n\n a \n\n</parameter></function>",
        "<function=write><parameter=path>NULL</parameter><parameter=other>nul</parameter></function>",
    ],
    "minimax_m2": [
        '<invoke name="write"><parameter name="lines">3</parameter></invoke>\n<invoke name="read"></invoke>'
    ],
    "glm47": [
        "write" + _P.format("lines") + "3" + _V + "\n" + _P.format("any") + "[1]" + _V,
        '{"name": "write", "arguments": {"path": 1}}',
    ],
    "minicpm5": ['"write"><param name="content"><![CDATA[a < b && c\n]]></param>'],
    "kimi_k3": [
        '<|open|>call tool="f" index="1"<|sep|><|open|>json type="object"<|sep|>{"a": 1}<|close|>json<|sep|>'
        "<|close|>call<|sep|>"
    ],
    "gemma4": ['call:f{a:1,b:[true,{c:<|"|>x: {y}, "z"<|"|>}],d:{}}'],
    "function_gemma": ["call:f{a:1,b:Oslo,c:<escape>x<escape>}"],
    "pythonic": [
        "[f(a=1, b=[1, {'x': \"y)\"}], c='it\\'s', d=true), g(), h(e=\"\", f=-1.5)]",
        '[write(path="a.py", content="import os\nx = 1\n")]',
        '[f(a="x" "y", b="""q""")]',
    ],
}


@pytest.mark.parametrize(("syntax", "text"), [(syntax, text) for syntax, texts in FORMS.items() for text in texts])
def test_forms_of_calls(syntax: str, text: str) -> None:
    for cuts in ((1,), (2, 5), (1000,)):
        same(syntax, wrapped(syntax, text), cuts)


@pytest.mark.parametrize("syntax", sorted(SYNTAXES.keys() - BY_VALUES))
def test_a_file_comes_as_it_is_written(syntax: str) -> None:
    """By half of the text near half of the arguments was told, in pieces about as long as what came."""
    text = wrapped(syntax, written(syntax, ("write", {"path": "src/a.py", "content": FILE})))
    parts, came = answered(syntax, text, (4,))
    pieces = [(at, part) for at, part in zip(came, parts, strict=True) if isinstance(part, ToolCallPart)]
    first = next(at for at, part in pieces if part.arguments)
    half = sum(len(part.arguments) for at, part in pieces if at <= len(text) // 2)
    assert first < 140, "the first bytes of the arguments"
    assert half > 0.45 * len(FILE)
    assert max(len(part.arguments) for _, part in pieces) < 60


@pytest.mark.parametrize("syntax", sorted(SYNTAXES.keys() - BY_VALUES))
def test_a_call_that_is_cut_off_keeps_what_was_told(syntax: str) -> None:
    text = wrapped(syntax, written(syntax, ("write", {"path": "src/a.py", "content": FILE[:2000]})))
    whole, _ = answered(syntax, text)
    for end in (len(text) // 2, len(text) // 3):
        parts, _ = answered(syntax, text[:end], (7,), is_cut=True)
        *_, call = joined(parts)
        assert isinstance(call, ToolCallPart)
        assert joined(whole)[-1].arguments.startswith(call.arguments)  # type: ignore[union-attr]
        assert isinstance(answered(syntax, text[:end], (7,))[0][-1], BrokenCall), "an answer that ends there is broken"


@pytest.mark.parametrize(
    "text", [f'{{"name": "f", "arguments": {rest}' for rest in ('{"a": 1}, "more": 2}', '{"a" 1}}', '{"a": 1')]
)  # fmt: skip
def test_what_was_told_of_a_call_that_is_none_is_broken(text: str) -> None:
    parts, _ = answered("json_tools", wrapped("json_tools", text), (3,))
    assert parts[-1] == BrokenCall()
    whole, _ = answered("json_tools", wrapped("json_tools", text), grows=False)
    assert joined(whole) == [TextPart(wrapped("json_tools", text))]


def test_what_is_no_call_from_the_start_is_text() -> None:
    text = wrapped("json_tools", "no JSON")
    assert joined(answered("json_tools", text, (1,))[0]) == [TextPart(text)]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(
    arguments=st.dictionaries(st.text(max_size=4), json_values, max_size=3),
    cuts=lengths, ascii_only=st.booleans(), indent=st.sampled_from([None, 1]),
)  # fmt: skip
def test_json_is_written_as_the_server_writes_it(
    arguments: dict[str, Any], cuts: list[int], ascii_only: bool, indent: int | None
) -> None:
    growing = GrowingCalls("mistral", lambda _: ToolCallPart("f", "{}"))
    text = "f[ARGS]" + json.dumps(arguments, ensure_ascii=ascii_only, indent=indent)
    pieces, at = list[ToolCallPart](), 0
    while at < len(text):
        pieces += growing.feed(text[at : at + cuts[0]])
        at += cuts[0]
    pieces += growing.finish([ToolCallPart("f", json.dumps(arguments, ensure_ascii=False))])
    assert "".join(piece.arguments for piece in pieces) == json.dumps(arguments, ensure_ascii=False)


@pytest.mark.parametrize(
    ("syntax", "text"),
    [
        ("kimi_k2", "a:" * 2000),
        ("qwen3_coder", "<function=" + "a" * 4000),
        ("qwen3_coder", "<function=write><parameter=content></parameter>" + " " * 4000),
        ("pythonic", "[f(a=[" + "a" * 4000),
        ("json_tools", '{"name": "f", "arguments": {"a": ' + "1" * 4000),
    ],
)
def test_what_is_looked_at_again_and_again_is_short(syntax: str, text: str) -> None:
    def whole(one: str) -> ToolCallPart:
        return ToolCallPart("write", json.dumps({"content": one}))

    growing, most = GrowingCalls(syntax, whole), 0
    for at in range(0, len(text), 4):
        growing.feed(text[at : at + 4])
        most = max(most, len(growing._rest) if growing._steps is not None else 0)
    assert 0 < most < 520
