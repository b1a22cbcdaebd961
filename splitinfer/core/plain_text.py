"""What a peer, another machine, a file or a model has written, as a terminal, a log or a table may show it. Pure."""

_CONTROLS = {c: None for c in (*range(0x20), *range(0x7F, 0xA0)) if chr(c) not in "\n\t"}


def without_controls(text: str) -> str:
    """Any lines, without what would command a terminal."""
    return text.translate(_CONTROLS)


def plain(text: str, most: int = 300) -> str:
    """One line, printable, not longer than ``most`` characters.

    >>> plain("a\\x1b[31mb\\nc")
    'a [31mb c'
    """
    clean = " ".join("".join(each if each.isprintable() else " " for each in text[: most * 4]).split())
    return clean if len(clean) <= most else clean[: most - 3] + "..."
