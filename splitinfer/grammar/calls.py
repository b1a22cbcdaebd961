"""Calls of tools in the form of a model's own syntax, as Lark grammars: an answer that is one call, which parses; free
text in which each call, once begun, is one; or calls alone, or else JSON of a schema: an agent's last answer.

The syntax is what ``core.call_syntax`` describes, and ``text.call_reader`` reads. Arguments are one JSON object, or
stand one by one: texts as they are, other values as JSON. No text has a word that ends it. Of the schema of a text
between tags its choices and its lengths are enforced; what else there is about it is refused.

A call has an id or a number only where its syntax has one. It is the model's own, of at most three digits or nine
letters; two calls of one answer may have the same (``text.answer``).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from splitinfer.core.call_syntax import ARGUMENTS, ID, KEY, NAME, NUMBER, CallSyntax, Keyed
from splitinfer.core.grammar import Grammar
from splitinfer.errors import RequestError
from splitinfer.grammar.compiling import json_in_lark
from splitinfer.grammar.tags import guarded, json_of_calls, kind_of, value_rules

Marker = Callable[[str], str]
"""The Lark for a text of the model's own, which may be special tokens."""

_OF_TAGS = frozenset({"type", "properties", "required", "additionalProperties", "description", "title", "default"})
_SHARED = ("$defs", "definitions")
_VARYING = {NUMBER: "/[0-9]{1,3}/", ID: "/[a-zA-Z0-9]{9}/"}
_FIRST = re.compile(r"\s*(<[^<>]+>|\[[A-Z_]+\]|.*)", re.DOTALL)
_TAG = re.compile("<[^<>]+>?")


@dataclass(frozen=True, slots=True)
class _Syntax:
    """A call in parts. ``opens``: what begins a call, and nothing else. ``before``: what stands behind it and before
    the arguments. ``behind``: what stands behind these. ``ends``: words that no value has."""

    opens: str
    before: str
    behind: str
    ends: tuple[str, ...]
    keyed: Keyed | None
    is_json: bool

    @classmethod
    def of(cls, syntax: CallSyntax) -> "_Syntax":
        body = syntax.body.replace(ID, syntax.id_form) if syntax.id_form else syntax.body
        head, _, tail = body.partition(ARGUMENTS)
        before, behind = f"{syntax.opens}{syntax.before}{head}", f"{tail}{syntax.behind}{syntax.closes}"
        fixed = re.split(f"[{NAME}{ID}{NUMBER}]", before)[0]
        found = _FIRST.match(fixed)
        opens = found[0] if found is not None else fixed
        keyed, ends = syntax.keyed, list[str]()
        if keyed is not None and not keyed.quote:
            closes = keyed.closes.strip().partition(KEY)[0] or keyed.between.strip()[:1]
            tag = _TAG.search(closes)
            ends = [tag[0] if tag is not None else closes[:1]]
            ends += [")"] if not keyed.closes.strip() else []
        return cls(opens, before[len(opens) :], behind, tuple(ends), keyed, syntax.members is not None)


def call_grammar(
    syntax: CallSyntax | None,
    tools: Sequence[Mapping[str, Any]],
    marker: Marker,
    *,
    must: bool = True,
    form: Grammar | None = None,
) -> Grammar:
    """An answer that calls one of some functions. With ``must`` false, any text is admitted; calls of ``strict``
    functions then have their schemas. ``tools``: each with ``name`` and ``parameters``. ``form``: a JSON schema, and
    an answer that need not call and does not has this form; all have it if the model's syntax is not known.

    Raises:
        RequestError: the model's syntax is not known, a function's parameters cannot be enforced in it, or all of them
            together are too long for a grammar.
    """
    asked, form = ("tool_choice", None) if must else ("strict", form)
    if syntax is None or syntax.is_text or syntax.head or (syntax.keyed is not None and syntax.keyed.is_nested):
        if form is not None:
            return form
        why = "the model has no syntax for calls" if syntax is None else "the model's syntax for calls"
        raise RequestError(f"{asked}: {why}{'' if syntax is None else ' cannot be enforced'}")
    known = _Syntax.of(syntax)
    opens = marker(known.opens) if known.opens else '""'
    if form is not None:
        more = f"(/\\n*/ {opens} call)*" if known.behind else ""
        rules = [f"start: form | {opens} call {more}", f"form: {json_in_lark(form)}"]
    else:
        rules = [f"start: {opens} call"] if must else _among_text(known, opens)
    keeps_all = must or (form is not None and known.keyed is not None)
    rules.append(f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}")
    for i, tool in enumerate(tools):
        rules += _call(i, tool if keeps_all or tool.get("strict") else _of_any(tool, known), known, marker)
    try:
        return Grammar.lark("\n".join(rules))
    except ValueError as error:
        raise RequestError(f"tools: {error}") from error


def _among_text(syntax: _Syntax, opens: str) -> list[str]:
    """Calls among text that does not begin one, or one call behind it where nothing marks a call's end. ``opens``: what
    begins a call, in Lark."""
    goes_on = bool(syntax.behind)
    if special := re.match(r"<\[(\d+)\]>", opens):
        free = f"free: <[^{special[1]}]>*"
        return [f"start: free ({opens} call free)*" if goes_on else f"start: free ({opens} call)?", free]
    found, anything = re.escape(syntax.opens).replace("/", "\\/"), r"(.|\n)*"
    behind = f"BEHIND: /{anything}/ & ~/{anything}{found}{anything}/"
    start = "(before call)* BEHIND" if goes_on else "BEHIND | before call"
    return [f"start: {start}", f"before[lazy]: /{anything}{found}/", behind]


def _of_any(tool: Mapping[str, Any], syntax: _Syntax) -> Mapping[str, Any]:
    """A function that is not strict beside one that is: its call is one, with any arguments."""
    if syntax.keyed is not None:
        raise RequestError(f"strict: {tool['name']!r:.60} must be strict, too, in a syntax with tags")
    return {**tool, "parameters": {"type": "object"}}


def _call(number: int, tool: Mapping[str, Any], syntax: _Syntax, marker: Marker) -> list[str]:
    name, schema = str(tool["name"]), tool.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(schema, Mapping):
        raise RequestError(f"tools: the parameters of {name} must be an object")
    before, behind = _varied(syntax.before, name, syntax, marker), marker(syntax.behind) if syntax.behind else ""
    inside = f"args_{number}"
    rules = [f"call_{number}: {before} {inside} {behind}"]
    if syntax.keyed is None:
        if "object" not in (schema.get("type", "object"), *_listed(schema.get("type"))):
            raise RequestError(f"tools: the parameters of {name} must be an object")
        arguments = guarded(f"the parameters of {name}", {**schema, "type": "object"}, syntax.ends)
        return [*rules, f"{inside}: {json_of_calls(arguments)}"]
    return [*rules, *_tagged(inside, name, schema, syntax, syntax.keyed, marker)]


def _listed(value: Any) -> list[Any]:
    return [*value] if isinstance(value, list | tuple) else []


def _varied(text: str, name: str, syntax: _Syntax, marker: Marker) -> str:
    """Return the Lark of a text with a function's name, and with an id or a number of the model's own."""
    text = text.replace(NAME, json.dumps(name, ensure_ascii=False)[1:-1] if syntax.is_json else name)
    parts = [
        _VARYING[part] if part in _VARYING else marker(part) for part in re.split(f"([{ID}{NUMBER}])", text) if part
    ]
    return " ".join(parts)


def _tagged(
    inside: str, name: str, schema: Mapping[str, Any], syntax: _Syntax, keyed: Keyed, marker: Marker
) -> list[str]:
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
    optional, rules = list[str](), list[str]()
    for i, (key, value) in enumerate(properties.items()):
        rule = f"{inside}_{i}"
        kind = kind_of(value, shared)
        middles = dict(keyed.middles)
        middle = middles.get(kind, middles.get("", ""))
        if not middle:
            raise RequestError(f"tools: the parameter {key!r:.60} of {name} cannot be enforced: it needs one type")
        quote = keyed.quote if kind == "string" and keyed.quote not in ("", '"') else ""
        before, behind = marker(f"{keyed.opens}{key}{middle}{quote}"), f"{quote}{keyed.closes.replace(KEY, key)}"
        rules.append(f"{rule}: {before} {rule}_value")
        behind = marker(behind) if behind else ""
        if kind == "string" and keyed.quote == '"':
            text = json_of_calls(guarded(f"{name}.{key}", {**shared, **value}, ()))
            rules.append(f"{rule}_value: {text}")
        else:
            ends = (quote,) if quote else syntax.ends
            rules += value_rules(f"{rule}_value", f"{name}.{key}", value, shared, ends, behind)
        optional.append("" if key in required else "?")
    return [*_in_order(inside, optional, marker(keyed.between) if keyed.between.strip() else ""), *rules]


def _in_order(inside: str, optional: Sequence[str], between: str) -> list[str]:
    """Return the rules of arguments in the order of their schema, with what is between two."""
    names = [f"{inside}_{i}" for i in range(len(optional))]
    if not between:
        parts = [f"{name}{mark}" for name, mark in zip(names, optional, strict=True)]
        return [f"{inside}: {' '.join(parts)}" if parts else f'{inside}: ""']
    rules, first, rest = list[str](), '""', '""'
    for i in reversed(range(len(names))):
        # What may follow with nothing before it, and behind another argument.
        may_skip = [f" | {after}" if optional[i] else "" for after in (first, rest)]
        rules += [f"{inside}_first_{i}: {names[i]} {rest}{may_skip[0]}"]
        rules += [f"{inside}_rest_{i}: {between} {names[i]} {rest}{may_skip[1]}"]
        first, rest = f"{inside}_first_{i}", f"{inside}_rest_{i}"
    return [f"{inside}: {first}", *rules]
