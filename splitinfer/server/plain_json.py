"""JSON as it is taken from others: bounded, and nothing in it that could not be written again.

Python reads more than JSON has: NaN and infinity. JSON can name half a character (a lone surrogate, ``"\\ud800"``),
which Python's texts can hold, but nothing that is sent or tokenized can. What is nested a thousand times breaks whoever
goes through it by recursion, templates among them.
"""

import json
import math
import re
from typing import Any

_MAX_DEPTH = 64  # of lists and objects in each other
_MAX_COMMAS = 1 << 20  # each value but the first has one before it; a parser of 32 MB of them holds everybody up
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class _NoJson(ValueError):
    """What Python would read."""


def plain_json(text: str) -> Any:
    """What a text says in JSON.

    Raises:
        ValueError: it is none, or goes beyond the bounds; the sentence lacks its subject.
    """
    if text.count(",") > _MAX_COMMAS:
        raise ValueError(f"may have {_MAX_COMMAS:,} commas")
    try:
        found = json.loads(text, parse_constant=_no_number, parse_float=_finite)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except (json.JSONDecodeError, _NoJson) as error:
        raise ValueError(f"is not JSON: {error}") from None
    except ValueError:  # of Python's, for an integer of over 4,300 digits
        raise ValueError("is not JSON: a number has too many digits") from None
    if _depth(found) > _MAX_DEPTH:
        raise ValueError("is nested too deeply")
    if _SURROGATE.search(text) and not _is_text(found):
        raise ValueError("has half a character, which no text can hold")
    return found


def _is_text(found: Any) -> bool:
    """Whether all texts in it can be written: the pattern alone also finds the halves of whole characters."""
    try:
        json.dumps(found, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _no_number(word: str) -> float:
    raise _NoJson(f"{word} is no number in JSON")


def _finite(word: str) -> float:
    value = float(word)
    if math.isinf(value):
        raise _NoJson(f"{word:.40} is too large a number")
    return value


def _depth(value: Any) -> int:
    """How deeply lists and objects lie in each other; as deep as the limit is enough to know."""
    level, depth = [value], 0
    while level and depth <= _MAX_DEPTH:
        below = [one for each in level for one in _inside(each)]
        level, depth = below, depth + 1
    return depth


def _inside(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []
