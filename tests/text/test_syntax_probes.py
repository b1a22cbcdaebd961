"""How a template writes calls and reasoning, found by rendering it: styles of every kind, each in a short template."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from splitinfer.core.call_syntax import ARGUMENTS, JSON_TOOLS, KEY, NAME, AnswerSyntax, CallSyntax, Keyed, Members
from splitinfer.errors import ModelError
from splitinfer.text.answer import AnswerFormat, BrokenCall, ReasoningPart, TextPart, ToolCallPart, joined
from splitinfer.text.tokenizer import Tokenizer
from tests.text.templates import folder_with

_TURNS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}"
    "{% if m.tool_calls %}@OPENS@{% for c in m.tool_calls %}{% set f = c.function %}@CALL@"
    "{% if not loop.last %}@BETWEEN@{% endif %}{% endfor %}@CLOSES@{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_EACH = "{% for k, v in f.arguments.items() %}@{% endfor %}"
_VALUE = "{{ v if v is string else v | tojson }}"
_NAME, _ARGS = "{{ f.name }}", "{{ f.arguments | tojson }}"


def each(argument: str) -> str:
    return _EACH.replace("@", argument.replace("KEY", "{{ k }}").replace("VALUE", _VALUE))


STYLES: Mapping[str, tuple[str, str, str, str]] = {
    "json in marks": ("", f'<tool_call>\n{{"name": "{_NAME}", "arguments": {_ARGS}}}\n</tool_call>', "", ""),
    "a list, and ids": ("<do>[", f'{{"name": "{_NAME}", "args": {_ARGS}, "n": "{{{{ c.id }}}}"}}', ", ", "]</do>"),
    "json without marks": ("[", f'{{"tool_name": "{_NAME}", "parameters": {_ARGS}}}', ", ", "]"),
    "the name is a key": ("<|calls|>[", f'{{"{_NAME}": {_ARGS}}}', ", ", "]<|/calls|>"),
    "json in a text": ("", '<call>{"name": "{{ f.name }}", "a": {{ f.arguments | tojson | tojson }}}</call>', "", ""),
    "a name and json": ("", f"[CALLS]{_NAME}[ID]{{{{ c.id }}}}[ARGS]{_ARGS}", "", ""),
    "fences": ("<|begin|>", f"<|call|>function<|sep|>{_NAME}\n```json\n{_ARGS}\n```<|/call|>", "\n", "<|/begin|>"),
    "python's words": ("", f"<call name={_NAME}>{{{{ f.arguments }}}}</call>", "", ""),
    "tags": (
        "",
        f"<tool_call>\n<function={_NAME}>\n"
        + each("<parameter=KEY>\nVALUE\n</parameter>\n")
        + "</function>\n</tool_call>",
        "\n",
        "",
    ),
    "pairs": ("<c:all>", f"<c:one>{_NAME}" + each("<k>KEY</k>\n<v>VALUE</v>") + "</c:one>", "\n", "</c:all>"),
    "tags that tell the kind": (
        "", f'<call name="{_NAME}">' + each('<arg name="KEY" text="{{ v is string }}">VALUE</arg>') + "</call>", "", ""
    ),
    "a call of python": (
        "[", f"{_NAME}(" + each("KEY={{ v | tojson }}{% if not loop.last %},{% endif %}") + ")", ", ", "]"
    ),
    "the key twice": ("", f'<do name="{_NAME}">' + each("<KEY>VALUE</KEY>") + "</do>", "", ""),
}  # fmt: skip
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"}, "count": {"type": "integer"}, "sure": {"type": "boolean"},
                    "all": {"type": "array", "items": {"type": "string"}}, "more": {"type": "object"},
                },
            },
        },
    }
    for name in ("get-sum", "get", "fs/read.all")
]  # fmt: skip
texts = st.text(st.sampled_from(list("abcé \"'\\{}[]:,=\n1")), max_size=12).map(lambda text: f"x{text}y")
arguments = st.fixed_dictionaries(
    {},
    optional={
        "text": texts, "count": st.integers(-9, 99), "sure": st.booleans(), "all": st.lists(texts, max_size=2),
        "more": st.dictionaries(st.sampled_from(["a", "b"]), texts, max_size=2),
    },
)  # fmt: skip
calls = st.lists(
    st.tuples(st.sampled_from([one["function"]["name"] for one in TOOLS]), arguments), min_size=1, max_size=2
)  # type: ignore[index]


def styled(style: str) -> str:
    template = _TURNS
    for word, text in zip(("@OPENS@", "@CALL@", "@BETWEEN@", "@CLOSES@"), STYLES[style], strict=True):
        template = template.replace(word, text)
    return template


@pytest.fixture(scope="module", params=STYLES)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    template = styled(request.param)
    return Tokenizer.from_folder(folder_with(tmp_path_factory.mktemp("style"), template))


def written(tokenizer: Tokenizer, calls: Any, said: str = "", thought: str = "") -> str:
    made = [
        {"id": f"callaaaa{i}", "type": "function", "function": {"name": name, "arguments": given}}
        for i, (name, given) in enumerate(calls)
    ]
    turns = [{"role": "user", "content": "U"}, {"role": "assistant", "content": said, "tool_calls": made}]
    turns[1] |= {"reasoning_content": thought} if thought else {}
    text = tokenizer.render_chat(turns, tools=TOOLS, opens_answer=False)
    prompt = tokenizer.render_chat(turns[:1], tools=TOOLS)
    assert text.startswith(prompt)
    return text.removeprefix(prompt).removesuffix("<|end|>")


def read(tokenizer: Tokenizer, text: str, cut: int, *, grows: bool = False) -> list[Any]:
    parser = tokenizer.answer_format.parser([], TOOLS, grows=grows)
    pieces = [text[i : i + cut] for i in range(0, len(text), cut)]
    return joined([*(part for piece in pieces for part in parser.feed(piece)), *parser.finish()])


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=calls, cut=st.sampled_from([1, 7, 10_000]), said=st.sampled_from(["", "I look."]), grows=st.booleans())
def test_what_a_template_writes_is_read(tokenizer: Tokenizer, calls: Any, cut: int, said: str, grows: bool):
    syntax = tokenizer.answer_format.syntax
    assert "To call one" not in tokenizer.render_chat([{"role": "user", "content": "U"}], tools=TOOLS)
    thought, *parts = read(tokenizer, written(tokenizer, calls, said, "Hm."), cut, grows=grows)
    assert thought == ReasoningPart("Hm.")
    assert [part for part in parts if isinstance(part, TextPart)] == ([TextPart(said)] if said else [])
    found = [(part.name, json.loads(part.arguments)) for part in parts if isinstance(part, ToolCallPart)]
    assert found == calls
    again = read(tokenizer, syntax.written([(name, given, "callaaaa1") for name, given in calls]), cut)
    assert [(part.name, json.loads(part.arguments)) for part in again] == calls


def test_what_is_inside_other_values_has_the_type_of_its_schema():
    each = {"type": "object", "properties": {"to": {"type": "string"}, "item": {"$ref": "#/$defs/count"}}}
    schema = {
        "properties": {"all": {"type": "array", "items": each}, "one": {"anyOf": [each, {"type": "null"}]}},
        "$defs": {"count": {"type": "integer"}},
    }
    keyed = Keyed("<", (("", ">"),), f"</{KEY}>", "")
    syntax = AnswerSyntax(CallSyntax(f"{NAME}{ARGUMENTS}", before="<call>", behind="</call>", keyed=keyed))
    format_ = AnswerFormat(lambda _: syntax, lambda _: "")
    parser = format_.parser([], [{"function": {"name": "f", "parameters": schema}}])
    text = "<call>f<all><item><to>true</to><item>5</item></item></all><one><item>7</item></one></call>"
    (call,) = joined([*(part for letter in text for part in parser.feed(letter)), *parser.finish()])
    assert json.loads(call.arguments) == {"all": [{"to": "true", "item": 5}], "one": {"item": 7}}


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ('go [{"name": "f", "arguments": {}}]<eos>', ""),
        ('go [{"name": "f", "arguments": {}}]', ""),
        ('go {"name": "f", "arguments": {}}', ""),
        ('go [{"name": "f", "arguments": {}} and', " and"),
    ],
)
def test_brackets_and_the_token_that_ends_answers_may_be_missing(text: str, left: str):
    body = f'{{"name": "{NAME}", "arguments": {ARGUMENTS}}}'
    syntax = CallSyntax(body, "go [", between=", ", closes="]<eos>", members=Members("name", "arguments"))
    format_ = AnswerFormat(lambda _: AnswerSyntax(syntax), lambda _: "")
    parser = format_.parser([], [{"function": {"name": "f"}}])
    call, *rest = joined([*parser.feed(text), *parser.finish()])
    assert call == ToolCallPart("f", "{}")
    assert rest == ([TextPart(left)] if left else [])


@pytest.mark.parametrize("grows", [False, True])
def test_a_call_whose_arguments_come_twice_is_no_call(grows: bool):
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}, "arguments": {"a": 2}}</tool_call>'
    parser = AnswerFormat(lambda _: AnswerSyntax(JSON_TOOLS), lambda _: "").parser(
        [], [{"function": {"name": "f"}}], grows=grows
    )
    *_, last = joined([part for letter in text for part in parser.feed(letter)] + parser.finish())
    assert last == (BrokenCall() if grows else TextPart(text))


def test_a_name_that_no_tool_has_stays_text(tokenizer: Tokenizer):
    text = written(tokenizer, [("get", {"text": "a"})]).replace("get", "got")
    assert read(tokenizer, text, 1) == [TextPart(text)]


def test_a_schema_that_a_template_refuses_is_completed_in_that_tool_alone(tmp_path: Path):
    shown = "{% for t in tools %}{{ t.function.name }}{% for k, v in t.function.parameters.properties.items() %}"
    shown += (
        "{{ k }}:{{ v.type | upper }}{{ raise_exception('type') if v.type is not string }}{% endfor %};{% endfor %}"
    )
    template = styled("tags").replace("{{ tools | tojson }}", shown)
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, template))
    odd = {"name": "odd", "parameters": {"properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}}}
    tools = [TOOLS[1], {"type": "function", "function": odd}, {"type": "function", "function": {"name": "bare"}}]
    text = tokenizer.render_chat([{"role": "user", "content": "U"}], tools=tools)
    assert "a:INTEGER;bare;" in text
    assert "To call one" not in text


def test_a_template_that_counts_tools_takes_a_chat_without_any_and_an_object_that_is_closed(tmp_path: Path):
    shown = "{% for t in tools %}{{ t.function.name }}{% for k, v in t.function.parameters.properties.items() %}"
    shown += "{{ '=' + v.additionalProperties.type if v.additionalProperties is defined }}{% endfor %};{% endfor %}"
    template = "{% if tools is none %}{{ raise_exception('tools') }}{% endif %}" + styled("tags")
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, template.replace("{{ tools | tojson }}", shown)))
    user = [{"role": "user", "content": "U"}]
    assert "U" in tokenizer.render_chat(user)
    for more, told in ((False, "odd;"), ({"type": "integer"}, "odd=integer;")):
        parameters = {"type": "object", "properties": {"a": {"type": "object", "additionalProperties": more}}}
        tool = {"type": "function", "function": {"name": "odd", "parameters": parameters}}
        assert told in tokenizer.render_chat(user, tools=[tool])


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_reaches_a_template_by_the_name_that_it_knows(tmp_path: Path, name: str):
    tokenizer = Tokenizer.from_folder(folder_with(tmp_path, styled("tags").replace("m.reasoning_content", f"m.{name}")))
    assert written(tokenizer, [("get", {})], "Yes.", "Hm.").startswith("<think>Hm.</think>Yes.")


def test_named_templates_and_older_files(tmp_path: Path):
    template = styled("tags")
    folder = folder_with(tmp_path, None)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    alone = Tokenizer.from_folder(folder)
    assert alone.template(False) == template
    config = json.loads((folder / "tokenizer_config.json").read_text())
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    named = [{"name": "default", "template": plain}, {"name": "tool_use", "template": template}]
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    both = Tokenizer.from_folder(folder)
    assert (both.template(False), both.template(True)) == (plain, template)
    assert both.answer_format.syntax == alone.answer_format.syntax
    assert both.info["chat_template"] == plain


def test_a_broken_template_is_told_at_the_start(tmp_path: Path):
    with pytest.raises(ModelError, match=r"the chat template in .* is broken: line 1: "):
        Tokenizer.from_folder(folder_with(tmp_path, "{{ m.content }"))
