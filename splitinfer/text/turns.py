"""Conversations in forms that narrower chat templates take: a ladder from the conversation as it is to one that any
template takes, in which there are only turns of the user and of the assistant, in turns.

Clients send histories of every kind: system messages anywhere, two turns of the user in a row, calls with other
servers' ids, tools that a template has no place for. A template refuses some of these, and leaves out others without a
word. So a form counts only if the template takes it *and* every text of it is found in what the template writes: it is
written a second time with a word of its own in the place of each text, which may be trimmed, or written as JSON.

Each step of the ladder (``STEPS``) changes only those turns that it is about, so that the beginning of a conversation
stays as it was when it grows, and its KV is found; and a form must do for the next turn, too, unless none does. If the
conversation as it is does not do, all steps are taken; then one after another is left out again, first those that
change most, as long as the template goes on taking everything.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from splitinfer.core.call_syntax import JSON_TOOLS, NAME, NUMBER, CallSyntax, kind_of
from splitinfer.errors import RequestError

Message = Mapping[str, Any]
Tool = Mapping[str, Any]

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""The names that templates have for the assistant's reasoning; conversations come with the first."""

_BETWEEN = "\n\n"
_ROLES = frozenset({"system", "user", "assistant", "tool"})
_GO_ON, _HEARD = "Continue.", "Noted."  # turns that templates demand and nobody said
_MAY_CALL = "You may call functions."
_ASKED: tuple[Message, ...] = ({"role": "user", "content": "?"},)
_NEXT: tuple[Message, ...] = ({"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And then?"})
_SHORT_ID = re.compile("[a-zA-Z0-9]{9}")
_RESULT = "<tool_response>\n{}\n</tool_response>"
_TOOLS = "You can call these functions:\n\n{}\n\nTo call one, write:\n\n{}"


@dataclass(frozen=True, slots=True)
class Form:
    """A conversation in one form, and the tools that the template is given."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()


FormStep = Callable[[Form], Form]


def fitting(asked: Form, write: Callable[[Form], str], syntax: CallSyntax = JSON_TOOLS) -> tuple[Form, str]:
    """Return the closest form of a conversation that a template takes as a whole, and what it writes for it.

    Args:
        write: renders the template; it may raise anything.
        syntax: in which calls are told that the template does not take. The reader of the answer reads the same.

    Raises:
        RequestError: there is none; with what the template makes of the conversation itself.
    """
    text, _ = _tried(asked, write, goes_on=True)
    if text is not None:
        return asked, text
    asked = with_whole_schemas(asked, write)
    ladder = steps(syntax)
    native = {name: step for name, step in ladder.items() if name not in ("tools", "systems")}
    for goes_on, each in itertools.product((True, False), (ladder, native) if asked.tools else (ladder,)):
        if (found := _closest(asked, write, each, goes_on=goes_on)) is not None:
            return found
    raise RequestError(f"the model's chat template {_tried(asked, write, goes_on=False)[1]}")


def _closest(
    asked: Form, write: Callable[[Form], str], ladder: Mapping[str, FormStep], *, goes_on: bool
) -> tuple[Form, str] | None:
    """Return as ``fitting`` does, or None if there is no such form. ``goes_on``: the template must take what may
    follow, too."""
    text, _ = _tried(asked, write, goes_on=goes_on)
    if text is not None:
        return asked, text
    kept = list(ladder.values())
    form = _taken(kept, asked)
    text, _ = _tried(form, write, goes_on=goes_on)
    for step in (ladder[name] for name in _MOST_FIRST if name in ladder):
        fewer = [one for one in kept if one is not step]
        closer = _taken(fewer, asked)
        if closer == form:
            kept = fewer
        elif closer != asked and (found := _tried(closer, write, goes_on=goes_on)[0]) is not None:
            kept, form, text = fewer, closer, found
    return None if text is None else (form, text)


def with_whole_schemas(form: Form, write: Callable[[Form], str]) -> Form:
    """Return a form with whole schemas in those tools for which the template raises, each tried alone."""

    def takes(tool: Tool) -> bool:
        try:
            write(Form(_ASKED, (tool,)))
        except Exception:  # noqa: BLE001 - a template is a program, and may raise anything
            return False
        return True

    return replace(form, tools=tuple(tool if takes(tool) else _whole(tool) for tool in form.tools))


def _whole(tool: Tool) -> Tool:
    """Return a tool with all that templates look for in a schema."""
    function = _function_of(tool)
    parameters = function.get("parameters")
    made = _whole_schema({"type": "object", **(parameters if isinstance(parameters, Mapping) else {})})
    told = {**function, "description": function.get("description") or "", "parameters": made}
    return {**tool, "function": told} if "function" in tool else told


def _whole_schema(schema: Any) -> dict[str, Any]:
    """Return a schema with one type, a description, and what belongs to objects and lists."""
    found = dict(schema) if isinstance(schema, Mapping) else {}
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(several := found.get(key), list | tuple):
            found[key] = [_whole_schema(one) for one in several]
            named = [one["type"] for one in found[key] if one["type"] != "null"]
            found.setdefault("type", (named or ["string"])[0])
    kinds = found.get("type")
    if isinstance(kinds, list | tuple):
        found["type"] = next((one for one in kinds if one != "null"), "string")
    elif not isinstance(kinds, str):
        choices = found.get("enum") or [found.get("const", "")]
        found["type"] = "object" if "properties" in found else kind_of(choices[0])
    found["description"] = found.get("description") or ""
    if found["type"] == "object":
        properties = found.get("properties")
        given = properties.items() if isinstance(properties, Mapping) else ()
        found |= {"properties": {key: _whole_schema(one) for key, one in given}}
        found.setdefault("required", [])
    if found["type"] == "array":
        found["items"] = _whole_schema(found.get("items"))
    if isinstance(more := found.pop("additionalProperties", None), Mapping):
        found["additionalProperties"] = _whole_schema(more)  # true and false are no types that could be told
    return found


def in_order(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the results of a turn's calls in the order of the calls: many templates write no ids.

    >>> calls = {"role": "assistant", "tool_calls": [{"id": "a"}, {"id": "b"}]}
    >>> results = [{"role": "tool", "tool_call_id": "b"}, {"role": "tool", "tool_call_id": "a"}]
    >>> [one["tool_call_id"] for one in in_order([calls, *results])[1:]]
    ['a', 'b']
    """
    made, at = list[Message](), 0
    while at < len(messages):
        message = messages[at]
        results = _results_of(messages, at)
        order = {call.get("id"): i for i, call in enumerate(_calls_of(message))}
        made += [message, *sorted(results, key=lambda one: order.get(one.get("tool_call_id"), len(order)))]
        at += 1 + len(results)
    return made


# -- whether a template takes everything -----------------------------------------------------------


def _tried(form: Form, write: Callable[[Form], str], *, goes_on: bool) -> tuple[str | None, str]:
    """Return a template's text for a form, or None and the reason if it does not take everything. ``goes_on``: it must
    also take an answer and a question after the form."""
    answered = not form.messages or form.messages[-1].get("role") == "assistant"
    marked, texts = _marked(form if answered or not goes_on else replace(form, messages=(*form.messages, *_NEXT)))
    try:
        text = write(form)
    except Exception as error:  # noqa: BLE001 - a template is a program, and may raise anything
        return None, f"refuses these messages: {error}"
    try:
        found = write(marked)
    except Exception as error:  # noqa: BLE001 - it does not go on, or looks into the texts and does not like the words
        if goes_on:
            return None, f"refuses what may follow: {error}"
        lost = (what for said, what in _marked(form)[1].values() if said.strip() not in text)
    else:
        lost = (what for word, (_, what) in texts.items() if word not in found)
    if (first := next(lost, None)) is None:
        return text, ""
    return None, f"leaves out {first}"


def _marked(form: Form) -> tuple[Form, dict[str, tuple[str, str]]]:
    """Return a form with a unique word in place of each text, and a map from each word to the text and its name."""
    texts = dict[str, tuple[str, str]]()

    def word(said: Any, what: str) -> Any:
        if not isinstance(said, str) or not said.strip():
            return said
        made = f"zq{len(texts)}qz"
        texts[made] = said, what
        return made

    def call(one: Mapping[str, Any]) -> Mapping[str, Any]:
        function = _function_of(one)
        told = {"name": word(function.get("name"), "a call of a tool")}
        match function.get("arguments"):
            case Mapping() as given:
                told["arguments"] = {key: word(value, "a call's arguments") for key, value in given.items()}
            case str(given):
                told["arguments"] = word(given, "a call's arguments")
        return _with_function(one, told)

    def message(one: Message) -> Message:
        said = one.get("content")
        made = {**one, "content": word(said, f"what the {one.get('role')} says: {str(said).strip()!r:.60}")}
        return made | ({"tool_calls": [*map(call, calls)]} if (calls := _calls_of(one)) else {})

    messages = tuple(map(message, form.messages))
    tools = tuple(
        _with_function(tool, {"name": word(_function_of(tool).get("name"), "the tools")}) for tool in form.tools
    )
    return Form(messages, tools), texts


def _function_of(one: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the function of a tool or of a call, whose name and arguments some programs write beside its id."""
    return found if isinstance(found := one.get("function"), Mapping) else one


def _with_function(one: Mapping[str, Any], told: Mapping[str, Any]) -> Mapping[str, Any]:
    changed = {key: value for key, value in told.items() if key in _function_of(one)}
    return {**one, "function": {**one["function"], **changed}} if "function" in one else {**one, **changed}


# -- the ladder ------------------------------------------------------------------------------------


def _taken(steps: Iterable[FormStep], form: Form) -> Form:
    for step in steps:
        form = step(form)
    return form


def _of_messages(change: Callable[[Sequence[Message]], Iterable[Message]]) -> FormStep:
    return lambda form: replace(form, messages=tuple(change(form.messages)))


@_of_messages
def _known_roles(messages: Sequence[Message]) -> Iterable[Message]:
    for message in messages:
        role = message.get("role")
        yield message if role in _ROLES else {**message, "role": "system" if role == "developer" else "user"}


@_of_messages
def arguments_as_objects(messages: Sequence[Message]) -> Iterable[Message]:
    def told(call: Mapping[str, Any]) -> Mapping[str, Any]:
        arguments = _function_of(call).get("arguments")
        return call if isinstance(arguments, Mapping) else _with_function(call, {"arguments": _object_of(arguments)})

    for message in messages:
        yield {**message, "tool_calls": [*map(told, calls)]} if (calls := _calls_of(message)) else message


def reasoning_as(form: Form, name: str) -> Form:
    """Return a form with the assistant's reasoning under the ``name`` that the template knows."""
    named = {THOUGHTS[0]: name}
    messages = ({named.get(key, key): value for key, value in one.items()} for one in form.messages)
    return replace(form, messages=tuple(messages))


def _object_of(arguments: Any) -> Mapping[str, Any]:
    """Return arguments that are no object as one: JSON that is one, or else an object that holds them."""
    if isinstance(arguments, str):
        try:
            found = json.loads(arguments or "null")
        except ValueError:
            found = arguments
        arguments = found if isinstance(found, Mapping | None) else arguments
    return arguments if isinstance(arguments, Mapping) else {} if arguments is None else {"arguments": arguments}


def _ids_in_form(form: Form, syntax: CallSyntax) -> Form:
    """Return calls and results with ids in the form that the model's calls have, or else of nine letters and digits, as
    Mistral's templates demand."""
    made, ids, number = list[Message](), dict[Any, str](), 0
    for message in form.messages:
        calls = list[Mapping[str, Any]]()
        for call in _calls_of(message):
            given, name = call.get("id"), str(_function_of(call).get("name"))
            if syntax.id_form:
                ids[given] = syntax.id_form.replace(NAME, name).replace(NUMBER, str(number))
            calls.append({**call, "id": ids.get(given, _short_id(given))})
            number += 1
        given = message.get("tool_call_id")
        is_result = {"tool_call_id": ids.get(given, _short_id(given))} if message.get("role") == "tool" else {}
        made.append({**message, **is_result, **({"tool_calls": calls} if calls else {})})
    return replace(form, messages=tuple(made))


def _short_id(given: Any) -> str:
    text = str(given or "")
    return text if _SHORT_ID.fullmatch(text) else hashlib.blake2b(text.encode("utf-8", "replace")).hexdigest()[:9]


@_of_messages
def _begun_by_user(messages: Sequence[Message]) -> Iterable[Message]:
    first = next((i for i, message in enumerate(messages) if message.get("role") != "system"), len(messages))
    if first < len(messages) and messages[first].get("role") == "user":
        return messages
    return [*messages[:first], {"role": "user", "content": _GO_ON}, *messages[first:]]


def _pairs_alone(messages: Sequence[Message], syntax: CallSyntax) -> Iterable[Message]:
    """Return calls without a result, and results without a call, as text."""
    made, asked = list[Message](), set[Any]()
    for i, message in enumerate(messages):
        if message.get("role") == "tool":
            made.append(message if message.get("tool_call_id") in asked else _told_result(message))
            continue
        came = {result.get("tool_call_id") for result in _results_of(messages, i)}
        asked = {call.get("id") for call in _calls_of(message)}
        made.append(_told_calls(message, [call for call in _calls_of(message) if call.get("id") not in came], syntax))
    return made


@_of_messages
def _one_call_a_turn(messages: Sequence[Message]) -> Iterable[Message]:
    at = 0
    while at < len(messages):
        message, calls = messages[at], _calls_of(messages[at])
        results = _results_of(messages, at) if len(calls) > 1 else []
        at += 1 + len(results)
        for i, call in enumerate(calls if len(calls) > 1 else ()):
            yield {**({"role": "assistant", "content": ""} if i else message), "tool_calls": [call]}
            came = [one for one in results if one.get("tool_call_id") == call.get("id")][:1]
            yield from came
            results = [one for one in results if one not in came]
        yield from results if len(calls) > 1 else [message]


@_of_messages
def _calls_alone(messages: Sequence[Message]) -> Iterable[Message]:
    """Yield the text beside calls as a turn before them."""
    for message in messages:
        if _calls_of(message) and _text_of(message).strip():
            yield {key: value for key, value in message.items() if key != "tool_calls"}
            yield {"role": "user", "content": _GO_ON}
            yield {**message, "content": ""}
        else:
            yield message


def _system_first(form: Form) -> Form:
    """Return a form that begins with a turn of the system if it has tools: some templates tell of them there alone."""
    if not form.tools or (form.messages and form.messages[0].get("role") == "system"):
        return form
    return replace(form, messages=({"role": "system", "content": _MAY_CALL}, *form.messages))


def tools_told(form: Form, syntax: CallSyntax) -> Form:
    """Return a form with the tools in the system's words."""
    if not form.tools:
        return form
    functions = "\n".join(json.dumps(_function_of(tool), ensure_ascii=False) for tool in form.tools)
    first, told = form.messages[:1], _TOOLS.format(functions, syntax.example)
    if first and first[0].get("role") == "system":
        system = {**first[0], "content": _together(_text_of(first[0]), told)}
        return Form((system, *form.messages[1:]))
    return Form(({"role": "system", "content": told}, *form.messages))


def exchanges_told(form: Form, syntax: CallSyntax) -> Form:
    """Return a form with calls as the assistant's words, and results as the user's."""
    told = [_told_calls(one, _calls_of(one), syntax) for one in form.messages]
    return replace(form, messages=tuple(_as_users(told, "tool")))


@_of_messages
def _later_systems_as_users(messages: Sequence[Message]) -> Iterable[Message]:
    first = next((i for i, one in enumerate(messages) if one.get("role") != "system"), len(messages))
    return [*messages[:first], *_as_users(messages[first:], "system")]


@_of_messages
def _systems_as_users(messages: Sequence[Message]) -> Iterable[Message]:
    return _as_users(messages, "system")


@_of_messages
def _results_answered(messages: Sequence[Message]) -> Iterable[Message]:
    """Yield a turn of the assistant between results and the user's next turn."""
    for i, message in enumerate(messages):
        if i and message.get("role") == "user" and messages[i - 1].get("role") == "tool":
            yield {"role": "assistant", "content": _HEARD}
        yield message


@_of_messages
def _neighbours_joined(messages: Sequence[Message]) -> Iterable[Message]:
    made = list[Message]()
    for message in messages:
        if made and made[-1].get("role") == message.get("role") != "tool":
            made[-1] = _joined(made[-1], message)
        else:
            made.append(message)
    return made


def steps(syntax: CallSyntax) -> Mapping[str, FormStep]:
    """Return the steps of the ladder by name. ``syntax``: used to write calls that the template does not take."""
    return {
        "roles": _known_roles,
        "objects": arguments_as_objects,
        "ids": lambda form: _ids_in_form(form, syntax),
        "user first": _begun_by_user,
        "pairs": _of_messages(lambda messages: _pairs_alone(messages, syntax)),
        "one call": _one_call_a_turn,
        "calls alone": _calls_alone,
        "system first": _system_first,
        "tools": lambda form: tools_told(form, syntax),
        "exchanges": lambda form: exchanges_told(form, syntax),
        "later systems": _later_systems_as_users,
        "systems": _systems_as_users,
        "results answered": _results_answered,
        "joined": _neighbours_joined,
    }


_MOST_FIRST = (
    "systems", "exchanges", "tools", "later systems", "pairs", "calls alone", "one call", "results answered",
    "system first", "user first", "joined", "ids", "objects", "roles",
)  # fmt: skip
"""The steps, those first that change most of what a conversation means."""


# -- parts of messages -----------------------------------------------------------------------------


def _text_of(message: Message) -> str:
    return str(message.get("content") or "")


def _calls_of(message: Message) -> Sequence[Mapping[str, Any]]:
    return message.get("tool_calls") or ()


def _results_of(messages: Sequence[Message], at: int) -> list[Message]:
    """Return the results that directly follow the calls of a message."""
    found = list[Message]()
    for message in messages[at + 1 :] if _calls_of(messages[at]) else ():
        if message.get("role") != "tool":
            break
        found.append(message)
    return found


def _told_calls(message: Message, told: Sequence[Mapping[str, Any]], syntax: CallSyntax) -> Message:
    """Return a message with some of its calls as a part of its text."""
    if not told:
        return message
    functions = [(_function_of(call), str(call.get("id") or "")) for call in told]
    text = syntax.written([(str(one.get("name")), _object_of(one.get("arguments")), name) for one, name in functions])
    left = [call for call in _calls_of(message) if call not in told]
    made = {key: value for key, value in message.items() if key != "tool_calls" or left}
    return made | {"content": _together(_text_of(message), text)} | ({"tool_calls": left} if left else {})


def _told_result(message: Message) -> Message:
    return {"role": "user", "content": _RESULT.format(_text_of(message))}


def _as_users(messages: Iterable[Message], role: str) -> list[Message]:
    """Return the messages of a role as the user's, joined with the user's own neighbours."""
    made, is_open = list[Message](), False
    for message in messages:
        changes = message.get("role") == role
        if changes:
            message = _told_result(message) if role == "tool" else {**message, "role": "user"}
        if made and made[-1].get("role") == message.get("role") == "user" and (changes or is_open):
            made[-1] = _joined(made[-1], message)
        else:
            made.append(message)
        is_open = changes
    return made


def _joined(one: Message, other: Message) -> Message:
    made = {**one, "content": _together(_text_of(one), _text_of(other))}
    for name in THOUGHTS:
        if thought := _together(one.get(name) or "", other.get(name) or ""):
            made[name] = thought
    return made | ({"tool_calls": calls} if (calls := [*_calls_of(one), *_calls_of(other)]) else {})


def _together(*texts: str) -> str:
    return _BETWEEN.join(filter(None, texts))
