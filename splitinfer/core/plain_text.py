"""Texts for people: what a peer, another machine, a file or a model has written, as a terminal, a log or a table may
show it; and numbers with units. Pure."""

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


def megabytes(nbytes: float) -> str:
    """
    >>> megabytes(999_949_999), megabytes(7e9)
    ('999.9 MB', '7.0 GB')
    """
    return f"{nbytes / 1e6:.1f} MB" if nbytes < 10**9 else f"{nbytes / 1e9:.1f} GB"


def duration(seconds: float) -> str:
    """
    >>> duration(59), duration(3600), duration(200000)
    ('59 s', '1 h', '2 days')
    """
    for size, least, unit in ((86400, 2 * 86400, "days"), (3600, 3600, "h"), (60, 60, "min")):
        if seconds >= least:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
