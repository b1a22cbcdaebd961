"""What followed the same tokens before, against a search of the whole text."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from splitinfer.core.speculation.ngram import AT_ONCE, MOST, SIZES, Guess, NGramIndex

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def searched(tokens: list[int], drafts: list[int]) -> int | None:
    stream = [*tokens, *drafts]
    for size in (size for size in SIZES if size <= len(stream)):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == stream[-size:]:
                return tokens[end]
    return None


def guessed(index: NGramIndex, tokens: list[int], drafts: Sequence[int] = ()) -> int | None:
    found = index.look_up(tokens, drafts)
    return None if found is None else found.token_id


@given(TOKENS, st.lists(st.integers(0, 3), max_size=5))
def test_it_finds_what_a_search_finds_and_reading_on_is_reading_anew(tokens: list[int], drafts: list[int]) -> None:
    assert guessed(NGramIndex(), tokens, drafts) == searched(tokens, drafts)
    index = NGramIndex()
    for end in range(1, len(tokens) + 1):
        assert guessed(index, tokens[:end], drafts) == searched(tokens[:end], drafts)


def test_how_many_tokens_agree() -> None:
    index = NGramIndex()
    text = [1, 2, 3, 4, 5, 6, 9, 2, 3, 4, 5]
    assert index.look_up(text) == Guess(6, 4)
    assert index.look_up(text, (6,)) == Guess(9, 5)
    assert index.look_up([*range(40), *range(30)], ()) is not None
    assert NGramIndex().look_up([*range(40), *range(30)]) == Guess(30, MOST)
    assert NGramIndex().look_up([7, 7]) == Guess(7, 1), "no more tokens agree than there are"


def test_every_token_shows_what_the_guess_for_it_was_worth() -> None:
    shown = []
    index = NGramIndex(lambda guess, is_right: shown.append((guess.token_id, guess.length, is_right)))
    index.follow([5, 6, 7, 5, 6, 8])
    assert shown == [(6, 1, True), (7, 2, False)]
    index.follow([5, 6, 7, 5, 6, 8, 5, 6])
    assert shown[2:] == [(6, 1, True)]


def test_a_long_prompt_is_indexed_a_part_at_a_time() -> None:
    """With each token of the text, or while nothing else is to be done; of the longest the beginning is left out."""
    text, index = [*range(100_000, 100_000 + 4 * AT_ONCE), 5, 6], NGramIndex()
    assert guessed(index, [*text, text[10]]) == text[11]
    assert guessed(index, [*text, text[2 * AT_ONCE]]) is None, "it has the first part alone, as the text is no longer"
    assert [index.catch_up([*text, 0]) for _ in range(4)] == [True, True, True, False]
    assert guessed(index, [*text, 0, text[2 * AT_ONCE]]) == text[2 * AT_ONCE + 1]
    endless = [*range(70_000), 7]
    longest = NGramIndex()
    while longest.catch_up(endless):
        pass
    assert guessed(longest, [*endless, 69_000]) == 69_001
    assert guessed(longest, [*endless, 0, 10]) is None
