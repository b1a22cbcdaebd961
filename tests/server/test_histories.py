"""What all APIs' requests tell a template. No block of a history ends its conversation: what is not read is told, but
for what the user has just sent."""

from typing import Any

import pytest

from splitinfer.pictures.marks import has_pictures
from splitinfer.server.anthropic.messages import MessageRequest
from splitinfer.server.ask import Ask
from splitinfer.server.fields import read
from splitinfer.server.history import NO_PICTURE
from splitinfer.server.ollama.requests import ChatRequest as OllamaRequest
from splitinfer.server.openai.chat import ChatRequest
from splitinfer.server.openai.responses import ResponseRequest
from splitinfer.server.problem import Problem
from splitinfer.server.reading import with_marks
from tests.server.stub_model import Model

HI, OK = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "ok"}
ON, OFF = {"enable_thinking": True}, {"enable_thinking": False}
PDF = {
    "type": "document",
    "title": "a.pdf",
    "source": {"type": "base64", "data": "AA", "media_type": "application/pdf"},
}
PNG = {"type": "image", "source": {"type": "base64", "data": "AA", "media_type": "image/png"}}
NO_PDF = '[a document, which this model cannot read: {"title": "a.pdf"}]'
SOUND = {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}
FILE = {"type": "input_file", "filename": "a.pdf", "file_data": "AA"}
SHELL = {"type": "local_shell_call", "call_id": "c", "status": "completed", "action": {"command": ["ls"]}}
FOUND = {"type": "web_search_result", "title": "T", "url": "u", "encrypted_content": "x"}
SEARCHED = [
    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
    {"type": "web_search_tool_result", "tool_use_id": "s", "content": [FOUND]},
    {"type": "text", "text": "Done."},
]
LOOKED = {"type": "tool_use", "id": "t", "name": "look", "input": {"at": 1}}
CALLED = {"id": "t", "type": "function", "function": {"name": "look", "arguments": {"at": 1}}}
THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": "of others"}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks), **more}


def result(*blocks: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t", "content": list(blocks)}


def asked(model: Any, turns: list[Any], **fields: Any) -> Ask:
    key = "input" if model is ResponseRequest else "messages"
    more = {"max_tokens": 1} if model is MessageRequest else {}
    return read(model, {key: turns, **more, **fields}).asks()[0]


def chat(model: Any, turns: list[Any]) -> Any:
    return asked(model, turns).prompt


@pytest.mark.parametrize(
    ("model", "fields", "options", "budget"),
    [
        (ChatRequest, {"reasoning_effort": "high", "verbosity": "low"},
         {"reasoning_effort": "high", **ON, "verbosity": "low"}, None),
        (ChatRequest, {"reasoning_effort": "none"}, {"reasoning_effort": "none", **OFF}, 0),
        (ChatRequest, OFF, OFF, 0),
        (ChatRequest, {"reasoning": {"effort": "low"}}, {**ON, "reasoning_effort": "low"}, None),
        (ChatRequest, {"reasoning": {"enabled": False}}, OFF, 0),
        (ChatRequest, {"chat_template_kwargs": {**OFF, "x": 1}, "reasoning_effort": "low"},
         {**OFF, "x": 1, "reasoning_effort": "low"}, 0),
        (ResponseRequest, {"reasoning": {"effort": None, "summary": "auto"}}, {}, None),
        (ResponseRequest, {"reasoning": {"effort": "high"}, "text": {"verbosity": "low"}},
         {"reasoning_effort": "high", **ON, "verbosity": "low"}, None),
        (ResponseRequest, {"reasoning": {"effort": "none"}}, {"reasoning_effort": "none", **OFF}, 0),
        (ResponseRequest, {"chat_template_kwargs": {"x": 1}, **OFF}, {"x": 1, **OFF}, 0),
        (MessageRequest, {}, {}, None),
        (MessageRequest, {"thinking": {"type": "disabled"}}, OFF, 0),
        (MessageRequest, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, ON, 1024),
        (MessageRequest, {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}},
         {**ON, "reasoning_effort": "low"}, None),
        (OllamaRequest, {"think": None}, {}, None),
        (OllamaRequest, {"think": True}, ON, None),
        (OllamaRequest, {"think": False}, OFF, 0),
        (OllamaRequest, {"think": "high"}, {**ON, "reasoning_effort": "high"}, None),
    ],
)  # fmt: skip
def test_how_much_to_reason_reaches_the_template(
    model: Any, fields: dict[str, Any], options: dict[str, Any], budget: int | None
):
    found = asked(model, [HI], **fields)
    assert (found.prompt.options, found.sampling.get("thinking_budget")) == (options, budget)


@pytest.mark.parametrize(
    ("model", "turns", "at", "told"),
    [
        (MessageRequest, [user(PDF, {"type": "text", "text": "?"}), OK, HI], 0, {"content": f"{NO_PDF}\n?"}),
        (MessageRequest, [HI, assistant(LOOKED), user(result(PDF, PNG))], 2, {"content": NO_PDF + NO_PICTURE}),
        (MessageRequest, [HI, assistant({**LOOKED, "input": ""}), user(result())], 1,
         {"tool_calls": [{**CALLED, "function": {"name": "look", "arguments": {}}}]}),
        (MessageRequest, [HI, assistant(*SEARCHED), HI], 1, {"content":
         '[server tool use: {"name": "web_search", "input": {"query": "x"}}]\n'
         '[web search tool result: {"content": [{"title": "T", "url": "u"}]}]\nDone.'}),
        (ChatRequest, [user(SOUND), OK, HI], 0, {"content": "[a recording, which this model cannot hear]"}),
        (ChatRequest, [HI, assistant(THOUGHT, {"type": "text", "text": "I look."}, LOOKED), {"role": "tool",
         "content": {"r": 3}}], 1, {"content": "I look.", "reasoning_content": "Hm.", "tool_calls": [CALLED]}),
        (ChatRequest, [HI, assistant({"type": "reasoning", "text": "Hm."}, LOOKED, tool_calls=[CALLED]), HI], 1,
         {"reasoning_content": "Hm.", "tool_calls": [CALLED]}),
        (ChatRequest, [HI, assistant(LOOKED), {"role": "tool", "content": {"r": 3}}], 2,
         {"content": '{"r": 3}', "tool_call_id": "t"}),
        (ChatRequest, [HI, {"role": "assistant", "function_call": CALLED["function"]}, {"role": "function",
         "name": "look", "content": "3"}], 2, {"role": "tool", "tool_call_id": "call00001"}),
        (ChatRequest, [HI, {"role": "assistant", "audio": {"id": "a"}}, HI], 1,
         {"content": "[a recording, which this model cannot hear]"}),
        (ResponseRequest, [user(FILE), OK, HI], 0,
         {"content": '[a document, which this model cannot read: {"filename": "a.pdf"}]'}),
        (ResponseRequest, [HI, SHELL, {"type": "local_shell_call_output", "output": "a.txt"}], 1, {"content":
         '[local shell call: {"action": {"command": ["ls"]}}]\n[local shell call output: {"output": "a.txt"}]\n'}),
        (ResponseRequest, [HI, {"type": "function_call", "call_id": "c", "name": "f", "arguments": {}},
         {"type": "function_call_output", "call_id": "c", "output": [FILE]}], 2,
         {"content": '[a document, which this model cannot read: {"filename": "a.pdf"}]'}),
        (OllamaRequest, [HI, {"role": "assistant", "tool_calls": [CALLED]}, {"role": "tool", "content": {"r": 3}}], 2,
         {"content": '{"r": 3}', "tool_call_id": "t"}),
    ],
)  # fmt: skip
def test_what_is_not_read_is_told_in_its_place(model: Any, turns: list[Any], at: int, told: dict[str, Any]):
    llm: Any = Model()
    llm.seeing.takes = lambda _url: False
    found, _ = with_marks(llm, chat(model, turns))
    assert {name: found.messages[at][name] for name in told} == told


@pytest.mark.parametrize(
    ("model", "turns", "words"),
    [
        (MessageRequest, [HI, OK, user(PDF)], r"^messages\[2\].content\[0\].source.type 'base64' is not supported"),
        (MessageRequest, [HI, assistant(LOOKED), user(result(), PDF)], r"^messages\[2\].content\[1\].source.type"),
        (ChatRequest, [HI, OK, user(SOUND)], r"^messages\[2\].content\[0\].type 'input_audio' is not supported"),
        (ResponseRequest, [user(FILE)], r"^input\[0\].content\[0\].type 'input_file' is not supported"),
        (ResponseRequest, [HI, {"type": "item_reference", "id": "x"}, HI], r"^input\[1\].type 'item_reference' is not"),
    ],
)
def test_what_the_user_has_just_sent_is_refused(model: Any, turns: list[Any], words: str):
    with pytest.raises(Problem, match=words):
        chat(model, turns)


def test_pictures_that_the_model_does_not_see_are_told_and_one_just_shown_is_left_for_its_refusal():
    llm: Any = Model()
    llm.seeing.takes = lambda _url: False
    for turns, left in (([user(PNG), OK, HI], False), ([user(PNG)], True), ([user(PNG), OK, user(PNG)], True)):
        found, _ = with_marks(llm, chat(MessageRequest, turns))
        assert has_pictures(found.messages[-1:]) is left
        assert not has_pictures(found.messages[:-1])
