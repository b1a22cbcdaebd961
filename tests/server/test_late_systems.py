"""The system's words in the middle of a conversation reach the model, whatever its template makes of them."""

from collections.abc import Callable
from typing import Any

import pytest

from splitinfer.server.ask import Chat, as_the_users, prompt_tokens, settled_chat


def said(*messages: str) -> tuple[dict[str, Any], ...]:
    """Messages written as ``role: content``."""
    return tuple(dict(zip(("role", "content"), one.split(": ", 1), strict=True)) for one in messages)


def everything(messages: Any) -> str:
    return "".join(f"<{message['role']}>{message['content'].strip()}" for message in messages)


def without_later_ones(messages: Any) -> str:
    return everything([message for i, message in enumerate(messages) if not i or message["role"] != "system"])


class Template:
    """A model of which only the template is there."""

    context_length, tokenizer = 8192, None

    def __init__(self, write: Callable[[Any], str]) -> None:
        self.write, self.times = write, 0

    def render_chat(self, messages: Any, **_: Any) -> str:
        self.times += 1
        return self.write(messages)

    def encode_chat(self, messages: Any, **_: Any) -> list[int]:
        return list(self.write(messages).encode())


LATE = Chat(said("system: Be kind.", "user: Hi", "system:  It is May. ", "assistant: Hello", "user: Bye"))


def test_a_template_that_takes_them_gets_them():
    assert settled_chat(Template(everything), LATE) is LATE


def test_for_others_they_are_the_users_and_are_computed():
    found = settled_chat(Template(without_later_ones), LATE)
    assert found.messages == said("system: Be kind.", "user: Hi\n\n It is May. ", "assistant: Hello", "user: Bye")
    tokens: Any = prompt_tokens(Template(without_later_ones), LATE)
    assert b"It is May." in bytes(tokens)


def test_a_conversation_without_them_is_not_written_twice():
    template, usual = Template(everything), Chat(said("system: Be kind.", "user: Hi", "assistant: Hello", "user: Bye"))
    assert (settled_chat(template, usual) is usual, template.times) == (True, 0)


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
