"""Calls that must be made: what random walks under the masks write, the reader of answers reads."""

import json
import random
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from constrained import allowed, rules

from splitinfer import Grammar, SamplingParams
from splitinfer.core.call_syntax import (
    ARGUMENTS,
    ID,
    JSON_TOOLS,
    KEY,
    KIMI_K2,
    KINDS,
    LFM2,
    NAME,
    AnswerSyntax,
    CallSyntax,
    Keyed,
)
from splitinfer.errors import RequestError
from splitinfer.grammar.calls import call_grammar
from splitinfer.llm.forms import AnswerForms
from splitinfer.text.answer import AnswerFormat, ToolCallPart, joined

FUNCTIONS = [
    {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "unit": {"type": "string", "enum": ["celsius", "kelvin"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 14},
                "exact": {"type": "boolean"},
                "at": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
    {"name": "time-now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
]
TOOLS = [{"type": "function", "function": one} for one in FUNCTIONS]
END = 0


def tagged(opens: str, middle: str, closes: str, **more: Any) -> Keyed:
    return Keyed(opens, (("", middle),), closes, more.pop("between", ""), **more)


SYNTAXES = {
    "json": JSON_TOOLS,
    "list": CallSyntax(JSON_TOOLS.body, "[CALLS][", between=", ", closes="]", members=JSON_TOOLS.members),
    "mistral": CallSyntax(f"{NAME}[ARGS]{ARGUMENTS}", before="[TOOL_CALLS]"),
    "with id": CallSyntax(f"{NAME}[ID]{ID}[ARGS]{ARGUMENTS}", before="[CALL]", behind="[/CALL]"),
    "kimi": KIMI_K2,
    "tags": CallSyntax(
        f"{NAME}>\n{ARGUMENTS}", before="<tool_call>\n<function=", behind="</function>\n</tool_call>",
        keyed=tagged("<parameter=", ">\n", "\n</parameter>\n"),
    ),
    "pairs": CallSyntax(
        f"{NAME}{ARGUMENTS}", before="<tool_call>", behind="</tool_call>",
        keyed=tagged("<key>", "</key><value>", "</value>"),
    ),
    "with kinds": CallSyntax(
        f'{NAME}">{ARGUMENTS}', "<calls>", '<call name="', "</call>", closes="</calls>",
        keyed=Keyed('<arg name="', tuple((kind, f'" kind="{kind}">') for kind in KINDS), "</arg>", ""),
    ),
    "python": LFM2,
    "bare python": replace(LFM2, keyed=tagged("", "=", "", between=", ")),
    "nested": CallSyntax(
        f'{NAME}">{ARGUMENTS}', "<calls>", '~<call name="', "~</call>", closes="~</calls>",
        keyed=tagged("~<", ">", f"~</{KEY}>"),
    ),
    "quoted": CallSyntax(
        f"{NAME}{{{ARGUMENTS}", before="<|call>", behind="}<call|>",
        keyed=tagged("", ":", "", between=",", quote='<|"|>'),
    ),
}  # fmt: skip


IN_A_TEXT = replace(JSON_TOOLS, is_text=True)


def read(syntax: CallSyntax, text: str, tools: list[dict[str, Any]] = TOOLS) -> list[dict[str, Any]]:
    """The calls in an answer that is nothing else."""
    parser = AnswerFormat(lambda _: AnswerSyntax(syntax), lambda _: "").parser([], tools)
    parts = joined([*parser.feed(text), *parser.finish()])
    assert all(isinstance(part, ToolCallPart) or not part.text.strip() for part in parts), text  # type: ignore[union-attr]
    calls = [part for part in parts if isinstance(part, ToolCallPart)]
    return [{"name": call.name, "arguments": json.loads(call.arguments)} for call in calls]


def opening(syntax: str) -> str:
    """What begins a call, and nothing else."""
    known = SYNTAXES[syntax]
    begins = re.match(r"<[^<>]+>|\[[A-Z_]+\]", known.opens + known.before)
    return begins[0]


def parsed(syntax: str, text: str, tools: list[dict[str, Any]] = TOOLS) -> dict[str, Any]:
    (call,) = read(SYNTAXES[syntax], text, tools)
    return call


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_every_call_parses_and_has_its_schema(made: AnswerForms, syntax: str) -> None:
    grammar = call_grammar(SYNTAXES[syntax], FUNCTIONS, json.dumps)
    names = set()
    for seed in range(12):
        drawn, walking, answer = random.Random(seed), rules(made, SamplingParams(grammar=grammar)), list[int]()
        while END not in answer:
            answer.append(drawn.choice(sorted(allowed(walking.masks(answer, len(answer))[0]))))
        call = parsed(syntax, made._prompts.needed.decode(answer))
        function = next(one for one in FUNCTIONS if one["name"] == call["name"].removeprefix("functions."))
        parameters: Mapping[str, Any] = function["parameters"]
        jsonschema.validate(call["arguments"], parameters)
        names.add(function["name"])
    assert len(names) == 2, "one of two functions was never called"


@pytest.mark.parametrize(("syntax", "special"), [*((one, None) for one in SYNTAXES), ("json", 1999), ("mistral", 1999)])
def test_a_call_among_text_keeps_its_schema_once_it_is_begun(
    made: AnswerForms, syntax: str, special: int | None
) -> None:
    opens = opening(syntax)
    written = {opens: f"<[{special}]>"} if special else {}
    strict = [{**one, "strict": True} for one in FUNCTIONS]
    grammar = call_grammar(SYNTAXES[syntax], strict, lambda text: written.get(text, json.dumps(text)), must=False)

    def encode(text: str) -> list[int]:
        return made._prompts.needed.encode(text, adds_special=False)

    walking = rules(made, SamplingParams(grammar=grammar))
    begun = [*encode("I <look>. "), *([special] if special else encode(opens))]
    for place, token in enumerate(begun):
        assert {token, END} <= allowed(walking.masks(begun[:place], place)[0]), "text was not free"
    drawn, answer = random.Random(3), list(begun)
    while END not in (able := allowed(walking.masks(answer, len(answer))[0])):
        answer.append(drawn.choice(sorted(able)))
    call = parsed(syntax, opens + made._prompts.needed.decode(answer[len(begun) :]))
    function = next(one for one in FUNCTIONS if one["name"] == call["name"].removeprefix("functions."))
    jsonschema.validate(call["arguments"], function["parameters"])
    more = encode(" and") + ([special] if special else encode(opens))
    goes_on = [
        token in allowed(walking.masks([*answer, *more[:i]], len(answer) + i)[0]) for i, token in enumerate(more)
    ]
    assert all(goes_on) == (syntax != "mistral"), "of mistral's calls nothing marks the end"


@pytest.mark.parametrize("syntax", ["json", "tags", "pairs", "python"])  # the others are as one of them
def test_an_answer_is_calls_or_has_its_form(made: AnswerForms, syntax: str) -> None:
    """Calls alone, without text around them; functions that are not strict have any object where that can be read."""
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    opens, numbers = opening(syntax), set[int]()
    weather = {**FUNCTIONS[0], "strict": True}
    grammar = call_grammar(SYNTAXES[syntax], [weather, FUNCTIONS[1]], json.dumps, must=False, form=Grammar.json(schema))
    for seed in range(16):
        drawn, walking, answer = random.Random(seed), rules(made, SamplingParams(grammar=grammar)), list[int]()
        while END not in answer:
            may = allowed(walking.masks(answer, len(answer))[0])
            answer.append(END if END in may and len(answer) > 100 else drawn.choice(sorted(may)))
        text = made._prompts.needed.decode(answer)
        before, *calls = text.split(opens)
        numbers.add(len(calls))
        if not calls:
            jsonschema.validate(json.loads(text), schema)
            continue
        assert before == ""
        for call in (parsed(syntax, opens + each.rstrip("\n")) for each in calls):
            if call["name"].removeprefix("functions.") == "weather":
                jsonschema.validate(call["arguments"], weather["parameters"])
    assert {0, 1} <= numbers
    assert max(numbers) > 1


def test_in_a_syntax_that_is_not_known_an_answer_has_its_form(made: AnswerForms) -> None:
    form = Grammar.json({"type": "object", "x-guidance": {"lenient": True, "whitespace_flexible": True}})
    for syntax in (None, IN_A_TEXT):
        assert call_grammar(syntax, FUNCTIONS, json.dumps, must=False, form=form) is form
    known = call_grammar(SYNTAXES["mistral"], FUNCTIONS, json.dumps, must=False, form=form)
    assert call_grammar(SYNTAXES["mistral"], FUNCTIONS, json.dumps, form=form) == call_grammar(
        SYNTAXES["mistral"], FUNCTIONS, json.dumps
    )
    assert '"whitespace_flexible": true, "lenient": false, "coerce_one_of": false' in known.text
    with pytest.raises(RequestError, match="more digits"):
        call_grammar(SYNTAXES["mistral"], FUNCTIONS, json.dumps, must=False, form=Grammar.json({"const": 2**60}))


ODD: tuple[tuple[dict[str, Any], str], ...] = (
    ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}}, '{"x":1}'),
    ({"type": "object", "propertyNames": {"pattern": "^a", "maxLength": 3}}, '{"ab":[1]}'),
    ({"type": "string", "format": "starts_with"}, '"ab"'),
    ({"type": "string", "format": "date"}, '"2024-02-29"'),
    ({"type": "string", "pattern": "^(?=a)b"}, '"ab"'),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1,1]"),
    ({"type": "integer", "maximum": 2**64}, "5"),
    ({"type": "integer", "if": {"minimum": 3}, "then": {"maximum": 5}}, "9"),
    ({"anyOf": [{"type": "object", "properties": {"a": {"not": {}}}}, {"type": "array"}]}, "[]"),
    ({"type": ["object", "array"], "items": {"$ref": "#/$defs/none"}}, "[1]"),
    ({"oneOf": [{"type": "number"}, {"type": "integer", "minimum": 1}]}, "5"),
)


@pytest.mark.parametrize("syntax", ["json", "tags", "pairs"])
def test_a_call_that_is_not_strict_is_enforced_as_far_as_it_can_be(made: AnswerForms, syntax: str) -> None:
    """Neither it nor another function is refused; what can be enforced is."""
    known, tried = SYNTAXES[syntax], made._compiler.compiles
    for schema, value in ODD:
        both = {"odd": schema, "kind": {"type": "string", "enum": ["up", "down"]}}
        odd = {"name": "fs.read", "parameters": {"type": "object", "properties": both, "required": ["odd", "kind"]}}
        for must in (True, False):
            strict = {**FUNCTIONS[0], "strict": True}
            grammar = call_grammar(known, [strict, odd], json.dumps, must=must, compiles=tried)
            walking = rules(made, SamplingParams(grammar=grammar))
            for kind, may_be in (("up", True), ("left", not must and known.keyed is None)):
                call = known.written([("fs.read", {"odd": json.loads(value), "kind": kind}, "")])
                answer = made._prompts.needed.encode(call, adds_special=False)
                is_call = all(token in allowed(walking.masks(answer[:i], i)[0]) for i, token in enumerate(answer))
                assert is_call == may_be, (schema, kind, must)


def test_arguments_are_any_where_no_parameter_is_known(made: AnswerForms) -> None:
    for syntax in ("json", "pairs"):
        call = SYNTAXES[syntax].written([("f", {"a": [1]}, "")])
        for parameters in (5, {"type": "array"}, {"type": "object", "anyOf": 5}, {"properties": 5}):
            odd = [{"name": "f", "parameters": parameters}, {"name": 'a"b'}]
            grammar = call_grammar(SYNTAXES[syntax], odd, json.dumps, compiles=made._compiler.compiles)
            answer = made._prompts.needed.encode(call, adds_special=False)
            assert len(rules(made, SamplingParams(grammar=grammar)).admitted([], answer)) == len(answer)


def test_what_is_not_strict_has_any_arguments_where_none_must_be_called(made: AnswerForms) -> None:
    strict = [{**FUNCTIONS[0], "strict": True}, FUNCTIONS[1]]
    with pytest.raises(RequestError, match="strict: the model's syntax for calls cannot be enforced"):
        call_grammar(IN_A_TEXT, strict, json.dumps, must=False)
    walking = rules(made, SamplingParams(grammar=call_grammar(SYNTAXES["json"], strict, json.dumps, must=False)))
    for name, is_free in (("time-now", True), ("weather", False)):
        call = f'<tool_call>\n{{"name": "{name}", "arguments": {{"other":1}}}}\n</tool_call>'
        answer = made._prompts.needed.encode(call, adds_special=False)
        assert (len(walking.admitted([], answer)) == len(answer)) == is_free


_TEXTS = {
    "Oslo": "Oslo",
    "": "",
    'say "hi" \\ it\'s': 'say "hi" \\ it\'s',
    "if a < b:\n    </div> </": "if a < b:\n    </div> </",
    "[1, 2]": "[1, 2]",
    "5": "5",
    "x</parameter>y": None,
    "x</invoke>": "x</invoke>",
    " x": None,
}
_NESTED = {"type": "object", "properties": {"t": {"type": "string"}}, "required": ["t"], "additionalProperties": False}
_READ: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "tags": [
        ({"type": "string"}, {**_TEXTS, "NULL": "NULL"}),
        ({"type": ["string", "null"]}, {"Oslo": "Oslo", "null": ..., "5": "5", "b'x'": "b'x'", "None, 1": "None, 1"}),
        ({"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}, {"5": "5", "null": ..., "{}": "{}"}),
        ({"type": ["integer", "null"]}, {"5": 5, "null": ..., "x": None}),
        ({"$ref": "#/$defs/nested"}, {'{"t":"a"}': {"t": "a"}, '{"t":"</parameter>"}': None}),
        ({"anyOf": [{"$ref": "#/$defs/nested"}, {"type": "null"}]}, {'{"t":"<b>"}': {"t": "<b>"}, "null": ...}),
        ({"enum": ["red", "null", None]}, {"red": "red", "null": ...}),
    ],
    "pairs": [
        ({"type": "string"}, {"null": "null", "x</parameter>y": "x</parameter>y", "x</value>": None, "": ""}),
        ({"anyOf": [{"$ref": "#/$defs/nested"}, {"type": "null"}]}, {'{"t":"</b>"}': {"t": "</b>"}}),
        ({"type": "number"}, {"1.5": 1.5, "1E999": None}),
        ({"type": "array", "items": {}}, {'["<",[1]]': ["<", [1]], '[{"a":"</value>"}]': None}),
    ],
}


@pytest.mark.parametrize("syntax", _READ)
def test_values_between_tags_are_read_as_they_were_meant(made: AnswerForms, syntax: str) -> None:
    """``None``: cannot be written; ``...``: is read as null."""
    known = SYNTAXES[syntax]
    keyed = known.keyed
    for schema, values in _READ[syntax]:
        parameters = {"properties": {"key": schema}, "required": ["key"], "$defs": {"nested": _NESTED}}
        function = {"name": "f", "parameters": parameters}
        walking = rules(made, SamplingParams(grammar=call_grammar(known, [function], json.dumps)))
        for value, meant in values.items():
            argument = f"{keyed.opens}key{keyed.middle(value)}{value}{keyed.closes}"
            body = known.body.replace(NAME, "f").replace(ARGUMENTS, argument)
            call = f"{known.opens}{known.before}{body}{known.behind}{known.closes}"
            answer = made._prompts.needed.encode(call, adds_special=False)
            is_whole = len(walking.admitted([], answer)) == len(answer) and END in allowed(
                walking.masks(answer, len(answer))[0]
            )
            assert is_whole == (meant is not None), (schema, value)
            if is_whole:
                found = parsed(syntax, call, [{"type": "function", "function": function}])["arguments"]
                assert found == {"key": None if meant is ... else meant}, (schema, value)


def test_markers_that_are_special_tokens_are_written_as_such(made: AnswerForms) -> None:
    assert made._as_lark("<|end|>{") == '<[0]> "{"'


@pytest.mark.parametrize(
    ("syntax", "function", "words"),
    [
        (None, FUNCTIONS[0], "no syntax"),
        (IN_A_TEXT, FUNCTIONS[0], "cannot be enforced"),
        ("json", {"name": 'a"b'}, "name"),
        ("pairs", {"name": "a", "parameters": {"properties": {"b": {"items": {"$ref": "#"}}}}}, "references"),
        ("pairs", {"name": "a", "parameters": {"properties": {"b": {"type": "string", "pattern": "x"}}}}, "pattern of"),
        ("pairs", {"name": "a", "parameters": {"properties": {"b": True}}}, "needs a schema"),
        ("pairs", {"name": "a", "parameters": {"properties": {}, "minProperties": 1}}, "minProperties of"),
        ("json", {"name": "a", "parameters": {"type": "array"}}, "must be an object"),
        ("tags", {"name": "a", "parameters": {"properties": {"b": {"anyOf": []}}}}, "could be another value"),
        ("pairs", {"name": "a", "parameters": {"properties": {"b c": {}}}}, "b c"),
        ("pairs", {"name": "a", "parameters": {"required": ["b"]}}, "'b'"),
        ("pairs", {"name": "a", "parameters": {"required": [{}]}}, "must be a list of names"),
        ("pairs", {"name": "a", "parameters": 5}, "parameters of a must be an object"),
        (
            "pairs",
            {"name": "a", "parameters": {"properties": {"b": {"type": "string", "enum": 5}}}},
            "choices of .* a.b",
        ),
        (
            "pairs",
            {"name": "a", "parameters": {"properties": {"b": {"type": "string", "minLength": 3, "maxLength": 2}}}},
            "lengths of .* a.b",
        ),
        ("json", {"name": "a", "parameters": {"title": "x" * (1 << 18)}}, "tools: a grammar may have 262,144"),
    ],
)
def test_what_cannot_be_enforced_is_refused(syntax: Any, function: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        call_grammar(SYNTAXES.get(syntax, syntax), [{**function, "strict": True}], json.dumps)


NUMBERS = {"type": "object", "properties": {"n": {"type": "integer"}, "f": {"type": "number"}}, "required": ["n", "f"]}


@pytest.mark.parametrize(
    ("arguments", "are_taken"),
    [
        ('{"n": 1, "f": 2.5}', True),
        ('{"n":1,"f":-2.5}', True),
        ('{"n":  1, "f": 2}', False),
        ('{"n":\r1, "f": 2}', False),
        ('{ "n": 1, "f": 2}', False),
        ('{"n": 1 , "f": 2}', False),
        ('{"n": 1, "f": 2} ', False),
        (f'{{"n": {"1" * 17}, "f": 2}}', False),
        (f'{{"n": 1, "f": {"1" * 17}}}', False),
        (f'{{"n": 1, "f": 0.{"3" * 10}}}', False),
    ],
)
def test_blanks_and_digits_come_to_an_end(made: AnswerForms, arguments: str, are_taken: bool) -> None:
    functions = [{"name": "f", "parameters": {**NUMBERS, "additionalProperties": False}}]
    walking = rules(made, SamplingParams(grammar=call_grammar(SYNTAXES["json"], functions, json.dumps)))
    text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    answer = made._prompts.needed.encode(text, adds_special=False)
    taken = [token in allowed(walking.masks(answer[:i], i)[0]) for i, token in enumerate(answer)]
    assert all(taken) is are_taken


@pytest.mark.parametrize("kind", ["integer", ["integer", "null"]])
def test_whole_numbers_of_forms_come_to_an_end(made: AnswerForms, kind: Any) -> None:
    walking = rules(made, SamplingParams(grammar=Grammar.json({"type": kind})))
    ones = made._prompts.needed.encode("1" * 40, adds_special=False)
    assert not all(token in allowed(walking.masks(ones[:i], i)[0]) for i, token in enumerate(ones))
