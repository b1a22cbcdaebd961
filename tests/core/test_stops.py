"""Stop strings are found over any borders, and no more text waits than must."""

from hypothesis import given
from hypothesis import strategies as st

from splitinfer.core.stops import StopMatcher

# Few letters, so that stops overlap, nest and repeat.
letters = st.text("ab\n", max_size=12)
stop_lists = st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4)


def first_complete(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition, word by word: read character by character, take the longest stop that ends here."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(st.lists(letters, max_size=8), stop_lists)
def test_the_answer_depends_on_the_text_alone(increments: list[str], stops: list[str]):
    matcher = StopMatcher(stops)
    updates = [matcher.feed(increment) for increment in increments]
    stopped = updates[-1].stopped if updates else None
    emitted = "".join(update.text for update in updates) + matcher.finish().text
    assert (emitted, stopped) == first_complete("".join(increments), stops)


@given(st.lists(letters, max_size=8), stop_lists)
def test_exactly_what_may_still_become_a_stop_waits(increments: list[str], stops: list[str]):
    matcher = StopMatcher(stops)
    text = ""
    for increment in increments:
        text += increment
        if matcher.feed(increment).stopped is not None:
            assert matcher.held == ""
            return
        suffixes = [text[start:] for start in range(len(text))]  # longest first
        may_become = [suffix for suffix in suffixes if any(stop.startswith(suffix) for stop in stops)]
        assert matcher.held == (may_become[0] if may_become else "")
