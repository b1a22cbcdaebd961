"""TXT records of DNS-SD: a list of strings ``key=value``, each of which has its length before it in one byte.

RFC 6763, section 6: a string has at most 255 bytes (6.1); the record should have at most about 400, so that it fits
into a packet with others (6.2); keys are printable ASCII without "=", are compared without regard to case, and only the
first of several equal ones counts (6.4). A string without "=" is an attribute without a value, which means nothing
here.
"""

from collections.abc import Iterable, Iterator, Mapping

MOST_STRING, MOST_RECORD = 255, 400  # bytes; of the record as this program writes it
_MOST_READ = 8192  # bytes of a record that are read


def encode(pairs: Mapping[str, str]) -> tuple[bytes, ...]:
    """The strings of a record with these keys and values; a value that is too long is cut at a character.

    Raises:
        ValueError: a key is none, or the record is longer than ``MOST_RECORD``.
    """
    strings = tuple(_string(key, value) for key, value in pairs.items())
    if sum(len(each) + 1 for each in strings) > MOST_RECORD:
        raise ValueError(f"the record is longer than {MOST_RECORD} bytes")
    return strings


def decode(strings: Iterable[bytes]) -> dict[str, str]:
    """The values by their keys in lower case; bytes that are no UTF-8 are replaced."""
    found: dict[str, str] = {}
    for each in strings:
        key, mark, value = each.partition(b"=")
        if mark and key:
            found.setdefault(key.decode("ascii", "replace").lower(), value.decode("utf-8", "replace"))
    return found


def strings_of(record: bytes) -> Iterator[bytes]:
    """The strings of a record's bytes; a length that reaches beyond the end ends it.

    >>> list(strings_of(b"\\x03a=1\\x00\\x09cut"))
    [b'a=1']
    """
    at = 0
    while at < min(len(record), _MOST_READ):
        end = at + 1 + record[at]
        if end > len(record):
            return
        if end > at + 1:
            yield record[at + 1 : end]
        at = end


def cut(text: str, most: int) -> str:
    """The text cut to ``most`` bytes of UTF-8, between characters.

    >>> cut("Zoë", 3), cut("Zoë", 4)
    ('Zo', 'Zoë')
    """
    return text.encode()[:most].decode("utf-8", "ignore")


def _string(key: str, value: str) -> bytes:
    if not key or not key.isascii() or not key.isprintable() or "=" in key:
        raise ValueError(f"{key!r} is no key of a TXT record")
    return key.encode() + b"=" + cut(value, MOST_STRING - len(key) - 1).encode()
