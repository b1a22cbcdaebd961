"""Of the tokens that a form admits, those with which a model would begin one of the texts that may follow.

A form admits every token that begins a text of it: before "Paris", "London" or "Rome" also "L" or "Ro". A model gives
these the probability of other words that begin so, which the form does not have, and the answer would be London because
of a word with L. So where few tokens are admitted, each is followed as far as the form says what comes behind it, and
stays only if the model's own tokenizer splits one of these texts so.

    admitted  L       London    Lo       Pa       Paris
    behind    ondon   -         ndon     ris      -
    split     London  London    London   Paris    Paris
    stays     no      yes       no       no       yes

What a text begins with is known once it has more than one token and its last one ends in no letter, or lies far from
the first: until then more text could change how it is split. Where a form is open (the inside of a string, any number),
or has too many texts, nothing is left out.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from splitinfer.grammar.vocabulary import Vocabulary, without

_FEW = 256  # admitted tokens; where there are more, a form is open
_MOST = 1024  # texts that are followed for one mask: some milliseconds
_DEPTH = 8  # times that a text may go on in several ways; a number goes on in ten for ever
_FAR = 24  # bytes behind a text's beginning; few tokens are as long
_SOME = re.compile(rb"[^\0]", re.DOTALL)


class _TooMany(Exception):
    """The form has more texts than can be followed."""


def whole_words(matcher: Any, vocabulary: Vocabulary, mask: bytes, before: Sequence[int]) -> bytes:
    """Return ``mask`` without the tokens that begin no text as the model's tokenizer splits it; as it is, if none would
    stay. ``matcher``: llguidance's ``LLMatcher``, whose mask it is. ``before``: tokens that it took last."""
    if not 1 < int.from_bytes(mask, "little").bit_count() <= _FEW:
        return mask
    texts = [token for token in tokens_of(mask) if token not in vocabulary.special | vocabulary.ends]
    if not _may_be_parts([vocabulary.tokens[token] for token in texts], before[-1:], vocabulary):
        return mask
    following = _Following(matcher.deep_copy(), vocabulary, before)
    try:
        parts = [token for token in texts if not following.begins(token)]
    except _TooMany:
        return mask
    whole = without(mask, vocabulary.only(parts))
    return whole if any(whole) else mask


def _may_be_parts(texts: list[bytes], last: Sequence[int], vocabulary: Vocabulary) -> bool:
    """Return whether any of some tokens is the beginning of another, or is split in another way behind the ``last``
    token."""
    in_order = sorted(texts)
    return any(longer.startswith(text) for text, longer in pairwise(in_order)) or any(
        _is_split_anew(text, token, vocabulary) for token in last for text in texts
    )


def _is_split_anew(text: bytes, behind: int, vocabulary: Vocabulary) -> bool:
    last = vocabulary.tokens[behind]
    try:
        return vocabulary.split(last + text)[:1] != [behind]
    except UnicodeDecodeError:
        return vocabulary.is_token(last + text)


def tokens_of(mask: bytes) -> Iterator[int]:
    """Yield the tokens of a mask, the lowest first."""
    for found in _SOME.finditer(mask):
        yield from (8 * found.start() + bit for bit in range(8) if found[0][0] >> bit & 1)


def may_grow(text: bytes) -> bool:
    """Return whether more text could change how the end of a text is split."""
    return text[-1:].isalnum() or text[-1:] >= b"\x80"


class _Following:
    """Follows what a form admits. ``matcher``: a copy of its own. ``before``: tokens that it took last."""

    def __init__(self, matcher: Any, vocabulary: Vocabulary, before: Sequence[int]) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary
        self._left = _MOST
        # A text may be parted elsewhere than between the tokens before: then what follows is looked at by itself.
        text = b"".join(vocabulary.tokens[token] for token in before)
        self._before = [*before] if self._split(text) == [*before] else []
        self._text = text if self._before else b""

    def begins(self, token: int) -> bool:
        """Return whether a text that may follow begins with a token, as the tokenizer splits it; or is not known."""
        self._wanted, self._seen = [*self._before, token], set[bytes]()
        return self._found(token, self._text, 0)

    def _found(self, token: int, text: bytes, depth: int) -> bool:
        """Return the same behind a text that has been followed, and ``token``."""
        matcher = self._matcher
        if matcher.try_consume_tokens([token]) != 1:
            return False
        run = [] if matcher.is_stopped() else matcher.compute_ff_tokens()
        taken = 1 + matcher.try_consume_tokens(run) if run else 1
        try:
            return self._found_behind(text + b"".join(self._vocabulary.tokens[each] for each in (token, *run)), depth)
        finally:
            matcher.rollback(taken)

    def _found_behind(self, text: bytes, depth: int) -> bool:
        if text in self._seen:
            return False
        self._seen.add(text)
        self._left -= 1
        if not self._left:
            raise _TooMany
        ends = self._matcher.is_stopped() or self._matcher.is_accepting()
        split = self._split(text)
        num_wanted, is_far = len(self._wanted), len(text) - len(self._text) >= _FAR
        is_known = len(split) > num_wanted and (is_far or not may_grow(text))
        if (ends or is_known) and split[:num_wanted] == self._wanted:
            return True
        if is_known or self._matcher.is_stopped():
            return False
        mask = bytes(self._matcher.compute_bitmask()[: self._vocabulary.mask_bytes])
        if depth == _DEPTH or int.from_bytes(mask, "little").bit_count() > _FEW:
            return True
        ends_of = self._vocabulary.special | self._vocabulary.ends
        return any(self._found(each, text, depth + 1) for each in tokens_of(mask) if each not in ends_of)

    def _split(self, text: bytes) -> list[int]:
        """Return a text's tokens, or an empty result if it ends within a character."""
        try:
            return self._vocabulary.split(text)
        except UnicodeDecodeError:
            return []
