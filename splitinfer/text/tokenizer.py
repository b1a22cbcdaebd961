"""Text to token ids and back, for the model in one folder.

A thin wrapper over the Hugging Face tokenizer as mlx-lm loads it (which knows the oddities of many models'
chat templates). What it adds: our errors, a hash of the vocabulary, one fixed way to decode (special tokens
left out, spaces as they are) that the incremental detokenizer shares, and nothing else.

A tokenizer is not safe for several threads at once; its detokenizers call it too.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import jinja2
from mlx_lm.tokenizer_utils import load

from splitinfer.errors import ModelError, RequestError
from splitinfer.text.detokenizer import Detokenizer


class Tokenizer:
    """``Tokenizer.from_folder(...)``; ``wrapper`` is an mlx-lm ``TokenizerWrapper``."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    @classmethod
    def from_folder(cls, path: Path, eos_token_ids: Iterable[int] | int | None = None) -> Self:
        """The tokenizer in the model folder ``path``; ``eos_token_ids`` are the model configuration's.

        Raises ``ModelError`` when there is none, or none that can be read.
        """
        if not path.is_dir():  # else a missing folder would be taken for a hub id, and looked for there
            raise ModelError(f"there is no model folder {path}")
        if eos_token_ids is not None and not isinstance(eos_token_ids, int):
            eos_token_ids = list(eos_token_ids)
        try:
            return cls(load(path, eos_token_ids=eos_token_ids))
        except (OSError, ValueError, KeyError, ImportError) as error:
            reason = str(error).strip().split("\n", 1)[0]
            raise ModelError(f"the model folder {path} holds no tokenizer that can be read: {reason}") from error

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids that end a text: the model configuration's and the tokenizer's own."""
        return frozenset(self._wrapper.eos_token_ids)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest token id: how much noise a token's random draw takes.

        It is the tokenizer's ``len`` unless its ids have holes; a model's table may be padded beyond it.
        """
        return 1 + max(self._vocabulary().values())

    @cached_property
    def vocabulary_hash(self) -> str:
        """SHA-256 over all (token, id) pairs: equal for a model and the drafts that can serve it."""
        pairs = sorted(self._vocabulary().items())
        return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The ids of ``text``, with the special tokens that the tokenizer itself adds."""
        return list(self._wrapper.encode(text))

    def encode_chat(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> list[int]:
        """The ids of a chat, ``{"role": ..., "content": ...}`` each, as the model's chat template writes it.

        A model without a template gets the contents, joined by blank lines. Raises ``RequestError`` when
        the template refuses the messages.
        """
        chat = [dict(message) for message in messages]
        if not chat:
            raise RequestError("a chat needs at least one message")
        if not all(isinstance(message.get("content"), str) for message in chat):
            raise RequestError("every chat message needs a 'content' that is text")
        if not self._wrapper.has_chat_template:
            return self.encode("\n\n".join(message["content"] for message in chat))
        try:
            return list(self._wrapper.apply_chat_template(chat, add_generation_prompt=add_generation_prompt))
        except (jinja2.TemplateError, ValueError) as error:
            raise RequestError(f"the model's chat template refuses these messages: {error}") from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ``token_ids`` without special tokens; bytes that are no character become U+FFFD."""
        text: str = self._wrapper.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def detokenizer(self) -> Detokenizer:
        """A new incremental decoder, for one sequence; its text is that of ``decode``."""
        return Detokenizer(self.decode, self._special_ids)

    def _vocabulary(self) -> dict[str, int]:
        token_to_id: dict[str, int] = self._wrapper.get_vocab()
        return token_to_id

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        """The ids that ``decode`` leaves out."""
        candidates = set(self._wrapper.all_special_ids)  # only those with a role, such as the end of a text
        with contextlib.suppress(NotImplementedError):  # mistral-common has no such list, and named all of its own
            candidates |= {token_id for token_id, token in self._wrapper.added_tokens_decoder.items() if token.special}
        return frozenset(token_id for token_id in candidates if not self.decode([token_id]))
