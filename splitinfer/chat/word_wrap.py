"""Wraps streamed text: a word that reaches the terminal's edge moves to the next line, though its beginning is shown.

|... I am a great deal more tha|   the next token is "n": go back over "tha", erase it,
|... I am a great deal more    |   and write it again below
|than                          |
"""

from rich.cells import cell_len

_TAB = 8


class WordWrap:
    """Turns text into the same text with line breaks and erasures. ``width``: cells to use, one less than there are.

    The last cell stays free because terminals differ in where the cursor is once it is filled.
    """

    def __init__(self, width: int) -> None:
        self._width = max(2, width)
        self._column = 0
        self._word = ""  # letters since the last space or wide character; a break moves them

    def feed(self, text: str) -> str:
        """The text to write for ``text``."""
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
