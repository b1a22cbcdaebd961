"""The rules of requests' answers: what a request asks for, made of the model's tokens (``splitinfer.grammar``).

Compiling happens in the caller's thread, before the engine hears of a request: one that cannot be enforced is refused
there, and nobody waits for it.
"""

import json
import re
from collections.abc import Sequence
from functools import cached_property, lru_cache

from splitinfer.core.grammar import Grammar
from splitinfer.core.sequence import SamplingParams
from splitinfer.errors import ModelError
from splitinfer.grammar.answer_rules import AnswerRules
from splitinfer.grammar.calls import call_grammar
from splitinfer.grammar.compiling import Compiler
from splitinfer.grammar.vocabulary import Thinking, Vocabulary
from splitinfer.llm.prompts import Prompts
from splitinfer.text.answer import Tool

_KEPT = 32  # forms of calls: trying what of each function's schema can be enforced takes a while
_CLOSING = "\nThere is no time left to think, so I answer now.\n"


class AnswerForms:
    """Makes the rules of requests for one model. From any thread."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self._call_grammars = lru_cache(_KEPT)(self._call_grammar)

    def rules(
        self, params: SamplingParams, prompt: Sequence[int], *, may_think: bool, weighs: bool = False
    ) -> AnswerRules | None:
        """Return the rules of an answer. Return None if every token may come anywhere. ``may_think``: the answer may
        begin with reasoning that the prompt has not opened. ``weighs``: whether the stages can score alternatives.

        Raises:
            RequestError: the grammar is invalid, or cannot be enforced.
            ModelError: the model's folder has no tokenizer.
        """
        if not params.has_rules:
            return None
        tokenizer = self._prompts.tokenizer
        opened = tokenizer.has_opened(prompt) if tokenizer is not None and tokenizer.thinking is not None else False
        may_open = opened is None and may_think
        if params.grammar is None and not params.min_tokens and not (opened or may_open):
            return None  # a bound of reasoning, where there is none
        if params.grammar is not None and tokenizer is None:
            raise ModelError("the model's folder has no tokenizer, so that no grammar can be enforced")
        return AnswerRules(
            self._vocabulary,
            None if params.grammar is None else self._compiler.matcher(params.grammar),
            thinks=opened is True,
            may_think=may_open,
            budget=params.thinking_budget,
            min_tokens=params.min_tokens,
            ends=self._prompts.end_tokens(params),
            weighs=weighs and not params.temperature and not params.changes_logits,
        )

    def call_grammar(self, tools: Sequence[Tool], *, must: bool, form: Grammar | None = None) -> Grammar:
        """Return the form of an answer that calls one of some functions, given as in OpenAI's API, in the model's own
        syntax. With ``must`` false, any text is admitted, or an answer of the ``form``; calls of ``strict`` functions
        then have their schemas.

        Raises:
            RequestError: the model's syntax is not known, or a strict function's parameters cannot be enforced in it.
        """
        return self._call_grammars(json.dumps([tool["function"] for tool in tools]), must, form)

    def _call_grammar(self, functions: str, must: bool, form: Grammar | None) -> Grammar:
        tokenizer, compiles = self._prompts.tokenizer, self._compiler.compiles
        syntax = None if tokenizer is None else tokenizer.answer_format.syntax
        return call_grammar(syntax, json.loads(functions), self._as_lark, must=must, form=form, compiles=compiles)

    def _as_lark(self, text: str) -> str:
        """Return a text of the model's own in Lark: special tokens by their ids, all else as text."""
        parts = re.split(f"({'|'.join(map(re.escape, names))})", text) if (names := self._named_in(text)) else [text]
        return " ".join(f"<[{names[part]}]>" if part in names else json.dumps(part) for part in parts if part)

    def _named_in(self, text: str) -> dict[str, int]:
        """Return the special tokens that the model makes of a text, by their names, the longest first."""
        tokenizer = self._prompts.needed
        tokens = tokenizer.encode(text, adds_special=False) if text else []
        special = {token for token in tokens if self._vocabulary.is_named_by_id(token)}
        named = {tokenizer.token_bytes(token).decode(): token for token in special}
        return dict(sorted(named.items(), key=lambda one: -len(one[0])))

    def close(self) -> None:
        """End the compiling process, if it was started."""
        if "_compiler" in self.__dict__:
            self._compiler.close()

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        prompts, tokenizer = self._prompts, self._prompts.tokenizer
        if tokenizer is None:
            size = prompts.vocab_size
            return Vocabulary(size, lambda: [b""] * size, lambda _: [], frozenset(), prompts.eos_tokens)
        marks = tokenizer.thinking
        return Vocabulary(
            tokenizer.vocab_size,
            tokenizer.bytes_of_all,
            tokenizer.split,
            tokenizer.special_ids,
            tokenizer.eos_token_ids,
            None if marks is None else Thinking(*marks, tuple(tokenizer.encode(_CLOSING, adds_special=False))),
        )

    @cached_property
    def _compiler(self) -> Compiler:
        return Compiler(self._vocabulary)
