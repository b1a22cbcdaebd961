"""Harmony, the form in which gpt-oss models read conversations and write answers, by OpenAI's package `openai-harmony`.

An answer is a list of messages, each on a channel, and a call of a tool is a message to it:

    <|channel|>analysis<|message|>The user wants ...<|end|><|start|>assistant<|channel|>final<|message|>It is ...
    <|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>

So *analysis* is reasoning, a message to ``functions.NAME`` is a call, and everything else is text ("OpenAI harmony
response format", OpenAI's cookbook). The package is an extra (``splitinfer[harmony]``). Without it the model's own
template is used, channels are not told apart, and tools are refused.

The package would download its vocabulary, o200k_base. But that is the model's own without the special tokens, so it is
written out of the model's tokenizer; the package compares its SHA-256.
"""

import base64
import json
import logging
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from splitinfer.errors import RequestError
from splitinfer.text.answer import AnswerPart, BrokenCall, ReasoningPart, TextPart, Tool, call_of, joined, told_end
from splitinfer.text.growing_calls import GrowingCalls
from splitinfer.text.token_bytes import bytes_of_tokens

log = logging.getLogger(__name__)

MODEL_TYPE = "gpt_oss"
NOT_INSTALLED = "a gpt-oss model's calls are read by openai-harmony; install it with pip install openai-harmony"
OTHER_VOCABULARY = "the model's vocabulary is not that of gpt-oss, by which its calls are read"

_ENCODING, _FILE, _BASE = "HarmonyGptOss", "o200k_base.tiktoken", "TIKTOKEN_ENCODINGS_BASE"
_NUM_RANKS = 199_998  # tokens of o200k_base that are not special
_MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_FUNCTIONS, _FINAL = "functions.", "<|channel|>final<|message|>"
_loading = threading.Lock()
_EFFORTS = {"none": "Low", "minimal": "Low", "low": "Low", "medium": "Medium"}  # others are High


class Harmony:
    """Conversations as token ids, and answers as parts, as ``text.answer.AnswerFormat``. ``encoding``: openai-harmony's
    ``HarmonyEncoding``."""

    markers = _MARKERS

    def __init__(self, encoding: Any) -> None:
        self._encoding = encoding

    @property
    def end_tokens(self) -> frozenset[int]:
        """The ids that end an answer: of the last message, and of a call."""
        return frozenset(self._encoding.stop_tokens_for_assistant_actions())

    @property
    def thinking(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """The ids that begin reasoning, those that begin the final message, and all that leads from the one to it."""
        texts = ("<|channel|>analysis<|message|>", _FINAL, "<|end|><|start|>assistant" + _FINAL)
        start, end, leave = (tuple(self._encoding.encode(text, allowed_special="all")) for text in texts)
        return start, end, leave

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Tool] = (),
        options: Mapping[str, Any] | None = None,
        opens_answer: bool = True,
    ) -> list[int]:
        """The ids of a chat. ``options``: ``reasoning_effort``; ``current_date``, today's if it is not given.

        Raises:
            RequestError: the messages or the tools cannot be written.
        """
        import openai_harmony as harmony

        try:
            found = harmony.Conversation.from_messages(_messages(messages, tools, options or {}))
            if opens_answer:
                return list(self._encoding.render_conversation_for_completion(found, harmony.Role.ASSISTANT))
            return list(self._encoding.render_conversation(found))
        except (harmony.HarmonyError, ValueError) as error:  # pydantic's errors are ValueErrors
            reason = str(error).strip().split("\n", 1)[0]
            raise RequestError(f"these messages cannot be converted to Harmony: {reason}") from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        return str(self._encoding.decode(list(token_ids)))

    def parser(
        self,
        _prompt: Sequence[int],
        tools: Sequence[Tool] = (),
        *,
        has_form: bool = False,
        grows: bool = False,
        begun: str | None = None,
    ) -> "HarmonyParser":
        """As ``AnswerFormat.parser``. ``has_form`` changes nothing: an answer of a form has Harmony's marks around
        it, too."""
        del has_form
        parser = HarmonyParser(self._encoding, has_tools=bool(tools), grows=grows)
        if begun is not None:
            parser.feed(_FINAL)
        return parser


class HarmonyParser:
    """Parses one answer as it grows. Text that is not Harmony is plain text, from the first such message on."""

    def __init__(self, encoding: Any, *, has_tools: bool, grows: bool = False) -> None:
        import openai_harmony as harmony

        self._encoding, self._has_tools, self._grows = encoding, has_tools, grows
        self._parser = harmony.StreamableParser(encoding, harmony.Role.ASSISTANT, strict=False)
        self._error: type[Exception] = harmony.HarmonyError
        self._ends = frozenset(encoding.stop_tokens())
        self._message: list[int] = []  # the ids of a message that is not shown yet: its header, or a call
        self._arguments = ""  # of the call under way
        self._growing: GrowingCalls | None = None  # the same, if it comes in pieces
        self._held = ""  # the beginning of a marker
        self._has_failed = False

    def feed(self, text: str) -> list[AnswerPart]:
        """The parts that are certain with the next ``text`` of the answer."""
        if self._has_failed:
            return [TextPart(text)] if text else []
        text, self._held = _without_open_marker(self._held + text)
        return self._take(text)

    def _take(self, text: str) -> list[AnswerPart]:
        tokens = self._encoding.encode(text, allowed_special="all")
        parts = list[AnswerPart]()
        for i, token in enumerate(tokens):
            try:
                parts += self._parts(token)
            except self._error:
                self._has_failed = True
                rest = self._encoding.decode([*self._message, *tokens[i:]])
                held, self._held = self._held, ""
                return joined([*parts, TextPart(rest + held)])
        return joined(parts)

    def finish(self, *, is_cut: bool = False) -> list[AnswerPart]:
        """The parts that were held back when the answer ended; its end token is not in its text. ``is_cut``: as of
        ``AnswerParser``."""
        held, self._held = self._held, ""
        parts = self._take(held)
        if self._has_failed or not self._message:
            return parts
        if self._parser.current_recipient is not None:
            ended = self._call(self._parser.current_recipient)
            return joined([*parts, *([] if is_cut and isinstance(ended[-1], BrokenCall) else ended)])
        header = self._encoding.decode(self._message)
        return joined([*parts, *([] if any(one in header for one in _MARKERS) else [TextPart(header)])])

    def _parts(self, token: int) -> list[AnswerPart]:
        recipient = self._parser.current_recipient  # of the message that may end now
        self._parser.process(token)
        self._message.append(token)
        if token in self._ends:
            ended = self._call(recipient) if recipient is not None else []
            self._message, self._arguments = [], ""
            return ended
        delta = self._parser.last_content_delta or ""
        if (name := self._parser.current_recipient) is not None:
            self._arguments += delta
            if delta and self._growing is None and self._grows and self._has_tools and name.startswith(_FUNCTIONS):
                self._growing = GrowingCalls.of_arguments(name.removeprefix(_FUNCTIONS))
            return [*self._growing.feed(delta)] if self._growing is not None else []
        if not delta:
            return []
        self._message = []
        return [ReasoningPart(delta) if self._parser.current_channel == "analysis" else TextPart(delta)]

    def _call(self, recipient: str) -> list[AnswerPart]:
        """The call of the message under way, or what is missing of it; its text, markers included, if it is not
        valid."""
        growing, self._growing = self._growing, None
        found = {"name": recipient.removeprefix(_FUNCTIONS), "arguments": self._arguments}
        if growing is not None:
            return told_end(growing, lambda: [call_of(found)])
        if self._has_tools and recipient.startswith(_FUNCTIONS):
            try:
                return [call_of(found)]
            except (ValueError, TypeError, KeyError):
                pass
        return [TextPart(self._encoding.decode(self._message))]


def _without_open_marker(text: str) -> tuple[str, str]:
    """A text up to where its end may be the beginning of a marker, and that beginning.

    >>> _without_open_marker("a<|end|>b<|en"), _without_open_marker("a < b|"), _without_open_marker("a<")
    (('a<|end|>b', '<|en'), ('a < b|', ''), ('a', '<'))
    """
    at = text.rfind("<")
    if at >= 0 and any(marker.startswith(text[at:]) and marker != text[at:] for marker in _MARKERS):
        return text[:at], text[at:]
    return text, ""


def _messages(messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], options: Mapping[str, Any]) -> list[Any]:
    """A chat, as templates know it, as messages of Harmony."""
    import openai_harmony as harmony

    system = harmony.SystemContent.new().with_conversation_start_date(
        str(options.get("current_date") or date.today().isoformat())
    )
    if (effort := options.get("reasoning_effort")) is not None:
        system = system.with_reasoning_effort(harmony.ReasoningEffort(_EFFORTS.get(str(effort), "High")))
    leads = bool(messages) and messages[0]["role"] == "system"
    made = [harmony.Message.from_role_and_content(harmony.Role.SYSTEM, system)]
    if leads or tools:
        made.append(_developer(messages[0]["content"] if leads else None, tools))
    names: dict[str, str] = {}
    for message in messages[1:] if leads else messages:
        made += _turn(message, names)
    return made


def _developer(instructions: str | None, tools: Sequence[Tool]) -> Any:
    import openai_harmony as harmony

    content = harmony.DeveloperContent.new()
    if instructions:
        content = content.with_instructions(instructions)
    if tools:
        functions = [tool["function"] for tool in tools]
        content = content.with_function_tools(
            [
                harmony.ToolDescription.new(one["name"], one.get("description") or "", one.get("parameters"))
                for one in functions
            ]
        )
    return harmony.Message.from_role_and_content(harmony.Role.DEVELOPER, content)


def _turn(message: Mapping[str, Any], names: dict[str, str]) -> Iterator[Any]:
    """One message of a chat. ``names``: of calls by their ids, which grows."""
    import openai_harmony as harmony

    text = message.get("content") or ""
    match message["role"]:
        case "system":
            yield _developer(text, ())
        case "assistant":
            yield from _answer(message, text, names)
        case "tool":
            name = names.get(message.get("tool_call_id", ""), message.get("name") or "tool")
            author = harmony.Author.new(harmony.Role.TOOL, _FUNCTIONS + name)
            result = harmony.Message.from_author_and_content(author, text)
            yield result.with_channel("commentary").with_recipient("assistant")
        case _:
            yield harmony.Message.from_role_and_content(harmony.Role.USER, text)


def _answer(message: Mapping[str, Any], text: str, names: dict[str, str]) -> Iterator[Any]:
    import openai_harmony as harmony

    def said(content: str, channel: str) -> Any:
        return harmony.Message.from_role_and_content(harmony.Role.ASSISTANT, content).with_channel(channel)

    calls = message.get("tool_calls") or ()
    if reasoning := message.get("reasoning_content"):
        yield said(reasoning, "analysis")
    if text or not calls:
        yield said(text, "commentary" if calls else "final")
    for call in calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        names[call.get("id", "")] = name
        content = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        addressed = said(content, "commentary").with_recipient(_FUNCTIONS + name)
        yield addressed.with_content_type("<|constrain|>json")


# -- loading ---------------------------------------------------------------------------------------


def load_harmony(wrapper: Any) -> Harmony | str:
    """What renders and parses for the model with this tokenizer; or why there is nothing that does."""
    try:
        import openai_harmony as harmony
    except ImportError:
        log.warning("%s; until then its reasoning is not told from its answer", NOT_INSTALLED)
        return NOT_INSTALLED
    ids = {marker: wrapper.convert_tokens_to_ids(marker) for marker in _MARKERS}
    if None in ids.values():
        return OTHER_VOCABULARY
    try:
        with _vocabulary(bytes_of_tokens(wrapper)(range(_NUM_RANKS))):
            encoding = harmony.load_harmony_encoding(_ENCODING)
    except harmony.HarmonyError:
        return OTHER_VOCABULARY
    same = all(encoding.encode(marker, allowed_special="all") == [i] for marker, i in ids.items())
    return Harmony(encoding) if same else OTHER_VOCABULARY


@contextmanager
def _vocabulary(tokens: Sequence[bytes]) -> Iterator[None]:
    """Lets openai-harmony find its vocabulary in a folder, unless it was told where it is. One thread at a time: the
    package is told by a variable of the process only. A child that began meanwhile has it, too, but not the folder."""
    with _loading:
        told = os.environ.get(_BASE)
        if told is not None and (Path(told) / _FILE).is_file():
            yield
            return
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / _FILE).write_bytes(ranks_file(tokens))
            os.environ[_BASE] = folder
            try:
                yield
            finally:
                os.environ.pop(_BASE)
                if told is not None:
                    os.environ[_BASE] = told


def ranks_file(tokens: Sequence[bytes]) -> bytes:
    """A vocabulary as tiktoken's files have it: the bytes of each token in base64, and its rank.

    >>> ranks_file([b"a", b"ab"])
    b'YQ== 0\\nYWI= 1\\n'
    """
    return b"".join(b"%s %d\n" % (base64.b64encode(token), i) for i, token in enumerate(tokens))
