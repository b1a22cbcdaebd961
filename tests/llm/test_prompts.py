"""Prompts and texts of one model, from several threads."""

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest

from splitinfer.llm import prompts
from splitinfer.llm.prompts import Prompts
from splitinfer.text.conversations import Conversations, TextCodec
from splitinfer.text.detokenizer import Detokenizer
from splitinfer.text.tokenizer import Tokenizer


class Slow:
    """A tokenizer that takes as long as it is told for anything but single tokens."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.codec = TextCodec(self.encode, self.decode)

    def encode(self, text: str, *, adds_special: bool = True) -> list[int]:
        del adds_special
        self._take_long(len(text))
        return [1] * len(text)

    def _take_long(self, length: int) -> None:
        if length > 2:
            self.has_begun.set()
            assert self.may_end.wait(30)

    def decode(self, ids: Sequence[int]) -> str:
        self._take_long(len(ids))
        return "a" * len(ids)

    def detokenizer(self, **_: object) -> Detokenizer:
        return Detokenizer(self.decode)


WORK: dict[str, Callable[[Tokenizer, Conversations], object]] = {
    "decode": lambda tokenizer, _: tokenizer.decode([1] * 5),
    "encode": lambda tokenizer, _: tokenizer.encode("aaaaa"),
    "known": lambda tokenizer, known: known.tokens("aaab", [1, 1, 1, 1], tokenizer.codec),
}


@pytest.mark.parametrize("how", WORK)
def test_streams_and_short_texts_go_on_while_a_long_text_is_read(monkeypatch: pytest.MonkeyPatch, how: str):
    tokenizer = Slow()
    monkeypatch.setattr(prompts, "tokenizer_of", lambda _checkpoint: tokenizer)
    encoder, known = Prompts(SimpleNamespace(vocab_size=10)), Conversations()  # type: ignore[arg-type]
    known.answered("a", [2], [1, 1, 1])

    long, shown = threading.Thread(target=WORK[how], args=(encoder.needed, known), daemon=True), list[str]()

    def stream() -> None:
        detokenizer = encoder.detokenizer()
        shown.append(detokenizer.add(1) + encoder.needed.decode(encoder.needed.encode("a")))

    short = threading.Thread(target=stream, daemon=True)
    long.start()
    assert tokenizer.has_begun.wait(30)
    short.start()
    short.join(2)
    tokenizer.may_end.set()
    assert shown == ["aa"]
    long.join(30)
    assert not long.is_alive()
