"""Calls of tools in the form of a model's own syntax, as Lark grammars: an answer that is one call, which parses; free
text in which each call, once begun, is one; or calls alone, or else JSON of a schema: an agent's last answer.

A syntax is named as mlx-lm's parser of it is (``mlx_lm.tool_parsers``). Two families are known:

    JSON    the arguments are one JSON object, inside words of the model's own: json_tools, longcat, mistral, kimi_k2
    tags    each argument has a tag around it, text as it is and other values as JSON: qwen3_coder, glm47, minimax_m2,
            minicpm5

No value has a word that ends a call, and values between tags are such that the parser reads what was meant
(``grammar.tags``). Of the schema of a text between tags its choices and its lengths can be enforced.

A strict function has its schema, or is refused. Any other has it as far as it can be enforced: a parameter that cannot
has its type alone, or any value; where that does not do either, the arguments are any object, or any texts in tags.

A call has a number only where its syntax has one. It is the model's own, of at most three digits; two calls of one
answer may have the same (``text.answer``).
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from splitinfer.core.grammar import Grammar
from splitinfer.errors import RequestError
from splitinfer.grammar.compiling import json_in_lark
from splitinfer.grammar.tags import (
    AS_JSON,
    BY_PYTHON,
    BY_TYPES,
    BY_TYPES_OR_CDATA,
    Reading,
    Schema,
    guarded,
    json_of_calls,
    value_rules,
)

Marker = Callable[[str], str]
"""The Lark for a text of the model's own, which may be special tokens."""

_OF_TAGS = frozenset({"type", "properties", "required", "additionalProperties", "description", "title", "default"})
_SHARED = ("$defs", "definitions")
_NAME = re.compile(r"""[^\s"'<>=\[\]{}\\]+""")  # what no syntax takes for the end of a name
_ANY_NAME = r" /[\w.-]+/ "
_OF_A_VALUE = ("type", "enum", "const", "minLength", "maxLength")
_ANY_NUMBER = "/[0-9]{1,3}/"


@dataclass(frozen=True, slots=True)
class _Syntax:
    """``opens``: what begins a call, and nothing else. ``around``: what stands behind it and before a call's arguments,
    with ``NAME`` for the function's and ``NUMBER`` for the call's, and behind these; ``argument``: what stands before
    and behind each argument's value, with ``KEY``; ``None``: they are one JSON object. ``reading``: how the parser
    makes their values. ``ends``: the words that end something wherever they stand."""

    opens: str
    around: tuple[str, str]
    ends: tuple[str, ...] = ()
    argument: tuple[str, str] | None = None
    reading: Reading = AS_JSON


_JSON_TOOLS = _Syntax("<tool_call>", ('\n{"name": "NAME", "arguments": ', "}\n</tool_call>"), ("</tool_call>",))
SYNTAXES: Mapping[str, _Syntax] = {
    "json_tools": _JSON_TOOLS,
    "longcat": _Syntax(
        "<longcat_tool_call>",
        ('{"name": "NAME", "arguments": ', "}</longcat_tool_call>"),
        ("</longcat_tool_call>",),
    ),
    "mistral": _Syntax("[TOOL_CALLS]", ("NAME[ARGS]", "")),
    "kimi_k2": _Syntax(
        "<|tool_calls_section_begin|>",
        (
            "<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>",
            "<|tool_call_end|><|tool_calls_section_end|>",
        ),
        ("<|tool_call_end|>", "<|tool_calls_section_end|>"),
    ),
    "qwen3_coder": _Syntax(
        "<tool_call>",
        ("\n<function=NAME>\n", "</function>\n</tool_call>"),
        ("</parameter>", "</tool_call>"),
        ("<parameter=KEY>\n", "\n</parameter>\n"),
        BY_PYTHON,
    ),
    "glm47": _Syntax(
        "<tool_call>",
        ("NAME", "</tool_call>"),
        ("</arg_value>", "</tool_call>"),
        ("<arg_key>KEY</arg_key><arg_value>", "</arg_value>"),
    ),
    "minimax_m2": _Syntax(
        "<minimax:tool_call>",
        ('\n<invoke name="NAME">\n', "</invoke>\n</minimax:tool_call>"),
        ("</parameter>", "</invoke>", "</minimax:tool_call>"),
        ('<parameter name="KEY">', "</parameter>\n"),
        BY_TYPES,
    ),
    "minicpm5": _Syntax(
        "<function name=",
        ('"NAME">', "</function>"),
        ("</param>", "</function>"),
        ('<param name="KEY">', "</param>"),
        BY_TYPES_OR_CDATA,
    ),
}
"""The known syntaxes, by mlx-lm's names."""


def call_grammar(
    syntax: str | None,
    tools: Sequence[Mapping[str, Any]],
    marker: Marker,
    *,
    must: bool = True,
    form: Grammar | None = None,
    compiles: Callable[[Grammar], bool] = lambda _: True,
) -> Grammar:
    """Return the form of an answer that calls one of some functions. With ``must`` false, any text is admitted, and
    calls. ``tools``: each with ``name`` and ``parameters``. ``form``: a JSON schema, and an answer that need not call
    and does not has this form; all have it if the model's syntax is not known. ``compiles``: whether a form can be
    enforced.

    Raises:
        RequestError: the model's syntax is not known, the parameters of a strict function cannot be enforced in it, or
            all functions together are too long for a grammar.
    """
    asked, form = ("tool_choice", None) if must else ("strict", form)
    known = None if syntax is None else SYNTAXES.get(syntax)
    if known is None and form is not None:
        return form
    if known is None:
        why = (
            "the model has no syntax for calls"
            if syntax is None
            else f"calls in the syntax {syntax} cannot be enforced"
        )
        raise RequestError(f"{asked}: {why}; those in {', '.join(sorted(SYNTAXES))} can be")
    opens = marker(known.opens)
    if form is not None:
        more = f"(/\\n*/ {opens} call)*" if known.around[1] else ""
        rules = [f"start: form | {opens} call {more}", f"form: {json_in_lark(form)}"]
    else:
        rules = [f"start: {opens} call"] if must else _among_text(known, opens)
    named = [tool for tool in tools if tool.get("strict") or _NAME.fullmatch(str(tool["name"]))] or tools
    rules.append(f"call: {' | '.join(f'call_{i}' for i in range(len(named)))}")

    def made(*, are_free: bool) -> Grammar:
        calls = _Calls(known, marker, compiles, are_free)
        return _grammar(*rules, *(rule for i, tool in enumerate(named) for rule in calls.of(i, tool)))

    found = made(are_free=not must and known.argument is None)
    return found if compiles(found) else made(are_free=True)


def _grammar(*rules: str) -> Grammar:
    try:
        return Grammar.lark("\n".join(rules))
    except ValueError as error:
        raise RequestError(f"tools: {error}") from error


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


@dataclass(frozen=True, slots=True)
class _Calls:
    """Writes the calls of functions. ``are_free``: a function that is not strict has any arguments."""

    syntax: _Syntax
    marker: Marker
    compiles: Callable[[Grammar], bool]
    are_free: bool

    def of(self, number: int, tool: Mapping[str, Any]) -> list[str]:
        """Return the rules of one function's calls, in Lark."""
        name, schema = str(tool["name"]), tool.get("parameters") or {"type": "object", "properties": {}}
        if not _NAME.fullmatch(name):
            raise RequestError(f"tools: the function's name {name!r:.60} cannot be enforced")
        if tool.get("strict"):
            return _call(number, name, schema, self.syntax, self.marker)
        if not self.are_free and (rules := self._tried(number, name, schema)):
            return rules
        less = None if self.are_free else self._loosened(name, schema)
        return (less and self._tried(number, name, less)) or _call(number, name, None, self.syntax, self.marker)

    def _tried(self, number: int, name: str, schema: Any) -> list[str]:
        """Return the rules of calls with a schema, as far as llguidance knows its keywords. If it cannot be enforced,
        return an empty list."""
        try:
            rules = _call(number, name, schema, self.syntax, self.marker, is_strict=False)
            return rules if self.compiles(_grammar(f"start: call_{number}", *rules)) else []
        except RequestError:
            return []

    def _loosened(self, name: str, schema: Any) -> Schema | None:
        """Return a schema that asks of each parameter what can be enforced by itself."""
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        if not isinstance(properties, Mapping):
            return None
        shared, found = {key: schema[key] for key in _SHARED if key in schema}, dict[str, Any]()
        for key, value in properties.items():
            for way in (value, *_less(value), {} if self.syntax.argument is None else {"type": "string"}):
                if self._tried(0, name, {**shared, "properties": {key: way}}):
                    found[key] = way
                    break
        required = [key for key in _listed(schema.get("required")) if key in found]
        return {**shared, "type": "object", "properties": found, "required": required}


def _less(value: Any) -> Iterator[Schema]:
    """Yield schemas that ask for less than one does."""
    if isinstance(value, Mapping):
        yield {key: value[key] for key in _OF_A_VALUE if key in value}
        yield {"type": value.get("type")}


def _call(number: int, name: str, schema: Any, syntax: _Syntax, marker: Marker, *, is_strict: bool = True) -> list[str]:
    """Return the rules of a function's calls, in Lark. ``schema``: of its parameters; ``None``: any."""
    kinds = schema.get("type", "object") if isinstance(schema, Mapping) else "" if schema else "object"
    if "object" not in (kinds, *_listed(kinds)):
        raise RequestError(f"tools: the parameters of {name} must be an object")
    before, behind = (_numbered(text, name, marker) for text in syntax.around)
    inside = f"args_{number}"
    rules = [f"call_{number}: {before} {inside} {behind}"]
    if syntax.argument is None:
        arguments = guarded(f"the parameters of {name}", {**(schema or {}), "type": "object"}, syntax.ends)
        return [*rules, f"{inside}: {json_of_calls(arguments, is_strict=is_strict)}"]
    if schema is None:
        key, end = (_ANY_NAME.join(map(marker, text.split("KEY"))) for text in syntax.argument)
        values = value_rules(f"{inside}_value", name, {"type": "string"}, {}, syntax.reading, syntax.ends, end)
        return [*rules, f"{inside}: ({key} {inside}_value)*", *values]
    return [*rules, *_tagged(inside, name, schema, syntax, marker, is_strict)]


def _listed(value: Any) -> list[Any]:
    return [*value] if isinstance(value, list | tuple) else []


def _numbered(text: str, name: str, marker: Marker) -> str:
    return f" {_ANY_NUMBER} ".join(marker(part.replace("NAME", name)) for part in text.split("NUMBER"))


def _tagged(inside: str, name: str, schema: Schema, syntax: _Syntax, marker: Marker, is_strict: bool) -> list[str]:
    assert syntax.argument is not None
    if unknown := sorted(schema.keys() - _OF_TAGS - {*_SHARED, "$schema"}):
        raise RequestError(f"tools: {unknown[0]} of the parameters of {name} cannot be enforced in tags")
    shared = {key: schema[key] for key in _SHARED if isinstance(schema.get(key), Mapping)}
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
        before, behind = (marker(text.replace("KEY", key)) for text in syntax.argument)
        parts.append(rule if key in required else f"{rule}?")
        rules.append(f"{rule}: {before} {rule}_value")
        rules += value_rules(
            f"{rule}_value", f"{name}.{key}", value, shared, syntax.reading, syntax.ends, behind, is_strict=is_strict
        )
    return [f"{inside}: {' '.join(parts)}" if parts else f'{inside}: ""', *rules]
