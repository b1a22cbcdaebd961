"""Calls that must be made: what random walks under the masks write, mlx-lm's own parsers read."""

import importlib
import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema
import pytest
from constrained import allowed, open_forms, rules
from tokenizers import AddedToken, Tokenizer

from splitinfer import SamplingParams
from splitinfer.demo import TARGET
from splitinfer.errors import RequestError
from splitinfer.grammar.calls import SYNTAXES, call_grammar
from splitinfer.llm.forms import AnswerForms

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


@pytest.fixture(scope="module")
def made() -> Iterator[AnswerForms]:
    with open_forms() as found:
        yield found


def parsed(syntax: str, text: str) -> dict[str, Any]:
    module = importlib.import_module(f"mlx_lm.tool_parsers.{syntax}")
    inside = text.removeprefix(module.tool_call_start)
    assert inside != text, text
    if module.tool_call_end:
        inside, end, rest = inside.rpartition(module.tool_call_end)
        assert (end, rest) == (module.tool_call_end, "")
    found = module.parse_tool_call(inside, TOOLS)
    return found[0] if isinstance(found, list) else found


@pytest.mark.parametrize("syntax", SYNTAXES)
def test_every_call_parses_and_has_its_schema(made: AnswerForms, syntax: str) -> None:
    grammar = call_grammar(syntax, FUNCTIONS, json.dumps)
    names = set()
    for seed in range(12):
        drawn, walking, answer = random.Random(seed), rules(made, SamplingParams(grammar=grammar)), list[int]()
        while END not in answer:
            answer.append(drawn.choice(sorted(allowed(walking.masks(answer, len(answer))[0]))))
        call = parsed(syntax, made._prompts.decode(answer))
        function = next(one for one in FUNCTIONS if one["name"] == call["name"].removeprefix("functions."))
        parameters: Mapping[str, Any] = function["parameters"]
        jsonschema.validate(call["arguments"], parameters)
        names.add(function["name"])
    assert len(names) == 2, "one of two functions was never called"


def test_markers_that_are_special_tokens_are_written_as_such(made: AnswerForms) -> None:
    assert made._as_lark("<|end|>{") == '<[0]> "{"'
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True)])
    assert tokenizer.encode("[TOOL_CALLS]").ids == [2048]


@pytest.mark.parametrize(
    ("syntax", "function", "words"),
    [
        (None, FUNCTIONS[0], "no syntax"),
        ("muse_spark", FUNCTIONS[0], "muse_spark cannot be enforced; those in glm47"),
        ("json_tools", {"name": 'a"b'}, "name"),
        ("glm47", {"name": "a", "parameters": {"properties": {"b": {"type": "string", "pattern": "x"}}}}, "pattern of"),
        ("glm47", {"name": "a", "parameters": {"properties": {"b": {"anyOf": []}}}}, "needs a type"),
        ("glm47", {"name": "a", "parameters": {"properties": {"b c": {}}}}, "'b c'"),
        ("glm47", {"name": "a", "parameters": {"required": ["b"]}}, "'b'"),
    ],
)
def test_what_cannot_be_enforced_is_refused(syntax: str | None, function: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        call_grammar(syntax, [function], json.dumps)
