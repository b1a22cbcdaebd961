"""What a model writes, told apart as it grows: text, reasoning, and calls of tools.

    <think>The user wants ...</think>It will <tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>
    ReasoningPart .................. TextPart ToolCallPart

mlx-lm knows the markers and the forms of calls of many models; this is the one module that uses its state machine
(``make_text_state_machine``) and its parsers, which change between its versions. What is added here:

- A call that cannot be parsed as a whole (``text.whole_calls``), or that the answer's end cuts off, becomes text again,
  with its markers. Without tools in the request, calls are text. Space alone between calls and reasoning is no text.
- Where an answer has a form, all is text once its form has begun: ``{"tag": "<think>"}`` opens no reasoning.
- Each call of an answer has another id. Where a model gives two calls the same one, the later has none of its own.
- Where it is asked for, a call comes in pieces while it is written (``text.growing_calls``). One of which something was
  told cannot become text: if it cannot be parsed it is broken, and if the answer is cut off there, its pieces end.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from splitinfer.core.plain_text import whole_characters
from splitinfer.text.growing_calls import GrowingCalls
from splitinfer.text.growing_calls import ToolCallPart as ToolCallPart
from splitinfer.text.whole_calls import calls_in

Tool = Mapping[str, Any]  # as in OpenAI's API: {"type": "function", "function": {"name": ..., "parameters": ...}}

_NORMAL, _REASONING, _TOOL = "normal", "reasoning", "tool"  # mlx-lm's names of states
_TEXT = (_NORMAL, "begin")  # the latter of Harmony; other states hold headers
_OF_CALLS = frozenset({"name", "arguments", "parameters", "id", "type"})  # with any other, something would be lost
_OPENING = 16  # last tokens of a prompt in which a template may open the reasoning


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
    """How one model marks what it writes. ``wrapper``: mlx-lm's ``TokenizerWrapper``."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    @property
    def syntax(self) -> str | None:
        """The name of mlx-lm's parser of the model's calls; ``None`` if there is none."""
        parser = getattr(self._wrapper, "tool_parser", None)
        return None if parser is None else str(parser.__module__).rsplit(".", 1)[-1]

    @property
    def call_start(self) -> str:
        """The text that opens a call of a tool; empty if nothing always does."""
        return self._wrapper.tool_call_start or ""

    @property
    def markers(self) -> tuple[str, ...]:
        """The strings that mark something. Text must contain them for a parser, although they may be special tokens."""
        wrapper = self._wrapper
        edges = [edge for edges in wrapper.response_transitions.values() for edge, _ in edges]
        fixed = (wrapper.think_start, wrapper.think_end, wrapper.tool_call_start, wrapper.tool_call_end)
        return tuple(sorted({marker for marker in (*fixed, *(wrapper.structural_markers or ()), *edges) if marker}))

    def parser(
        self,
        prompt: Sequence[int],
        tools: Sequence[Tool] = (),
        *,
        has_form: bool = False,
        grows: bool = False,
        begun: str | None = None,
    ) -> "AnswerParser":
        """A parser for the answer to a prompt. ``tools``: those that it may call; none: calls are text. ``has_form``:
        a grammar is enforced for what is neither reasoning nor a call. ``grows``: calls come in pieces. ``begun``: the
        text with which the prompt ends, if the answer goes on with it."""
        from mlx_lm.generate import make_text_state_machine  # here, because importing it takes long

        wrapper, given = self._wrapper, list(tools)
        machine = make_text_state_machine(wrapper if tools else _WithoutTools(wrapper))
        edges = wrapper.tool_call_start or "", wrapper.tool_call_end or ""
        state = self._initial_state(prompt) if begun is None else self._state_behind(begun)

        syntax = self.syntax or ""

        def parse(text: str) -> list[ToolCallPart]:
            return [*map(call_of, calls_in(text, syntax, lambda one: wrapper.tool_parser(one, given)))]

        def whole(text: str) -> ToolCallPart:
            (one,) = parse(text)
            return one

        grow = (lambda: GrowingCalls(syntax, whole)) if grows else None
        return AnswerParser(machine, state, *edges, parse, has_form, grow)

    def _initial_state(self, prompt: Sequence[int]) -> str:
        if (state := self._wrapper.response_initial_state) is not None:
            return str(state)
        return _REASONING if self._wrapper.has_thinking and self.has_opened(prompt) else _NORMAL

    def has_opened(self, prompt: Sequence[int]) -> bool | None:
        """Whether a prompt ends inside reasoning; ``None``: it says nothing of reasoning, so the model may open it."""
        tail = list(prompt[-_OPENING:])
        opened, ended = self._wrapper.rfind_think_start(tail), self._wrapper.rfind_think_end(tail)
        return None if opened == ended else opened > ended

    def _state_behind(self, text: str) -> str:
        if not self._wrapper.has_thinking:
            return _NORMAL
        is_open = text.rfind(self._wrapper.think_start) > text.rfind(self._wrapper.think_end)
        return _REASONING if is_open else _NORMAL


class _WithoutTools:
    """A ``TokenizerWrapper`` that knows no calls."""

    has_tool_calling = False
    tool_call_start = tool_call_end = None

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper

    @property
    def response_transitions(self) -> dict[str, list[tuple[str, str]]]:
        given = self._wrapper.response_transitions
        return {state: [edge for edge in edges if edge[1] != _TOOL] for state, edges in given.items() if state != _TOOL}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapper, name)


def call_of(found: Any) -> ToolCallPart:
    """A call as a parser returns it. Raises ValueError, TypeError or KeyError for anything else."""
    name, given = found["name"], [found[key] for key in ("arguments", "parameters") if key in found]
    arguments = given[0] if given else {}
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "null")
    arguments = {} if arguments is None else arguments
    is_whole = len(given) < 2 and not found.keys() - _OF_CALLS
    if not isinstance(name, str) or not name or not isinstance(arguments, dict) or not is_whole:
        raise ValueError(f"a tool call needs a name and arguments, not {found!r:.80}")
    call_id = found.get("id")
    text = whole_characters(json.dumps(arguments, ensure_ascii=False))  # a model may write half of one as an escape
    return ToolCallPart(name, text, call_id if isinstance(call_id, str) else None)


@dataclass(slots=True)
class AnswerParser:
    """Parses one answer as it grows. ``machine``: mlx-lm's ``TextStateMachine``. ``call_start``, ``call_end``: the
    markers around a call. ``parse_call``: finds the calls of which the text between them consists. ``has_form``: text
    has no markers in it. ``grow``: makes what reads a text of calls as it comes; none: calls come whole."""

    machine: Any
    initial_state: str
    call_start: str
    call_end: str
    parse_call: Callable[[str], list[ToolCallPart]]
    has_form: bool = False
    grow: Callable[[], GrowingCalls] | None = None
    _growing: GrowingCalls | None = None
    _ids: set[str] = field(default_factory=set)
    _state: Any = field(init=False)
    _in_call: str = ""  # the text of a call that has not ended
    _space: str = ""  # that came behind something other than text
    _is_behind_text: bool = False
    _has_others: bool = False
    _is_in_form: bool = False
    _is_marked: bool = False  # whether the last character is of reasoning or of a call
    _lead: str = ""  # what has come since then, up to where a form begins

    def __post_init__(self) -> None:
        self._state = self.machine.make_state(self.initial_state)
        self._is_marked = self.initial_state not in _TEXT

    def feed(self, text: str) -> list[AnswerPart]:
        """The parts that are certain with the next ``text`` of the answer."""
        if not self.has_form:
            return joined(self._fed(text))
        parts = list[AnswerPart]()
        for i, letter in enumerate(text):  # one by one: where a form begins, nothing behind it is looked at
            if self._is_in_form:
                return joined([*parts, TextPart(text[i:])])
            was_marked = self._is_marked
            self._lead += letter
            found = self._fed(letter)
            if self._is_in_form:
                found = [TextPart(self._lead)]
                self._state, _, _ = self.machine.flush(self._state)
            elif was_marked or self._is_marked:
                self._lead = ""
            parts += found
        return joined(parts)

    def _fed(self, text: str) -> list[AnswerPart]:
        self._state, segments = self.machine.split(self._state, text)
        self._is_marked = segments[-1][0] not in _TEXT
        parts = list[AnswerPart]()
        for i, (state, inside) in enumerate(segments):
            parts += self._parts(state, inside, is_left=i < len(segments) - 1)
        return parts

    def finish(self, *, is_cut: bool = False) -> list[AnswerPart]:
        """The parts that were held back when the answer ended. ``is_cut``: it would have gone on."""
        self._state, held, state = self.machine.flush(self._state)
        parts = self._parts(state, held, is_left=False)
        if self._in_call:
            unfinished, self._in_call = self._in_call, ""
            # Some models do not mark a call's end: then it ends with the answer.
            if not self.call_end:
                ended = self._called(unfinished)
            else:
                has_begun = self._growing is not None and self._growing.has_begun
                ended = [BrokenCall() if has_begun else TextPart(self.call_start + unfinished)]
            parts += [] if is_cut and isinstance(ended[-1], BrokenCall) else ended
        if self._space and not self._has_others and not parts:
            parts.append(TextPart(self._space))  # an answer of nothing else
        return joined(parts)

    def _parts(self, state: str | None, text: str, *, is_left: bool) -> list[AnswerPart]:
        """What is certain of ``text`` in a state; ``is_left``: the state ends with it."""
        if state == _TOOL:
            self._in_call += text
            if self.grow is not None:
                self._growing = self._growing or self.grow()
            grown = self._with_own_ids(self._growing.feed(text)) if self._growing is not None else []
            if is_left:
                call, self._in_call = self._in_call, ""
                grown += self._called(call)
            return self._behind_other(grown) if grown else []
        if state == _REASONING:
            return self._behind_other([ReasoningPart(text)]) if text else []
        return self._text(text) if state in _TEXT and text else []

    def _called(self, text: str) -> list[AnswerPart]:
        """The calls in a text, or what is missing of them; the text itself, with its markers, if it is not valid."""
        growing, self._growing = self._growing, None
        has_begun = growing is not None and growing.has_begun
        try:
            found = self.parse_call(text)
            return self._with_own_ids(growing.finish(found) if growing is not None and has_begun else found)
        except Exception:  # noqa: BLE001 - any error of a model's parser means that this is no call
            return [BrokenCall() if has_begun else TextPart(self.call_start + text + self.call_end)]

    def _with_own_ids(self, parts: Sequence[AnswerPart]) -> list[AnswerPart]:
        found = list(parts)
        for i, part in enumerate(found):
            if isinstance(part, ToolCallPart) and part.call_id is not None:
                found[i] = replace(part, call_id=None) if part.call_id in self._ids else part
                self._ids.add(part.call_id)
        return found

    def _behind_other(self, parts: list[AnswerPart]) -> list[AnswerPart]:
        self._space, self._has_others = "", True
        self._is_behind_text = isinstance(parts[-1], TextPart)
        return parts

    def _text(self, text: str) -> list[AnswerPart]:
        if not self._is_behind_text:
            self._space += text
            if not self._space.strip():
                return []
            text, self._space, self._is_behind_text = self._space, "", True
        self._is_in_form = self.has_form
        return [TextPart(text)]


def joined(parts: Iterable[AnswerPart]) -> list[AnswerPart]:
    """Neighbours of one kind as one part."""
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
