"""Markdown while it streams: a block is shown as it was written until it is whole, then drawn again by rich.

    |## Two *wol|        the tail of the answer, as it comes
    |Two wolves |        the block has ended: back to its first row, erase, draw

A block ends at an empty line, unless the next line is indented or goes on with the same list, and a fenced one at its
fence. What has no markup stays as it was written; so does a block that is higher than the terminal, because its first
row is out of reach, and one during which the terminal changed its size.
"""

import io
import re
from collections.abc import Callable

from rich.cells import cell_len

_FENCE = re.compile(r" {0,3}(```+|~~~+)")
_LIST = re.compile(r"\s*([-*+]|\d+[.)])\s")
_MARKUP = re.compile(r"[*_`~|\[]|^ {0,3}(#|>|[-+] |\d+[.)] )", re.MULTILINE)

_COLOUR = re.compile(r"\x1b\[[\d;]*m")

Size = tuple[int, int]  # columns and rows


class MarkdownStream:
    """Turns parts of an answer into text for a terminal.

    Args:
        size: returns the terminal's columns and rows.
        draw: returns a block for a number of columns, each line with its end. None: nothing is drawn again.
    """

    def __init__(self, size: Callable[[], Size], draw: Callable[[str, int], str] | None) -> None:
        self._size, self._draw = size, draw
        self._begin()

    def _begin(self) -> None:
        self._at = self._size()
        self._flow = WordWrap(self._at[0] - 1)
        self._block, self._rows, self._fence = "", 0, ""

    def feed(self, text: str) -> str:
        """Return what to send for ``text``."""
        return "".join(map(self._feed_char, text))

    def end(self) -> str:
        """Return what to send at the answer's end, behind which a new line begins."""
        return self._settled() or ("" if self._block.endswith("\n") else "\n")

    def _feed_char(self, char: str) -> str:
        settled = ""
        if self._is_between() and char != "\n" and not self._goes_on(char):
            settled = self._settled()
            self._begin()
        written = self._flow.feed(char)
        self._rows += written.count("\n")
        self._block += char
        if char == "\n":
            self._mark_fence()
        return settled + written

    def _is_between(self) -> bool:
        """Return whether the block has ended, unless the next line goes on with it."""
        return not self._fence and self._block.endswith("\n\n") and bool(self._block.strip())

    def _goes_on(self, char: str) -> bool:
        return char in " \t" or (_LIST.match(self._block) is not None and char in "-*+0123456789")

    def _mark_fence(self) -> None:
        """Learn from the line that has just ended whether code goes on."""
        line = self._block[self._block.rfind("\n", 0, -1) + 1 : -1]
        found = _FENCE.match(line)
        if found is None:
            return
        if not self._fence:
            self._fence = found[1]
        elif found[1].startswith(self._fence) and not line.strip().strip(found[1][0]):
            self._fence = ""

    def _settled(self) -> str:
        """Return the text that draws the block over its raw form, or an empty text if that is impossible or useless."""
        columns, rows = self._at
        if self._draw is None or self._size() != self._at or self._rows >= rows - 1 or not _MARKUP.search(self._block):
            return ""
        up = f"\x1b[{self._rows}A" if self._rows else ""
        gap = "\n" if self._block.endswith("\n\n") else ""
        return f"\r{up}\x1b[J{self._draw(self._block, columns)}{gap}"


def drawn(block: str, columns: int) -> str:
    """Return a block as rich draws it, in this terminal's colours, without the empty lines around it."""
    from rich.console import Console

    from splitinfer.chat.lists import Markdown

    buffer = io.StringIO()
    Console(file=buffer, width=columns - 1, force_terminal=True).print(
        Markdown(block, code_theme="ansi_dark", hyperlinks=False)
    )
    lines = buffer.getvalue().splitlines()
    full = [i for i, line in enumerate(lines) if _COLOUR.sub("", line).strip()]
    return "".join(f"{line}\n" for line in lines[full[0] : full[-1] + 1]) if full else ""


_TAB = 8


class WordWrap:
    """Turns text into the same text with line breaks and erasures: a word that reaches the terminal's edge moves to
    the next line, though its beginning is shown. ``width``: cells to use, one less than there are.

    The last cell stays free because terminals differ in where the cursor is once it is filled.
    """

    def __init__(self, width: int) -> None:
        self._width = max(2, width)
        self._column = 0
        self._word = ""  # letters since the last space or wide character; a break moves them

    def feed(self, text: str) -> str:
        """Return the text to write for ``text``."""
        return "".join(map(self._feed_char, text))

    def _feed_char(self, char: str) -> str:
        if char == "\n":
            return self._break("\n")
        cells = _TAB - self._column % _TAB if char == "\t" else cell_len(char)
        if self._column + cells > self._width:
            return self._over_the_edge(char, cells)
        self._column += cells
        self._word = self._word + char if cells <= 1 and not char.isspace() else ""
        return char

    def _over_the_edge(self, char: str, cells: int) -> str:
        if char.isspace():
            return self._break("\n")  # the break stands for the space
        word, moved = self._word, cell_len(self._word)
        if cells > 1 or moved in (0, self._column):  # a break is allowed here, or the word fills the line
            return self._break("\n") + self._feed_char(char)
        return self._break(f"\x1b[{moved}D\x1b[K\n") + "".join(map(self._feed_char, word + char))

    def _break(self, written: str) -> str:
        self._column, self._word = 0, ""
        return written
