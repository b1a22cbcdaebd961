"""Pictures in the texts of messages, until a template writes these out.

A picture stands in a message's text as its source between two characters that Unicode leaves to programs. So the order
of pictures is that of the text, whatever becomes of the messages before. Then the pictures are taken out, and what the
model's template writes for a picture takes their places. Somebody who writes such characters into a text sends a
picture in another way, and nothing else.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_MARKED = re.compile(f"{_OPEN}([^{_CLOSE}]*){_CLOSE}")


def marked(source: str) -> str:
    """A picture as a part of a text."""
    return f"{_OPEN}{source}{_CLOSE}"


def taken_out(messages: Sequence[Mapping[str, Any]], mark: str) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Messages with ``mark`` in the places of their pictures, and the pictures' sources in that order.

    >>> taken_out([{"role": "user", "content": f"See {marked('a.png')}."}], "<picture>")
    ([{'role': 'user', 'content': 'See <picture>.'}], ['a.png'])
    """
    sources = list[str]()

    def take(found: re.Match[str]) -> str:
        sources.append(found.group(1))
        return mark

    def without(message: Mapping[str, Any]) -> Mapping[str, Any]:
        content = message.get("content")
        if not isinstance(content, str) or _OPEN not in content:
            return message
        return {**message, "content": _MARKED.sub(take, content)}

    return list(map(without, messages)), sources


def has_pictures(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether any message has one."""
    contents = (message.get("content") for message in messages)
    return any(isinstance(content, str) and _OPEN in content for content in contents)


def shown(text: str) -> str:
    """A text as a person is shown it.

    >>> shown(f"{marked('a.png')} What is it?")
    '[a.png] What is it?'
    """
    return _MARKED.sub(r"[\1]", text)
