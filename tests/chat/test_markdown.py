"""Markdown and words at a terminal's edge while they stream: what the screen shows in the end, whatever the parts."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len

from splitinfer.chat.markdown import MarkdownStream, WordWrap, drawn

SIZE = (40, 12)


def screen_of(written: str, columns: int = SIZE[0]) -> list[str]:
    """The rows that a terminal shows: text, line ends, and the escapes that a stream uses. Its last column stays
    free."""
    rows, row, column = [list[str]()], 0, 0  # one entry a cell; the second cell of a wide character is ""
    for part in re.findall(r"\x1b\[(?:\d+[AD]|[JK])|\x1b\[[\d;]*m|.|\n", written):
        if part == "\n":
            row, column = row + 1, 0
            rows += [[] for _ in range(row + 1 - len(rows))]
        elif part == "\r":
            column = 0
        elif part.endswith("A") and part[0] == "\x1b":
            row -= int(part[2:-1])
        elif part.endswith("D") and part[0] == "\x1b":
            column -= int(part[2:-1])
            assert column >= 0, "went back over the line's beginning"
        elif part in ("\x1b[K", "\x1b[J"):
            del rows[row][column:], rows[row + 1 if part == "\x1b[J" else len(rows) :]
        elif cell_len(part) == 0 and part not in "\t" and column:
            rows[row][column - 1] += part
        elif part[0] != "\x1b":
            cells = [" "] * (8 - column % 8) if part == "\t" else [part, *[""] * (cell_len(part) - 1)]
            rows[row] += [" "] * (column - len(rows[row]))
            rows[row][column : column + len(cells)] = cells
            column += len(cells)
            assert column < columns, "the last column was filled"
    return ["".join(each) for each in rows]


def marked(block: str, columns: int) -> str:
    """A block between marks, in lines that leave the last cell free."""
    lines = f"<{block.strip()}>".split("\n")
    return "".join(f"{line[at : at + columns - 1]}\n" for line in lines for at in range(0, len(line) or 1, columns - 1))


def shown(*parts: str, size: tuple[int, int] = SIZE) -> list[str]:
    stream = MarkdownStream(lambda: size, marked)
    return [row.rstrip() for row in screen_of("".join([*map(stream.feed, parts), stream.end()]))]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("plain words\n\nand more", ["plain words", "", "and more", ""]),
        ("# Wolf\n\nand *more*", ["<# Wolf>", "", "<and *more*>", ""]),
        ("`a`\n\n    b\n\nc", ["<`a`", "", "    b>", "", "c", ""]),  # indented: the same block
        ("- a\n\n- b\n\nc", ["<- a", "", "- b>", "", "c", ""]),  # one list
        ("```py\n\n# x\n\n```\n\n*c*", ["<```py", "", "# x", "", "```>", "", "<*c*>", ""]),
        ("```\n" + "x\n" * 20 + "```\n\nend", ["```", *["x"] * 20, "```", "", "end", ""]),  # higher than the terminal
        ("", ["", ""]),
    ],
)
def test_each_block_is_drawn_once_it_is_whole(text: str, rows: list[str]):
    assert shown(text) == rows


def test_a_terminal_that_changes_its_size_keeps_what_was_written():
    sizes = iter([(40, 12), (30, 12), (30, 12), (30, 12)])
    stream = MarkdownStream(lambda: next(sizes), lambda *_: "drawn\n")
    assert screen_of(stream.feed("*a*\n\n*b*") + stream.end())[:3] == ["*a*", "", "drawn"]


PARTS = st.sampled_from(["# a", "\n", "- b ", "**c**", "`d`", "```\n", "word ", "1. ", "  ", "|x|"])


@given(st.lists(PARTS, max_size=30))
@example(["# a"] * 13)  # as wide as the terminal
def test_it_does_not_matter_in_which_parts_an_answer_comes(parts: list[str]):
    assert shown(*parts) == shown("".join(parts))


def test_rich_draws_what_the_marks_mean():
    said = drawn("# Wolf\n\n- *one*\n- `two`\n\n9. three\n10. four", 40)
    plain = re.sub(r"\x1b\[[\d;]*m", "", said)
    assert plain.split() == ["Wolf", "•", "one", "•", "two", "9.", "three", "10.", "four"]
    assert "\x1b]8" not in drawn("[x](https://example.org)", 40)


# -- words at the edge -----------------------------------------------------------------------------


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
    assert screen_of(flow(text, columns), columns) == lines
    assert screen_of(WordWrap(columns - 1).feed(text), columns) == lines, "pieces make no difference"


words = st.lists(st.sampled_from([*"abcé春🙂 \n\t", "e\u0301"]), max_size=200).map("".join)


@given(words, st.integers(10, 40))
@example("aaaa 春aaaaaaaaa", 10)
def test_nothing_is_lost_or_out_of_place(text: str, columns: int):
    lines = screen_of(flow(text, columns), columns)

    def letters(part: str) -> str:
        return "".join(part.split())

    assert letters("".join(lines)) == letters(text)
    for paragraph in text.split("\n"):
        if not any(c in paragraph for c in "\t春🙂") and all(cell_len(w) < columns for w in paragraph.split(" ")):
            for word in paragraph.split():
                assert any(word in line for line in lines), "a word that fits a line was broken"
