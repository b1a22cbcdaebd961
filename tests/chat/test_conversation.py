"""What is dropped when a conversation outgrows the context, and conversations as JSON."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitinfer.chat.conversation import ChatMessage, Conversation, Turn, fit, from_json, room_for_answer, to_json

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
conversations = st.builds(
    Conversation, st.none() | texts, st.lists(st.builds(Turn, texts, texts), max_size=8).map(tuple)
)


def encode(messages: list[ChatMessage]) -> list[int]:
    """One token for each character, and one to begin each message."""
    return [ord(c) for m in messages for c in "\0" + m["content"]]


def turns(*lengths: int) -> Conversation:
    return Conversation("S", tuple(Turn("u" * n, "") for n in lengths))


@pytest.mark.parametrize(
    ("lengths", "asked", "context", "kept", "tokens"),
    [  # turns of 10: each costs 12 tokens, the system message 2, the new text "x" 2
        ([10, 10], 1, 38, 2, 28),  # it fits
        ([10] * 8, 1, 99, 5, 64),  # down to three quarters of what would fit: 5 * 12 + 4 <= 66 = 89 * 3 // 4
        ([10, 60], 1, 80, 1, 66),  # one turn is kept if it fits, though it is over three quarters
        ([10, 10], 90, 80, 0, 93),  # a new text that is too long stays whole
    ],
)
def test_the_oldest_turns_are_dropped(lengths: list[int], asked: int, context: int, kept: int, tokens: int):
    dropped, found = fit(turns(*lengths), "x" * asked, encode, context=context, room=10)
    assert (dropped, len(found)) == (len(lengths) - kept, tokens)


@given(conversations, texts, st.integers(2, 200), st.data())
def test_fit(conversation: Conversation, asked: str, context: int, data: st.DataObject):
    room = data.draw(st.integers(1, context - 1))
    dropped, tokens = fit(conversation, asked, encode, context=context, room=room)
    kept = conversation.without_oldest(dropped)
    assert tokens == encode(kept.messages(asked))
    if kept.turns:
        assert len(tokens) + room <= context
    elif conversation.turns:
        assert len(encode(conversation.without_oldest(len(conversation.turns) - 1).messages(asked))) + room > context


@given(st.integers(1, 10**6), st.integers(2, 10**6))
def test_room(max_tokens: int, context: int):
    assert 1 <= room_for_answer(max_tokens, context) <= max(1, min(max_tokens, context // 4))


@given(conversations)
def test_json_and_back(conversation: Conversation):
    assert from_json(to_json(conversation)) == conversation
    assert from_json(json.dumps({"messages": conversation.messages()})) == conversation


def message(role: str, content: object = "x") -> dict[str, object]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ("", "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
        ({"a": 1}, "it does not contain a list of messages"),
        ([message("user"), 5], "message 2 needs a role and a content, both text"),
        ([message("user", 5)], "message 1 needs a role and a content, both text"),
        ([message("assistant")], "message 1 has the role 'assistant', but 'user' was expected"),
        ([message("system"), message("system")], "message 2 has the role 'system', but 'user' was expected"),
        ([message("user"), message("user")], "message 2 has the role 'user', but 'assistant' was expected"),
        ([message("user")], "its last message has no answer"),
    ],
)
def test_refused_documents(document: object, sentence: str):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        from_json(document if isinstance(document, str) else json.dumps(document))


def test_half_surrogates_are_replaced():
    assert from_json('[{"role": "system", "content": "\\ud83d"}]') == Conversation("\ufffd")


def test_what_an_answer_was_generated_as_is_kept_with_it():
    conversation = Conversation(None, (Turn("a", "b", (5, 6)), Turn("c", "d")))
    assert from_json(to_json(conversation)).turns[0].token_ids == (5, 6)
    assert [message.get("token_ids") for message in conversation.messages("e")] == [None, [5, 6], None, None, None]
