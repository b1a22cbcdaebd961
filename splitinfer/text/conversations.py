"""Conversations that come back as text, and the tokens that they were computed as.

A tokenizer may cut an answer elsewhere than the model did when it wrote it, and from there on no cached KV fits. So for
each answer the text up to its end, as the template wrote it, is remembered with its tokens, and a conversation that
begins with such a text begins with those tokens. What is given out must decode to the same text as what the tokenizer
makes of it, with the same special tokens in the same order, or that is used: what is cut so that it stays text, such as
`<|start|>` in a tool's result, an encoder makes a special token of. Of a text only a hash is kept.
"""

import hashlib
import threading
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

MOST_TOKENS = 1 << 20  # in all, of 4 bytes each
_MOST_PENDING = 64
_BROKEN = "\ufffd"
_Digest = bytes


@dataclass(frozen=True, slots=True)
class TextCodec:
    """A tokenizer's functions. ``encode``: a part of a text, with no tokens of its own before it. ``decode``: with
    special tokens. ``special``: the special tokens' ids."""

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    special: frozenset[int] = frozenset()

    def say_the_same(self, one: Sequence[int], other: Sequence[int]) -> bool:
        """Return whether tokens mean the same to a model: in their text and in what of it is special."""
        special = [[token for token in tokens if token in self.special] for tokens in (one, other)]
        return special[0] == special[1] and self.decode(one) == self.decode(other)


@dataclass(frozen=True, slots=True)
class _Pending:
    """An answer that was not taken in yet: the hash of the text before it, which goes on, that text's length, the
    tokens up to the answer, and the answer's."""

    so_far: hashlib.blake2b
    length: int
    prompt: "array[int]"
    answer: "array[int]"


class Conversations:
    """A bounded memory of texts' tokens; those not used for longest go first. Any thread may use it."""

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._most_tokens, self._lock = most_tokens, threading.Lock()
        self._known: OrderedDict[_Digest, tuple[int, array[int]]] = OrderedDict()  # characters, tokens
        self._lengths: Counter[int] = Counter()
        self._num_tokens = 0
        self._pending: deque[_Pending] = deque(maxlen=_MOST_PENDING)

    def answered(self, text: str, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """An answer has ended. ``text``: what the template wrote, of which ``prompt`` are the tokens. ``answer``: its
        tokens, without an end token. It is taken in later: decoding takes time."""
        if answer:
            self._pending.append(_Pending(_hash_of(text), len(text), array("I", prompt), array("I", answer)))

    def tokens(self, text: str, plain: list[int], codec: TextCodec) -> list[int]:
        """Return the tokens of a conversation. ``plain``: what the tokenizer makes of its text."""
        with self._lock:
            self._take_in(codec)
            length, known = self._longest(text)
        if not known or plain[: len(known)] == known:
            return plain
        found = [*known, *codec.encode(text[length:])]
        return found if codec.say_the_same(found, plain) else plain

    def _take_in(self, codec: TextCodec) -> None:
        while self._pending:
            one = self._pending.popleft()
            if _BROKEN not in (said := codec.decode(one.answer)):  # else the text says less than the tokens
                one.so_far.update(_raw(said))
                self._keep(one.so_far.digest(), one.length + len(said), one.prompt + one.answer)

    def _keep(self, digest: _Digest, length: int, tokens: "array[int]") -> None:
        self._forget(digest)
        self._known[digest] = length, tokens
        self._lengths[length] += 1
        self._num_tokens += len(tokens)
        while self._num_tokens > self._most_tokens:
            self._forget(next(iter(self._known)))

    def _forget(self, digest: _Digest) -> None:
        length, tokens = self._known.pop(digest, (0, ()))
        self._num_tokens -= len(tokens)
        if length:
            self._lengths[length] -= 1
            if not self._lengths[length]:
                del self._lengths[length]

    def _longest(self, text: str) -> tuple[int, list[int]]:
        """Return the longest beginning of a text that is known: its characters, and its tokens; none: 0."""
        lengths = sorted(length for length in self._lengths if length <= len(text))
        for digest in reversed(list(_digests(text, lengths))):
            if digest in self._known:
                self._known.move_to_end(digest)
                length, tokens = self._known[digest]
                return length, list(tokens)
        return 0, []


def _digests(text: str, lengths: Iterable[int]) -> Iterator[_Digest]:
    """Yield the hashes of a text's first characters, for ascending numbers of them, in one pass over the text."""
    so_far, at = _hash_of(""), 0
    for length in lengths:
        so_far.update(_raw(text[at:length]))
        at = length
        yield so_far.copy().digest()


def _hash_of(text: str) -> hashlib.blake2b:
    return hashlib.blake2b(_raw(text), digest_size=16)


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
