"""Tokens that a conversation was computed as: found again by its text, and never those of another text."""

from collections.abc import Sequence
from dataclasses import fields

from hypothesis import given
from hypothesis import strategies as st

from splitinfer.text.conversations import Conversations, TextCodec

# A tokenizer that prefers "ab" to "a" and "b", as a byte-pair tokenizer does, and a special token.
WORDS = {1: "a", 2: "b", 3: "ab", 4: "c", 9: "<end>"}


def encode(text: str) -> list[int]:
    found = []
    while text:
        word = max((i for i in WORDS if text.startswith(WORDS[i])), key=lambda i: len(WORDS[i]))
        found.append(word)
        text = text[len(WORDS[word]) :]
    return found


def decode(ids: list[int]) -> str:
    return "".join(WORDS[i] for i in ids)


CODEC = TextCodec(encode, decode)  # type: ignore[arg-type]


def tokens(known: Conversations, text: str) -> list[int]:
    return known.tokens(text, encode(text), CODEC)


def remember(known: Conversations, answer: list[int]) -> None:
    """A conversation that is one answer."""
    known.answered("", [], answer)
    tokens(known, "")


def test_an_answer_keeps_its_tokens_in_the_next_turn():
    known = Conversations()
    known.answered("c", [4], [1, 2, 1])
    assert tokens(known, "caba<end>ab") == [4, 1, 2, 1, 9, 3]
    assert tokens(known, "cab") == [4, 3], "another conversation"
    assert tokens(known, "aba") == [3, 1], "the same answer in another place"


def test_the_longest_beginning_counts_and_earlier_turns_stay():
    known = Conversations()
    known.answered("c", [4], [1, 2])
    first = tokens(known, "cab<end>c")
    known.answered("cab<end>c", first, [1, 2])
    assert tokens(known, "cab<end>cab<end>") == [4, 1, 2, 9, 4, 1, 2, 9]
    assert tokens(known, "cab<end>cc") == [4, 1, 2, 9, 4, 4], "the last message was edited"


def test_what_would_read_otherwise_is_left():
    known = Conversations()
    remember(known, [4, 1])
    wrong = TextCodec(lambda text: encode(text)[:-1], decode)  # type: ignore[arg-type]
    assert known.tokens("caab", encode("caab"), wrong) == encode("caab")
    assert known.tokens("cab", encode("cab"), TextCodec(encode, lambda ids: str(ids))) == [4, 3]  # type: ignore[arg-type]


def test_what_is_special_must_be_the_same():
    """As in Harmony: the tokenizer of a chat writes a text that looks like a special token as ordinary text."""
    pieces = {11: "<", 12: "end>"}

    def spelled(ids: Sequence[int]) -> str:
        return "".join((WORDS | pieces)[i] for i in ids)

    known, codec = Conversations(), TextCodec(encode, spelled, frozenset([9]))  # type: ignore[arg-type]
    known.answered("c", [4], [1, 2])
    plain = [4, 3, 9, 4, 11, 12]  # the second "<end>" is a part of a tool's result
    assert known.tokens("cab<end>c<end>", plain, codec) == plain
    assert known.tokens("cab<end>c", [4, 3, 9, 4], codec) == [4, 1, 2, 9, 4]


def test_of_what_waits_there_is_no_text_either():
    known, text = Conversations(), "c" * 10_000
    for _ in range(100):
        known.answered(text, [4] * 10_000, [1, 2])
    assert len(known._pending) <= 64
    assert not any(isinstance(getattr(one, field.name), str) for one in known._pending for field in fields(one))
    assert tokens(known, text + "ab") == [*[4] * 10_000, 1, 2]
    half = "\ud83d"  # surrogates, of which JSON may have halves
    known.answered(half, [4], [1])
    assert tokens(known, "cab") == [4, 3]
    assert known._longest(half + "a") == (2, [4, 1])


def test_memory_is_bounded_and_what_is_used_stays():
    known = Conversations(most_tokens=10)
    for i in range(5):
        remember(known, [4] * (i + 1) + [1, 2])
        assert known._num_tokens <= 10
    assert tokens(known, "cccccab") == [4] * 5 + [1, 2]
    assert len(known._known) == 1
    remember(known, [1])
    remember(known, [2])
    tokens(known, "cccccab")
    remember(known, [4, 4])
    assert tokens(known, "cccccab") == [4] * 5 + [1, 2]
    assert known._num_tokens <= 10


@given(st.lists(st.tuples(st.text("abc", max_size=3), st.lists(st.sampled_from([1, 2, 3, 4]), max_size=4)), max_size=8))
def test_the_text_is_always_that_of_the_conversation(turns: list[tuple[str, list[int]]]):
    known, text, computed = Conversations(most_tokens=40), "", list[int]()
    for asked, answer in turns:
        text += asked
        found = tokens(known, text)
        assert decode(found) == text
        if known._num_tokens and len(computed) < 40:
            assert found[: len(computed)] == computed, "all that was computed is found"
        known.answered(text, found, answer)
        text += decode(answer)
        computed = [*found, *answer] if answer else computed
        tokens(known, "")
