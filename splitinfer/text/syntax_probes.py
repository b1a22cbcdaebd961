"""How a chat template writes answers, found by rendering it.

Histories with marked names, arguments, ids and texts are rendered and compared: what stands between the marks is how
the model writes. Nothing is known of single models. A description of calls counts only if calls with values of all
kinds, written by the template, are read as what they were.

A template that renders no calls has none; it may be an exception that is listed in ``core.call_syntax``.
"""

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from splitinfer.core.call_syntax import (
    ARGUMENTS,
    ID,
    KEY,
    NAME,
    NUMBER,
    AnswerSyntax,
    CallSyntax,
    Keyed,
    Members,
    kind_of,
)
from splitinfer.text.answer import AnswerFormat, ToolCallPart, joined
from splitinfer.text.call_reader import literal
from splitinfer.text.turns import THOUGHTS

Message = Mapping[str, Any]
Arguments = Mapping[str, Any]

_USER, _TEXT, _THOUGHT, _RESULT = "zquserzq", "zqtextzq", "zqthoughtzq", "zqresultzq"
_NAMES = ("zqfuna", "zqfunb")
_IDS = ("zqid0aaaa", "zqid0bbbb")  # nine letters and digits, as Mistral's templates demand
_KEYS = ("zqkeya", "zqkeyb")
_FORM_OF_IDS = f"functions.{NAME}:{NUMBER}"  # of Kimi-K2, whose template writes nothing else of a name
_NUMBERS = {_KEYS[0]: 1234567, _KEYS[1]: 7654321}
_TEXTS = {_KEYS[0]: "zqvala", _KEYS[1]: "zqvalb"}
_OTHERS: Sequence[Any] = (1234.5, True, None, ["zqv", 5], {"zqin": "zqv"})
_VALUES: Mapping[str, Any] = {
    "zqstring": "zqv", "zqlines": 'a "b"\n  c\\d', "zqinteger": 12, "zqnumber": -1.5, "zqboolean": True,
    "zqarray": ["zqv", "w"], "zqobject": {"zqin": [1, {"zqdeep": "zqv"}]},
}  # fmt: skip
_MARK = re.compile(r"<[^<>]+>|\[/?[A-Z][A-Z_ ]+\]")
_FIRST_MARK = re.compile(r"<[^<>]+>|\[/?[A-Z_]+\]|[^\w\s]{3,}")
_WORD = re.compile("[A-Za-z]+")
_INSIDE = re.compile(r"[\w<\[|/:\uff5c\u2581]*$")
_PAIRS = (
    ("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<thinking>", "</thinking>"), ("<|think|>", "<|/think|>"),
    ("<longcat_think>", "</longcat_think>"), ("<|think:start|>", "<|think:end|>"), ("<seed:think>", "</seed:think>"),
    ("<|channel>thought", "<channel|>"), ("<|START_THINKING|>", "<|END_THINKING|>"),
)  # fmt: skip
"""Marks of models whose templates write no reasoning: an exception, by words of the template or of the vocabulary."""


class Render(Protocol):
    """Renders a chat. It may raise anything."""

    def __call__(
        self, messages: Sequence[Message], tools: Sequence[Message], opens: bool, /, **settings: Any
    ) -> str: ...


def _tools(keys: Iterable[str] = _VALUES) -> list[Message]:
    kinds = {key: {"type": kind_of(_VALUES[key]), "description": "d"} for key in keys}
    parameters = {"type": "object", "properties": kinds, "required": []}
    function = {"description": "d", "parameters": parameters}
    return [{"type": "function", "function": {"name": name, **function}} for name in _NAMES]


@dataclass(frozen=True, slots=True)
class _Way:
    """How a template takes calls: ``as_text``: arguments as JSON in a text. ``content``: beside a call. ``answered``:
    with results. ``ids``: those of calls."""

    as_text: bool = False
    content: str | None = ""
    answered: bool = False
    ids: tuple[str, ...] = _IDS

    def messages(self, *calls: tuple[str, Arguments], **more: Any) -> list[Message]:
        made = [
            {
                "id": self.ids[i], "type": "function",
                "function": {"name": name, "arguments": json.dumps(given) if self.as_text else given},
            }
            for i, (name, given) in enumerate(calls)
        ]  # fmt: skip
        message = {"role": "assistant", "content": self.content, "tool_calls": made, **more}
        results = [
            {"role": "tool", "name": calls[i][0], "tool_call_id": self.ids[i], "content": _RESULT}
            for i in range(len(calls) * self.answered)
        ]
        return [{"role": "user", "content": _USER}, message, *results]


class _Probes:
    """The renderings of one template."""

    def __init__(self, render: Render, kinds: Sequence[str]) -> None:
        self._render, self._tools, self.before_user = render, _tools(kinds), ""
        user = [{"role": "user", "content": _USER}]
        self.prompt = self.behind_user(user, opens=True)
        self.base = self.behind_user(user)
        try:
            plain = self.behind_user([*user, {"role": "assistant", "content": _TEXT}])
        except Exception:  # noqa: BLE001 - a template is a program, and may raise anything
            plain = f"{self.prompt}{_TEXT}"
        self.before_text, _, self.behind_text = plain.partition(_TEXT)

    def behind_user(self, messages: Sequence[Message], *, opens: bool = False, **settings: Any) -> str:
        self.before_user, found, behind = self._render(messages, self._tools, opens, **settings).rpartition(_USER)
        if not found:
            raise ValueError("the template does not write the user's words")
        return behind

    def answer(self, messages: Sequence[Message], **settings: Any) -> str:
        """Return what the template writes of the answer, without what opens every answer."""
        prompt = self.behind_user(messages[:1], opens=True, **settings) if settings else self.prompt
        whole = self.behind_user(messages, **settings)
        heads = [head for head in (prompt, self.before_text) if head.strip()]
        heads = [head for head in (*heads, *map(str.rstrip, heads)) if whole.startswith(head)]
        if heads:
            return whole[len(max(heads, key=len)) :]
        common = _common(whole, prompt)
        common = common[: len(common) - len(_INSIDE.search(common)[0])] if common != whole else common  # type: ignore[index]
        return whole[max(len(common), len(self.base) if whole.startswith(self.base) else 0) :]

    def calls(self, way: _Way, *calls: tuple[str, Arguments], **more: Any) -> str:
        """Return what the template writes of an answer with calls, up to the end of the turn."""
        written = self.answer(way.messages(*calls, **more)).partition(_RESULT)[0]
        end = self.behind_text.strip()
        if end and way.answered:
            return written.partition(end)[0] if end in written else written
        return written.removesuffix(_common_end(written, self.behind_text)).rstrip().removesuffix(end)


def find_syntax(render: Render, words: str) -> AnswerSyntax:
    """Return how a template writes answers. ``words``: the template's text, and names of the tokenizer's tokens."""
    probes = _probes_of(render)
    takes_tools = probes is not None
    probes = probes or _probes_of(lambda messages, _, opens, /, **settings: render(messages, (), opens, **settings))
    if probes is None:
        return AnswerSyntax(reasoning=_pair_in(words), takes_tools=False)
    calls, takes_objects = next(_calls(probes), (None, False))
    found = AnswerSyntax(calls, takes_tools=takes_tools, takes_objects=takes_objects)
    reasoning, name = _reasoning(probes, words)
    return _with_text_marks(replace(found, reasoning=reasoning, reasoning_name=name), probes)


def _probes_of(render: Render) -> _Probes | None:
    for kinds in (tuple(_VALUES), ("zqstring",)):  # some templates take no lists and objects
        try:
            return _Probes(render, kinds)
        except Exception:  # noqa: BLE001 - a template is a program, and may raise anything
            continue
    return None


# -- calls -----------------------------------------------------------------------------------------


def _calls(probes: _Probes) -> Iterator[tuple[CallSyntax, bool]]:
    """Yield descriptions that read calls of all kinds back, and whether arguments are given as objects."""
    numbered = tuple(_FORM_OF_IDS.replace(NAME, name).replace(NUMBER, str(i)) for i, name in enumerate(_NAMES))
    for ids, content, answered, as_text in itertools.product(
        (_IDS, numbered), ("", None), (False, True), (False, True)
    ):
        way = _Way(as_text, content, answered, ids)
        try:
            found = _described(probes, way)
            if found is not None and _comes_back(probes, way, found):
                yield found, not as_text
        except Exception:  # noqa: BLE001 - of a template, or because it cannot be understood
            continue


def _described(probes: _Probes, way: _Way) -> CallSyntax | None:
    one = probes.calls(way, (_NAMES[0], _NUMBERS))
    if _NAMES[0] not in one:
        return None
    try:
        two = probes.calls(way, (_NAMES[0], _NUMBERS), (_NAMES[1], _NUMBERS))
        two = two if _NAMES[1] in two else ""
    except Exception:  # noqa: BLE001 - many templates take one call
        two = ""
    for read in (_as_object, _as_named):
        first = read(probes, way, two or one, 0)
        second = read(probes, way, two, 1) if two else None
        if first is None or (two and second is None):
            continue
        return _assembled(two or one, first, second)
    return None


@dataclass(frozen=True, slots=True)
class _Body:
    """The place of a call's body in a rendered chat, and the body without the parts that vary."""

    begins: int
    ends: int
    body: str
    members: Members | None = None
    keyed: Keyed | None = None
    is_text: bool = False
    id_form: str = ""


def _assembled(written: str, first: _Body, second: _Body | None) -> CallSyntax:
    before = written[: first.begins]
    behind, between, closes = written[first.ends :], "", ""
    opens, body = "", first.body
    if second is not None:
        middle, last = written[first.ends : second.begins], written[second.ends :]
        common = _common_end(before, middle)
        opens, before = before[: len(before) - len(common)], common
        middle = middle[: len(middle) - len(common)]
        behind = _common_beginning(middle, last)
        between, closes = middle[len(behind) :], last[len(behind) :]
        body = _with_numbers(first.body, second.body)
    opens, before = opens.strip(), before if opens.strip() else before.lstrip()
    closes, between = closes.rstrip(), between if between.strip() or opens or closes else ""
    return CallSyntax(
        body, opens, before, behind.rstrip(), between, closes, first.members, first.keyed, first.is_text, first.id_form
    )


def _with_numbers(one: str, other: str) -> str:
    """Return the first of two bodies with its number in its place, where they differ in one."""
    if one == other:
        return one
    parts, others = re.split(r"([0-9]+)", one), re.split(r"([0-9]+)", other)
    if len(parts) != len(others):
        return one
    return "".join(part if part == same else NUMBER for part, same in zip(parts, others, strict=True))


def _as_object(probes: _Probes, way: _Way, written: str, number: int) -> _Body | None:
    """Find a call that is a JSON object."""
    at = written.find(_NAMES[number])
    for begins in (found.start() for found in re.finditer(r"\{", written[:at])):
        try:
            value, length = json.JSONDecoder().raw_decode(written[begins:])
        except ValueError:
            continue
        given = {kind: key for key, one in value.items() for kind in [_kind_of_member(one, way, number)] if kind}
        if not {"name", "arguments"} <= given.keys() or not begins + length > at:
            continue
        text = written[begins : begins + length]
        others = frozenset(value.keys() - given.values())
        members = Members(given["name"], given["arguments"], given.get("id"), others)
        is_text = isinstance(value[given["arguments"]], str)
        begun, ended = _span_of(text, value[given["arguments"]])
        body = text[:begun] + ARGUMENTS + text[ended:]
        body = body.replace(_NAMES[number], NAME).replace(way.ids[number], ID)
        return _Body(begins, begins + length, body, members, None, is_text)
    return None


def _kind_of_member(value: Any, way: _Way, number: int) -> str | None:
    if isinstance(value, str) and value in (_NAMES[number], way.ids[number]):
        return "name" if value == _NAMES[number] else "id"
    if isinstance(value, str):
        try:
            value = literal(value)
        except ValueError:
            return None
    return "arguments" if value == _NUMBERS else None


def _span_of(text: str, value: Any) -> tuple[int, int]:
    """Return where a value, an object or a text, stands in JSON that has it."""
    for found in re.finditer(r"[{\"]", text[1:]):
        try:
            one, length = json.JSONDecoder().raw_decode(text[found.start() + 1 :])
        except ValueError:
            continue
        if one == value:
            return found.start() + 1, found.start() + 1 + length
    raise ValueError("the value is not there")


def _as_named(probes: _Probes, way: _Way, written: str, number: int) -> _Body | None:
    """Find a call whose name stands before its arguments."""
    name, call_id = _NAMES[number], way.ids[number]
    previous = 0
    if number:
        previous = max(written.rfind(str(value), 0, written.find(name)) for value in _NUMBERS.values())
    whole_id = written.find(call_id, previous)
    has_form = name in call_id
    begins = min(at for at in (written.find(name, previous), whole_id) if at >= 0)
    keys = written.find(_KEYS[0], begins)
    span = _object_at(written, begins, keys)
    if span is not None:
        text, ends, keyed = written[begins : span[0]] + ARGUMENTS, span[1], None
        is_text = written[span[0]] != "{"
    else:
        keyed = _keyed(probes, way)
        values = written.find(str(_NUMBERS[_KEYS[1]]), keys)
        ends = values + len(str(_NUMBERS[_KEYS[1]])) + len(keyed.closes.replace(KEY, _KEYS[1]))
        text, is_text = written[begins : keys - len(keyed.opens)] + ARGUMENTS, False
    text = text.replace(call_id, ID).replace(name, NAME)
    return _Body(begins, ends, text, None, keyed, is_text, _FORM_OF_IDS if has_form else "")


def _object_at(written: str, begins: int, keys: int) -> tuple[int, int] | None:
    """Return where the object stands that has a key, as JSON, as Python writes it, or as JSON in a text."""
    for opened in (written.rfind("{", begins, keys), written.rfind('"{', begins, keys)):
        for ends in (found.end() for found in re.finditer(r"[}\"]", written[keys:])) if opened >= 0 else ():
            try:
                value = literal(written[opened : keys + ends])
                value = literal(value) if isinstance(value, str) else value
            except ValueError:
                continue
            if value == _NUMBERS:
                return opened, keys + ends
    return None


def _keyed(probes: _Probes, way: _Way) -> Keyed:
    """Find how arguments stand one by one."""

    def cut(given: Arguments, values: Sequence[str]) -> list[str]:
        """Return the texts around keys and values, from before the first key to after the last value."""
        rest, parts = probes.calls(way, (_NAMES[0], given)), list[str]()
        rest = rest[rest.rfind(_NAMES[0], 0, rest.find(_KEYS[0])) + len(_NAMES[0]) :]
        for word in (_KEYS[0], values[0], _KEYS[1], values[1]):
            before, found, rest = rest.partition(word)
            if not found:
                raise ValueError(f"{word} is not written")
            parts.append(before)
        return [*parts, rest]

    head, middle, inner, _, tail = cut(_NUMBERS, [*map(str, _NUMBERS.values())])
    _, of_text, inner_of_text, _, _ = cut(_TEXTS, [*_TEXTS.values()])
    # A key that is written once more is behind its value.
    inner, tail = inner.replace(_KEYS[0], KEY), tail.replace(_KEYS[1], KEY)
    inner_of_text = inner_of_text.replace(_KEYS[0], KEY)
    opens = _common_end(head, inner)
    closes = _common_beginning(inner[: len(inner) - len(opens)], tail)
    between = inner[len(closes) : len(inner) - len(opens)]
    quote = of_text[len(middle) :] if of_text.startswith(middle) else ""
    if quote and not inner_of_text.startswith(quote):
        raise ValueError("texts end otherwise than they begin")
    middles = {"": middle}
    if not quote and of_text != middle:
        middles = {"string": of_text, "integer": middle, "number": middle}
    for value in _OTHERS if "string" in middles else ():
        given = {_KEYS[0]: value, _KEYS[1]: 7654321}
        rest = probes.calls(way, (_NAMES[0], given)).partition(_KEYS[0])[2].partition(_KEYS[1])[0]
        rest = rest[: len(rest) - len(opens) - len(between)].removesuffix(closes.replace(KEY, _KEYS[0]))
        texts = sorted({str(value), json.dumps(value), json.dumps(value, separators=(",", ":"))}, key=len)
        ends = next((text for text in reversed(texts) if rest.endswith(text)), "")
        middles[kind_of(value)] = rest.removesuffix(ends)
    return Keyed(opens.lstrip() if opens.strip() else opens, tuple(middles.items()), closes, between, quote)


def _comes_back(probes: _Probes, way: _Way, found: CallSyntax) -> bool:
    """Return whether calls with values of all kinds are read back unchanged."""
    asked = [(_NAMES[0], _VALUES), (_NAMES[1], {}), (_NAMES[1], {"zqstring": "x"})]
    several = [asked[:1], asked[1:2], asked[2:]]
    if found.opens or found.between or found.closes:
        several.append([asked[0], asked[2]])
    for calls in several:
        written = probes.calls(way, *calls)
        if _read(found, written, cut=0) != calls or _read(found, written, cut=1) != calls:
            return False
    return True


def _read(syntax: CallSyntax, text: str, cut: int) -> list[tuple[str, Arguments]]:
    format_ = AnswerFormat(lambda _: AnswerSyntax(syntax), lambda _: "")
    parser = format_.parser([], _tools())
    pieces = text if cut else [text]
    parts = joined([part for piece in pieces for part in parser.feed(piece)] + parser.finish())
    return [(str(part.name), json.loads(part.arguments)) for part in parts if isinstance(part, ToolCallPart)]


# -- reasoning and text ----------------------------------------------------------------------------


def _reasoning(probes: _Probes, words: str) -> tuple[tuple[str, str] | None, str]:
    """Return the marks around reasoning, and the name of the message's part that the template takes it from."""
    call = {"content": "", "tool_calls": _Way().messages((_NAMES[0], {}))[1]["tool_calls"]}
    for settings in ({}, {"enable_thinking": True, "thinking": True}, {"reasoning_effort": "high"}):
        for name, beside in itertools.product(THOUGHTS, ({"content": _TEXT}, call)):
            messages = [{"role": "user", "content": _USER}, {"role": "assistant", name: _THOUGHT, **beside}]
            try:
                before, found, rest = probes.behind_user(messages, **settings).partition(_THOUGHT)
                prompt = probes.behind_user(messages[:1], opens=True, **settings)
            except Exception:  # noqa: BLE001 - a template is a program, and may raise anything
                continue
            behind, has_text, _ = rest.partition(_TEXT)
            if found and has_text and (marks := _around_thought(prompt, before, behind)) is not None:
                return marks, name
    return _pair_in(words), THOUGHTS[0]


def _around_thought(prompt: str, before: str, behind: str) -> tuple[str, str] | None:
    """Return the marks around reasoning, or None. ``before``, ``behind``: the text around it."""
    marks = [found.end() for found in _MARK.finditer(behind)]
    starts = [found.start() for found in _MARK.finditer(behind)]
    words = _WORD.findall(behind[: starts[1]] if len(starts) > 1 else behind)
    tail = before[([0, 0, *(found.start() for found in _MARK.finditer(before))])[-2] :]
    word = next((one for one in words if len(one) > 3 and one in tail), None)
    closes = behind.strip()
    if word is not None:
        closes = behind[: next((end for end in marks if end >= behind.find(word) + len(word)), len(behind))].strip()
    elif len(marks) > 1 and closes.startswith(behind[: marks[0]].strip()):
        closes = behind[: marks[0]].strip()
    if before.startswith(prompt) and before[len(prompt) :].strip():
        opens = before[len(prompt) :].strip()
    elif prompt.startswith(before.rstrip()) and prompt[len(before.rstrip()) :].strip():
        opens = prompt[len(before.rstrip()) :].strip()
    else:
        starts = [found.start() for found in _MARK.finditer(before)]
        limit = before.rfind(word) if word is not None else len(before)
        opens = before[max((start for start in starts if start < limit), default=len(before)) :].strip()
    return (opens, closes) if opens and closes and opens != closes else None


def _pair_in(words: str) -> tuple[str, str] | None:
    return next((pair for pair in _PAIRS if pair[1] in words), None)


def _with_text_marks(found: AnswerSyntax, probes: _Probes) -> AnswerSyntax:
    """Return a syntax with the marks around text, and with the part of a call's beginning that every prompt has."""
    calls, prompt, before = found.calls, probes.prompt, probes.before_text
    first = _FIRST_MARK.match((calls.opens + calls.before + calls.between).strip()) if calls is not None else None
    begun = first[0] if first is not None and prompt.endswith(first[0]) else ""
    opens = before[len(prompt if before.startswith(prompt) else _common_beginning(before, prompt)) :]
    for text in found.reasoning or ():
        opens = opens.replace(text, "")
    opens = f"{begun}{opens.strip()}" if opens.strip() else ""
    # Where the prompt opens no answer, or turns of users begin so, it is the head of a turn.
    first_of_text, marks = _MARK.search(opens), _MARK.findall(probes.before_user)
    is_header = first_of_text is None or not _common_beginning(prompt, before).strip()
    is_header = is_header or (first_of_text is not None and first_of_text[0] in marks[-1:])
    return replace(found, left_out=(opens,) if begun or not is_header else (), begun=begun)


def _common(one: str, other: str) -> str:
    """Return what two texts begin with."""
    number = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:number]


_OPEN_MARK = re.compile(r"(<[^<>\s]*(\s[^<>]*)?|\[/?[A-Z_]*)$")


def _common_beginning(one: str, other: str) -> str:
    """Return what two texts begin with, without a part of a mark."""
    common = _common(one, other)
    found = _OPEN_MARK.search(common) if len(common) < max(len(one), len(other)) else None
    return common if found is None else common[: found.start()]


def _common_end(one: str, other: str) -> str:
    """Return what two texts end with, without a part of a mark."""
    common = _common(one[::-1], other[::-1])[::-1]
    while common and any(_OPEN_MARK.search(text[: len(text) - len(common)]) for text in (one, other)):
        common = common[1:]
    return common
