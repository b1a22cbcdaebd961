"""Words at a terminal's edge, seen through a terminal of two dozen lines of Python."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len

from splitinfer.chat.markdown import WordWrap


def shown(written: str, columns: int) -> list[str]:
    """The lines on a screen that is high enough. Nothing may fill the last column."""
    lines: list[list[str]] = [[]]  # one entry a cell; the second cell of a wide character is ""
    for part in re.findall(r"\x1b\[(\d+)D\x1b\[K|(.)", written, re.DOTALL):
        back, char = part
        line = lines[-1]
        if back:
            assert 0 < int(back) <= len(line), "went back over the line's beginning"
            del line[-int(back) :]
        elif char == "\n":
            lines.append([])
        elif char == "\t":
            line += [" "] * (8 - len(line) % 8)
        elif cell_len(char) == 0 and line:
            line[-1] += char
        else:
            line += [char] + [""] * (cell_len(char) - 1)
        assert len(line) < columns, "the last column was filled"
    return ["".join(line) for line in lines]


def flow(text: str, columns: int) -> str:
    stream = WordWrap(columns - 1)
    return "".join(map(stream.feed, text))


@pytest.mark.parametrize(
    ("text", "columns", "lines"),
    [
        ("a great deal more than this", 13, ["a great deal", "more than ", "this"]),
        ("see http://example.org/long", 11, ["see ", "http://exa", "mple.org/l", "ong"]),  # too long for a line
        ("so: 春眠不觉晓处处闻啼鸟", 12, ["so: 春眠不", "觉晓处处闻", "啼鸟"]),
        ("aaaaaaaa \u0301a", 10, ["aaaaaaaa \u0301", "a"]),  # an accent without its letter is written once
    ],
)
def test_words_move_as_a_whole_where_they_can(text: str, columns: int, lines: list[str]):
    assert shown(flow(text, columns), columns) == lines
    assert shown(WordWrap(columns - 1).feed(text), columns) == lines, "pieces make no difference"


words = st.lists(st.sampled_from([*"abcé春🙂 \n\t", "e\u0301"]), max_size=200).map("".join)


@given(words, st.integers(10, 40))
@example("aaaa 春aaaaaaaaa", 10)
def test_nothing_is_lost_or_out_of_place(text: str, columns: int):
    lines = shown(flow(text, columns), columns)

    def letters(part: str) -> str:
        return "".join(part.split())

    assert letters("".join(lines)) == letters(text)
    for paragraph in text.split("\n"):
        if not any(c in paragraph for c in "\t春🙂") and all(cell_len(w) < columns for w in paragraph.split(" ")):
            for word in paragraph.split():
                assert any(word in line for line in lines), "a word that fits a line was broken"
