"""Calls as they grow: the arguments of a call while the model still writes it.

What a call is, ``text.whole_calls`` says when it has ended. Until then its text is read a second time, and what the
arguments surely begin with is told at once, as the JSON that they will be:

    <function=write><parameter=path>a.py</parameter><parameter=content>import os\\n...
                                                                    {"path": "a.py", "content": "import os\\n...

At its end each call is compared with what ``whole_calls`` finds, and only what is missing is told. So a mistake here
can hold a call up, or end it as broken, but cannot change it. Nothing is told of what could still become something
else; whether a value is text is found by asking the model's own parser about values that are not. Where that does not
go, a value comes whole at its end, or the call at its: arguments before the name, JSON in a string, numbers, values of
no declared type, JSON of GLM's models, MiniCPM's CDATA, Python over several lines.
"""

import ast
import json
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import regex

from splitinfer.core.plain_text import whole_characters
from splitinfer.text.whole_calls import QUOTED, SHAPES, Shape

Steps = Generator[None, None, None]

_NO_TEXTS = ("1", "{}", "true")  # what a parser leaves as it is only if the value is declared as a text
_NOTHING = ("null", "none", "nil")  # texts that are no texts to some parsers
_MOST_HELD = 512  # characters that are looked at again and again, as more text comes
_LONGEST_LETTER = 12  # of a text: two escapes of JSON
_SPACE = regex.compile(r"\s*")
_PYTHON_TOKEN = regex.compile(
    r"""[\[({]|[\])}]|,|[^,()\[\]{}"']+|"(?:[^"\\]|\\.)*+"|'(?:[^'\\]|\\.)*+'""", regex.DOTALL
)


@dataclass(frozen=True, slots=True)
class ToolCallPart:
    """A call, or what comes next of it. ``name``: of the function, in its first part, and ``call_id`` there, if the
    model gave one. ``arguments``: of a JSON object as text. ``ends``: it is the last part."""

    name: str | None
    arguments: str
    call_id: str | None = None
    ends: bool = True


class GrowingCalls:
    """The calls of a text that grows. ``syntax``: as of ``calls_in``. ``whole``: reads a text of one call; it may raise
    anything."""

    def __init__(self, syntax: str, whole: Callable[[str], ToolCallPart]) -> None:
        self._syntax, self._whole = syntax, whole
        self._rest, self._call = "", list[str]()  # text that is not read yet; text of this call that is
        self._name: str | None = None  # of this call, if it was told
        self._said, self._pieces = list[str](), list[ToolCallPart]()
        self._num_ended = 0
        self._steps: Steps | None = self._calls()

    @property
    def has_begun(self) -> bool:
        """Whether anything was told."""
        return self._name is not None or self._num_ended > 0

    def feed(self, text: str) -> list[ToolCallPart]:
        """What is certain with the next ``text``."""
        if self._steps is not None:
            self._rest += text
            try:
                next(self._steps)
            except Exception:  # noqa: BLE001 - of a parser, or of ours: the rest comes when the calls have ended
                self._steps = None
        return self._told()

    def finish(self, found: Sequence[ToolCallPart]) -> list[ToolCallPart]:
        """What is missing when the text has ended. ``found``: the calls that it consists of.

        Raises:
            ValueError: what was told is none of them.
        """
        for one in found[self._num_ended :]:
            self._end(one)
        if self._name is not None or self._num_ended > len(found):
            raise ValueError("there are fewer calls than were told")
        return self._told()

    # -- what is told ------------------------------------------------------------------------------

    def _told(self) -> list[ToolCallPart]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _begin(self, name: str | None, call_id: str | None) -> None:
        self._name = name
        self._pieces.append(ToolCallPart(name, "", call_id, ends=False))

    def _say(self, text: str) -> None:
        if text:
            self._said.append(text)
            self._pieces.append(ToolCallPart(None, text, ends=False))

    def _end(self, whole: ToolCallPart) -> None:
        """The call under way is this one."""
        if self._name is None:
            self._begin(whole.name, whole.call_id)
        said = "".join(self._said)
        if whole.name != self._name or not whole.arguments.startswith(said):
            raise ValueError("the call is another one than what was told of it")
        self._pieces.append(ToolCallPart(None, whole.arguments[len(said) :]))
        self._num_ended += 1
        self._name, self._said, self._call = None, [], []

    # -- reading -----------------------------------------------------------------------------------

    def _take(self, number: int) -> str:
        taken, self._rest = self._rest[:number], self._rest[number:]
        self._call.append(taken)
        return taken

    def _matched(self, pattern: regex.Pattern[str]) -> Generator[None, None, regex.Match[str]]:
        """What comes next and is a pattern, as soon as more text cannot make it longer.

        Raises:
            ValueError: it is not.
        """
        while True:
            if (found := pattern.match(self._rest, partial=True)) is None:
                raise ValueError("that is not a part of a call")
            if not found.partial and found.end() < len(self._rest):
                self._take(found.end())
                return found
            yield from self._more()

    def _more(self) -> Steps:
        if len(self._rest) > _MOST_HELD:
            raise ValueError("this takes too long to understand")
        yield

    def _calls(self) -> Steps:
        quote = QUOTED.get(self._syntax, '"')
        shape = _BRACED if quote != '"' else SHAPES.get("glm47" if self._syntax == "laguna" else self._syntax)
        yield from self._matched(_SPACE)
        while True:
            if self._syntax in ("json_tools", "longcat", "mistral") and self._rest[0] in "{[,":
                yield from self._object()
            elif self._syntax == "pythonic":
                yield from self._python()
            elif shape is not None:
                yield from self._shaped(shape, quote)
            else:
                return
            yield from self._matched(_SPACE)  # something else follows
            one = "".join(self._call).lstrip(_BETWEEN)
            self._end(self._whole(f"[{one}]" if self._syntax == "pythonic" else one))

    # -- JSON --------------------------------------------------------------------------------------

    def _object(self) -> Steps:
        """A call as an object, in a list or not."""
        yield from self._matched(_BEGIN)
        name, call_id = "", None
        while True:
            key = json.loads((yield from self._matched(_KEY))[1])
            if key == "arguments" or (key == "parameters" and self._syntax != "mistral"):
                if not name or self._rest[0] != "{":
                    raise ValueError("these arguments come whole")
                self._begin(name, call_id)
                yield from self._value(self._say)
            else:
                value = list[str]()
                yield from self._value(value.append)
                name = json.loads("".join(value)) if key == "name" else name
                call_id = json.loads("".join(value)) if key == "id" else call_id
            if (yield from self._matched(_NEXT))[1] == "}":
                return

    def _value(self, say: Callable[[str], None], quote: str = '"') -> Steps:
        """A value in JSON, said as ``json.dumps`` writes it. ``quote``: what is around texts; if it is another one,
        there are no escapes in them, and names have none."""
        token, depth, has_value = _TOKENS[quote], 0, False
        while depth or not has_value:
            found = (yield from self._matched(token))[1]
            if found in (",", ":"):
                has_value = False
                say(f"{found} ")
            elif found in ("}", "]"):
                depth, has_value = depth - 1, True
                say(found)
            elif has_value:
                raise ValueError("there is a value behind a value")
            elif found in ("{", "["):
                depth += 1
                say(found)
            elif found == quote:
                has_value = True
                say('"')
                yield from self._text(say, *_TEXTS[quote])
                say('"')
            else:
                has_value = True
                is_name = quote != '"' and self._rest[0] == ":"
                say(json.dumps(found if is_name else json.loads(found), ensure_ascii=False))

    def _text(
        self, say: Callable[[str], None], quote: str, letters: regex.Pattern[str], read: Callable[[str], str]
    ) -> Steps:
        """A text up to the ``quote`` behind it. ``letters``: as many of it as are whole; ``read``: what they stand
        for."""
        while not self._rest.startswith(quote):
            if (found := letters.match(self._rest)) and found.end():
                say(_inside(read(self._take(found.end()))))
            elif len(self._rest) >= _LONGEST_LETTER:
                raise ValueError("that is not a text")
            else:
                yield
        self._take(len(quote))

    # -- tags --------------------------------------------------------------------------------------

    def _shaped(self, shape: Shape, quote: str) -> Steps:
        head = (yield from self._matched(regex.compile(shape.head, regex.DOTALL)))[0]
        if shape.argument is None:
            empty = self._whole(f"{head}{{}}{shape.ends[1]}")
            if self._rest[0] != "{":
                raise ValueError("these arguments are not an object")
            self._begin(empty.name, empty.call_id)
            yield from self._value(self._say, quote)
            yield from self._matched(regex.compile(rf"\s*{shape.tail}"))
            return
        opens, closes = shape.argument
        following = regex.compile(rf"\s*(?:({opens})|{shape.tail})", regex.DOTALL)
        end = regex.compile(rf"({closes})\s*(?:{opens}|{shape.tail})", regex.DOTALL)
        while opened := (yield from self._matched(following))[1]:
            yield from self._argument(head + opened, "".join(shape.ends), end)

    def _argument(self, before: str, behind: str, end: regex.Pattern[str]) -> Steps:
        """An argument between tags. ``before``, ``behind``: make a value a call of this argument alone. ``end``: where
        it ends, and something else begins."""

        def read(value: str) -> tuple[str, Any]:
            ((key, found),) = json.loads(self._whole(before + value + behind).arguments).items()
            return key, found

        is_text = self._syntax != "minicpm5" and all(read(one)[1] == one for one in _NO_TEXTS)
        self._named(self._whole(before + _NO_TEXTS[0] + behind).name, read(_NO_TEXTS[0])[0])
        value, held, begin = list[str](), "", len(self._said)  # as it came; what was not told of it; what was
        while True:
            at, closing = self._closing(end)
            value.append(self._take(at))
            held += value[-1]
            kept = held.rstrip()
            if len(self._said) > begin:
                self._say(_inside(kept))
                held = held[len(kept) :]
            elif is_text and kept and not any(one.startswith(kept.strip().lower()) for one in _NOTHING):
                self._say(json.dumps(read(kept)[1], ensure_ascii=False)[:-1])
                held = held[len(kept) :]
            if closing:
                break
            yield from self._more()
        self._take(closing)
        whole, said = json.dumps(read("".join(value))[1], ensure_ascii=False), "".join(self._said[begin:])
        if not whole.startswith(said):
            raise ValueError("the value is another one than what was told of it")
        self._say(whole[len(said) :])

    def _named(self, name: str | None, key: str) -> None:
        """The next argument of a call begins."""
        if self._name is None:
            self._begin(name, None)
        self._say(f"{', ' if self._said else '{'}{json.dumps(key, ensure_ascii=False)}: ")

    def _closing(self, end: regex.Pattern[str]) -> tuple[int, int]:
        """Up to where text is surely of a value, and how long what ends it there is; 0: it goes on."""
        for letter in _CLOSES.finditer(self._rest):
            if found := end.match(self._rest, letter.start(), partial=True):
                is_certain = not found.partial and found.end() < len(self._rest)
                return letter.start(), len(found[1]) if is_certain else 0
        return len(self._rest), 0

    # -- Python ------------------------------------------------------------------------------------

    def _python(self) -> Steps:
        name = (yield from self._matched(_FUNCTION))[1]
        while key := (yield from self._matched(_KEYWORD))[1]:
            self._named(name, key)
            if (begins := self._rest[0]) in "\"'":
                self._take(1)
                self._say('"')
                yield from self._text(self._say, *_PYTHON[begins])
                yield from self._matched(_SPACE)
                if self._rest[0] not in ",)":
                    raise ValueError("the text is a part of a value")
                self._say('"')
            else:
                value, depth = list[str](), 0
                while depth or self._rest[0] not in ",)":
                    value.append((yield from self._matched(_PYTHON_TOKEN))[0])
                    depth += (value[-1] in "[({") - (value[-1] in "])}")
                whole = json.loads(self._whole(f"[{name}({key}={''.join(value)})]").arguments)[key]
                self._say(json.dumps(whole, ensure_ascii=False))


def _inside(text: str) -> str:
    """A text as JSON, without its quotation marks."""
    return whole_characters(json.dumps(text, ensure_ascii=False))[1:-1]


_BETWEEN, _LONG = "[, \n", '"' * 3
_BEGIN = regex.compile(r"[\s\[\],]*\{")
_KEY = regex.compile(r'\s*("(?:[^"\\]|\\.)*")\s*:\s*')
_NEXT = regex.compile(r"\s*([,}])")
_BRACED = Shape(r"[\s,]*call:[\w-]+")
_FUNCTION = regex.compile(r"[\s\[,]*([\w.]+)\(")
_KEYWORD = regex.compile(r"[\s,]*(?:(\w+)\s*=\s*|\))")
_CLOSES = regex.compile("<")
_Text = tuple[str, regex.Pattern[str], Callable[[str], str]]  # as ``_text`` takes them
_UNICODE = r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u(?![dD][89abAB])[0-9a-fA-F]{4}"
_JSON = regex.compile(rf'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|{_UNICODE})*+')


def _plain_text(quote: str) -> _Text:
    """Without escapes."""
    less = rf"<(?=.{{{len(quote) - 1}}})(?!{regex.escape(quote[1:])})"
    return quote, regex.compile(rf"(?:[^<]|{less})*+", regex.DOTALL), str


def _python_text(quote: str) -> _Text:
    escape = r"""\\(?:[\\'"abfnrtv]|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4})"""
    letters = regex.compile(rf"(?:[^{quote}\\\n]|{escape})*+")
    return quote, letters, lambda text: str(ast.literal_eval(f"{_LONG}{text} {_LONG}"))[:-1]


_TEXTS = {'"': ('"', _JSON, lambda text: str(json.loads(f'"{text}"')))} | {
    one: _plain_text(one) for one in QUOTED.values()
}
_PYTHON = {one: _python_text(one) for one in "\"'"}
_TOKENS = {
    quote: regex.compile(rf'{space}({regex.escape(quote)}|[\[{{\]}},:]|[^\s\[\]{{}},:"<]+)')
    for quote, space in (('"', r"\s*"), *((quote, "") for quote in QUOTED.values()))
}
