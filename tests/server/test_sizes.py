"""What is too large is refused by its size, before anybody goes through it; what an answer repeats is small."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from splitinfer.server.anthropic.messages import counted_chat, message_ask
from splitinfer.server.ask import MAX_MESSAGES, MAX_TOOLS, Chat
from splitinfer.server.openai.chat import chat_ask
from splitinfer.server.openai.completions import completions_of
from splitinfer.server.openai.responses import counted_input, response_ask
from splitinfer.server.problem import Problem
from splitinfer.server.texts import template_ask, tokenize_ask

SAID = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "w"}}


class Untouched(list[Any]):
    """A list that must not be gone through."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("it was gone through")


MANY = Untouched(SAID * 100_000)
IN_CHAT = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": MANY}}
IN_RESPONSES = {"type": "allowed_tools", "mode": "auto", "tools": MANY}


@pytest.mark.parametrize(
    ("read", "body", "name", "most"),
    [
        (chat_ask, {"messages": MANY}, "messages", MAX_MESSAGES),
        (chat_ask, {"messages": SAID, "tools": MANY}, "tools", MAX_TOOLS),
        (chat_ask, {"messages": SAID, "tool_choice": IN_CHAT}, "tool_choice.allowed_tools.tools", MAX_TOOLS),
        (tokenize_ask, {"messages": MANY}, "messages", MAX_MESSAGES),
        (template_ask, {"messages": SAID, "tools": MANY}, "tools", MAX_TOOLS),
        (response_ask, {"input": MANY}, "input", 4 * MAX_MESSAGES),
        (counted_input, {"input": MANY}, "input", 4 * MAX_MESSAGES),
        (response_ask, {"input": SAID, "tools": MANY}, "tools", MAX_TOOLS),
        (response_ask, {"input": SAID, "tools": [{"type": "namespace", "name": "n", "tools": MANY}]},
         "tools[0].tools", MAX_TOOLS),
        (response_ask, {"input": SAID, "tool_choice": IN_RESPONSES}, "tool_choice.tools", MAX_TOOLS),
        (message_ask, {"max_tokens": 1, "messages": MANY}, "messages", MAX_MESSAGES),
        (counted_chat, {"messages": SAID, "tools": MANY}, "tools", MAX_TOOLS),
    ],
)  # fmt: skip
def test_a_long_list_is_refused_by_its_length(
    read: Callable[[Mapping[str, Any]], Any], body: dict[str, Any], name: str, most: int
):
    with pytest.raises(Problem) as caught:
        read(body)
    assert (caught.value.status, caught.value.param) == (400, name)
    assert str(caught.value) == f"{name} may have {most:,} entries, not 100,000"


def test_lists_may_have_as_many_as_the_bounds_say():
    chat, _ = chat_ask({"messages": SAID * MAX_MESSAGES, "tools": [TOOL] * MAX_TOOLS})
    response, _ = response_ask({"input": SAID * 4 * MAX_MESSAGES})
    for ask, number in ((chat, MAX_MESSAGES), (response, 4 * MAX_MESSAGES)):
        assert isinstance(ask.prompt, Chat)
        assert len(ask.prompt.messages) == number
    assert response_ask({"input": "x" * 100_000}), "a text is no list"


class Counted(str):
    """A text that counts how often one of its kind is compared."""

    __slots__ = ()
    number = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.number += 1
        return str.__eq__(self, other)


NAMES = [Counted(f"tool{i}") for i in range(500)]
AGAIN = [{"type": "function", "name": Counted(name)} for name in reversed(NAMES)]


@pytest.mark.parametrize(
    ("read", "body"),
    [
        (chat_ask, {
            "messages": SAID,
            "tools": [{"type": "function", "function": {"name": name}} for name in NAMES],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"tools": [{"type": "function", "function": {"name": one["name"]}} for one in AGAIN]},
            },
        }),
        (response_ask, {
            "input": SAID,
            "tools": [{"type": "function", "name": name} for name in NAMES],
            "tool_choice": {"type": "allowed_tools", "tools": AGAIN},
        }),
        (response_ask, {"input": SAID, "tools": [{"type": "function", "name": name} for name in NAMES]}),
        (counted_chat, {
            "messages": [
                *({"role": Counted("system"), "content": "Hm.", "clear_at": "next_user_message"} for _ in NAMES),
                {"role": Counted("user"), "content": "Hi"},
            ],
        }),
    ],
)  # fmt: skip
def test_entries_are_not_compared_with_all_others(read: Callable[[Mapping[str, Any]], Any], body: dict[str, Any]):
    Counted.number = 0
    read(body)
    assert Counted.number < 20 * len(NAMES)


KEPT = {"user": "u" * 512, "safety_identifier": "s" * 512, "prompt_cache_key": "p" * 512, "model": "m" * 512}
METADATA = {f"{i:064}": "v" * 512 for i in range(16)}


@pytest.mark.parametrize(
    ("read", "body", "taken"),
    [
        (chat_ask, {"messages": SAID}, {*KEPT, "metadata"}),
        (response_ask, {"input": "Hi"}, {*KEPT, "metadata"}),
        (completions_of, {"prompt": "Hi"}, {"user", "model"}),
        (message_ask, {"messages": SAID, "max_tokens": 1}, {"model"}),
    ],
)
def test_what_is_repeated_is_small(read: Callable[[Mapping[str, Any]], Any], body: dict[str, Any], taken: set[str]):
    given = {name: value for name, value in {**KEPT, "metadata": METADATA}.items() if name in taken}
    read({**body, **given})
    for name in KEPT.keys() & taken:
        with pytest.raises(Problem, match=f"^{name} may have 512 characters, not 513$") as caught:
            read({**body, name: "x" * 513})
        assert (caught.value.status, caught.value.param) == (400, name)
    if "metadata" not in taken:
        return
    for metadata, sentence in (
        ({**METADATA, "x": "y"}, "metadata may have 16 entries, not 17"),
        ({"k" * 65: "v"}, "a name in metadata may have 64 characters, not 65"),
        ({"k": "v" * 513}, "metadata.k may have 512 characters, not 513"),
    ):
        with pytest.raises(Problem, match=f"^{sentence}$"):
            read({**body, "metadata": metadata})
