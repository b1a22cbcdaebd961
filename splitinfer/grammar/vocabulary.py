"""A model's tokens as llguidance needs them: made once for a model, when the first grammar is asked for.

llguidance is given the bytes of each token, and which tokens are *special*: no text is made of these, so a form never
has them but by their ids. It is not given the tokenizer's own file. From that it would take every added token that
looks like ``<...>`` as special, also ``<tool_call>`` or ``<b>`` where the model's tokenizer makes them of text; and it
would force the ids of special tokens where a form has the text of their names.

Forced text becomes the tokens that the model knows it by, because the model's own tokenizer splits it (*canonical*).
Where that gives other bytes than the text, or a special token, the longest tokens that fit are taken, one by one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from llguidance import LLTokenizer
from llguidance._tokenizer import TokenizerWrapper


@dataclass(frozen=True, slots=True)
class Thinking:
    """How a model marks its reasoning: the ids that open it, those that end it, and those that lead out of it to that
    end. ``closing``: words that come before them when its budget is used up."""

    start: tuple[int, ...]
    end: tuple[int, ...]
    leave: tuple[int, ...]
    closing: tuple[int, ...] = ()


class Vocabulary:
    """The tokens of one model. ``size``: one more than the highest id. ``tokens``: makes the bytes of each. ``encode``:
    splits a text as the model's tokenizer does. ``special``: ids that no text is made of. ``ends``: ids that end an
    answer. ``thinking``: how it marks its reasoning, if it does."""

    def __init__(
        self,
        size: int,
        tokens: Callable[[], list[bytes]],
        encode: Callable[[str], list[int]],
        special: frozenset[int],
        ends: frozenset[int],
        thinking: Thinking | None = None,
    ) -> None:
        self.size, self.special, self.ends, self.thinking = size, special, ends, thinking
        self._make_tokens, self._encode = tokens, encode
        self._completing: dict[bytes, bytes] = {}

    @cached_property
    def tokens(self) -> list[bytes]:
        """The bytes of each token; of special ones their names. Takes a second for a large vocabulary."""
        return self._make_tokens()

    @cached_property
    def names(self) -> dict[str, int]:
        """The ids of special tokens by their names."""
        return {self.tokens[i].decode(errors="replace"): i for i in sorted(self.special | self.ends) if i < self.size}

    def completing(self, written: bytes, marker: bytes) -> bytes:
        """Return a mask of the tokens behind which a text has a marker. ``written``: the end of the text before, of
        which no part is the whole marker."""
        mask = self._beginning(marker, anywhere=True)
        for num in range(1, len(marker)):
            if written.endswith(marker[:num]):
                mask = union(mask, self._beginning(marker[num:], anywhere=False))
        return mask

    def _beginning(self, text: bytes, *, anywhere: bool) -> bytes:
        """Return a mask of the tokens that begin with a text, or have it ``anywhere``."""
        if text not in self._completing:
            found = [i for i, raw in enumerate(self.tokens) if (text in raw if anywhere else raw.startswith(text))]
            self._completing[text] = self.only(found)
        return self._completing[text]

    @cached_property
    def tokenizer(self) -> Any:
        """llguidance's ``LLTokenizer``. Takes a second or two for a large vocabulary."""
        return LLTokenizer(TokenizerWrapper(self._as_asked), eos_token=sorted(self.ends) or None)

    @cached_property
    def _as_asked(self) -> "_Tokens":
        return _Tokens(self.tokens, self.special | self.ends, min(self.ends, default=0), self._encode)

    def split(self, text: bytes) -> list[int]:
        """Return a text's tokens within an answer, as the model's tokenizer splits it.

        Raises:
            UnicodeDecodeError: it ends within a character.
        """
        return self._as_asked(text)

    def is_token(self, text: bytes) -> bool:
        """Return whether a text is one token."""
        return text in self._as_asked.ids

    def is_named_by_id(self, token_id: int) -> bool:
        """Return whether a form can have a token by its id alone, whatever its name."""
        return bool(self.tokenizer.is_special_token(token_id))

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


class _Tokens:
    """A tokenizer as llguidance asks for one. ``tokens``: the bytes of each."""

    def __init__(
        self, tokens: list[bytes], special: frozenset[int], end: int, encode: Callable[[str], list[int]]
    ) -> None:
        self.tokens, self._encode = tokens, encode
        self.eos_token_id, self.bos_token_id = end, None
        self.special_token_ids = sorted(special)
        self._special = special
        self.ids = {raw: i for i, raw in reversed([*enumerate(tokens)]) if raw and i not in special}
        self._longest = max(map(len, self.ids), default=0)

    def __call__(self, raw: bytes) -> list[int]:
        text = raw.decode()
        # Some tokenizers put a blank before a text: then the text is split behind a line's end.
        return (
            self._end_of(self._encode(text), raw)
            or self._end_of(self._encode("\n" + text), raw)
            or self._longest_of(raw)
        )

    def _end_of(self, token_ids: list[int], raw: bytes) -> list[int]:
        """Return the last of some tokens, if these are the text and not special; otherwise none."""
        left = len(raw)
        for first in range(len(token_ids) - 1, -1, -1):
            left -= len(self.tokens[token_ids[first]])
            if left <= 0:
                found = token_ids[first:]
                is_text = b"".join(self.tokens[i] for i in found) == raw and self._special.isdisjoint(found)
                return found if is_text else []
        return []

    def _longest_of(self, raw: bytes) -> list[int]:
        """Return the longest token that fits, and so on; what no token has is left out."""
        found, at = list[int](), 0
        while at < len(raw):
            ends = range(min(at + self._longest, len(raw)), at, -1)
            end = next((end for end in ends if raw[at:end] in self.ids), None)
            if end is not None:
                found.append(self.ids[raw[at:end]])
            at = end or at + 1
        return found


def without(mask: bytes, other: bytes) -> bytes:
    size = len(mask)
    return (int.from_bytes(mask, "little") & ~int.from_bytes(other, "little")).to_bytes(size, "little")


def union(mask: bytes, other: bytes) -> bytes:
    size = len(mask)
    return (int.from_bytes(mask, "little") | int.from_bytes(other, "little")).to_bytes(size, "little")
