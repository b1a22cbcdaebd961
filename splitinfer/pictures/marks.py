"""Pictures in the texts of messages, until a template writes these out.

A picture stands in a message's text as its source between two characters that Unicode leaves to programs, so that the
order of pictures is that of the text. Behind the first of these is a number that each process draws, so that no text
that somebody else wrote is taken for a picture. Nor is the name of the token that stands for pictures one, where it is
in a text: it is cut in two.
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
    """Messages with ``mark`` in the places of their pictures, and the pictures' sources in that order. ``name``: of the
    token that stands for pictures, cut in two where it is in other texts.

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
    """Return messages with ``words`` in the place of each picture whose source is not taken.

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
    """Texts with line breaks between them, but none around pictures.

    >>> [taken_out([{"content": in_lines([marked("a"), marked("b"), "What is", "it?"])}], "<p>")[0]]
    [[{'content': '<p><p>What is\\nit?'}]]
    """
    found = ""
    for text in texts:
        is_beside = not found or found.endswith(_CLOSE) or text.startswith(_OPEN)
        found += text if is_beside else f"\n{text}"
    return found


def portable(text: str, *, reads: bool = False) -> str:
    """A text with pictures for a file, in which the number is of no use; ``reads``: one of a file for this process.

    >>> portable(portable(marked("a.png")), reads=True) == marked("a.png")
    True
    """
    return text.replace("\ufdd0 ", _OPEN) if reads else text.replace(_OPEN, "\ufdd0 ")


def shown(text: str) -> str:
    """A text as a person is shown it.

    >>> shown(f"{marked('a.png')} What is {marked('data:image/png;base64,AA==')}?")
    '[a.png] What is [a picture]?'
    """
    return _MARKED.sub(lambda found: "[a picture]" if found[1].startswith("data:") else f"[{found[1]}]", text)
