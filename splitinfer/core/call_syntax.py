"""How one model writes calls of functions: the one description that reading, forms and histories follow.

    opens     <minimax:tool_call>                    before the first call of a section
    before    <invoke name="                         before each call's ``body``
    body      NAME">ARGUMENTS                        with the name, and where there are some, an id or a number
    behind    </invoke>                              behind each call
    between                                          what else stands between two calls
    closes    </minimax:tool_call>                   behind the last call

The arguments are one object (JSON or Python's), or stand one by one (``Keyed``). Where the body is a JSON object,
``members`` says which of its members are what, so that they are read in any order. Space between the parts means
nothing, except inside arguments. ``text.syntax_probes`` finds the description of a chat template by rendering it.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NAME, ID, NUMBER, ARGUMENTS, KEY = "\ufdd4", "\ufdd5", "\ufdd6", "\ufdd7", "\ufdd8"
"""What stands in a description for what varies."""

_DEEPEST = 64  # of schemas inside schemas
KINDS: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "boolean": (bool,), "integer": (int,), "number": (int, float), "null": (type(None),),
    "array": (list,), "object": (dict,),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Members:
    """The members of a call that is a JSON object. ``others``: names of members that mean nothing."""

    name: str
    arguments: str
    call_id: str | None = None
    others: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Keyed:
    """Arguments that stand one by one: ``opens`` KEY ``middles`` VALUE ``closes``, with ``between`` between two.

    ``middles``: what stands between the key and the value, by the value's kind, if it tells the kind; "" is any kind.
    ``quote``: what is around a text, so that a value ends by itself; empty if a value is all up to ``closes``, which
    may have the key once more; then objects and lists are written in the same way, one inside the other.
    """

    opens: str
    middles: tuple[tuple[str, str], ...]
    closes: str
    between: str
    quote: str = ""

    def middle(self, value: Any) -> str:
        """Return the text before a value of this kind."""
        found = dict(self.middles)
        return found.get(kind_of(value), found.get("", self.middles[0][1]))

    @property
    def is_nested(self) -> bool:
        """Whether objects and lists are written as arguments are."""
        return KEY in self.closes


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How calls are written. The module's text shows the parts. ``head``: a regular expression in place of ``before``
    and the body's text up to the arguments, for models that vary it; it has the groups that NAME and ID stand for."""

    body: str
    opens: str = ""
    before: str = ""
    behind: str = ""
    between: str = ""
    closes: str = ""
    members: Members | None = None
    keyed: Keyed | None = None
    is_text: bool = False  # the arguments are JSON inside a text
    id_form: str = ""  # of an id that has the function's name, and is all that is written of it
    head: str = ""

    @property
    def has_marker(self) -> bool:
        """Whether something marks a call that no other text has."""
        return bool((self.opens + self.before + self.head).strip(" \n[{\"'"))

    @property
    def example(self) -> str:
        """A call as an example for a model."""
        if self.members is not None and not self.is_text:
            body = self.body.replace(f'"{NAME}"', "...").replace(f'"{ID}"', "...").replace(NUMBER, "0")
            return f"{self.opens}{self.before}{body.replace(ARGUMENTS, '{...}')}{self.behind}{self.closes}"
        return self.written([("NAME", {"PARAMETER": "VALUE"}, "call00001")])

    @property
    def markers(self) -> tuple[str, ...]:
        """The fixed texts. A tokenizer may have special tokens for parts of them."""
        body = _fixed(self.body) if self.members is None else []
        texts = [self.opens, self.before, self.behind, self.between, self.closes, *body]
        if (keyed := self.keyed) is not None:
            texts += [keyed.opens, *_fixed(keyed.closes), keyed.between, keyed.quote]
            texts += [middle for _, middle in keyed.middles]
        return tuple(dict.fromkeys(text for text in map(str.strip, texts) if text))

    def written(self, calls: Iterable[tuple[str, Mapping[str, Any], str]]) -> str:
        """Return the text of calls, each given as its function's name, its arguments and its id."""
        texts = [
            f"{self.before}{self._body(number, *call)}{self.behind}" for number, call in enumerate(calls)
        ]  # fmt: skip
        return f"{self.opens}{self.between.join(texts)}{self.closes}"

    def _body(self, number: int, name: str, arguments: Mapping[str, Any], call_id: str) -> str:
        if (keyed := self.keyed) is not None:
            given = keyed.between.join(_argument(keyed, key, value) for key, value in arguments.items())
        else:
            given = json.dumps(arguments, ensure_ascii=False)
            given = json.dumps(given, ensure_ascii=False) if self.is_text else given
        made = self.body.replace(ID, self.id_form) if self.id_form else self.body
        for letter, text in ((NAME, name), (ID, call_id), (NUMBER, str(number)), (ARGUMENTS, given)):
            made = made.replace(letter, text)
        return made


@dataclass(frozen=True, slots=True)
class AnswerSyntax:
    """How one model writes answers.

    Args:
        calls: None if the template does not tell the model about functions.
        reasoning: the marks that open and close it; None if the model has no marks for it.
        left_out: marks around parts of an answer, which readers do not see.
        begun: the end of every prompt, if the answer's first mark begins there.
    """

    calls: CallSyntax | None = None
    reasoning: tuple[str, str] | None = None
    left_out: tuple[str, ...] = ()
    begun: str = ""
    takes_tools: bool = True  # the template tells of functions so that the answers are read
    takes_calls: bool = True  # the template writes calls so that they are read, or none
    takes_objects: bool = False  # arguments are given to the template as objects, not as JSON
    reasoning_name: str = "reasoning_content"  # of a message's part, for the template

    @property
    def markers(self) -> tuple[str, ...]:
        """All fixed texts that mark something."""
        calls = () if self.calls is None else self.calls.markers
        return tuple(dict.fromkeys((*(self.reasoning or ()), *self.left_out, *calls)))


def _argument(keyed: Keyed, key: str, value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if keyed.quote:
        text = _quoted(value, keyed.quote)
    elif keyed.is_nested and isinstance(value, dict | list):
        inside = value.items() if isinstance(value, dict) else [("item", one) for one in value]
        text = keyed.between.join(_argument(keyed, str(name), one) for name, one in inside)
    return f"{keyed.opens}{key}{keyed.middle(value)}{text}{keyed.closes.replace(KEY, key)}"


def _quoted(value: Any, quote: str) -> str:
    """Return a value as JSON with another mark around texts; with such, names have none."""
    if quote in ('"', "'"):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_quoted(one, quote)}" for key, one in value.items()) + "}"
    return "[" + ",".join(_quoted(one, quote) for one in value) + "]" if isinstance(value, list) else json.dumps(value)


def kind_of(value: Any) -> str:
    """Return JSON Schema's name for the type of a value."""
    return next((kind for kind, types in KINDS.items() if isinstance(value, types)), "string")


def admitted(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Return the JSON types that a schema admits, as far as it says. Empty: any."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return frozenset()
    if isinstance(name := schema.get("$ref"), str):
        return admitted(referred(name, root), root, depth + 1)
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return frozenset({kinds})
    if isinstance(kinds, list | tuple):
        return frozenset(one for one in kinds if isinstance(one, str))
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(choices, list | tuple):
        return frozenset(map(kind_of, choices))
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(several := schema.get(key), list | tuple):
            found = [admitted(one, root, depth + 1) for one in several]
            if key == "allOf":
                return next(filter(None, found), frozenset())
            return frozenset().union(*found) if all(found) else frozenset()
    return frozenset({"object"}) if "properties" in schema else frozenset()


def referred(name: str, root: Any) -> Any:
    """Return what a ``$ref`` of a schema names; None if ``root`` lacks it."""
    for part in name.lstrip("#/").split("/"):
        root = root.get(part) if isinstance(root, Mapping) else None
    return root


def _fixed(text: str) -> list[str]:
    """Return the parts of a text that do not vary."""
    for letter in (ID, NUMBER, ARGUMENTS, KEY):
        text = text.replace(letter, NAME)
    return text.split(NAME)


_JSON_BODY = f'{{"name": "{NAME}", "arguments": {ARGUMENTS}}}'
JSON_TOOLS = CallSyntax(
    _JSON_BODY, before="<tool_call>\n", behind="\n</tool_call>", members=Members("name", "arguments")
)
"""How calls are told where a template knows none."""

LFM2 = CallSyntax(
    f"{NAME}({ARGUMENTS}",
    "<|tool_call_start|>[", behind=")", between=", ", closes="]<|tool_call_end|>",
    keyed=Keyed("", (("", "="),), "", ", ", '"'),
)  # fmt: skip
GRANITE = CallSyntax(_JSON_BODY, "<|tool_call|>[", between=", ", closes="]", members=Members("name", "arguments"))
KIMI_K2 = CallSyntax(
    f"{ID}<|tool_call_argument_begin|>{ARGUMENTS}",
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_end|>", closes="<|tool_calls_section_end|>",
    id_form=f"functions.{NAME}:{NUMBER}",
)  # fmt: skip
NOT_WRITTEN: Sequence[tuple[tuple[str, ...], CallSyntax]] = (
    (("<|tool_call_start|>", "<|tool_list_start|>"), LFM2),
    (("<|tool_call|>",), GRANITE),
    (("<|tool_calls_section_begin|>",), KIMI_K2),
    (("<tool_call>",), JSON_TOOLS),
)
"""The exceptions: syntaxes of models whose templates tell functions and write no calls, by words of the template."""
