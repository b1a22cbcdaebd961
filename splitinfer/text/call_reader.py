"""Calls read as they come, by the description of how they are written (``core.call_syntax``).

A section of calls is a generator over text that grows: it takes what is certain and waits for more. What the arguments
surely begin with is told at once, as the JSON that they will be:

    <function=write><parameter=path>a.py</parameter><parameter=content>import os\\n...
                                                                    {"path": "a.py", "content": "import os\\n...

Names are those of the request: a call begins only where the name of one of its functions stands, the longest that fits.
A value between tags goes on until what ends it stands where the next argument begins or the call ends. It is a text if
its schema says so; otherwise JSON or Python's literal, if that has an admitted type. Such values come whole.
"""

import json
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import regex

from splitinfer.common.plain_text import whole_characters
from splitinfer.core.call_syntax import ARGUMENTS, ID, KEY, KINDS, NAME, NUMBER, CallSyntax, Keyed, admitted, referred

Steps = Generator[None, None, None]
Say = Callable[[str], None]
Schema = Mapping[str, Any]

_MOST_HELD = 4096  # characters that are looked at again and again, as more text comes
_DEEPEST = 64  # of values inside values
_LONGEST_ESCAPE = 12  # characters: a surrogate pair
_WORDS: Mapping[str, Any] = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_KEY = r"(?!/)[^\s<>=:,(){}\[\]\"']{1,200}?"
_WORD = r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|" + "|".join(_WORDS)
_NUMBER_GROWS = regex.compile(r"[.eE+\-0-9]*\Z")
_BARE = r"""[^\s\[\]{},:"'<>()]+"""
_COMMA, _COLON, _LIST = regex.compile(r"\s*([,}\]])"), regex.compile(r"\s*:\s*"), regex.compile(r"\s*(\]?)")
_FIRST = regex.compile(r"(?P<space>\s*)(?P<first>\S)")
_MEMBER, _BEGIN = regex.compile(r"\s*(\}?)"), regex.compile(r"\s*\{")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_ESCAPE = regex.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|U([0-9a-fA-F]{8})|(.))", regex.DOTALL)
_PAIR = r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_SINGLE = r"\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\x[0-9a-fA-F]{2}|\\U[0-9a-fA-F]{8}|\\[^uxU]"


@dataclass(frozen=True, slots=True)
class ToolCallPart:
    """A call, or its next part.

    Args:
        name: the function's name, in the first part; otherwise None.
        arguments: the next text of a JSON object.
        call_id: the model's own id, in the first part, if it wrote one.
        ends: this is the last part.
    """

    name: str | None
    arguments: str
    call_id: str | None = None
    ends: bool = True


class Source:
    """Text that grows. The generators take text and wait for more; they raise ValueError if the text does not fit.
    ``has_ended``: the text is complete."""

    def __init__(self, text: str = "", *, has_ended: bool = False) -> None:
        self.rest, self.has_ended = text, has_ended
        self.taken = list[str]()  # since something was complete

    def take(self, number: int) -> str:
        """Return the next characters and leave them behind."""
        taken, self.rest = self.rest[:number], self.rest[number:]
        self.taken.append(taken)
        return taken

    def more(self) -> Steps:
        """Wait for more text."""
        if self.has_ended or len(self.rest) > _MOST_HELD:
            raise ValueError("something is missing")
        yield

    def matched(
        self, pattern: regex.Pattern[str], *, may_grow: bool = False, upto: int | str = 0
    ) -> Generator[None, None, regex.Match[str]]:
        """Take the text that matches a pattern, up to the end of a group. ``may_grow``: wait until text follows it."""
        while True:
            found = pattern.match(self.rest, partial=not self.has_ended)
            if found is None:
                raise ValueError(f"that is not expected here: {self.rest[:40]!r}")
            if not found.partial and not (may_grow and found.end() == len(self.rest) and not self.has_ended):
                self.take(found.end(upto))
                return found
            yield from self.more()

    def value(self, say: Say, quote: str = "", depth: int = 0) -> Steps:
        """Take a value in JSON or as Python writes it and say it as ``json.dumps`` would. ``quote``: what else may
        stand around texts. With it, names may have nothing around them."""
        if depth > _DEEPEST:
            raise ValueError("too many values inside values")
        found = yield from self._token(quote)
        if found["quote"]:
            yield from self._text(say, found["quote"])
        elif (word := found["word"]) is not None:
            say(json.dumps(_WORDS[word] if word in _WORDS else json.loads(word)))
        elif found["mark"] == "{":
            yield from self._entries(say, quote, depth, "{}", _MEMBER)
        elif found["mark"] == "[":
            yield from self._entries(say, quote, depth, "[]", _LIST)
        else:
            raise ValueError("a value is missing")

    def _entries(self, say: Say, quote: str, depth: int, marks: str, first: regex.Pattern[str]) -> Steps:
        """Take what follows the first of an object's or a list's two ``marks``. ``first``: matches the other, or what
        comes before an entry."""
        say(marks[0])
        is_last = (yield from self.matched(first, may_grow=True))[1]
        while not is_last:
            if marks == "{}":
                yield from self.name(say, quote)
                say(": ")
            yield from self.value(say, quote, depth + 1)
            is_last = (yield from self.matched(_COMMA))[1] != ","
            say("" if is_last else ", ")
        say(marks[1])

    def name(self, say: Say, quote: str = "") -> Steps:
        """Take the name of an object's member and the colon after it."""
        found = yield from self._token(quote, _BARE)
        if found["quote"]:
            yield from self._text(say, found["quote"])
        elif found["word"] and quote:
            say(json.dumps(found["word"], ensure_ascii=False))
        else:
            raise ValueError("a name is missing")
        yield from self.matched(_COLON)

    def _token(self, quote: str, word: str = _WORD) -> Generator[None, None, regex.Match[str]]:
        also = f"{regex.escape(quote)}|" if quote else ""
        pattern = regex.compile(rf"""\s*(?:(?P<quote>{also}["'])|(?P<mark>[\[\]{{}}])|(?P<word>{word}))""")
        while True:
            found = pattern.match(self.rest, partial=not self.has_ended)
            if found is None:
                raise ValueError(f"that is no value: {self.rest[:40]!r}")
            may_grow = found["word"] and not self.has_ended and _NUMBER_GROWS.match(self.rest, found.end())
            if not found.partial and not may_grow:
                self.take(found.end())
                return found
            yield from self.more()

    def _text(self, say: Say, quote: str) -> Steps:
        """Take a text behind its first ``quote``, up to the one that ends it."""
        say('"')
        escapes = len(quote) == 1
        letters = regex.compile(
            rf"(?:[^{quote}\\]|{_PAIR}|{_SINGLE})*+" if escapes else _all_but(quote), regex.DOTALL
        )  # fmt: skip
        while not self.rest.startswith(quote):
            if (found := letters.match(self.rest)) and found.end():
                taken = self.take(found.end())
                say(_inside(_unescaped(taken) if escapes else taken))
            elif escapes and self.rest[:2] == "\\u" and (len(self.rest) >= _LONGEST_ESCAPE or self.has_ended):
                say(_inside(_unescaped(self.take(6))))
            elif len(self.rest) >= max(_LONGEST_ESCAPE, len(quote)) and escapes:
                raise ValueError("that is not a text")
            else:
                yield from self.more()
        self.take(len(quote))
        say('"')


def literal(text: str) -> Any:
    """Return the value that a text is, in JSON or as Python writes it. Raise ValueError if it is not a value."""
    source, said = Source(text, has_ended=True), list[str]()
    for _ in source.value(said.append):
        pass
    if source.rest.strip():
        raise ValueError("there is more than a value")
    return json.loads("".join(said))


class CallReader:
    """What reads the calls of one request. ``tools``: its functions, as in OpenAI's API."""

    def __init__(self, syntax: CallSyntax, tools: Iterable[Mapping[str, Any]]) -> None:
        self.syntax = syntax
        functions = [tool.get("function") or tool for tool in tools]
        self.schemas = {str(one["name"]): one.get("parameters") or {} for one in functions}
        self.names = _any_of(self.schemas)
        members = syntax.members
        opens = _fixed(syntax.opens) if members is None else _with_optional_brackets(syntax.opens)
        before = syntax.head.replace(NAME, self.names) if syntax.head else _fixed(syntax.before) or r"\s*"
        self.opens, self.before = regex.compile(opens), regex.compile(before)
        self.body = regex.compile(r"\s*" + self._body(syntax.body) if members is None and not syntax.head else "")
        self.behind = regex.compile(_fixed(syntax.behind))
        between = f"{_fixed(syntax.between)}{before}" if syntax.between or syntax.opens else ""
        self.closes = _fixed(syntax.closes)
        follows = [f"(?P<closes>{self.closes})"] * bool(syntax.closes) + [f"(?P<next>{between})"] * bool(between)
        self.begun_closes = regex.compile(self.closes or "(?!)")
        self.follows = regex.compile("|".join(follows)) if follows else None
        if members is None:
            begins = "" if syntax.head else self._body(syntax.body.partition(NAME)[0] + NAME)
        elif syntax.has_marker:
            begins = r"\s*\{"
        else:
            known = {members.name, members.arguments, members.call_id or members.name, *members.others, "parameters"}
            begins = rf'\s*\{{\s*"(?:{_any_of(known)})"\s*:'
        self.opener = regex.sub(r"^(?:\\s\*)+", "", opens + before + begins)

    def _body(self, body: str) -> str:
        """Return the expression of a body's text up to the arguments."""
        made, has_name, has_id = "", False, False
        id_text = r"(?P<id>[^\s<>\[\]\"]{1,200}?)"
        if (id_form := self.syntax.id_form) and not body.count(NAME):
            inside = _fixed(id_form).replace(NAME, f"(?P<name>{self.names})").replace(NUMBER, r"[0-9]{1,6}")
            id_text = f"(?P<id>{inside})"
        for letter in regex.split(f"([{NAME}{ID}{NUMBER}])", body.partition(ARGUMENTS)[0]):
            if letter == NAME:
                made += "(?P=name)" if has_name else f"(?P<name>{self.names})"
                has_name = True
            elif letter == ID:
                made += "(?P=id)" if has_id else id_text
                has_id = True
            else:
                made += r"[0-9]{1,6}" if letter == NUMBER else _fixed(letter)
        return made


class Section(Source):
    """The calls of one section, which begin where the reader's ``opener`` was found. ``parts``: the parts that nobody
    has taken yet. ``is_done``: the section has ended before ``rest``."""

    def __init__(self, reader: CallReader) -> None:
        super().__init__()
        self._reader, self._syntax = reader, reader.syntax
        self.parts, self.is_done, self.has_begun = list[ToolCallPart](), False, False
        self._steps = self._calls()

    def feed(self, text: str, *, has_ended: bool = False) -> None:
        """Read more. Raises ValueError or another error if that is no call."""
        self.rest += text
        self.has_ended = has_ended
        try:
            next(self._steps)
        except StopIteration:
            self.is_done = True

    @property
    def unfinished(self) -> str:
        """The text of the call that has not ended, and all text after it."""
        return "".join(self.taken) + self.rest

    def _begin(self, name: str, call_id: str | None) -> None:
        self.has_begun = True
        self.parts.append(ToolCallPart(name, "", call_id, ends=False))

    def _say(self, text: str) -> None:
        if text:
            self.parts.append(ToolCallPart(None, text, ends=False))

    def _calls(self) -> Steps:
        reader = self._reader
        yield from self.matched(reader.opens)
        while True:
            head = yield from self.matched(reader.before)
            if self._syntax.members is not None:
                yield from self._object()
                yield from self.matched(reader.behind)
            else:
                if not self._syntax.head:
                    yield from self._whole_name()
                    head = yield from self.matched(reader.body)
                given = head.groupdict()
                yield from self._named(given["name"], given.get("id"))
            self.parts.append(ToolCallPart(None, ""))
            self.has_begun, self.taken = False, []
            if reader.follows is None:
                return
            found = yield from self._next()
            if found is None or found.groupdict().get("closes") is not None:
                self.taken = []
                return

    def _whole_name(self) -> Steps:
        """Wait until no longer name can come than the one that is there."""
        while not self.has_ended:
            found = self._reader.body.match(self.rest, partial=True)
            if found is None:
                return
            text = "" if found.partial else self.rest[found.start("name") :]
            if not found.partial and not any(
                len(name) > len(text) and name.startswith(text) for name in self._reader.schemas
            ):
                return
            yield from self.more()

    def _next(self) -> Generator[None, None, regex.Match[str] | None]:
        """Take the end of the section, or the text between two calls, but nothing of the next call."""
        follows = self._reader.follows
        assert follows is not None
        while True:
            found = follows.match(self.rest, partial=not self.has_ended)
            if found is None:
                if self.has_ended and (begun := self._reader.begun_closes.match(self.rest, partial=True)):
                    self.take(begun.end())  # the rest is a token that ends answers, which is not in the text
                return None
            if not found.partial:
                groups = found.groupdict()
                if groups.get("closes") is not None:
                    self.take(found.end())
                elif self._syntax.between:
                    between = regex.match(_fixed(self._syntax.between), self.rest)
                    self.take(between.end() if between else 0)
                return found
            yield from self.more()

    # -- a JSON object ---------------------------------------------------------------------------

    def _object(self) -> Steps:
        members = self._syntax.members
        assert members is not None
        name, call_id, waiting, seen = "", None, list[str](), set[str]()
        yield from self.matched(_BEGIN)
        is_last = (yield from self.matched(_MEMBER, may_grow=True))[1]
        while not is_last:
            said = list[str]()
            yield from self.name(said.append)
            key = json.loads("".join(said))
            key = members.arguments if key in ("arguments", "parameters") else key
            if key in seen:
                raise ValueError(f"{key} comes twice")
            seen.add(key)
            if key == members.arguments:
                if name:
                    self._begin(name, call_id)
                yield from self._arguments(self._say if name else waiting.append)
            elif key in (members.name, members.call_id, "id", *members.others):
                said = []
                yield from self.value(said.append)
                found = json.loads("".join(said))
                if key == members.name:
                    name = self._known(found)
                if key in (members.call_id, "id") and isinstance(found, str):
                    call_id = found
            else:
                raise ValueError(f"a call has no {key}")
            is_last = (yield from self.matched(_COMMA))[1] != ","
        if not self.has_begun:
            self._begin(self._known(name), call_id)
            self._say("".join(waiting) or "{}")

    def _known(self, name: Any) -> str:
        if not isinstance(name, str) or name not in self._reader.schemas:
            raise ValueError(f"there is no function {name!r:.60}")
        return name

    def _arguments(self, say: Say) -> Steps:
        """Take an object, or a text that holds one as JSON."""
        said = list[str]()
        found = yield from self.matched(_FIRST, upto="space")
        if found["first"] == "{":
            yield from self.value(say)
            return
        yield from self.value(said.append)
        given = json.loads("".join(said))
        given = literal(given or "null") if isinstance(given, str) else given
        given = {} if given is None else given
        if not isinstance(given, dict):
            raise ValueError("the arguments are no object")
        say(_dumped(given))

    # -- a name outside of the arguments ---------------------------------------------------------

    def _named(self, name: str, call_id: str | None) -> Steps:
        keyed = self._syntax.keyed
        if keyed is None:
            self._begin(name, call_id)
            yield from self._arguments(self._say)
            yield from self.matched(self._reader.behind)
            return
        schema = self._reader.schemas.get(name) or {}
        argument, behind = _argument(keyed, schema), self._reader.behind.pattern
        between = _fixed(keyed.between)
        if keyed.quote:
            between = r"(?:\s*,)?"
        elif between and keyed.closes.strip():
            between = f"(?:{between})?"
        self._begin(name, call_id)
        is_first, either = True, regex.compile(rf"(?P<argument>{argument})|(?P<behind>{behind})", regex.DOTALL)
        while (found := (yield from self.matched(either, may_grow=True)))["argument"] is not None:
            key = found["key"]
            self._say(f"{'{' if is_first else ', '}{json.dumps(key, ensure_ascii=False)}: ")
            if is_first:
                either = regex.compile(rf"(?P<argument>{between}{argument})|(?P<behind>{behind})", regex.DOTALL)
                is_first = False
            if keyed.quote or (not keyed.closes.strip() and (yield from self._is_quoted())):
                yield from self.value(self._say, keyed.quote)
            else:
                yield from self._raw(keyed, key, found["middle"], schema, f"{between}{argument}")
        self._say("{}" if is_first else "}")

    def _is_quoted(self) -> Generator[None, None, bool]:
        """Return whether a quote comes next: a model may write one where its template writes texts as they are, and
        nothing but a comma would say where one ends."""
        return (yield from self.matched(_FIRST, upto="space"))["first"] in "\"'"

    def _raw(self, keyed: Keyed, key: str, middle: str, schema: Schema, argument: str) -> Steps:
        """Take a value that is all up to what closes it."""
        reader, syntax = self._reader, self._syntax
        inside = _schema_inside(schema, key, schema)
        kinds = _kinds_by(keyed, middle) or admitted(inside, schema)
        behind = reader.behind.pattern
        after = [behind]
        if syntax.closes:
            after = [behind + reader.closes, behind + _fixed(syntax.between) + reader.before.pattern]
        argument = argument.replace("?P<key>", "?:").replace("?P<middle>", "?:")
        closes = _exactly(keyed.closes.replace(KEY, key))
        end = regex.compile(rf"(?P<closes>{closes})(?:{argument}|{'|'.join(after)})", regex.DOTALL)
        is_text, value = kinds == {"string"}, list[str]()
        if is_text:
            self._say('"')
        while True:
            found = end.search(self.rest, partial=not self.has_ended)
            if found is None and self.has_ended:  # what closes the section is missing
                found = regex.compile(rf"(?P<closes>{closes}){behind}\s*\Z", regex.DOTALL).search(self.rest)
            upto = len(self.rest) if found is None else found.start()
            if upto:
                taken = self.take(upto)
                value.append(taken)
                if is_text:
                    self._say(_inside(taken))
            if found is not None and not found.partial:
                break
            yield from self.more()
        self.take(found.end("closes") - found.start())
        self._say('"' if is_text else _dumped(typed("".join(value), kinds, keyed, inside, schema)))


# -- values by their schemas -----------------------------------------------------------------------


def _schema_inside(schema: Any, key: str, root: Schema, depth: int = 0) -> Any:
    """Return the schema of an object's member, or of a list's items for the key "item"; None if unknown."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return None
    if isinstance(properties := schema.get("properties"), Mapping) and key in properties:
        return properties[key]
    several = [one for name in ("anyOf", "oneOf", "allOf") for one in schema.get(name) or ()]
    several += [referred(name, root)] if isinstance(name := schema.get("$ref"), str) else []
    found = (_schema_inside(one, key, root, depth + 1) for one in several)
    return next(filter(None, found), schema.get("items" if key == "item" else "additionalProperties"))


def typed(
    text: str, kinds: frozenset[str], keyed: Keyed | None = None, schema: Any = None, root: Schema | None = None
) -> Any:
    """Return the value that stands between tags as ``text``.

    Args:
        kinds: the JSON types that the value may have; empty: any.
        schema: the value's own, for objects and lists that are written as arguments are.
        root: the schema with the definitions that ``schema`` refers to.
    """
    if kinds == {"string"}:
        return text
    if keyed is not None and keyed.is_nested and not text.strip() and kinds & {"object", "array"}:
        return {} if "object" in kinds else []
    if keyed is not None and keyed.is_nested and (found := _nested(text, kinds, keyed, schema, root or {})) is not None:
        return found
    try:
        value = literal(text)
    except ValueError:
        value = text
        if "null" in kinds and not text.strip():
            return None
    if isinstance(value, str) and "string" not in kinds and kinds:
        return value
    is_admitted = not kinds or any(isinstance(value, KINDS.get(kind, ())) for kind in kinds)
    return value if is_admitted and not isinstance(value, str) else text


def _nested(text: str, kinds: frozenset[str], keyed: Keyed, schema: Any, root: Schema) -> Any:
    """Return the object or list that is written as arguments are. Return None if it is written otherwise."""
    opens = regex.compile(rf"\s*{_fixed(keyed.opens)}(?P<key>{_KEY}){_exactly(keyed.middles[0][1])}")
    if opens.match(text) is None:
        return None
    found, at = list[tuple[str, Any]](), 0
    while (begins := opens.match(text, at)) is not None:
        either = regex.compile(f"(?P<more>{opens.pattern})|{_fixed(keyed.closes.replace(KEY, begins['key']))}")
        depth, end = 1, begins.end()
        while depth:
            if (next_one := either.search(text, end)) is None:
                return None
            same = next_one["more"] is not None and next_one["key"] == begins["key"]
            depth += 1 if same else -1 if next_one["more"] is None else 0
            end, begun = next_one.end(), next_one.start()
        inside = _schema_inside(schema, begins["key"], root)
        value = typed(text[begins.end() : begun], admitted(inside, root), keyed, inside, root)
        found.append((begins["key"], value))
        at = end
    if text[at:].strip():
        return None
    may_be_list = "array" in kinds or "object" not in kinds
    is_list = may_be_list and all(key == "item" for key, _ in found)
    return [one for _, one in found] if is_list else dict(found)


def _kinds_by(keyed: Keyed, middle: str) -> frozenset[str]:
    """Return the JSON types that the text between a key and its value tells. Return an empty set if it tells none."""
    given = [kind for kind, text in keyed.middles if kind and "".join(text.split()) == "".join(middle.split())]
    return frozenset(given)


# -- expressions -----------------------------------------------------------------------------------


def spaced(text: str) -> str:
    """Return the expression of a fixed text. Any space may stand where it has some."""
    return r"\s*".join(map(regex.escape, text.split()))


def _fixed(text: str) -> str:
    """Return the expression of a fixed text. Any space may stand where it has some, and before it."""
    return rf"\s*{spaced(text)}" if text.strip() else ""


def _exactly(text: str) -> str:
    """Return the expression of a fixed text beside a value: space at its ends is a part of it, or is missing."""
    inner = text.strip()
    at = text.find(inner) if inner else len(text)
    edges = ["".join(f"(?:{regex.escape(one)})?" for one in part) for part in (text[:at], text[at + len(inner) :])]
    return f"{edges[0]}{spaced(inner)}{edges[1]}"


def _with_optional_brackets(text: str) -> str:
    """Return the expression of the text before JSON, in which a list's bracket may be missing."""
    bare = text.rstrip().removesuffix("[")
    return rf"{_fixed(bare)}(?:\s*\[)?" if bare.strip() != text.strip() else _fixed(text)


def _any_of(texts: Iterable[str]) -> str:
    return "|".join(map(regex.escape, sorted(texts, key=len, reverse=True))) or "(?!)"


def _argument(keyed: Keyed, schema: Schema) -> str:
    """Return the expression of the text before an argument's value. The names of the schema come first."""
    known = _any_of(schema.get("properties") or ())
    may_be_other = keyed.closes.strip() or keyed.quote or not schema.get("properties")
    middles = {_fixed(text) if keyed.quote else rf"\s*{_exactly(text)}" for _, text in keyed.middles}
    key = f"(?P<key>{known}|{_KEY})" if may_be_other else f"(?P<key>{known})"
    opens = _fixed(keyed.opens) or r"\s*"
    return rf"{opens}{key}(?P<middle>{'|'.join(sorted(middles, key=len, reverse=True))})"


def _all_but(quote: str) -> str:
    first, more = regex.escape(quote[0]), regex.escape(quote[1:])
    return rf"(?:[^{first}]|{first}(?=.{{{len(quote) - 1}}})(?!{more}))*+"


def _unescaped(text: str) -> str:
    def one(found: regex.Match[str]) -> str:
        code = found[1] or found[2] or found[3]
        return chr(int(code, 16)) if code else _ESCAPES.get(found[4], found[4])

    if "\\" not in text:
        return text
    return str(_ESCAPE.sub(one, text)).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _inside(text: str) -> str:
    """Return a text as JSON, without its quotation marks."""
    return whole_characters(json.dumps(text, ensure_ascii=False))[1:-1]


def _dumped(value: Any) -> str:
    return whole_characters(json.dumps(value, ensure_ascii=False))
