"""Calls of tools in the form of a model's own syntax, as Lark grammars: an answer that is one call, which parses, or
free text in which each call, once begun, is one.

A syntax is named as mlx-lm's parser of it is (``mlx_lm.tool_parsers``). Two families are known:

    JSON    the arguments are one JSON object, inside words of the model's own: json_tools, longcat, mistral, kimi_k2
    tags    each argument has a tag around it, text as it is and other values as JSON: qwen3_coder, glm47, minimax_m2,
            minicpm5

Text between tags cannot hold ``<``, which might begin a tag, nor blanks at its ends, which parsers take off. Of a
text's schema its choices and its lengths are enforced; what else there is about it is refused.

A call has a number only where its syntax has one. It is the model's own, of at most three digits; two calls of one
answer may have the same (``text.answer``).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from splitinfer.core.grammar import Grammar
from splitinfer.errors import RequestError

Marker = Callable[[str], str]
"""The Lark for a text of the model's own, which may be special tokens."""

_NOTES = frozenset({"type", "description", "title", "default", "examples", "enum", "const", "minLength", "maxLength"})
_NAME = re.compile(r"[\w-]+")
_ANY_NUMBER = "/[0-9]{1,3}/"


@dataclass(frozen=True, slots=True)
class _Syntax:
    """``opens``: what begins a call, and nothing else. ``around``: what stands behind it and before a call's arguments,
    with ``NAME`` for the function's and ``NUMBER`` for the call's, and behind these; ``argument``: what stands before
    and behind each argument's value, with ``KEY``; ``None``: they are one JSON object."""

    opens: str
    around: tuple[str, str]
    argument: tuple[str, str] | None = None


_JSON_TOOLS = _Syntax("<tool_call>", ('\n{"name": "NAME", "arguments": ', "}\n</tool_call>"))
SYNTAXES: Mapping[str, _Syntax] = {
    "json_tools": _JSON_TOOLS,
    "longcat": _Syntax("<longcat_tool_call>", ('{"name": "NAME", "arguments": ', "}</longcat_tool_call>")),
    "mistral": _Syntax("[TOOL_CALLS]", ("NAME[ARGS]", "")),
    "kimi_k2": _Syntax(
        "<|tool_calls_section_begin|>",
        (
            "<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>",
            "<|tool_call_end|><|tool_calls_section_end|>",
        ),
    ),
    "qwen3_coder": _Syntax(
        "<tool_call>", ("\n<function=NAME>\n", "</function>\n</tool_call>"), ("<parameter=KEY>\n", "\n</parameter>\n")
    ),
    "glm47": _Syntax("<tool_call>", ("NAME", "</tool_call>"), ("<arg_key>KEY</arg_key><arg_value>", "</arg_value>")),
    "minimax_m2": _Syntax(
        "<minimax:tool_call>",
        ('\n<invoke name="NAME">\n', "</invoke>\n</minimax:tool_call>"),
        ('<parameter name="KEY">', "</parameter>\n"),
    ),
    "minicpm5": _Syntax("<function name=", ('"NAME">', "</function>"), ('<param name="KEY">', "</param>")),
}
"""The known syntaxes, by mlx-lm's names."""


def call_grammar(
    syntax: str | None, tools: Sequence[Mapping[str, Any]], marker: Marker, *, must: bool = True
) -> Grammar:
    """An answer that calls one of some functions. With ``must`` false, any text is admitted; calls of ``strict``
    functions then have their schemas. ``tools``: each with ``name`` and ``parameters``.

    Raises:
        RequestError: the model's syntax is not known, or a function's parameters cannot be enforced in it.
    """
    asked = "tool_choice" if must else "strict"
    known = None if syntax is None else SYNTAXES.get(syntax)
    if known is None:
        why = (
            "the model has no syntax for calls"
            if syntax is None
            else f"calls in the syntax {syntax} cannot be enforced"
        )
        raise RequestError(f"{asked}: {why}; those in {', '.join(sorted(SYNTAXES))} can be")
    opens = marker(known.opens)
    rules = [f"start: {opens} call"] if must else _among_text(known, opens)
    rules.append(f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}")
    for i, tool in enumerate(tools):
        rules += _call(i, tool if must or tool.get("strict") else _of_any(tool, known), known, marker)
    return Grammar.lark("\n".join(rules))


def _among_text(syntax: _Syntax, opens: str) -> list[str]:
    """Calls among text that does not begin one, or one call behind it where nothing marks a call's end. ``opens``: what
    begins a call, in Lark."""
    goes_on = bool(syntax.around[1])
    if special := re.match(r"<\[(\d+)\]>", opens):
        free = f"free: <[^{special[1]}]>*"
        return [f"start: free ({opens} call free)*" if goes_on else f"start: free ({opens} call)?", free]
    found, anything = re.escape(syntax.opens).replace("/", "\\/"), r"(.|\n)*"
    behind = f"BEHIND: /{anything}/ & ~/{anything}{found}{anything}/"
    start = "(before call)* BEHIND" if goes_on else "BEHIND | before call"
    return [f"start: {start}", f"before[lazy]: /{anything}{found}/", behind]


def _of_any(tool: Mapping[str, Any], syntax: _Syntax) -> Mapping[str, Any]:
    """A function that is not strict beside one that is: its call is one, with any arguments."""
    if syntax.argument is not None:
        raise RequestError(f"strict: {tool['name']!r:.60} must be strict, too, in a syntax with tags")
    return {**tool, "parameters": {"type": "object"}}


def _call(number: int, tool: Mapping[str, Any], syntax: _Syntax, marker: Marker) -> list[str]:
    name, schema = str(tool["name"]), tool.get("parameters") or {"type": "object", "properties": {}}
    if not _NAME.fullmatch(name):
        raise RequestError(f"tools: the function's name {name!r:.60} cannot be enforced")
    if not isinstance(schema, Mapping):
        raise RequestError(f"tools: the parameters of {name} must be an object")
    before, behind = (_numbered(text, name, marker) for text in syntax.around)
    inside = f"args_{number}"
    rules = [f"call_{number}: {before} {inside} {behind}"]
    if syntax.argument is None:
        return [*rules, f"{inside}: %json {json.dumps({'type': 'object', **schema})}"]
    return [*rules, *_tagged(inside, name, schema, syntax.argument, marker)]


def _numbered(text: str, name: str, marker: Marker) -> str:
    return f" {_ANY_NUMBER} ".join(marker(part.replace("NAME", name)) for part in text.split("NUMBER"))


def _tagged(inside: str, name: str, schema: Mapping[str, Any], around: tuple[str, str], marker: Marker) -> list[str]:
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if not isinstance(properties, Mapping):
        raise RequestError(f"tools: the properties of {name} must be an object")
    if not isinstance(required, list | tuple) or not all(isinstance(key, str) for key in required):
        raise RequestError(f"tools: what {name} requires must be a list of names")
    if unknown := sorted(set(required) - set(properties)):
        raise RequestError(f"tools: {name} requires {unknown[0]!r:.60}, but its properties lack that")
    parts, rules = [], []
    for i, (key, value) in enumerate(properties.items()):
        if not _NAME.fullmatch(key):
            raise RequestError(f"tools: the parameter {key!r:.60} of {name} cannot be enforced in tags")
        rule = f"{inside}_{i}"
        before, behind = (marker(text.replace("KEY", key)) for text in around)
        parts.append(rule if key in required else f"{rule}?")
        rules += [f"{rule}: {before} {rule}_value {behind}", *_value(f"{rule}_value", f"{name}.{key}", value, schema)]
    return [f"{inside}: {' '.join(parts)}" if parts else f'{inside}: ""', *rules]


def _value(rule: str, where: str, value: Any, schema: Mapping[str, Any]) -> list[str]:
    if not isinstance(value, Mapping) or value.get("type") != "string":
        shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        given = dict(value) if isinstance(value, Mapping) else {}
        if not _is_typed(given):
            raise RequestError(f"tools: the parameter {where} needs one type to be enforced in tags")
        return [f"{rule}: %json {json.dumps({**shared, **given})}"]
    if unknown := sorted(set(value) - _NOTES):
        raise RequestError(f"tools: {unknown[0]} of the parameter {where} cannot be enforced in tags")
    choices = value.get("enum", [value["const"]] if "const" in value else None)
    form = _of_lengths(where, value) if choices is None else _of_choices(where, choices)
    return [f"{rule}: {rule.upper()}", f"{rule.upper()}: {form}"]


def _of_choices(where: str, choices: Any) -> str:
    given = choices if isinstance(choices, list | tuple) else ()
    texts = [one for one in given if isinstance(one, str) and one and one == one.strip() and "<" not in one]
    if not texts:
        raise RequestError(f"tools: the choices of the parameter {where} cannot be enforced in tags")
    return " | ".join(map(json.dumps, texts))


def _of_lengths(where: str, value: Mapping[str, Any]) -> str:
    least, most = value.get("minLength", 1), value.get("maxLength")
    are_numbers = all(type(one) is int for one in (least, 1 if most is None else most))
    if not are_numbers or (most is not None and most < max(1, least)):
        raise RequestError(f"tools: the lengths of the parameter {where} cannot be enforced in tags")
    least = max(1, least)
    inner = "{" + f"{max(0, least - 2)},{'' if most is None else max(0, most - 2)}" + "}"
    edge = r"[^<\s]"
    longer = f"{edge}[^<]{inner}{edge}"
    return f"/{longer if least > 1 else edge if most == 1 else f'{edge}|{longer}'}/"


def _is_typed(schema: Mapping[str, Any]) -> bool:
    """Whether a value of a schema is never text, which would stand between tags as it is."""
    kinds = schema.get("type")
    return isinstance(kinds, str) and kinds in ("integer", "number", "boolean", "null", "array", "object")
