"""A model's tokens as llguidance needs them: made once for a model, when the first grammar is asked for.

A tokenizer of Hugging Face's tokenizers is taken as its JSON, so that llguidance splits a text as the model would
(*canonical*), and forced text becomes the tokens that the model knows it by. Of any other tokenizer only the bytes of
its tokens are known; forced text is then split greedily.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from splitinfer.errors import NotInstalled

MISSING = "the llguidance package is needed for grammars; install it with `pip install 'splitinfer[grammar]'`"


@dataclass(frozen=True, slots=True)
class Thinking:
    """How a model marks its reasoning: the ids that open it, those that end it, and those that lead out of it to that
    end. ``closing``: words that come before them when its budget is used up."""

    start: tuple[int, ...]
    end: tuple[int, ...]
    leave: tuple[int, ...]
    closing: tuple[int, ...] = ()


class Vocabulary:
    """The tokens of one model. ``size``: one more than the highest id. ``as_json``: the tokenizer as tokenizers' JSON;
    ``None``: ``token_bytes`` gives each token's bytes. ``special``: ids that no text is made of. ``ends``: ids that end
    an answer. ``thinking``: how it marks its reasoning, if it does."""

    def __init__(
        self,
        size: int,
        as_json: Callable[[], str | None],
        token_bytes: Callable[[int], bytes],
        encode: Callable[[str], list[int]],
        special: frozenset[int],
        ends: frozenset[int],
        thinking: Thinking | None = None,
    ) -> None:
        self.size, self.special, self.ends, self.thinking = size, special, ends, thinking
        self._as_json, self._token_bytes, self._encode = as_json, token_bytes, encode

    @cached_property
    def tokenizer(self) -> Any:
        """llguidance's ``LLTokenizer``. Takes up to a second.

        Raises:
            NotInstalled: llguidance is missing.
        """
        try:
            from llguidance import LLTokenizer
        except ImportError:
            raise NotInstalled(MISSING) from None
        ends = sorted(self.ends) or None
        text = self._as_json()
        if text is None:
            return LLTokenizer(self._plain(), eos_token=ends)
        return LLTokenizer(text, n_vocab=self.size, eos_token=ends)

    def _plain(self) -> Any:
        from llguidance._tokenizer import TokenizerWrapper

        return TokenizerWrapper(_Plain([self._token_bytes(i) for i in range(self.size)], self))

    def split(self, raw: bytes) -> list[int]:
        """Forced text as tokens, where llguidance does not split it: greedily."""
        return list(self.tokenizer.greedy_tokenize(raw.decode("utf-8", "ignore")))

    @property
    def mask_bytes(self) -> int:
        """The bytes of a mask: whole words of 32 bits."""
        return -(-self.size // 32) * 4

    def only(self, token_ids: Sequence[int] | frozenset[int]) -> bytes:
        mask = bytearray(self.mask_bytes)
        for token in token_ids:
            if 0 <= token < self.size:
                mask[token >> 3] |= 1 << (token & 7)
        return bytes(mask)

    def all_but(self, token_ids: Sequence[int] | frozenset[int]) -> bytes:
        return without(self.only(range(self.size)), self.only(token_ids))


class _Plain:
    """A tokenizer of which the tokens' bytes are known."""

    def __init__(self, tokens: list[bytes], owner: Vocabulary) -> None:
        self.tokens, self._encode = tokens, owner._encode
        self.eos_token_id = min(owner.ends, default=0)
        self.bos_token_id = None
        self.special_token_ids = sorted(owner.special)

    def __call__(self, text: str) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode())


def without(mask: bytes, other: bytes) -> bytes:
    size = len(mask)
    return (int.from_bytes(mask, "little") & ~int.from_bytes(other, "little")).to_bytes(size, "little")


def union(mask: bytes, other: bytes) -> bytes:
    size = len(mask)
    return (int.from_bytes(mask, "little") | int.from_bytes(other, "little")).to_bytes(size, "little")
