"""What followed the same tokens before, against a search of the whole text."""

from hypothesis import given
from hypothesis import strategies as st

from splitinfer.core.speculation.ngram import LONGEST, NGramIndex

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def searched(tokens: list[int], drafts: list[int]) -> int | None:
    stream = [*tokens[-LONGEST:], *drafts]
    for size in range(min(LONGEST, len(stream)), 0, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == stream[-size:]:
                return tokens[end]
    return None


@given(TOKENS, st.lists(st.integers(0, 3), max_size=5))
def test_it_finds_what_a_search_finds(tokens: list[int], drafts: list[int]) -> None:
    assert NGramIndex().guess(tokens, drafts) == searched(tokens, drafts)


@given(TOKENS)
def test_reading_on_is_reading_anew(tokens: list[int]) -> None:
    index = NGramIndex()
    for end in range(1, len(tokens) + 1):
        assert index.guess(tokens[:end]) == searched(tokens[:end], [])


def test_it_goes_on_along_what_was_there() -> None:
    tokens, drafts = [1, 2, 3, 4, 5, 1, 2], list[int]()
    index = NGramIndex()
    for expected in (3, 4, 5, 1, 2):
        guess = index.guess(tokens, drafts)
        assert guess == expected
        drafts.append(expected)


def test_nothing_was_said_twice() -> None:
    assert NGramIndex().guess([1, 2, 3]) is None
