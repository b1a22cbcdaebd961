"""What the system says in the middle of a conversation."""

from typing import Any

from splitinfer.server.anthropic.messages import MessageRequest, message_ask
from splitinfer.server.ask import Chat
from splitinfer.server.fields import read

USER = {"role": "user", "content": "Hi"}


def chat(*messages: Any, **more: Any) -> Chat:
    ask, _ = message_ask(read(MessageRequest, {"model": "m", "max_tokens": 9, "messages": list(messages), **more}))
    assert isinstance(ask.prompt, Chat)
    return ask.prompt


def test_its_words_stand_where_they_stood():
    text = {"type": "text", "text": "It is May.", "cache_control": {"type": "ephemeral"}}
    for content in ("It is May.", [text]):
        turn = {"role": "system", "content": content}
        said = [(one["role"], one["content"]) for one in chat(USER, turn).messages]
        assert said == [("user", "Hi"), ("system", "It is May.")]
    assert len(chat(USER, {"role": "system", "content": []}).messages) == 1


def test_effort_is_told():
    assert chat(USER, output_config={"effort": "medium"}).options["reasoning_effort"] == "medium"
