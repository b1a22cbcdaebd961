"""Marks pictures in the texts of messages until a template writes the texts out.

A picture stands in a message's text as its source between two characters that Unicode reserves for programs, so the
pictures keep their place in the text. A random number of each process follows the first of these characters, so no text
from outside counts as a picture. If a text has the name of the token that stands for pictures, it is cut in two, so
that it does not count as one either.
"""

import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

_OPEN, _CLOSE = f"\ufdd0{secrets.token_hex(8)} ", "\ufdd1"
_MARKED = re.compile(f"{_OPEN}([^{_CLOSE}]*){_CLOSE}")


def marked(source: str) -> str:
    return f"{_OPEN}{source}{_CLOSE}"


def taken_out(
    messages: Sequence[Mapping[str, Any]], mark: str, name: str = ""
) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Return messages with ``mark`` in place of their pictures, and the pictures' sources in that order. ``name``: the
    name of the token that stands for pictures; it is cut in two in other texts.

    >>> taken_out([{"role": "user", "content": f"<p> is {marked('a.png')}."}], "<start><p>", "<p>")
    ([{'role': 'user', 'content': '< p> is <start><p>.'}], ['a.png'])
    """
    sources = list[str]()

    def plain(value: Any) -> Any:
        if isinstance(value, str):
            texts = _MARKED.split(value)  # with the sources between them
            sources.extend(texts[1::2])
            cut = [text.replace(name, f"{name[0]} {name[1:]}") for text in texts[::2]] if name else texts[::2]
            return mark.join(cut)
        if isinstance(value, Mapping):
            return {key: plain(each) for key, each in value.items()}
        return [plain(each) for each in value] if isinstance(value, list | tuple) else value

    return [plain(message) for message in messages], sources


def unseen(messages: Sequence[Mapping[str, Any]], takes: Callable[[str], bool], words: str) -> list[Mapping[str, Any]]:
    """Return messages with ``words`` in place of each picture whose source ``takes`` refuses.

    >>> unseen([{"role": "user", "content": f"Look: {marked('a.png')}"}], lambda _: False, "[a picture]")
    [{'role': 'user', 'content': 'Look: [a picture]'}]
    """

    def told(content: Any) -> Any:
        return _MARKED.sub(lambda found: found[0] if takes(found[1]) else words, content)

    return [{**one, "content": told(one["content"])} if has_pictures([one]) else one for one in messages]


def has_pictures(messages: Sequence[Mapping[str, Any]]) -> bool:
    contents = (message.get("content") for message in messages)
    return any(isinstance(content, str) and _OPEN in content for content in contents)


def in_lines(texts: Iterable[str]) -> str:
    """Return texts with line breaks between them, but none around pictures.

    >>> [taken_out([{"content": in_lines([marked("a"), marked("b"), "What is", "it?"])}], "<p>")[0]]
    [[{'content': '<p><p>What is\\nit?'}]]
    """
    found = ""
    for text in texts:
        is_beside = not found or found.endswith(_CLOSE) or text.startswith(_OPEN)
        found += text if is_beside else f"\n{text}"
    return found


def portable(text: str, *, reads: bool = False) -> str:
    """Return a text with pictures for a file, without this process's number. ``reads``: convert a file's text back for
    this process.

    >>> portable(portable(marked("a.png")), reads=True) == marked("a.png")
    True
    """
    return text.replace("\ufdd0 ", _OPEN) if reads else text.replace(_OPEN, "\ufdd0 ")


def shown(text: str) -> str:
    """Return a text in the form that a person sees.

    >>> shown(f"{marked('a.png')} What is {marked('data:image/png;base64,AA==')}?")
    '[a.png] What is [a picture]?'
    """
    return _MARKED.sub(lambda found: "[a picture]" if found[1].startswith("data:") else f"[{found[1]}]", text)
