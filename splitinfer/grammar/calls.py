"""Calls of tools in the form of a model's own syntax, as Lark grammars: an answer that is one call, which parses; free
text in which each call, once begun, is one; or calls alone, or else JSON of a schema: an agent's last answer.

The syntax is what ``core.call_syntax`` describes, and ``text.call_reader`` reads. Arguments are one JSON object, or
stand one by one: texts as they are, other values as JSON. No text has a word that ends it. Of the schema of a text
between tags its choices and its lengths can be enforced.

A strict function has its schema, or is refused. Any other has it as far as it can be enforced: a parameter that cannot
has its type alone, or any value; where that does not do either, the arguments are any object, or any texts in tags.

A call has an id or a number only where its syntax has one. It is the model's own, of at most three digits or nine
letters; two calls of one answer may have the same (``text.answer``).
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from splitinfer.core.call_syntax import ARGUMENTS, ID, KEY, NAME, NUMBER, CallSyntax, Keyed
from splitinfer.core.grammar import Grammar
from splitinfer.errors import RequestError
from splitinfer.grammar.compiling import json_in_lark
from splitinfer.grammar.tags import Schema, guarded, json_of_calls, kind_of, value_rules, with_one_type

Marker = Callable[[str], str]
"""The Lark for a text of the model's own, which may be special tokens."""

_DEEPEST = 8  # of values inside values, in tags
_OF_LISTS = frozenset({"type", "items", "minItems", "maxItems", "description", "title", "default"})
_OF_TAGS = frozenset({"type", "properties", "required", "additionalProperties", "description", "title", "default"})
_SHARED = ("$defs", "definitions")
_NAME = re.compile(r"""[^\s"'<>=\[\]{}\\]+""")  # what no syntax takes for the end of a name
_ANY_NAME = r"/[\w.-]+/"
_OF_A_VALUE = ("type", "enum", "const", "minLength", "maxLength")
_VARYING = {NUMBER: "/[0-9]{1,3}/", ID: "/[a-zA-Z0-9]{9}/"}
_FIRST = re.compile(r"\s*(<[^<>]+>|\[[A-Z_]+\]|.*)", re.DOTALL)
_TAG = re.compile("<[^<>]+>?")


@dataclass(frozen=True, slots=True)
class _Syntax:
    """A call in parts.

    Args:
        opens: the text that begins a call and nothing else.
        before: the text from there to the arguments.
        behind: the text after the arguments.
        ends: words that no value has.
    """

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
            if closes := keyed.closes.strip().partition(KEY)[0]:
                tag = _TAG.search(closes)
                ends = [tag[0] if tag is not None else closes[:1]]
            else:  # nothing would say where a text ends
                keyed = replace(keyed, quote='"')
        return cls(opens, before[len(opens) :], behind, tuple(ends), keyed, syntax.members is not None)


def call_grammar(
    syntax: CallSyntax | None,
    tools: Sequence[Mapping[str, Any]],
    marker: Marker,
    *,
    must: bool = True,
    form: Grammar | None = None,
    compiles: Callable[[Grammar], bool] = lambda _: True,
) -> Grammar:
    """Return the form of an answer that calls one of some functions.

    Args:
        tools: each with ``name`` and ``parameters``.
        must: the answer is a call. Otherwise any text is admitted, and calls.
        form: a JSON schema. An answer that need not call, and does not, has this form; all have it if the model's
            syntax is not known.
        compiles: says whether a form can be enforced.

    Raises:
        RequestError: the model's syntax is not known, the parameters of a strict function cannot be enforced in it, or
            all functions together are too long for a grammar.
    """
    asked, form = ("tool_choice", None) if must else ("strict", form)
    if syntax is None or syntax.is_text or syntax.head:
        if form is not None:
            return form
        has_none, why = "the model has no syntax for calls", "the model's syntax for calls cannot be enforced"
        raise RequestError(f"{asked}: {has_none if syntax is None else why}")
    known = _Syntax.of(syntax)
    opens = marker(known.opens) if known.opens else '""'
    if form is not None:
        more = f"(/\\n*/ {opens} call)*" if known.behind else ""
        rules = [f"start: form | {opens} call {more}", f"form: {json_in_lark(form)}"]
    else:
        rules = [f"start: {opens} call"] if must else _among_text(known, opens)
    named = [tool for tool in tools if tool.get("strict") or _NAME.fullmatch(str(tool["name"]))] or tools
    rules.append(f"call: {' | '.join(f'call_{i}' for i in range(len(named)))}")

    def made(*, are_free: bool) -> Grammar:
        calls = _Calls(known, marker, compiles, are_free)
        return _grammar(*rules, *(rule for i, tool in enumerate(named) for rule in calls.of(i, tool)))

    found = made(are_free=not must and known.keyed is None)
    return found if compiles(found) else made(are_free=True)


def _grammar(*rules: str) -> Grammar:
    try:
        return Grammar.lark("\n".join(rules))
    except ValueError as error:
        raise RequestError(f"tools: {error}") from error


def _among_text(syntax: _Syntax, opens: str) -> list[str]:
    """Return calls among text that does not begin a call, or one call after it if nothing marks a call's end.
    ``opens``: what begins a call, in Lark."""
    goes_on = bool(syntax.behind)
    if special := re.match(r"<\[(\d+)\]>", opens):
        free = f"free: <[^{special[1]}]>*"
        return [f"start: free ({opens} call free)*" if goes_on else f"start: free ({opens} call)?", free]
    found, anything = re.escape(syntax.opens).replace("/", "\\/"), r"(.|\n)*"
    behind = f"BEHIND: /{anything}/ & ~/{anything}{found}{anything}/"
    start = "(before call)* BEHIND" if goes_on else "BEHIND | before call"
    return [f"start: {start}", f"before[lazy]: /{anything}{found}/", behind]


@dataclass(frozen=True, slots=True)
class _Calls:
    """Writes the calls of functions. ``are_free``: functions that are not strict take any arguments."""

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
            return self._call(number, name, schema, is_strict=True)
        if not self.are_free and (rules := self._tried(number, name, schema)):
            return rules
        less = None if self.are_free else self._loosened(name, schema)
        return (less and self._tried(number, name, less)) or self._call(number, name, None, is_strict=True)

    def _tried(self, number: int, name: str, schema: Any) -> list[str]:
        """Return calls with a schema, as far as llguidance knows its keywords, or an empty list."""
        try:
            rules = self._call(number, name, schema, is_strict=False)
            return rules if self.compiles(_grammar(f"start: call_{number}", *rules)) else []
        except RequestError:
            return []

    def _loosened(self, name: str, schema: Any) -> Schema | None:
        """Return a schema with what can be enforced of each parameter by itself."""
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        if not isinstance(properties, Mapping):
            return None
        shared, found = {key: schema[key] for key in _SHARED if key in schema}, dict[str, Any]()
        for key, value in properties.items():
            for way in (value, *_less(value), {} if self.syntax.keyed is None else {"type": "string"}):
                if self._tried(0, name, {**shared, "properties": {key: way}}):
                    found[key] = way
                    break
        required = [key for key in _listed(schema.get("required")) if key in found]
        return {**shared, "type": "object", "properties": found, "required": required}

    def _call(self, number: int, name: str, schema: Any, *, is_strict: bool) -> list[str]:
        """Return the rules of a function's calls. ``schema``: of its parameters; None: any arguments."""
        kinds = schema.get("type", "object") if isinstance(schema, Mapping) else "" if schema else "object"
        if "object" not in (kinds, *_listed(kinds)):
            raise RequestError(f"tools: the parameters of {name} must be an object")
        syntax, inside = self.syntax, f"args_{number}"
        rules = [f"call_{number}: {self._varied(syntax.before, name)} {inside} {self._marked(syntax.behind)}"]
        if syntax.keyed is None:
            arguments = guarded(f"the parameters of {name}", {**(schema or {}), "type": "object"}, syntax.ends)
            return [*rules, f"{inside}: {json_of_calls(arguments, is_strict=is_strict)}"]
        between = self._marked(syntax.keyed.between) if syntax.keyed.between.strip() else ""
        if schema is None:
            value = self._argument(f"{inside}_any", None, name, {"type": "string"}, {}, is_strict=is_strict)
            return [*rules, f"{inside}: ({inside}_any ({between} {inside}_any)*)?", *value]
        return [*rules, *self._tagged(inside, name, schema, between, is_strict=is_strict)]

    def _tagged(self, inside: str, name: str, schema: Schema, between: str, *, is_strict: bool) -> list[str]:
        """Return the rules of arguments that stand one by one. ``between``: the text between two, in Lark."""
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
        rules = list[str]()
        for i, (key, value) in enumerate(properties.items()):
            if not _NAME.fullmatch(key):
                raise RequestError(f"tools: the parameter {key!r:.60} of {name} cannot be enforced in tags")
            rules += self._argument(f"{inside}_{i}", key, f"{name}.{key}", value, shared, is_strict=is_strict)
        return [*_in_order(inside, ["" if key in required else "?" for key in properties], between), *rules]

    def _argument(
        self, rule: str, key: str | None, where: str, value: Any, shared: Schema, *, is_strict: bool
    ) -> list[str]:
        """Return the rules of one argument. ``key``: its name; None: any. ``value``: its schema."""
        keyed = self.syntax.keyed
        assert keyed is not None
        kind, middles = kind_of(value, shared), dict(keyed.middles)
        middle = middles.get(kind, middles.get("", ""))
        if not middle:
            raise RequestError(f"tools: the parameter {where} cannot be enforced: it needs one type")
        quote = keyed.quote if kind == "string" and keyed.quote not in ("", '"') else ""
        if key is None:
            before = f"{self._marked(keyed.opens)} {_ANY_NAME} {self.marker(middle + quote)}"
        else:
            before = self.marker(f"{keyed.opens}{key}{middle}{quote}")
        behind = self._marked(f"{quote}{keyed.closes.replace(KEY, key or '')}")
        if keyed.is_nested and kind in ("object", "array"):
            inside = self._nested(f"{rule}_in", where, with_one_type(value, shared)[0], shared, is_strict=is_strict)
            return [f"{rule}: {before} {rule}_in {behind}", *inside]
        rules = [f"{rule}: {before} {rule}_value"]
        if kind == "string" and keyed.quote == '"':
            text = json_of_calls(guarded(where, {**shared, **value}, ()), is_strict=is_strict)
            return [*rules, f"{rule}_value: {text}"]
        ends = (quote,) if quote else self.syntax.ends
        return [*rules, *value_rules(f"{rule}_value", where, value, shared, ends, behind, is_strict=is_strict)]

    def _nested(self, rule: str, where: str, value: Schema, shared: Schema, *, is_strict: bool) -> list[str]:
        """Return the rules of an object or a list that is written as arguments are."""
        if rule.count("_in") > _DEEPEST:
            raise RequestError(f"tools: the parameter {where} cannot be enforced in tags: it is too deep")
        if value["type"] == "object":
            return self._tagged(rule, where, {**shared, **value}, "", is_strict=is_strict)
        least, most = value.get("minItems", 0), value.get("maxItems", "")
        if value.keys() - _OF_LISTS or not isinstance(value.get("items"), Mapping):
            raise RequestError(f"tools: the list {where} cannot be enforced in tags")
        item = self._argument(f"{rule}_item", "item", where, value["items"], shared, is_strict=is_strict)
        return [f"{rule}: {rule}_item{{{least},{most}}}", *item]

    def _varied(self, text: str, name: str) -> str:
        """Return the Lark of a text with a function's name, and with an id or a number of the model's own."""
        text = text.replace(NAME, json.dumps(name, ensure_ascii=False)[1:-1] if self.syntax.is_json else name)
        parts = re.split(f"([{ID}{NUMBER}])", text)
        return " ".join(_VARYING[part] if part in _VARYING else self.marker(part) for part in parts if part)

    def _marked(self, text: str) -> str:
        """Return the Lark of a text that may be empty."""
        return self.marker(text) if text else ""


def _less(value: Any) -> Iterator[Schema]:
    """Yield schemas that ask for less than one does."""
    if isinstance(value, Mapping):
        yield {key: value[key] for key in _OF_A_VALUE if key in value}
        yield {"type": value.get("type")}


def _listed(value: Any) -> list[Any]:
    return [*value] if isinstance(value, list | tuple) else []


def _in_order(inside: str, optional: Sequence[str], between: str) -> list[str]:
    """Return the rules of arguments in the order of their schema. ``between``: the text between two, in Lark."""
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
