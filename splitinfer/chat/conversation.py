"""A conversation as values: its turns, which of them to drop when they outgrow the context, and their JSON.

system | turn 0: user, assistant | turn 1: user, assistant | ... | the user's new text
         ^ dropped first
"""

import json
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from splitinfer.common.json_text import dumps
from splitinfer.common.plain_text import whole_characters
from splitinfer.pictures.marks import marked

ChatMessage = dict[str, Any]
Encode = Callable[[list[ChatMessage]], list[int]]


@dataclass(frozen=True, slots=True)
class Turn:
    """The user's text and the model's answer, with the token ids that were generated, if known, and the reasoning
    before it."""

    user: str
    assistant: str
    token_ids: tuple[int, ...] = field(default=(), compare=False)
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The turns so far, oldest first."""

    system: str | None = None
    turns: tuple[Turn, ...] = ()

    def messages(self, asked: str | None = None) -> list[ChatMessage]:
        """Return the messages that a chat template takes; ``asked`` is the user's next text."""
        messages = [] if self.system is None else [_message("system", self.system)]
        for turn in self.turns:
            answer = _message("assistant", turn.assistant, turn.token_ids)
            thought = {"reasoning_content": turn.reasoning} if turn.reasoning else {}
            messages += [_message("user", turn.user), answer | thought]
        if asked is not None:
            messages.append(_message("user", asked))
        return messages

    def without_oldest(self, count: int) -> Self:
        """Return this conversation without its first ``count`` turns."""
        return replace(self, turns=self.turns[count:])


def room_for_answer(max_tokens: int, context: int) -> int:
    """Return the tokens to keep free after the prompt: the whole answer, or a quarter of the context if that is
    less."""
    return max(1, min(max_tokens, context // 4))


def fit(conversation: Conversation, asked: str, encode: Encode, *, context: int, room: int) -> tuple[int, list[int]]:
    """Return how many of the oldest turns to drop so that the prompt and ``room`` tokens fit ``context``, and the
    prompt then.

    Dropping a turn changes the prompt's prefix, so all of the prompt has to be computed again. Hence more is dropped
    than necessary, down to three quarters, and the next turns have a prefix to reuse. The new text itself is never
    cut: if it alone is too long, so is the result.
    """
    most = context - room
    whole = encode(conversation.messages(asked))
    if len(whole) <= most or not conversation.turns:
        return 0, whole

    def tokens(dropped: int) -> list[int]:
        return encode(conversation.without_oldest(dropped).messages(asked))

    num_turns = len(conversation.turns)
    for goal in (most * 3 // 4, most):
        dropped = bisect_left(range(num_turns), -goal, key=lambda n: -len(tokens(n)))
        if dropped < num_turns:
            break
    return dropped, tokens(dropped)


# -- JSON --------------------------------------------------------------------------------------------


def to_json(conversation: Conversation) -> str:
    """Return a list of messages as JSON, each with ``role`` and ``content``; answers with their ``reasoning_content``,
    and with their ``token_ids``: a later chat finds their KV by these in the prefix cache."""
    return dumps(conversation.messages(), indent=1) + "\n"


def from_json(text: str) -> Conversation:
    """Return the conversation in a text that ``to_json``, or another program, wrote in that form.

    Raises:
        ValueError: the text is something else; one sentence says what.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({error})") from error
    messages = document.get("messages") if isinstance(document, dict) else document
    if not isinstance(messages, list):
        raise ValueError("it does not contain a list of messages")
    pairs = [_pair(i, message) for i, message in enumerate(messages, 1)]
    system = pairs.pop(0)[1] if pairs and pairs[0][0] == "system" else None
    first = len(messages) - len(pairs)
    found, answers = _turns(pairs, first + 1), messages[first + 1 :: 2]
    about = [(_ids(message), _reasoning(message)) for message in answers]
    return Conversation(system, tuple(Turn(*said, *more) for said, more in zip(found, about, strict=True)))


def _message(role: str, content: str, token_ids: Sequence[int] = ()) -> ChatMessage:
    return {"role": role, "content": content, **({"token_ids": list(token_ids)} if token_ids else {})}


def _ids(message: Any) -> tuple[int, ...]:
    """Return the ``token_ids`` of a message, or an empty tuple if they are not a list of ids."""
    ids = message.get("token_ids")
    if not isinstance(ids, list) or not all(type(one) is int and 0 <= one < 2**31 for one in ids):
        return ()
    return tuple(ids)


def _reasoning(message: Any) -> str:
    thought = message.get("reasoning_content") or message.get("reasoning")
    return whole_characters(thought) if isinstance(thought, str) else ""


def _pair(number: int, message: Any) -> tuple[str, str]:
    role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
    if isinstance(content, list):
        content = "".join(_part(number, part) for part in content)
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError(f"message {number} needs a role and a content, both text")
    return role, whole_characters(content)


def _part(number: int, part: Any) -> str:
    """Return a part of a message, as OpenAI's API has it."""
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "image_url", "image_url": {"url": str(url)}} if url.startswith("data:"):
            return marked(url)
    raise ValueError(f"message {number} has a part that is no text and no data URL of a picture")


def _turns(pairs: Sequence[tuple[str, str]], first: int) -> list[tuple[str, str]]:
    """Return the question and the answer of each turn. Raises ValueError: a role is not due there."""
    for i, (role, _) in enumerate(pairs):
        due = ("user", "assistant")[i % 2]
        if role != due:
            raise ValueError(f"message {first + i} has the role {role!r}, but {due!r} was expected")
    if len(pairs) % 2:
        raise ValueError("its last message has no answer")
    return [(pairs[i][1], pairs[i + 1][1]) for i in range(0, len(pairs), 2)]
