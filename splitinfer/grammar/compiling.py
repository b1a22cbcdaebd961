"""A grammar as a matcher, within bounds of time and size.

llguidance bounds what compiling costs by its own limits, and it lets the GIL go meanwhile, so that nobody waits. What
it does not support it refuses, and so does this: a schema is enforced as a whole, or not at all. Lenient schemas and
approximations are switched off, whatever the schema says of them.

JSON is written without blanks unless the schema asks for them (``"x-guidance": {"whitespace_flexible": true}``).
"""

import json
from collections import OrderedDict
from threading import Lock
from typing import Any

from splitinfer.core.grammar import Grammar, GrammarKind
from splitinfer.errors import RequestError
from splitinfer.grammar.vocabulary import Vocabulary

_KEPT = 32  # compiled grammars
_DEFAULTS = {"whitespace_flexible": False}
_OVERRIDES = {"lenient": False, "coerce_one_of": False}


class Compiler:
    """Compiles grammars for one vocabulary. From any thread."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._compiled: OrderedDict[Grammar, Any] = OrderedDict()
        self._lock = Lock()

    def matcher(self, grammar: Grammar) -> Any:
        """A matcher of its own at the grammar's beginning: llguidance's ``LLMatcher``.

        Raises:
            RequestError: the grammar is invalid, too large, or has something that cannot be enforced.
            ConfigError: llguidance is not installed.
        """
        with self._lock:
            found = self._compiled.get(grammar)
        if found is None:
            found = self._compile(grammar)
            with self._lock:
                self._compiled[grammar] = found
                while len(self._compiled) > _KEPT:
                    self._compiled.popitem(last=False)
        return found.deep_copy()

    def _compile(self, grammar: Grammar) -> Any:
        tokenizer = self._vocabulary.tokenizer
        from llguidance import LLMatcher, LLParserLimits

        matcher = LLMatcher(tokenizer, _as_llguidance(grammar, LLMatcher), log_level=0, limits=LLParserLimits())
        if matcher.is_error():
            raise RequestError(f"the grammar cannot be enforced: {_first_lines(matcher.get_error())}")
        return matcher


def _as_llguidance(grammar: Grammar, compiler: Any) -> str:
    try:
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                return str(compiler.grammar_from_json_schema(_as_object(grammar.text), _DEFAULTS, _OVERRIDES))
            case GrammarKind.REGEX:
                return str(compiler.grammar_from_regex(grammar.text))
            case GrammarKind.LARK:
                return str(compiler.grammar_from_lark(grammar.text))
    except ValueError as error:
        raise RequestError(f"the grammar cannot be enforced: {_first_lines(str(error))}") from None


def _as_object(text: str) -> str:
    """A schema as an object: `true` admits everything, and `false` nothing."""
    schema = json.loads(text)
    return text if not isinstance(schema, bool) else json.dumps({} if schema else {"enum": []})


def _first_lines(error: str) -> str:
    lines = [line.strip() for line in error.strip().splitlines() if line.strip()]
    return " ".join(lines[:4])[:400]
