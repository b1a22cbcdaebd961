"""The form that an answer must have, and the questions that the scheduler asks about it.

A ``Grammar`` is text: a JSON schema, a regular expression, a grammar in Lark or GBNF, or a list of answers. The tokens
that it admits depend on the answer's own tokens alone. So only the coordinator matches it, once
(``splitinfer.grammar``): no cut, batch, draft or lost worker changes it. The scheduler sees it as ``TokenRules``.

    tokens so far ──TokenRules──> jump forward   the tokens that must come next: drafts that are always right
                                  mask           the tokens that may come next; the last stage chooses only among these
                                  alternatives   a few texts, exactly one comes next; each is scored as a whole
"""

import json
import re
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from splitinfer.common.json_text import is_deeper

MAX_GRAMMAR = 1 << 18  # characters of a grammar's text
MAX_CHOICES = 4096
GBNF_RULE = re.compile(r"^[^\S\n]*[\w-]+\s*::=", re.MULTILINE)  # the beginning of a rule; Lark has ":" instead of "::="
_MAX_NESTED = 128  # levels of objects and lists in a schema


class GrammarKind(StrEnum):
    """The language of a grammar's text."""

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
        """Return the grammar of the JSON that a schema admits. The schema is a mapping, its text, or a pydantic model,
        whose JSON has no other fields. ``None`` admits any JSON object."""
        schema = _read(schema)
        if not isinstance(schema, Mapping | bool):
            raise ValueError(f"a JSON schema must be an object, not {schema!r:.40}")
        if is_deeper(schema, _MAX_NESTED):
            raise ValueError(f"a JSON schema may have {_MAX_NESTED} objects and lists in each other")
        try:
            text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
        except (TypeError, ValueError) as error:
            raise ValueError(f"the JSON schema cannot be written as JSON: {error}") from None
        return cls(GrammarKind.JSON_SCHEMA, text)

    @classmethod
    def regex(cls, pattern: str) -> "Grammar":
        """Return the grammar of text that a regular expression matches as a whole."""
        return cls(GrammarKind.REGEX, pattern)

    @classmethod
    def lark(cls, text: str) -> "Grammar":
        """Return a Lark grammar, in llguidance's dialect. Its first rule is ``start``."""
        return cls(GrammarKind.LARK, text)

    @classmethod
    def gbnf(cls, text: str) -> "Grammar":
        """Return a grammar in llama.cpp's GBNF. Its first rule is ``root``."""
        return cls(GrammarKind.GBNF, text)

    @classmethod
    def choice(cls, answers: Iterable[str]) -> "Grammar":
        """Return the grammar whose only answers are ``answers``."""
        texts = list(answers)
        if isinstance(answers, str) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise ValueError("choices must be a list of one or more texts, none of them empty")
        if len(texts) > MAX_CHOICES:
            raise ValueError(f"there may be {MAX_CHOICES:,} choices, not {len(texts):,}")
        return cls.lark("start: ANSWER\nANSWER: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts))

    @classmethod
    def of(cls, given: Any) -> "Grammar":
        """Return the grammar for ``given``: a grammar, a JSON schema as a mapping, or a pydantic model. Raise
        ValueError if it is something else."""
        if isinstance(given, Grammar):
            return given
        if isinstance(given, Mapping) or hasattr(given, "model_json_schema"):
            return cls.json(given)
        raise ValueError(f"grammar must be a Grammar, a JSON schema or a pydantic model, not {given!r:.40}")


def _read(schema: Any) -> Any:
    """Return a schema as a value. It may be given as a pydantic model, as text, or as None (any object)."""
    if hasattr(schema, "model_json_schema"):
        return _closed(schema.model_json_schema())
    if isinstance(schema, str):
        try:
            return json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the JSON schema is not JSON: {error}") from None
    return {"type": "object"} if schema is None else schema


def _closed(schema: Any) -> Any:
    """Return a model's schema without additional properties, which the model would drop anyway."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {name: _closed(one) for name, one in schema.items()}
    is_object = found.get("type") == "object" and isinstance(found.get("properties"), Mapping)
    return {"additionalProperties": False, **found} if is_object else found


Text = tuple[int, ...]
Texts = tuple[Text, ...]
"""Texts that a grammar admits, as tokens."""


class TokenRules(Protocol):
    """The rules for the tokens of one answer. Each method depends only on the tokens given. A call whose tokens begin
    like the last call's pays only for the new ones. May be called from several threads.

    ``failure``: why the rules can no longer be applied; the request then ends with this error.
    """

    @property
    def failure(self) -> str | None: ...

    def refuses(self, answer: Seq[int]) -> bool:
        """Return whether a token of ``answer`` cannot follow those before it, so that the rules were broken."""
        ...

    def jump_forward(self, answer: Seq[int], most: int) -> tuple[int, ...]:
        """Return up to ``most`` tokens that must follow ``answer``; empty if there is a choice or the answer may
        end."""
        ...

    def admitted(self, answer: Seq[int], drafts: Seq[int]) -> list[bool]:
        """Return, for each of the ``drafts`` that may follow ``answer`` one after the other, whether no other token may
        come."""
        ...

    def alternatives(self, answer: Seq[int]) -> Texts:
        """Return the tokens of the few texts from which the likeliest must follow ``answer``, if their first tokens
        alone do not decide it. Empty elsewhere, and once it is decided. ``admitted`` admits no draft there."""
        ...

    def decide(self, answer: Seq[int], tokens: Text) -> None:
        """Make ``tokens``, one of the ``alternatives``, the only tokens that may follow ``answer``."""
        ...

    def masks(self, answer: Seq[int], first: int) -> list[bytes | None]:
        """Return the tokens that may follow each beginning of ``answer`` that has at least ``first`` tokens, the
        shortest first: a bit for each id, lowest first, or None for any token."""
        ...


def beginning_of(text: Text, other: Text) -> bool:
    """Return whether ``text`` is a proper prefix of ``other``."""
    return len(text) < len(other) and other[: len(text)] == text
