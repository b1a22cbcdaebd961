"""Text for people. Makes text from a peer, another machine, a file or a model safe for a terminal, a log or a table,
and writes numbers with units. Pure."""

import re
import textwrap
from collections.abc import Sequence

_COMMAND = re.compile(r"`[^`]*`|\{[^}]*\}|splitinfer [a-z]+(?: (?:-\S+|[0-9a-f]{64}|\S+\.\w+|\d+))*")
_HALF = re.compile("[\ud800-\udfff]")
_CONTROLS = {c: None for c in (*range(0x20), *range(0x7F, 0xA0)) if chr(c) not in "\n\t"}


def without_controls(text: str) -> str:
    """Return ``text`` without control characters, which could command a terminal. Newlines and tabs stay."""
    return text.translate(_CONTROLS)


def whole_characters(text: str) -> str:
    """Return ``text`` with U+FFFD in place of each lone surrogate, which no tokenizer accepts.

    >>> whole_characters("a\\ud83d") == "a\\ufffd"
    True
    """
    return _HALF.sub("\ufffd", text)


def plain(text: str, most: int = 300) -> str:
    """Return ``text`` as one printable line of at most ``most`` characters.

    >>> plain("a\\x1b[31mb\\nc")
    'a [31mb c'
    """
    clean = " ".join("".join(each if each.isprintable() else " " for each in text[: most * 4]).split())
    return clean if len(clean) <= most else clean[: most - 3] + "..."


def wrapped(text: str, width: int) -> str:
    """Return ``text`` with lines of ``width``. Lines break between words, but not within commands, so that these can be
    copied. A line that begins with four spaces is a command. Continuation lines keep their line's indent.

    >>> wrapped("one two\\nthree: run splitinfer worker --port 5577", 12)
    'one two\\nthree: run\\nsplitinfer worker --port 5577'
    >>> wrapped("  one two three\\n    ssh mini ls -l", 12)
    '  one two\\n  three\\n    ssh mini ls -l'
    """
    whole = _COMMAND.sub(lambda found: found[0].replace(" ", "\0"), text)
    lines = [line if line.startswith("    ") else _filled(line, width) for line in whole.split("\n")]
    return "\n".join(lines).replace("\0", " ")


def _filled(line: str, width: int) -> str:
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.fill(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, replace_whitespace=False
    )


def size(num_bytes: float) -> str:
    """Return a number of bytes with three digits and a decimal unit.

    >>> size(0), size(20.48e6), size(21.04e9), size(5.35e12)
    ('0 B', '20.5 MB', '21 GB', '5.35 TB')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(num_bytes) < 999.5:  # more is rounded to four digits
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes * 1000:,.0f} TB"


def duration(seconds: float) -> str:
    """Return whole days, hours, minutes or seconds.

    >>> duration(59), duration(3600), duration(200000)
    ('59 s', '1 h', '2 days')
    """
    for size, least, unit in ((86400, 2 * 86400, "days"), (3600, 3600, "h"), (60, 60, "min")):
        if seconds >= least:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def seconds(value: float) -> str:
    """Return a time with its unit.

    >>> seconds(0.0058), seconds(0.0251), seconds(2.51), seconds(251.2), seconds(1420)
    ('5.8 ms', '25 ms', '2.5 s', '251 s', '24 min')
    """
    if value < 0.9995:
        return f"{1000 * value:.1f} ms" if value < 0.00995 else f"{1000 * value:.0f} ms"
    return f"{value:.1f} s" if value < 99.95 else f"{value:.0f} s" if value < 600 else duration(value)


def rate(value: float) -> str:
    """Return a rate with two digits, or all digits of its whole part.

    >>> rate(0.123), rate(4.951), rate(55.3), rate(1420.3)
    ('0.12', '5.0', '55', '1,420')
    """
    return f"{value:.2g}" if value < 1 else f"{value:.1f}" if value < 20 else f"{value:,.0f}"


def listed(words: Sequence[str]) -> str:
    """Return words as part of a sentence.

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
