"""What the system says in the middle of a conversation, for templates that leave it out in silence.

Agents add to the system's words later: Claude Code tells of the machine behind the user's first message, and others
remind. Some templates write such a message where it stands; some refuse it, for which there are simpler forms
(``text.turns``); and some know no system but the first, and write nothing. So a conversation with one is written out,
and where the words are not found they become the user's, in the place where they were.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from splitinfer.server.ask import Chat

Message = Mapping[str, Any]


class Writes(Protocol):
    """Writes conversations out as its template has it (``LLM``)."""

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation."""
        ...


def settled(llm: Writes, chat: Chat) -> Chat:
    """The conversation as the model's template takes it without losing anything of the system's.

    Raises:
        SplitinferError: as ``LLM.render_chat``.
    """
    late = [message["content"].strip() for message in _late(chat.messages)]
    if not late:
        return chat
    text = llm.render_chat(chat.messages, tools=chat.tools, options=chat.options)
    if all(words in text for words in late):
        return chat
    return replace(chat, messages=tuple(as_the_users(chat.messages)))


def as_the_users(messages: Sequence[Message]) -> list[Message]:
    """The messages with later ones of the system as the user's. Next to the user's own they are a part of these, for
    templates want turns to alternate.

    >>> said = [{"role": "user", "content": "Hi"}, {"role": "system", "content": "It is May."}]
    >>> as_the_users(said)
    [{'role': 'user', 'content': 'Hi\\n\\nIt is May.'}]
    """
    late, made = {id(message) for message in _late(messages)}, list[Message]()
    is_open = False  # whether the last message takes in a further one of the user
    for message in messages:
        is_late = id(message) in late
        if made and made[-1]["role"] == "user" and (is_late or (is_open and message["role"] == "user")):
            made[-1] = {**made[-1], "content": f"{made[-1]['content']}\n\n{message['content']}"}
        else:
            made.append({**message, "role": "user"} if is_late else message)
        is_open = is_late
    return made


def _late(messages: Sequence[Message]) -> list[Message]:
    """The system's messages behind any other."""
    first = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    return [message for message in messages[first:] if message["role"] == "system"]
