"""A grammar as a matcher, within bounds of time and size.

A grammar is tried in another process first, within bounds of time and memory (``trial``); then it is compiled here, by
llguidance's own limits, which lets the GIL go meanwhile, so that nobody waits. What it does not support it refuses, and
so does this: a schema is enforced as a whole, or not at all. Lenient schemas and approximations are switched off,
whatever the schema says of them.

A grammar in GBNF becomes one in Lark by llguidance's own translation, which knows neither all of its escapes nor that a
dot stands for ends of lines, too: these are written otherwise first.

JSON is written without blanks unless the schema asks for them (``"x-guidance": {"whitespace_flexible": true}``).
"""

import json
import re
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import gbnf_to_lark

from splitinfer.core.grammar import GBNF_RULE, Grammar, GrammarKind
from splitinfer.errors import RequestError
from splitinfer.grammar.schemas import ESCAPES, enforceable
from splitinfer.grammar.trial import Trials, first_lines
from splitinfer.grammar.vocabulary import Vocabulary

_KEPT = 32  # compiled grammars
_MAX_ITEMS = 10_000  # of the parser for one token: a mask takes 80 ms at most, and usual ones need some hundreds
_IDS = re.compile(r"<\[[\^\d,-]+\]>")  # tokens by their ids, in Lark
_MAX_RULES = 1000  # of a grammar in GBNF; their translation takes time by the square of them, up to a second
# What is not closed goes to the end: else each further bracket would be looked at to the end, by the square of them.
_GBNF = re.compile(r'#[^\n]*|"(?:\\.|[^"\\])*+(?:"|\\?\Z)|\[(?:\\.|[^\]\\])*+(?:\]|\\?\Z)|\.', re.DOTALL)
# A comment, a text or an expression of Lark; or a special token by its name.
_IN_LARK = re.compile(
    r'(?:#|//)[^\n]*|"(?:\\.|[^"\\])*+(?:"|\\?\Z)|/(?:\\.|[^/\\])++(?:/|\\?\Z)|(<[^<>\s\[][^<>\s]*>)', re.DOTALL
)
_ESCAPED = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_DEFAULTS: Any = {"whitespace_flexible": False}
_OVERRIDES: Any = {"lenient": False, "coerce_one_of": False, **ESCAPES}


class Compiler:
    """Compiles grammars for one vocabulary. From any thread."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary, self._trials = vocabulary, Trials()
        self._compiled = lru_cache(_KEPT)(self._compile)

    def close(self) -> None:
        self._trials.close()

    def matcher(self, grammar: Grammar) -> Any:
        """Return a matcher of its own at the grammar's beginning: llguidance's ``LLMatcher``.

        Raises:
            RequestError: the grammar is invalid, too large, or has something that cannot be enforced.
        """
        return self._compiled(grammar).deep_copy()

    def _compile(self, grammar: Grammar) -> Any:
        text = self._tried(grammar)
        limits = LLParserLimits(step_max_items=_MAX_ITEMS)
        matcher = LLMatcher(self._vocabulary.tokenizer, text, log_level=0, limits=limits)
        if matcher.is_error():
            raise RequestError(f"the grammar cannot be enforced: {first_lines(matcher.get_error())}")
        return matcher

    def compiles(self, grammar: Grammar) -> bool:
        """Return whether a grammar can be enforced, as far as a trial without the vocabulary knows."""
        try:
            self._tried(grammar)
        except RequestError:
            return False
        return True

    def _tried(self, grammar: Grammar) -> str:
        """Try a grammar, and return it as llguidance reads it."""
        is_lark = grammar.kind is GrammarKind.LARK
        text = _as_llguidance(grammar.kind, _IN_LARK.sub(self._by_id, grammar.text) if is_lark else grammar.text)
        # The vocabulary of a trial has few tokens, so ids become 0 there.
        self._trials.check(_IDS.sub(lambda ids: re.sub(r"\d+", "0", ids[0]), text) if is_lark else text)
        return text

    def _by_id(self, part: re.Match[str]) -> str:
        """Write a special token of a grammar in Lark by its id, because a trial knows no names. Change nothing else."""
        if part[1] is None:
            return part[0]
        names = self._vocabulary.names
        if part[1] not in names:
            some = ", ".join([*names][:8]) or "none"
            raise RequestError(f"the grammar names {part[1]:.60}, but the model's special tokens are {some}")
        return f"<[{names[part[1]]}]>"


def _as_llguidance(kind: GrammarKind, text: str) -> str:
    try:
        match kind:
            case GrammarKind.JSON_SCHEMA:
                schema = json.dumps(enforceable(json.loads(text)))
                return str(LLMatcher.grammar_from_json_schema(schema, _DEFAULTS, _OVERRIDES))
            case GrammarKind.REGEX:
                return str(LLMatcher.grammar_from_regex(text))
            case GrammarKind.LARK:
                return str(LLMatcher.grammar_from_lark(text))
            case GrammarKind.GBNF:
                return str(LLMatcher.grammar_from_lark(_as_lark(text)))
    except ValueError as error:
        raise RequestError(f"the grammar cannot be enforced: {first_lines(str(error))}") from None


def _as_lark(gbnf: str) -> str:
    """Return the same grammar in Lark.

    Raises:
        RequestError: it is not GBNF, or has too many rules.
    """
    if (count := len(GBNF_RULE.findall(gbnf))) > _MAX_RULES:
        raise RequestError(f"a grammar in GBNF may have {_MAX_RULES:,} rules, not {count:,}")
    try:
        return str(gbnf_to_lark(_GBNF.sub(_plainer, gbnf)))
    except Exception as error:  # noqa: BLE001 - what it raises is of no class of its own
        raise RequestError(f"the grammar is not GBNF: {first_lines(str(error))}") from None


def _plainer(part: re.Match[str]) -> str:
    """Return a comment, a text, some characters or a dot of GBNF, as its translation reads it."""
    if part[0] == ".":
        return "[\\x00-\U0010ffff]"
    return "" if part[0].startswith("#") else _ESCAPED.sub(_unescaped, part[0])


def _unescaped(escape: re.Match[str]) -> str:
    digits = next(filter(None, escape.groups()), None)
    if digits is None:
        return escape[0]
    code = int(digits, 16)
    if code < 0x80:
        return f"\\x{code:02x}"
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise ValueError(f"{escape[0]} is not a character")
    return chr(code)


def json_in_lark(grammar: Grammar) -> str:
    """Return JSON of a schema as a part of a Lark grammar, written as the schema alone would be.

    Raises:
        RequestError: it cannot be enforced.
    """
    schema = enforceable(json.loads(grammar.text))
    options = schema.get("x-guidance")
    options = {**_DEFAULTS, **(options if isinstance(options, dict) else {}), **_OVERRIDES}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"
