"""What a model writes, told apart as it grows: text, reasoning, and calls of tools.

    <think>The user wants ...</think>It will <tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>
    ReasoningPart .................. TextPart ToolCallPart

What marks them is found by rendering the model's chat template (``text.syntax_probes``); ``text.call_reader`` reads
calls. What is decided here:

- A call that cannot be read, or that the answer's end cuts off, becomes text again, with its markers. Without tools in
  the request, calls are text. Space alone between calls and reasoning is no text.
- A call with a marker also ends reasoning that the model has not closed.
- Where an answer has a form, all is text once its form has begun: ``{"tag": "<think>"}`` opens no reasoning.
- Each call of an answer has another id. Where a model gives two calls the same one, the later has none of its own.
- If the caller asks for it, a call comes in pieces while it is written. A call whose first piece was told cannot become
  text again: if the rest cannot be read the call is broken, and if the answer is cut off there, its pieces end.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import regex

from splitinfer.core.call_syntax import AnswerSyntax, CallSyntax
from splitinfer.text.call_reader import CallReader, Section, spaced
from splitinfer.text.call_reader import ToolCallPart as ToolCallPart

Tool = Mapping[str, Any]  # as in OpenAI's API: {"type": "function", "function": {"name": ..., "parameters": ...}}

_OPENING = 64  # last tokens of a prompt, which have the mark with which a template may open the reasoning


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class BrokenCall:
    """Pieces of a call were told, and the whole is not a call. It is the answer's last part."""


AnswerPart = TextPart | ReasoningPart | ToolCallPart | BrokenCall


class AnswerFormat:
    """How one model marks its answers.

    Args:
        find: returns the syntax of answers; its argument says whether the request has tools.
        shown: returns the text of tokens, with special ones.
    """

    def __init__(self, find: Callable[[bool], AnswerSyntax], shown: Callable[[Sequence[int]], str]) -> None:
        self.of, self._shown = find, shown

    @property
    def syntax(self) -> CallSyntax | None:
        """How calls are written; None if the model's template takes no tools at all."""
        return self.of(True).calls

    @property
    def call_start(self) -> str:
        """The text that opens a call of a tool; empty if nothing always does."""
        calls = self.syntax
        return "" if calls is None else calls.opens.strip() or calls.before.strip()

    @property
    def markers(self) -> tuple[str, ...]:
        """The strings that mark something. Text must contain them for a parser, although they may be special tokens."""
        return tuple(sorted({*self.of(True).markers, *self.of(False).markers}))

    def parser(
        self,
        prompt: Sequence[int],
        tools: Sequence[Tool] = (),
        *,
        has_form: bool = False,
        grows: bool = False,
        begun: str | None = None,
    ) -> "AnswerParser":
        """Return a parser for the answer to a prompt.

        Args:
            tools: the functions that the answer may call. Without any, calls are text.
            has_form: a grammar is enforced outside reasoning and calls.
            grows: calls come in pieces.
            begun: the end of the prompt, if the answer continues that text.
        """
        syntax = self.of(bool(tools))
        is_open = self._opened(syntax, prompt) if begun is None else _is_open_in(syntax, begun)
        reader = CallReader(syntax.calls, tools) if tools and syntax.calls is not None else None
        already = syntax.begun if begun is None and not is_open else ""
        return AnswerParser(syntax, reader, is_open=bool(is_open), has_form=has_form, grows=grows, already=already)

    def has_opened(self, prompt: Sequence[int]) -> bool | None:
        """Return whether a prompt ends inside reasoning. Return None if it says nothing of reasoning, so that the model
        may open it."""
        return self._opened(self.of(False), prompt)

    def _opened(self, syntax: AnswerSyntax, prompt: Sequence[int]) -> bool | None:
        if syntax.reasoning is None:
            return None
        tail = self._shown(prompt[-_OPENING:]).rstrip()  # elsewhere than at its end it is a text of somebody
        opens, closes = (tail.endswith(mark) for mark in syntax.reasoning)
        return opens if opens or closes else None


def _is_open_in(syntax: AnswerSyntax, begun: str) -> bool:
    opened, closed = (begun.rfind(mark) for mark in syntax.reasoning or ("", ""))
    return opened > closed


class AnswerParser:
    """Parses one answer as it grows. ``reader``: of calls; None: they are text. ``is_open``: it begins with reasoning.
    ``has_form``: text has no markers in it. ``grows``: calls come in pieces. ``already``: what the prompt has of the
    first mark."""

    def __init__(
        self,
        syntax: AnswerSyntax,
        reader: CallReader | None = None,
        *,
        is_open: bool = False,
        has_form: bool = False,
        grows: bool = False,
        already: str = "",
    ) -> None:
        self._reader, self._has_form, self._grows = reader, has_form, grows
        self._rest, self._already = already, len(already)  # text that is not read yet; how much of it is the prompt's
        self._reasons, self._is_in_form, self._is_over = is_open, False, False
        self._section: Section | None = None
        self._waiting = list[AnswerPart]()  # of a call that has not ended, where calls come whole
        self._ids = set[str]()
        self._space = ""  # that came behind something other than text
        self._is_behind_text = self._has_others = False
        self._call = regex.compile(reader.opener) if reader is not None else None
        call = [f"(?P<call>{reader.opener})"] if reader is not None else []
        opens, closes = syntax.reasoning or ("", "")
        marks = [f"(?P<opens>{regex.escape(opens)})"] if opens else []
        left_out = "|".join(map(spaced, sorted(syntax.left_out, key=len, reverse=True)))
        marks += [f"(?P<left>{left_out})"] if left_out else []
        marks += [f"(?P<closes>{regex.escape(closes)})"] if closes else []
        self._in_text = regex.compile("|".join([*call, *marks]) or "(?!)")
        calls = call if reader is not None and reader.syntax.has_marker else []
        self._in_reasoning = regex.compile("|".join([*calls, f"(?P<closes>{regex.escape(closes)})"]))
        # The first characters of all marks; ``None``: they are not known.
        begins = {mark[0] for mark in (opens, closes, *(mark.lstrip() or mark for mark in syntax.left_out)) if mark}
        self._begins = frozenset(begins) if reader is None and not has_form else None

    def feed(self, text: str) -> list[AnswerPart]:
        """Return the parts that are certain with the next ``text`` of the answer."""
        if not self._rest and self._begins is not None and self._begins.isdisjoint(text):  # nearly every token
            self._rest = text
            return self._told(len(text))
        self._rest += text
        return joined(self._read(has_ended=False))

    def finish(self, *, is_cut: bool = False) -> list[AnswerPart]:
        """Return the parts that were held back when the answer ended. ``is_cut``: it would have gone on."""
        parts = self._read(has_ended=True)
        if is_cut:
            parts = [part for part in parts if not isinstance(part, BrokenCall)]
        if self._space and not self._has_others and not parts:
            parts.append(TextPart(self._space))  # an answer of nothing else
        return joined(parts)

    def _read(self, *, has_ended: bool) -> list[AnswerPart]:
        parts = list[AnswerPart]()
        while not self._is_over:
            if self._section is not None:
                parts += self._called(has_ended=has_ended)
                if self._section is not None:
                    break
            elif not self._marked(parts, has_ended=has_ended):
                break
        return parts

    def _marked(self, parts: list[AnswerPart], *, has_ended: bool) -> bool:
        """Take the text up to the next mark, and the mark. Return whether more text may be ready."""
        if self._is_in_form:
            parts += self._told(len(self._rest))
            return False
        pattern = self._in_reasoning if self._reasons else self._in_text
        if self._has_form and not self._reasons:
            at = len(self._rest) - len(self._rest.lstrip())
            found = pattern.match(self._rest, at, partial=not has_ended)
            if found is None and at < len(self._rest):
                self._is_in_form = True
                return True
        else:
            found = pattern.search(self._rest, partial=not has_ended)
        if found is None:
            parts += self._told(len(self._rest))
            return False
        begins, waits = found.start(), found.partial
        if not has_ended and (call_at := self._may_be_call()) is not None and call_at <= begins:
            begins, waits = call_at, True
        if not (self._has_form and not self._reasons and waits):
            parts += self._told(begins)
        if waits:
            return False
        return self._behind_mark(found, parts)

    def _behind_mark(self, found: regex.Match[str], parts: list[AnswerPart]) -> bool:
        """Take the mark that was found, which is next. Return as ``_marked`` does."""
        match found.lastgroup if found.lastgroup in ("opens", "closes", "left") else "call":
            case "call":
                assert self._reader is not None
                self._section, self._reasons = Section(self._reader), False
                return True
            case "left":
                self._space = ""
            case "closes" if not self._reasons and (self._has_others or self._is_behind_text):
                parts += self._told(found.end() - found.start())  # it closes nothing
                return bool(self._rest)
            case mark:
                self._reasons = mark == "opens"
                parts += self._behind_other([])
        self._take(found.end() - found.start())
        return bool(self._rest)

    def _may_be_call(self) -> int | None:
        """Return the place where a call may begin, if more text is needed to decide. Return None if there is none."""
        found = self._call.search(self._rest, partial=True) if self._call is not None else None
        return found.start() if found is not None and found.partial else None

    def _take(self, number: int) -> str:
        """Take the next characters and return them without the part that stands in the prompt."""
        taken, self._rest = self._rest[:number], self._rest[number:]
        known = min(self._already, number)
        self._already -= known
        return taken[known:]

    def _told(self, number: int) -> list[AnswerPart]:
        text = self._take(number)
        if not text:
            return []
        return self._behind_other([ReasoningPart(text)]) if self._reasons else self._text(text)

    def _called(self, *, has_ended: bool) -> list[AnswerPart]:
        """Read on in a section of calls. Return its calls, or its text if it is not a call."""
        section = self._section
        assert section is not None
        text, self._rest = self._rest, ""
        self._already = 0
        failed = False
        try:
            section.feed(text, has_ended=has_ended)
        except Exception:  # noqa: BLE001 - it is no call: of whatever kind the reason is
            failed = True
        self._waiting += self._with_own_ids(section.parts)
        section.parts = []
        ended = max(
            (i + 1 for i, part in enumerate(self._waiting) if isinstance(part, ToolCallPart) and part.ends), default=0
        )
        ready = len(self._waiting) if self._grows else ended
        parts, self._waiting = self._waiting[:ready], self._waiting[ready:]
        told = self._behind_other(parts) if parts else []
        if section.is_done:
            self._section, self._rest = None, section.rest
        elif failed:
            self._section, self._waiting = None, []
            if self._grows and section.has_begun:
                self._is_over = True
                return [*told, BrokenCall()]
            self._rest = section.unfinished
            told += self._told(max(1, len(self._rest) - len(section.rest)) if not ended or section.taken else 0)
        return told

    def _with_own_ids(self, parts: Sequence[AnswerPart]) -> list[AnswerPart]:
        found = list(parts)
        for i, part in enumerate(found):
            if isinstance(part, ToolCallPart) and part.call_id is not None:
                found[i] = replace(part, call_id=None) if part.call_id in self._ids else part
                self._ids.add(part.call_id)
        return found

    def _behind_other(self, parts: list[AnswerPart]) -> list[AnswerPart]:
        self._space, self._has_others, self._is_behind_text = "", True, False
        return parts

    def _text(self, text: str) -> list[AnswerPart]:
        if not self._is_behind_text:
            self._space += text
            if not self._space.strip():
                return []
            text, self._space, self._is_behind_text = self._space, "", True
        return [TextPart(text)]


def joined(parts: Iterable[AnswerPart]) -> list[AnswerPart]:
    """Return neighbours of one kind as one part."""
    found: list[AnswerPart] = []
    for part in parts:
        match (found[-1] if found else None, part):
            case (TextPart(before), TextPart(text)):
                found[-1] = TextPart(before + text)
            case (ReasoningPart(before), ReasoningPart(text)):
                found[-1] = ReasoningPart(before + text)
            case (ToolCallPart(name, before, call_id, ends=False), ToolCallPart(None, text, ends=ends)):
                found[-1] = ToolCallPart(name, before + text, call_id, ends)
            case _:
                found.append(part)
    return found
