"""Texts as token ids and back: that part of ``LLM``, which needs no pipeline."""

from collections.abc import Mapping, Sequence
from typing import Any

from splitinfer.core.grammar import Grammar
from splitinfer.llm.forms import AnswerForms
from splitinfer.llm.prompts import PromptEncoder
from splitinfer.text.answer import Tool
from splitinfer.text.conversations import Conversations
from splitinfer.text.tokenizer import Tokenizer


class Texts:
    """By a model's own tokenizer and chat template."""

    _prompts: PromptEncoder
    _forms: AnswerForms
    tokenizer: Tokenizer | None

    def encode(self, text: str, *, adds_special: bool = True) -> list[int]:
        """Text as token ids. ``adds_special``: with the special tokens that the tokenizer itself adds.

        Raises:
            ModelError: the model's folder has no tokenizer, so only token ids can be given.
        """
        return self._prompts.encode(text, adds_special=adds_special)

    def call_grammar(self, tools: Sequence[Tool], *, must: bool = True) -> Grammar:
        """The form of an answer that calls one of some functions, in the model's own syntax. ``tools``: as in OpenAI's
        API. ``must``: false admits any text, in which calls of ``strict`` functions have their schemas.

        Raises:
            RequestError: the model's syntax is not known, or a function's parameters cannot be enforced in it.
        """
        return self._forms.call_grammar(tools, must=must)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, which may be a part of a character; empty without a tokenizer."""
        return b"" if self.tokenizer is None else self.tokenizer.token_bytes(token_id)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Tool] = (),
        options: Mapping[str, Any] | None = None,
        opens_answer: bool = True,
    ) -> list[int]:
        """A chat as token ids, as the model's chat template writes it, up to where the next answer begins.

        Each message has ``role`` and ``content``. An answer may have its ``token_ids``, so that its cached KV is found
        even if the tokenizer would split its text in another way. ``tools``: those that the model may call, as in
        OpenAI's API. ``options``: further values for the template, such as ``enable_thinking``. ``opens_answer``: false
        leaves out what opens the next answer.

        Raises:
            ModelError: the model's folder has no tokenizer.
            RequestError: the template refuses the messages, or there is none for the tools.
        """
        return self._prompts.encode_chat(messages, tools=tools, options=options, opens_answer=opens_answer)

    def encode_known(
        self,
        messages: Sequence[Mapping[str, Any]],
        known: Conversations,
        *,
        tools: Sequence[Tool] = (),
        options: Mapping[str, Any] | None = None,
        opens_answer: bool = True,
    ) -> tuple[list[int], str]:
        """``encode_chat`` for chats that come again as text alone, and the text. ``known``: the answers so far, each
        told with ``answered``; a chat that begins with one gets the tokens that were computed, so that its KV is found.

        Raises:
            ModelError, RequestError: as ``encode_chat``.
        """
        return self._prompts.encode_known(messages, known, tools=tools, options=options, opens_answer=opens_answer)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Tool] = (),
        options: Mapping[str, Any] | None = None,
        opens_answer: bool = True,
    ) -> str:
        """The text that ``encode_chat`` encodes.

        Raises:
            ModelError, RequestError: as ``encode_chat``.
        """
        return self._prompts.render_chat(messages, tools=tools, options=options, opens_answer=opens_answer)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Token ids as text, special tokens left out.

        Raises:
            ModelError: the model's folder has no tokenizer.
            RequestError: an id is outside the vocabulary.
        """
        return self._prompts.decode(token_ids)
