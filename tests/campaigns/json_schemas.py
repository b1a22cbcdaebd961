"""Answers in the form of hundreds of schemas, by the built-in model at temperature 1, where nothing but the mask makes
JSON; each that ended is compared with its schema by jsonschema.

    python -m tests.campaigns.json_schemas [--skip N] [--schemas N] [--seeds N] [--stages N]

The schemas are made of the keywords by a seed: every keyword alone with several values, pairs of them, and compositions
to a depth of three, with references. It prints what was refused, by the first words of the reason; what was cut off,
and how much of that has a schema that bounds every length (digits of fractions are not bounded); and every answer that
its schema does not admit, of which there must be none.
"""

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import jsonschema
from stages import pipeline

from splitinfer import SamplingParams
from splitinfer.demo import TARGET
from splitinfer.errors import RequestError

Schema = dict[str, Any]

_AT_ONCE = 40  # answers

_PATTERNS = ("^[a-z]{2,5}$", "^\\d{3}-\\d{4}$", "^(ab|cd)+$", "x.?y", "^[A-Z][a-z]*( [A-Z][a-z]*){0,2}$", "^\\S{1,4}$")
_FORMATS = ("date", "time", "date-time", "email", "uuid", "ipv4", "ipv6", "hostname", "uri", "duration")
_LEAVES: tuple[Schema, ...] = (
    {"type": "boolean"}, {"type": "null"}, {"type": "integer", "minimum": -5, "maximum": 250},
    {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 99},
    {"type": "number", "minimum": 0, "maximum": 1}, {"type": "number", "exclusiveMinimum": -2.5, "maximum": 3.75},
    {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 8}, {"type": "string", "maxLength": 0},
    {"type": "string", "minLength": 3, "maxLength": 9}, {"type": "string", "maxLength": 20},
    {"enum": ["a", "the king", "ä ö", 3, 2.5, None, True, [1, 2], {"k": "v"}]},
    {"const": "yes"}, {"const": {"a": [1, None]}}, {"const": 12345678901234567890}, {"enum": [-1, 0, 1.5, 1e3]},
    {"enum": ["quote \" and \\ slash", "line\nbreak", "tab\t"]}, {"type": ["string", "null"], "maxLength": 4},
    {"type": ["integer", "boolean"], "minimum": 0, "maximum": 5},
)  # fmt: skip


def keywords() -> Iterator[Schema]:
    """Every keyword alone."""
    yield from _LEAVES
    yield from ({"type": "string", "pattern": one} for one in _PATTERNS)
    yield from ({"type": "string", "format": one} for one in _FORMATS)
    some, number = {"type": "string", "maxLength": 5}, {"type": "integer", "minimum": 0, "maximum": 9}
    closed = {"type": "object", "additionalProperties": False}
    for low, high in ((0, 0), (0, 3), (2, 2), (1, 4)):
        yield {"type": "array", "items": number, "minItems": low, "maxItems": high}
        yield {"type": "object", "additionalProperties": number, "minProperties": low, "maxProperties": high}
    yield {"type": "array", "prefixItems": [some, number], "items": False, "minItems": 2}
    yield {"type": "array", "prefixItems": [some], "items": number, "maxItems": 3}
    yield {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True, "maxItems": 3}
    yield {"type": "array", "contains": {"const": 1}, "items": number, "maxItems": 3}
    for required in ([], ["a"], ["b", "a"], ["c"]):
        yield {**closed, "properties": {"a": some, "b": number}, "required": required}
        yield {"type": "object", "properties": {"a": some, "b": number}, "required": required, "maxProperties": 4}
    yield {**closed, "patternProperties": {"^x[0-9]$": number}, "maxProperties": 3}
    yield {"type": "object", "propertyNames": {"pattern": "^[a-c]$"}, "maxProperties": 2}
    yield {**closed, "properties": {"a": some}, "dependentRequired": {"a": ["b"]}}
    yield {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}}
    yield {"not": {"type": "string"}}
    yield {"anyOf": [some, number]}
    yield {"oneOf": [some, number]}
    yield {"oneOf": [{"type": "integer", "maximum": 5, "minimum": 0}, {"type": "integer", "minimum": 3, "maximum": 9}]}
    yield {"allOf": [{"type": "integer", "minimum": 0}, {"maximum": 7}]}
    yield {"allOf": [{**closed, "properties": {"a": some}}, {"required": ["a"]}]}
    yield {"$defs": {"n": number}, "type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 3}
    chain = {"anyOf": [{"$ref": "#/$defs/t"}, {"type": "null"}]}
    link = {**closed, "properties": {"v": number, "n": chain}, "required": ["v", "n"]}
    yield {"$defs": {"t": link}, "$ref": "#/$defs/t"}
    named = {**closed, "properties": {"a": {"$ref": "#/definitions/s"}}, "required": ["a"]}
    yield {"definitions": {"s": some}, **named}
    yield {**closed, "properties": {"a/b": some, "": number, 'ä"': {"type": "null"}}, "required": ["", "a/b", 'ä"']}
    yield {**closed, "properties": {"a": False, "b": number}, "required": ["b"]}
    yield {"type": "object", "unevaluatedProperties": False, "properties": {"a": some}}


def compositions(seed: int) -> Iterator[Schema]:
    """Schemas made of others, without end."""
    drawn = random.Random(seed)
    while True:
        yield {"$defs": {f"d{i}": _composed(drawn, 0) for i in range(3)}, **_composed(drawn, 3)}


def _composed(drawn: random.Random, depth: int) -> Schema:
    kind = drawn.choice(("leaf", "object", "object", "array", "anyOf", "ref")) if depth else "leaf"
    match kind:
        case "object":
            names = drawn.sample(["id", "name", "the key", "x_1", "ä", "items", "type", "$ref2"], drawn.randint(0, 4))
            properties = {name: _composed(drawn, depth - 1) for name in names}
            required = [name for name in names if drawn.random() < 0.6]
            drawn.shuffle(required)
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case "array":
            low = drawn.randint(0, 2)
            return {
                "type": "array",
                "items": _composed(drawn, depth - 1),
                "minItems": low,
                "maxItems": low + drawn.randint(0, 2),
            }
        case "anyOf":
            return {"anyOf": [_composed(drawn, depth - 1) for _ in range(drawn.randint(1, 3))]}
        case "ref":
            return {"anyOf": [{"$ref": f"#/$defs/d{drawn.randint(0, 2)}"}, _composed(drawn, depth - 1)]}
    leaves = (
        *_LEAVES,
        *({"type": "string", "pattern": one} for one in _PATTERNS),
        {"type": "string", "format": "date"},
    )
    return drawn.choice(leaves)


def is_bounded(schema: Any, defs: Schema) -> bool:
    """Whether no part of an answer can go on for ever."""
    if not isinstance(schema, dict) or "enum" in schema or "const" in schema:
        return schema is not True
    if "anyOf" in schema or "$ref" in schema:
        name, others = (
            schema.get("$ref", "").rpartition("/")[2],
            {**defs, schema.get("$ref", "").rpartition("/")[2]: True},
        )
        inside = [*schema.get("anyOf", ()), *([defs.get(name, True)] if name else [])]
        return all(is_bounded(one, others if name else defs) for one in inside)
    types = schema.get("type", [])
    return bool(types) and all(_ends(kind, schema, defs) for kind in ([types] if isinstance(types, str) else types))


def _ends(kind: str, schema: Schema, defs: Schema) -> bool:
    match kind:
        case "string":
            pattern = schema.get("pattern", "*")
            is_short = pattern[0] == "^" and pattern[-1] == "$" and not set(pattern) & set("*+")
            return "maxLength" in schema or schema.get("format") in ("date", "uuid", "ipv4") or is_short
        case "integer":
            return bool(
                {"minimum", "exclusiveMinimum"} & schema.keys() and {"maximum", "exclusiveMaximum"} & schema.keys()
            )
        case "array":
            return "maxItems" in schema and is_bounded(schema.get("items", True), defs)
        case "object":
            inside = schema.get("properties", {}).values()
            return schema.get("additionalProperties") is False and all(is_bounded(one, defs) for one in inside)
    return kind in ("boolean", "null")


def main() -> None:
    """Run the campaign."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--schemas", type=int, default=400)
    options.add_argument("--skip", type=int, default=0, help="schemas that another run has tried")
    options.add_argument("--seeds", type=int, default=2, help="answers to each schema")
    options.add_argument("--stages", type=int, default=2)
    options.add_argument("--max-tokens", type=int, default=400)
    given = options.parse_args()
    schemas = [*islice(chain(keywords(), compositions(1)), given.skip, given.skip + given.schemas)]
    refused, ended, cut, wrong = Counter[str](), 0, [], 0
    shape = [12] if given.stages == 1 else [6, 6]
    with pipeline(TARGET, shape, max_running=_AT_ONCE) as llm:
        requests = []
        for number, schema in enumerate(schemas, given.skip):
            try:
                params = [
                    SamplingParams(grammar=schema, temperature=1.0, seed=seed, max_tokens=given.max_tokens)
                    for seed in range(number, number + given.seeds)
                ]
                requests += [(schema, llm.submit("The record of the king: ", one)) for one in params]
            except RequestError as error:
                refused[f"{error}"[:90]] += 1
        for schema, request in requests:
            output = request.result()
            if output.finish_reason != "stop":
                cut.append((output.finish_reason, output.error, schema))
                continue
            ended += 1
            problem = _problem(output.text, schema)
            if problem is not None:
                wrong += 1
                print("WRONG", problem, json.dumps(schema), repr(output.text))
    for words, count in refused.most_common():
        print(f"refused {count} of {len(schemas)}: {words}")
    for reason, error, schema in cut:
        print(f"not ended ({reason}) {error or ''}: {json.dumps(schema)[:150]}")
    bounded = [id(schema) for schema, _ in requests if is_bounded(schema, schema.get("$defs", {}))]
    short = sum(id(schema) in bounded for _, _, schema in cut)
    print(f"{short} of {len(bounded)} answers whose schema bounds everything did not end")
    print(f"{len(schemas)} schemas, {sum(refused.values())} refused; {ended} answers ended, {len(cut)} did not")
    print(f"{wrong} wrong")


def _problem(text: str, schema: Schema) -> str | None:
    try:
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{error}".split("\n", 1)[0][:120]
    return None


if __name__ == "__main__":
    main()
