"""Conversations that go on: whatever a template demands, it gets a form of which it leaves nothing out."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from splitinfer.errors import RequestError
from splitinfer.text.turns import Form, Message, fitting, in_order
from tests.text.templates import SHAPES, writer

TOOLS = tuple({"type": "function", "function": {"name": name, "parameters": {}}} for name in ("look", "edit"))


def call(call_id: str, *, name: str = "look", arguments: Any = None) -> dict[str, Any]:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments or {"of": f"<{call_id}>"}},
    }


def said(*messages: str) -> list[Message]:
    """Messages as ``role: content``; `calls: 1 2 text` are the assistant's calls 1 and 2 beside a text, and
    `tool: 1 text` is the result of the first."""
    made: list[Message] = []
    for message in messages:
        role, _, content = message.partition(": ")
        ids = [word for word in content.split() if word.isdigit()]
        text = " ".join(word for word in content.split(" ") if not word.isdigit())
        match role:
            case "calls":
                made.append(
                    {"role": "assistant", "content": text, "tool_calls": [call(f"call_{int(i):020}") for i in ids]}
                )
            case "tool":
                made.append({"role": "tool", "content": text, "tool_call_id": f"call_{int(ids[0]):020}"})
            case _:
                made.append({"role": role, "content": content})
    return made


def shown(form: Form) -> str:
    """The messages of a form in a line."""
    return " ".join(
        f"{one['role']}:{one.get('content', '')!s}{'+' * len(one.get('tool_calls') or ())}" for one in form.messages
    ).replace("\n", "/")


def texts_of(messages: Sequence[Message]) -> Iterator[str]:
    for message in messages:
        yield (message.get("content") or "").strip()
        for one in message.get("tool_calls") or ():
            arguments = one["function"]["arguments"]
            yield from [arguments] if isinstance(arguments, str) else arguments.values()


CALL, RESULT = "<tool_call>/{}/</tool_call>", "<tool_response>/{}/</tool_response>"

AS_THEY_ARE = [
    ("everything", said("user: UU", "user: VV", "assistant: AA", "system: SS", "calls: 1 2 BB", "tool: 1 RR")),
    ("arguments are objects", said("user: UU", "calls: 1 BB", "tool: 1 RR", "user: VV")),
    ("one call", said("system: SS", "user: UU", "calls: 1", "tool: 1 RR", "assistant: AA")),
    ("contents", said("system: SS", "user: UU", "system: TT", "assistant: AA")),
]


@pytest.mark.parametrize(("shape", "messages"), AS_THEY_ARE)
def test_what_a_template_takes_stays_as_it_is(shape: str, messages: list[Message]):
    asked = Form(tuple(messages))
    assert fitting(asked, writer(shape)) == (asked, writer(shape)(asked))


@pytest.mark.parametrize(
    ("shape", "messages", "expected"),
    [
        ("strict turns", said("user: U", "user: V"), "user:U//V"),
        ("strict turns", said("user: U", "assistant: A", "assistant: B", "user: V"), "user:U assistant:A//B user:V"),
        ("strict turns", said("assistant: A", "user: U"), "user:Continue. assistant:A user:U"),
        (
            "strict turns",
            said("system: S", "user: U", "assistant: A", "system: T", "user: V"),
            "system:S user:U assistant:A user:T//V",
        ),
        ("strict turns, no system", said("system: S"), "user:S"),
        ("strict turns, no system", said("system: S", "user: U", "system: T"), "user:S//U//T"),
        ("a user is demanded", said("calls: 1", "tool: 1 R"), "user:Continue. assistant:+ tool:R"),
        ("a user is demanded", said("system: S", "tool: 1 R"), "system:S user:Continue. tool:R"),
        (
            "nine letters",
            said("user: U", "calls: 1 T", "tool: 1 R", "user: V"),
            "user:U assistant:T user:Continue. assistant:+ tool:R assistant:Noted. user:V",
        ),
        ("three roles", said("system: S", "user: U", "system: T", "assistant: A"), "system:S user:U//T assistant:A"),
        ("three roles", said("user: U", "tool: 1 R", "user: V"), f"user:U user:{RESULT} user:V"),
        (
            "one call",
            said("user: U", "calls: 1 2", "tool: 1 R", "tool: 2 Q"),
            "user:U assistant:+ tool:R assistant:+ tool:Q",
        ),
        (
            "one call",
            said("user: U", "calls: 1 T", "tool: 1 R"),
            "user:U assistant:T user:Continue. assistant:+ tool:R",
        ),
        ("pairs", said("user: U", "calls: 1", "user: V"), f"user:U assistant:{CALL} user:V"),
        ("pairs", said("user: U", "tool: 1 R"), f"user:U user:{RESULT}"),
        ("known roles", [{"role": "critic", "content": "C"}], "user:C"),
        ("known roles", [{"role": "developer", "content": "D"}, *said("user: U")], "system:D user:U"),
    ],
)  # fmt: skip
def test_only_what_is_refused_or_left_out_changes(shape: str, messages: list[Message], expected: str):
    form, text = fitting(Form(tuple(messages)), writer(shape))
    told = '{"name": "look", "arguments": {"of": "<call_00000000000000000001>"}}'
    results = [*expected.split(RESULT)]
    answers = [one["content"] for one in messages if one["role"] == "tool"]
    if len(results) > 1:
        expected = RESULT.format(answers[0]).join(results)
    assert shown(form) == expected.replace(CALL, CALL.format(told))
    assert all(one in text for one in texts_of(messages))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", "text", "null", "", None, [1], '{"a": "b"}'])
def test_arguments_may_be_anything(shape: str, arguments: Any):
    messages = said("user: U", "calls: 1", "tool: 1 R")
    messages[1]["tool_calls"][0]["function"]["arguments"] = arguments
    form, text = fitting(Form(tuple(messages), TOOLS), writer(shape))
    assert all(one in text for one in ("look", "R"))
    if shape == "arguments are objects":
        told = form.messages[1]["tool_calls"][0]["function"]["arguments"]
        known = {"null": {}, "": {}, None: {}, '{"a": "b"}': {"a": "b"}}
        assert told == (
            known[arguments] if isinstance(arguments, str | None) and arguments in known else {"arguments": arguments}
        )


def test_ids_are_the_clients_where_they_may_be_and_stay_the_same():
    messages = said("user: U", "calls: 1 2", "tool: 2 R", "tool: 1 Q")
    form, _ = fitting(Form(tuple(messages)), writer("nine letters"))
    ids = [one["id"] for one in form.messages[1]["tool_calls"]]
    assert [one["tool_call_id"] for one in form.messages[2:]] == ids[::-1]
    assert [len(one) for one in {*ids} if one.isalnum()] == [9, 9]
    for one in (*messages[1]["tool_calls"], *messages[2:]):
        assert "call_" in (one.get("id") or one["tool_call_id"])
    again, _ = fitting(Form((*messages, *said("assistant: A"))), writer("nine letters"))
    assert again.messages[:4] == form.messages
    nine = [{**messages[1], "tool_calls": [call("AbCdE6789")]}]
    assert "AbCdE6789" in fitting(Form((messages[0], *nine)), writer("nine letters"))[1]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("messages", [said("user: U"), said("system: S", "user: U"), said("system: S")])
def test_tools_reach_the_model(shape: str, messages: list[Message]):
    form, text = fitting(Form(tuple(messages), TOOLS), writer(shape))
    assert all(one in text for one in ("look", "edit"))
    assert all(one in text for one in texts_of(messages))
    told = any("<tool_call>" in one["content"] for one in form.messages)
    assert told is (shape in ("contents", "contents alone", "three roles", "strict turns", "strict turns, no system"))


def test_results_stand_in_the_order_of_their_calls():
    messages = said("user: U", "calls: 1 2", "tool: 2 R", "tool: 9 X", "tool: 1 Q", "user: V")
    assert [one["content"] for one in in_order(messages)] == ["U", "", "Q", "R", "X", "V"]


def test_what_no_form_of_a_template_says_is_refused_by_name():
    for template, why in (
        (lambda _: "", "leaves out what the user says: 'UU'"),
        (lambda _: 1 / 0, "refuses these .*zero"),
    ):
        with pytest.raises(RequestError, match=f"the model's chat template {why}"):
            fitting(Form(tuple(said("user: UU"))), template)  # type: ignore[arg-type]


def test_a_text_is_not_found_in_another():
    """ "a" stands in "Hearsay", too."""
    asked = Form(tuple(said("user: Hearsay", "tool: 1 a")))
    assert "<tool_response>\na" in fitting(asked, writer("three roles"))[1]


def test_a_template_that_reads_what_it_writes_is_believed():
    def write(form: Form) -> str:
        if not all("ok" in one["content"] for one in form.messages):
            raise ValueError
        return "".join(one["content"] for one in form.messages)

    assert fitting(Form(tuple(said("user: ok", "user: ok too"))), write)[1] == "okok too"


# -- histories -------------------------------------------------------------------------------------


_ODD = 20


def history(seed: int) -> tuple[list[Message], tuple[Any, ...]]:
    """An agent's conversation; the higher the seed, the odder."""
    chance, made, number = random.Random(seed), list[Message](), 0
    if seed % 3:
        made += said(f"system: s{seed} be kind")
    for turn in range(5):
        made += said(f"user: question {turn} of {seed}")
        for step in range(chance.randrange(3)):
            ids = [number + i for i in range(1 + chance.randrange(2))]
            number += len(ids)
            beside = f"thought {turn} {step} " if chance.random() < 0.4 else ""
            asked = said(f"calls: {' '.join(map(str, ids))}")[0]
            made.append({**asked, "content": beside.strip()})
            results = [{**said(f"tool: {i}")[0], "content": f"result {i} of {turn}.{step}"} for i in ids]
            made += chance.sample(results, len(results)) if seed >= 10 else results
        if seed >= 15 and chance.random() < 0.5:
            made += said(f"{chance.choice(('system', 'user', 'assistant'))}: by the way {turn}")
        made += said(f"assistant: answer {turn}")
    if seed >= _ODD:
        for _ in range(1 + seed // 10):
            at = chance.randrange(len(made))
            odd = chance.choice(("out", "twice", "swapped"))
            made[at : at + 1] = {"out": [], "twice": [made[at]] * 2, "swapped": made[at : at + 2][::-1]}[odd]
    return in_order(made), TOOLS if seed % 4 else ()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(3, 40, 4))
def test_a_history_goes_on(shape: str, seed: int):
    """Cut wherever an answer is asked for, it is written as a whole, and begins as it was written before. Only where
    messages were lost, repeated or swapped, it may begin otherwise now and then."""
    messages, tools = history(seed)
    before, num_anew = None, 0
    for end in range(1, len(messages) + 1):
        if messages[end - 1]["role"] == "assistant" or (messages[end:] and messages[end]["role"] != "assistant"):
            continue
        form, text = fitting(Form(tuple(messages[:end]), tools), writer(shape))
        found = text.replace("\\", "")
        assert not [one for one in texts_of(messages[:end]) if one not in found]
        assert not tools or "edit" in text
        num_anew += before is not None and form.messages[: len(before.messages)] != before.messages
        before = form
    assert num_anew <= (0 if seed < _ODD else 3)
