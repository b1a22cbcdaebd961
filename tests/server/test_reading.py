"""What is told of an answer when it is over."""

from types import SimpleNamespace

from splitinfer.server.reading import _teller
from splitinfer.text.conversations import Codec, Conversations

CODEC = Codec(lambda text: [ord(letter) for letter in text], lambda ids: "".join(map(chr, ids)))
END = ord("$")


def test_an_answer_is_known_without_its_end_token():
    llm, known = SimpleNamespace(tokenizer=SimpleNamespace(eos_token_ids=frozenset([END]))), Conversations()
    for answer in ([500, END], [500, 600], []):
        _teller(llm, known, "ab", [1000])(answer)  # type: ignore[arg-type]
    assert known.tokens("ab", [97, 98], CODEC) == [97, 98]
    assert len(known) == 2
    lenient = Codec(CODEC.encode, lambda _: "")
    assert known.tokens(f"ab{chr(500)}!", [0], lenient) == [1000, 500, ord("!")]
    assert known.tokens(f"ab{chr(500)}{chr(600)}!", [0], lenient) == [1000, 500, 600, ord("!")]
