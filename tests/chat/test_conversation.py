"""What is dropped when a conversation outgrows the context, and conversations as JSON."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitinfer.chat.conversation import (
    Conversation,
    Message,
    Turn,
    clean,
    fit,
    from_json,
    room_for_answer,
    to_json,
)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
conversations = st.builds(
    Conversation, st.none() | texts, st.lists(st.builds(Turn, texts, texts), max_size=8).map(tuple)
)


def encode(messages: list[Message]) -> list[int]:
    """One token for each character, and one to begin each message."""
    return [ord(c) for m in messages for c in "\0" + m["content"]]


def turns(*lengths: int) -> Conversation:
    return Conversation("S", tuple(Turn("u" * n, "") for n in lengths))


# With turns of 10: each costs 12 tokens, the system message 2, the new text "x" 2.


def test_what_fits_is_left_alone():
    fitted = fit(turns(10, 10), "x", encode, context=38, room=10)
    assert (fitted.num_dropped, len(fitted.tokens)) == (0, 28)


def test_oldest_turns_go_down_to_three_quarters_of_what_would_fit():
    fitted = fit(turns(*[10] * 8), "x", encode, context=99, room=10)
    assert len(encode(turns(*[10] * 8).messages("x"))) == 100
    assert (fitted.num_dropped, len(fitted.tokens)) == (3, 64)  # 5 * 12 + 4 <= 66 = 89 * 3 // 4
    assert fitted.conversation == turns(*[10] * 5)


def test_one_turn_is_kept_if_it_fits_though_it_is_over_three_quarters():
    fitted = fit(turns(10, 60), "x", encode, context=80, room=10)
    assert fitted.conversation == turns(60)


def test_a_new_text_that_is_too_long_stays_whole():
    fitted = fit(turns(10, 10), "x" * 90, encode, context=80, room=10)
    assert (fitted.num_dropped, len(fitted.tokens)) == (2, 93)
    assert fitted.conversation.system == "S"


@given(conversations, texts, st.integers(2, 200), st.data())
def test_fit(conversation: Conversation, asked: str, context: int, data: st.DataObject):
    room = data.draw(st.integers(1, context - 1))
    fitted = fit(conversation, asked, encode, context=context, room=room)
    kept = fitted.conversation
    assert kept == conversation.without_oldest(fitted.num_dropped)
    assert fitted.tokens == encode(kept.messages(asked))
    if kept.turns:
        assert len(fitted.tokens) + room <= context
    elif conversation.turns:
        assert len(encode(conversation.without_oldest(len(conversation.turns) - 1).messages(asked))) + room > context


@given(st.integers(1, 10**6), st.integers(2, 10**6))
def test_room(max_tokens: int, context: int):
    assert 1 <= room_for_answer(max_tokens, context) <= max(1, min(max_tokens, context // 4))


# -- JSON --------------------------------------------------------------------------------------------


@given(conversations)
def test_json_and_back(conversation: Conversation):
    assert from_json(to_json(conversation)) == conversation
    assert from_json(json.dumps({"messages": conversation.messages()})) == conversation


def message(role: str, content: object = "x") -> dict[str, object]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ({"a": 1}, "it does not contain a list of messages"),
        ("hello", "it does not contain a list of messages"),
        ([message("user"), 5], "message 2 needs a role and a content, both text"),
        ([message("user", 5)], "message 1 needs a role and a content, both text"),
        ([message("assistant")], "message 1 has the role 'assistant', but 'user' was expected"),
        ([message("system"), message("system")], "message 2 has the role 'system', but 'user' was expected"),
        ([message("user"), message("user")], "message 2 has the role 'user', but 'assistant' was expected"),
        ([message("user"), message("tool")], "message 2 has the role 'tool', but 'assistant' was expected"),
        ([message("user")], "its last message has no answer"),
    ],
)
def test_refused_documents(document: object, sentence: str):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        from_json(json.dumps(document))


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000])
def test_no_json(text: str):
    with pytest.raises(ValueError, match="it is not JSON"):
        from_json(text)


def test_half_surrogates_are_replaced():
    assert clean("a\ud83db") == "a\ufffdb"
    assert from_json('[{"role": "system", "content": "\\ud83d"}]') == Conversation("\ufffd")


def test_what_an_answer_was_generated_as_is_kept_with_it():
    conversation = Conversation(None, (Turn("a", "b", (5, 6)), Turn("c", "d")))
    assert from_json(to_json(conversation)).turns[0].token_ids == (5, 6)
    assert [message.get("token_ids") for message in conversation.messages("e")] == [None, [5, 6], None, None, None]


@pytest.mark.parametrize("ids", [None, 5, "56", [5, "6"], [-1], [2**40], [True], {"5": 6}])
def test_token_ids_that_are_none_are_left_out(ids: object):
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "token_ids": ids}]
    assert from_json(json.dumps(said)).turns[0].token_ids == ()
