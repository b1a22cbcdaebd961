"""The form that an answer must have, and what the scheduler asks of whatever enforces it.

A ``Grammar`` is text: a JSON schema, a regular expression, a grammar in Lark or GBNF, or a list of answers. What it
admits is a function of the answer's own tokens, so it is matched once, on the coordinator, and on no other machine
(``splitinfer.grammar``): no cut, batch, draft or lost worker changes it. The scheduler sees it as ``TokenRules``.

    tokens so far ──TokenRules──> jump forward   the tokens that must come next: drafts that are always right
                                  mask           the tokens that may come next; the last stage chooses among these alone
                                  alternatives   the few texts of which one comes next; each is scored as a whole
"""

import json
import re
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

MAX_GRAMMAR = 1 << 18  # characters of a grammar's text
MAX_CHOICES = 4096
GBNF_RULE = re.compile(r"^[^\S\n]*[\w-]+\s*::=", re.MULTILINE)  # where one begins; Lark has a colon alone there
_MAX_NESTED = 128  # objects and lists of a schema in each other


class GrammarKind(StrEnum):
    """What a grammar's text is."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    GBNF = "gbnf"


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form of an answer, made by one of the functions below.

    ``text``: the schema as JSON, the regular expression, or the grammar.

    Raises:
        ValueError: the text is too long, or is not text.
    """

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not self.text:
            raise ValueError(f"a grammar must be text, not {self.text!r:.40}")
        if len(self.text) > MAX_GRAMMAR:
            raise ValueError(f"a grammar may have {MAX_GRAMMAR:,} characters, not {len(self.text):,}")

    @classmethod
    def json(cls, schema: Any = None) -> "Grammar":
        """Return JSON that a schema admits: a mapping, its text, or a pydantic model, of whose fields there are no
        others; ``None``: any JSON object."""
        schema = _read(schema)
        if not isinstance(schema, Mapping | bool):
            raise ValueError(f"a JSON schema must be an object, not {schema!r:.40}")
        if _is_deep(schema):
            raise ValueError(f"a JSON schema may have {_MAX_NESTED} objects and lists in each other")
        try:
            text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
        except (TypeError, ValueError) as error:
            raise ValueError(f"the JSON schema cannot be written as JSON: {error}") from None
        return cls(GrammarKind.JSON_SCHEMA, text)

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """Return text that a regular expression matches as a whole."""
        return cls(GrammarKind.REGEX, pattern)

    @classmethod
    def lark(cls, text: str) -> "Grammar":
        """Return text of a Lark grammar, as llguidance reads it; its first rule is ``start``."""
        return cls(GrammarKind.LARK, text)

    @classmethod
    def gbnf(cls, text: str) -> "Grammar":
        """Return text of a grammar as llama.cpp has it; its first rule is ``root``."""
        return cls(GrammarKind.GBNF, text)

    @classmethod
    def choice(cls, answers: Iterable[str]) -> "Grammar":
        """Return one of some answers."""
        texts = list(answers)
        if isinstance(answers, str) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise ValueError("choices must be a list of one or more texts, none of them empty")
        if len(texts) > MAX_CHOICES:
            raise ValueError(f"there may be {MAX_CHOICES:,} choices, not {len(texts):,}")
        return cls.lark("start: ANSWER\nANSWER: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts))

    @classmethod
    def of(cls, given: Any) -> "Grammar":
        """Return a grammar from what a caller gives: one, a JSON schema as a mapping, or a pydantic model.

        Raises:
            ValueError: it is something else.
        """
        if isinstance(given, Grammar):
            return given
        if isinstance(given, Mapping) or hasattr(given, "model_json_schema"):
            return cls.json(given)
        raise ValueError(f"grammar must be a Grammar, a JSON schema or a pydantic model, not {given!r:.40}")


def _read(schema: Any) -> Any:
    """Return a schema that was given as a pydantic model, as text, or not at all."""
    if hasattr(schema, "model_json_schema"):
        return _closed(schema.model_json_schema())
    if isinstance(schema, str):
        try:
            return json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the JSON schema is not JSON: {error}") from None
    return {"type": "object"} if schema is None else schema


def _closed(schema: Any) -> Any:
    """Return a model's schema without further fields, which the model would leave out anyway."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {name: _closed(one) for name, one in schema.items()}
    is_object = found.get("type") == "object" and isinstance(found.get("properties"), Mapping)
    return {"additionalProperties": False, **found} if is_object else found


def _is_deep(value: Any) -> bool:
    """Return whether a schema is nested too deeply for programs that go through it by recursion."""
    level, depth = [value], 0
    while level and depth <= _MAX_NESTED:
        below = [list(one.values()) if isinstance(one, Mapping) else one for one in level if _holds(one)]
        level, depth = [each for inside in below for each in inside], depth + 1
    return depth > _MAX_NESTED


def _holds(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple)


Text = tuple[int, ...]
Texts = tuple[Text, ...]
"""Texts of a form, as tokens."""


class TokenRules(Protocol):
    """What the tokens of one answer may be. Each method is a function of the tokens given, and of nothing else; tokens
    that share a beginning with those of the call before cost what is new. May be called from several threads.

    ``failure``: why the rules cannot be applied any further, if so; the request ends with it.
    """

    @property
    def failure(self) -> str | None: ...

    def refuses(self, answer: Seq[int]) -> bool:
        """Return whether a token of an answer could not follow those before it: then the rules have not been kept."""
        ...

    def jump_forward(self, answer: Seq[int], most: int) -> tuple[int, ...]:
        """Return the tokens, at most so many, that must follow ``answer``; none where there is a choice or an end."""
        ...

    def admitted(self, answer: Seq[int], drafts: Seq[int]) -> list[bool]:
        """For each of the ``drafts`` that may follow ``answer``, one after the other, whether no other may come."""
        ...

    def alternatives(self, answer: Seq[int]) -> Texts:
        """Return the tokens of the few texts one of which must follow ``answer``, if the likeliest is wanted and is not
        decided by their first tokens alone; empty elsewhere, and once it is decided. ``admitted`` admits no draft
        there."""
        ...

    def decide(self, answer: Seq[int], tokens: Text) -> None:
        """Have one of the ``alternatives`` be the tokens that must follow ``answer``."""
        ...

    def masks(self, answer: Seq[int], first: int) -> list[bytes | None]:
        """For each beginning of ``answer`` of at least ``first`` tokens, the shortest first, the tokens that may follow
        it: a bit for each id, the lowest first; ``None``: any."""
        ...


def beginning_of(text: Text, other: Text) -> bool:
    """Return whether some tokens are the beginning of others, and not all of them."""
    return len(text) < len(other) and other[: len(text)] == text
