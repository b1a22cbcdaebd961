"""Prompts as token ids, and token ids as text, for one model. From any number of threads at a time, without a lock, so
that no short text waits for a long one, and no stream, whose every token is decoded, for either.

A Hugging Face tokenizer must not be changed by one thread while another uses it (tokenizers' "Already borrowed").
Encoding changes it the first time only: to the settings that it is used with from then on, which are always the same
(no truncation, no padding, special tokens as such). So a text is encoded once before any other. After that
``_encode_plus`` of transformers 5 only reads (tokenization_utils_tokenizers.py: it sets what differs;
tokenization_python.py and tokenization_mistral_common.py set nothing), and so does decoding: tokenizers 0.23 takes the
tokenizer as ``&self`` for both (bindings/python/src/tokenizer.rs).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from splitinfer.core.sequence import SamplingParams
from splitinfer.engine.coordinator.requests import Detokenizing
from splitinfer.errors import ContextExceeded, ModelError, RequestError
from splitinfer.models.checkpoint import Checkpoint
from splitinfer.models.generation_config import end_tokens
from splitinfer.text.answer import Tool
from splitinfer.text.conversations import Conversations
from splitinfer.text.tokenizer import Tokenizer


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer | None:
    """Load the model's tokenizer; ``None`` where the folder has none, so that prompts must be token ids."""
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if not any((checkpoint.folder / name).exists() for name in names):
        return None
    config = checkpoint.config
    return Tokenizer.from_folder(checkpoint.folder, end_tokens(checkpoint.folder, config), config.get("model_type"))


class Texts:
    """Texts as token ids and back, by a model's own tokenizer and chat template. ``tokenizer``: the model's; ``None``
    where its folder has none."""

    tokenizer: Tokenizer | None
    _checkpoint: Checkpoint

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, which may be a part of a character; empty without a tokenizer."""
        return b"" if self.tokenizer is None else self.tokenizer.token_bytes(token_id)

    def encode(self, text: str, *, adds_special: bool = True) -> list[int]:
        """Text as token ids. ``adds_special``: with the special tokens that the tokenizer itself adds.

        Raises:
            ModelError: the model's folder has no tokenizer, so only token ids can be given.
        """
        return self._need_tokenizer().encode(text, adds_special=adds_special)

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
        return self._need_tokenizer().encode_chat(messages, tools=tools, options=options, opens_answer=opens_answer)

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
        return self._need_tokenizer().render_chat(messages, tools=tools, options=options, opens_answer=opens_answer)

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
        tokenizer = self._need_tokenizer()
        plain, text = tokenizer.write_chat(messages, tools=tools, options=options, opens_answer=opens_answer)
        return known.tokens(text, plain, tokenizer.codec), text

    def decode(self, token_ids: Sequence[int]) -> str:
        """Token ids as text, special tokens left out.

        Raises:
            ModelError: the model's folder has no tokenizer.
            RequestError: an id is outside the vocabulary.
        """
        self._check_ids(token_ids)
        return self._need_tokenizer().decode(token_ids)

    @property
    def _num_embeddings(self) -> int:
        return self._checkpoint.vocab_size or 2**31 - 1

    def _check_ids(self, tokens: Sequence[int]) -> None:
        size = self._num_embeddings
        bad = next((t for t in tokens if not 0 <= t < size), None)
        if bad is not None:
            raise RequestError(f"token id {bad} is not in the model's vocabulary of {size:,}")

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ModelError(f"{self._checkpoint.folder} has no tokenizer, so prompts must be token ids")
        return self.tokenizer


class PromptEncoder(Texts):
    """Encodes and checks prompts."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.tokenizer = tokenizer_of(checkpoint)
        if self.tokenizer is not None:
            self.tokenizer.encode("")  # changes what it has to change

    @property
    def vocab_size(self) -> int:
        """The number of tokens that may be sampled."""
        return self.tokenizer.vocab_size if self.tokenizer is not None else self._num_embeddings

    def check(self, tokens: Sequence[int], context_length: int) -> None:
        """Check a prompt.

        Raises:
            ContextExceeded: it is too long.
            RequestError: it is empty, or has ids outside the vocabulary.
        """
        if not tokens:
            raise RequestError("the prompt is empty; give at least one token")
        if len(tokens) >= context_length:
            most = self._checkpoint.context_length
            more = f"; the model has {most:,} (see --context)" if most > context_length else ""
            raise ContextExceeded(
                f"the prompt has {len(tokens):,} tokens, but the context is {context_length:,}, "
                f"the answer's first token included{more}"
            )
        self._check_ids(tokens)

    def check_biases(self, params: SamplingParams) -> None:
        """Check a request's biases.

        Raises:
            RequestError: one is for an id outside the vocabulary.
        """
        size = self._num_embeddings
        bad = next((token for token, _ in params.logit_bias if token >= size), None)
        if bad is not None:
            raise RequestError(f"logit_bias has token id {bad}, but the model's vocabulary is {size:,}")

    def end_tokens(self, params: SamplingParams) -> frozenset[int]:
        """The tokens that end an answer. One in the form of a grammar ends where that does, whatever else is asked."""
        stops = frozenset(params.stop_token_ids)
        return stops if params.ignore_eos and params.grammar is None else stops | self.eos_tokens

    @property
    def eos_tokens(self) -> frozenset[int]:
        """The model's own tokens that end a text."""
        if self.tokenizer is not None:
            return self.tokenizer.eos_token_ids
        eos = end_tokens(self._checkpoint.folder, self._checkpoint.config)
        return frozenset() if eos is None else frozenset([eos] if isinstance(eos, int) else eos)

    def detokenizer(self, *, shows_markers: bool = False) -> Detokenizing | None:
        """A detokenizer for one answer, for one thread at a time; ``None`` without a tokenizer. ``shows_markers``: its
        text has what marks reasoning and calls of tools."""
        return None if self.tokenizer is None else self.tokenizer.detokenizer(shows_markers=shows_markers)
