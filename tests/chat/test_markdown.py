"""Markdown while it streams: what the screen shows in the end, whatever the parts it came in."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from splitinfer.chat.markdown import MarkdownStream, drawn

SIZE = (40, 12)


def screen_of(written: str, columns: int = SIZE[0]) -> list[str]:
    """The rows that a terminal shows: text, line ends, and the escapes that a stream uses."""
    rows, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[(?:\d+[AD]|[JK])|\x1b\[[\d;]*m|.|\n", written):
        if part == "\n":
            row, column = row + 1, 0
            rows += [""] * (row + 1 - len(rows))
        elif part == "\r":
            column = 0
        elif part.endswith("A") and part[0] == "\x1b":
            row -= int(part[2:-1])
        elif part.endswith("D") and part[0] == "\x1b":
            column -= int(part[2:-1])
        elif part == "\x1b[K":
            rows[row] = rows[row][:column]
        elif part == "\x1b[J":
            rows[row:] = [rows[row][:column]]
        elif part[0] != "\x1b":
            rows[row] = rows[row][:column].ljust(column) + part + rows[row][column + 1 :]
            column += 1
            assert column < columns, "the last cell stays free"
    return [each.rstrip() for each in rows]


def marked(block: str, columns: int) -> str:
    """A block between marks, in lines that leave the last cell free."""
    lines = f"<{block.strip()}>".split("\n")
    return "".join(f"{line[at : at + columns - 1]}\n" for line in lines for at in range(0, len(line) or 1, columns - 1))


def shown(*parts: str, size: tuple[int, int] = SIZE) -> list[str]:
    stream = MarkdownStream(lambda: size, marked)
    return screen_of("".join([*map(stream.feed, parts), stream.end()]))


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
