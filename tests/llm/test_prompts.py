"""Prompts and texts of one model, from several threads."""

import threading
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from splitinfer.llm import prompts
from splitinfer.llm.prompts import PromptEncoder
from splitinfer.text.conversations import Codec, Conversations
from splitinfer.text.detokenizer import Detokenizer


class Slow:
    """A tokenizer that takes as long as it is told for anything but single tokens."""

    def __init__(self) -> None:
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.codec = Codec(self.encode, self.decode)

    def encode(self, text: str) -> list[int]:
        return [1] * len(text)

    def decode(self, ids: Sequence[int]) -> str:
        if len(ids) > 2:
            self.has_begun.set()
            assert self.may_end.wait(30)
        return "a" * len(ids)

    def encode_chat(self, *_given: object, **_more: object) -> list[int]:
        return [1, 1, 1, 1]

    def render_chat(self, *_given: object, **_more: object) -> str:
        return "aaab"

    def detokenizer(self, *, shows_markers: bool = False) -> Detokenizer:
        del shows_markers
        return Detokenizer(self.decode)


@pytest.mark.parametrize("how", ["decode", "encode_known"])
def test_streams_go_on_while_a_long_text_is_decoded(monkeypatch: pytest.MonkeyPatch, how: str):
    tokenizer = Slow()
    monkeypatch.setattr(prompts, "tokenizer_of", lambda _checkpoint: tokenizer)
    encoder, known = PromptEncoder(SimpleNamespace(vocab_size=10)), Conversations()  # type: ignore[arg-type]
    known.answered("a", [2], [1, 1, 1])

    def work() -> None:
        encoder.decode([1] * 5) if how == "decode" else encoder.encode_known([], known)

    long, shown = threading.Thread(target=work, daemon=True), list[str]()

    def stream() -> None:
        detokenizer = encoder.detokenizer()
        assert detokenizer is not None
        shown.append(detokenizer.add(1) + encoder.decode([1]))

    short = threading.Thread(target=stream, daemon=True)
    long.start()
    assert tokenizer.has_begun.wait(30)
    short.start()
    short.join(2)
    tokenizer.may_end.set()
    assert shown == ["aa"]
    long.join(30)
    assert not long.is_alive()
