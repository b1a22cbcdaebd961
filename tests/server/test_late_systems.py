"""The system's words in the middle of a conversation reach the model, whatever its template makes of them."""

from collections.abc import Callable
from typing import Any, cast

import pytest

from splitinfer.llm import LLM
from splitinfer.server.ask import Chat, as_the_users, known_tokens
from splitinfer.text.conversations import Codec, Conversations


def said(*messages: str) -> tuple[dict[str, Any], ...]:
    """Messages written as ``role: content``."""
    return tuple(dict(zip(("role", "content"), one.split(": ", 1), strict=True)) for one in messages)


def everything(messages: Any) -> str:
    return "".join(f"<{message['role']}>{message['content'].strip()}" for message in messages)


def without_later_ones(messages: Any) -> str:
    return everything([message for i, message in enumerate(messages) if not i or message["role"] != "system"])


class Template:
    """A model of which only the template is there."""

    context_length, no_tools, codec = (
        8192,
        None,
        Codec(lambda text: list(text.encode()), lambda ids: bytes(ids).decode()),
    )

    def __init__(self, write: Callable[[Any], str]) -> None:
        self.write, self.times, self.tokenizer = write, 0, self

    def write_chat(self, messages: Any, **_: Any) -> tuple[list[int], str]:
        self.times += 1
        text = self.write(messages)
        return list(text.encode()), text


LATE = Chat(said("system: Be kind.", "user: Hi", "system:  It is May. ", "assistant: Hello", "user: Bye"))
USUAL = Chat(said("system: Be kind.", "user: Hi", "assistant: Hello", "user: Bye"))


def read(template: Template, chat: Chat) -> str | None:
    tokens, text = known_tokens(cast(LLM, template), chat, Conversations())
    assert bytes(tokens).decode() == text
    return text


@pytest.mark.parametrize("chat", [LATE, USUAL])
def test_a_template_that_takes_them_writes_once(chat: Chat):
    template = Template(everything)
    assert (read(template, chat), template.times) == (everything(chat.messages), 1)


def test_for_others_they_are_the_users_and_are_computed():
    as_users = said("system: Be kind.", "user: Hi\n\n It is May. ", "assistant: Hello", "user: Bye")
    assert read(Template(without_later_ones), LATE) == everything(as_users)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("user: a", "system: b", "system: c"), ("user: a\n\nb\n\nc",)),
        (("assistant: a", "system: b", "user: c"), ("assistant: a", "user: b\n\nc")),
        (("user: a", "system: b", "user: c", "user: d"), ("user: a\n\nb\n\nc", "user: d")),
        (("user: a", "tool: b", "system: c"), ("user: a", "tool: b", "user: c")),
        (("system: a", "user: b", "user: c"), ("system: a", "user: b", "user: c")),
    ],
)
def test_they_join_the_users_own_words(before: tuple[str, ...], after: tuple[str, ...]):
    assert tuple(as_the_users(said(*before))) == said(*after)
