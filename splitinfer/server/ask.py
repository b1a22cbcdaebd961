"""A client's request in one form for all APIs (the prompt, how to sample, what to show), and prompts as token ids at a
cost that is bounded before it is paid.

A tokenizer takes about a second for each megabyte or two, a request may have 32 MB, and templates may look at all
messages for each message. So a prompt that cannot fit is refused by its size. A conversation is bounded by its number
of messages and tools. A text of over a million characters, or of over 16 for each token of the context, is refused once
enough of its pieces were tokenized to make twice the context, so a text that fits is never refused.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from splitinfer.core.grammar import Grammar, GrammarKind
from splitinfer.core.sampling_defaults import Recommended
from splitinfer.core.sequence import SamplingParams
from splitinfer.llm import LLM
from splitinfer.server.fields import Fields, Name
from splitinfer.server.problem import Problem, invalid
from splitinfer.text.conversations import Conversations
from splitinfer.text.fill import Gap

MAX_CHOICES = 16  # answers to one prompt
MAX_MESSAGES, MAX_TOOLS = 4096, 1024  # of a conversation

_SAMPLING = {
    "temperature": 1.0,  # the APIs' default; the library's is 0
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def in_force(defaults: Recommended) -> dict[str, Any]:
    """Return the sampling values of a request that sets none. ``defaults``: the model's own."""
    return {**_SAMPLING, **defaults.values}


@dataclass(frozen=True, slots=True)
class AskedChat:
    """A conversation for the model's template, as ``Tokenizer.write_chat`` takes it."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    opens_answer: bool = True
    mark: str = ""
    continues: bool = False

    def __post_init__(self) -> None:
        if self.continues and (self.messages[-1]["role"] != "assistant" or self.messages[-1].get("tool_calls")):
            raise invalid("messages", "for the last message to go on, it must be the assistant's and have no calls")

    @property
    def begun(self) -> str | None:
        """The text with which the answer goes on, if it does."""
        return str(self.messages[-1].get("content") or "") if self.continues else None


AskedPrompt = AskedChat | Gap | str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. ``sampling``: the fields of ``SamplingParams`` that the client gave. ``max_tokens``: ``None`` is as
    many as the context has room for. ``one_call``: the answer ends after its first tool call. ``tools``: the tools that
    it may call, in OpenAI's form; the prompt may describe more. ``must_call``: it must call one of them, whatever form
    an answer would have. ``grows``: calls are shown while they are written."""

    prompt: AskedPrompt
    sampling: Mapping[str, Any]
    max_tokens: int | None = None
    num_choices: int = 1
    one_call: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()
    must_call: bool = False
    grows: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.prompt, AskedChat) and self.prompt.continues and "grammar" in self.sampling:
            raise invalid("messages", "an answer that goes on with the last message cannot be held to a form")

    @property
    def form(self) -> Grammar | None:
        """The JSON that an answer is unless it calls a function. With a grammar of another kind it calls none."""
        form = self.sampling.get("grammar")
        return form if isinstance(form, Grammar) and form.kind is GrammarKind.JSON_SCHEMA else None

    @property
    def has_formed_calls(self) -> bool:
        """Whether what a call is, once begun, is enforced: one must be made, or is of a strict function, or stands in
        the place of JSON."""
        if self.must_call or "grammar" not in self.sampling:
            return self.must_call or any(tool["function"].get("strict") is True for tool in self.tools)
        return bool(self.tools) and self.form is not None

    def params(self, defaults: Recommended, room: int, choice: int = 0) -> SamplingParams:
        """Return the sampling parameters of one choice. ``room``: tokens that the context has left for the answer.

        Choices of one request with a seed have seeds of their own, the first the one that was given.

        Raises:
            Problem: 400, a value is out of its range.
        """
        most = room if self.max_tokens is None else min(self.max_tokens, room)
        values = {**in_force(defaults), **self.sampling, "max_tokens": max(1, most)}
        if isinstance(seed := values.get("seed"), int):
            values["seed"] = (seed + choice) % 2**64
        try:
            return SamplingParams(**values)
        except (TypeError, ValueError) as error:
            named = next((name for name in values if f"{error}".startswith(name)), None)
            raise Problem(400, f"{error}", param=named) from error


class AnswerRequest(Fields):
    """A request for answers, as every API has it."""

    model: Name | None = None
    stream: bool = False

    def asks(self) -> tuple[Ask, ...]:
        """Return one request for each prompt, alike in everything else. Return () if the model is only to load.

        Raises:
            Problem: 400, fields contradict each other.
        """
        raise NotImplementedError


# -- prompts as token ids --------------------------------------------------------------------------


_AT_ONCE, _AT_ONCE_FOR_EACH = 1 << 20, 16  # characters; characters for each token of the context
_PIECE = 1 << 16  # characters


def known_tokens(llm: LLM, prompt: AskedPrompt, known: Conversations) -> tuple[list[int], str | None]:
    """Return a prompt's tokens, and the text that the template made if it is a chat. The tokens of a known beginning
    are the ones computed earlier. This takes time: call it on a thread, not on the event loop.

    Raises:
        Problem: 400, the prompt is too large to tokenize.
        SplitinferError: as ``LLM.tokenizer`` and ``Tokenizer.encode_chat``.
    """
    match prompt:
        case AskedChat():
            return _chat_tokens(llm, prompt, known)
        case Gap():
            check_size(llm, prompt)
            return llm.tokenizer.filling(prompt), None
        case str(text):
            check_size(llm, text)
            return llm.tokenizer.encode(text), None
        case tokens:
            return list(tokens), None


def check_size(llm: LLM, prompt: AskedChat | Gap | str) -> None:
    """Refuse a prompt whose size alone says that it cannot be answered.

    Raises:
        Problem: 400, with the numbers.
    """
    if isinstance(prompt, AskedChat):
        _check_number("messages", len(prompt.messages), MAX_MESSAGES)
        _check_number("tools", len(prompt.tools), MAX_TOOLS)
    parts: Any = (prompt.messages, prompt.tools, prompt.options) if isinstance(prompt, AskedChat) else prompt
    parts = (prompt.prefix, prompt.suffix, prompt.begun, prompt.files) if isinstance(prompt, Gap) else parts
    texts = [*_texts_in(parts)]
    if sum(map(len, texts)) > max(_AT_ONCE, _AT_ONCE_FOR_EACH * llm.context_length):
        _check_pieces(llm, texts)


def _check_number(what: str, number: int, most: int) -> None:
    if number > most:
        raise Problem(400, f"a conversation may have {most:,} {what}, not {number:,}", param=what)


def _check_pieces(llm: LLM, texts: list[str]) -> None:
    found, most = 0, 2 * llm.context_length
    for text in texts:
        for start in range(0, len(text), _PIECE):
            found += len(llm.tokenizer.encode(text[start : start + _PIECE]))
            if found > most:
                raise Problem(
                    400,
                    f"the prompt has over {most:,} tokens, but the context is {llm.context_length:,}",
                    code="context_length_exceeded",
                )


def _texts_in(value: Any) -> Iterator[str]:
    """Yield all texts in it, names of fields and numbers too: templates write them all."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield key
            yield from _texts_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts_in(each)
    elif value is not None:
        yield repr(value)


def _chat_tokens(llm: LLM, chat: AskedChat, known: Conversations) -> tuple[list[int], str]:
    """Return a conversation as the model's template takes it without losing anything.

    Raises:
        Problem: 400, it is too large.
        SplitinferError: as ``known_tokens``.
    """
    check_size(llm, chat)
    tokenizer = llm.tokenizer
    messages = without_lines(chat.messages, llm.settings.left_out)
    more: Any = {"options": chat.options, "opens_answer": chat.opens_answer, "mark": chat.mark}
    more["continues"] = chat.continues
    plain, text = tokenizer.write_chat(messages, tools=chat.tools, **more)
    return known.tokens(text, plain, tokenizer.codec), text


def without_lines(messages: Sequence[Mapping[str, Any]], pattern: str) -> Sequence[Mapping[str, Any]]:
    """Return the messages without the lines that a pattern names where they begin the system's words.

    >>> without_lines([{"role": "system", "content": "x: 1\\nBe kind."}, {"role": "user", "content": "x: 2"}], "x:.*")
    [{'role': 'system', 'content': 'Be kind.'}, {'role': 'user', 'content': 'x: 2'}]
    """
    if not pattern or not messages or messages[0]["role"] != "system":
        return messages
    line = re.compile(rf"\s*(?:{pattern})[^\S\n]*(?:\n\s*|\Z)", re.IGNORECASE)
    text, end = messages[0]["content"], 0
    while (found := line.match(text, end)) and found.end() > end:  # a pattern may match nothing
        end = found.end()
    if not end:
        return messages
    text = text[end:]
    return [*([{**messages[0], "content": text}] if text else []), *messages[1:]]
