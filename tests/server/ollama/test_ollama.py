"""Ollama's API: what is asked in its words, how it is answered, and what editors look for to find it."""

import json
from datetime import datetime
from typing import Any

import httpx2 as httpx
import pytest

from splitinfer.core.grammar import Grammar
from splitinfer.engine.loop.requests import TokenLogprobs
from splitinfer.llm import LLM
from splitinfer.pictures.marks import taken_out
from splitinfer.server.answer import ChoiceTimes, Piece, Usage
from splitinfer.server.ask import Ask
from splitinfer.server.fields import read
from splitinfer.server.ollama.requests import ChatRequest, GenerateRequest
from splitinfer.server.ollama.writer import OllamaWriter
from splitinfer.server.problem import Problem
from splitinfer.text.answer import ReasoningPart, TextPart, ToolCallPart

HI = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def chat(**fields: Any) -> Ask:
    return read(ChatRequest, {"messages": [HI], **fields}).asks()[0]


def test_options_are_sampling():
    given = {"temperature": 0, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": 7, "stop": "x", "num_predict": 9}
    ask = chat(options={**given, "repeat_penalty": 1.1, "repeat_last_n": -1, "num_ctx": 4096, "mirostat": 0})
    assert ask.max_tokens == 9
    assert ask.sampling == {
        "temperature": 0, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": 7, "stop": ("x",), "repetition_penalty": 1.1
    }  # fmt: skip


@pytest.mark.parametrize(("num_predict", "most"), [(-1, None), (-2, None), (None, None), (3, 3)])
def test_below_zero_an_answer_has_no_limit(num_predict: int | None, most: int | None):
    assert chat(options={"num_predict": num_predict}).max_tokens == most


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("options.mirostat", {"options": {"mirostat": 2}}),
        ("options.top_k", {"options": {"top_k": "many"}}),
        ("format", {"format": "xml"}),
        ("think", {"think": 3}),
        ("messages[0].role", {"messages": [{"role": "robot"}]}),
    ],
)
def test_what_is_wrong_is_named(field: str, fields: dict[str, Any]):
    with pytest.raises(Problem) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, field)


def test_a_form_is_json_or_a_schema():
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}}
    assert "grammar" not in chat(format="").sampling
    assert chat(format="json").sampling["grammar"] == Grammar.json()
    assert chat(format=schema).sampling["grammar"] == Grammar.json(schema)


def test_calls_get_ids_and_outcomes_those_of_their_calls():
    def call(name: str, **more: Any) -> dict[str, Any]:
        return {"function": {"name": name, "arguments": {"at": 1}}, **more}

    turns = [
        {"role": "system", "content": "Be kind."}, {"role": "system", "content": "Be short."}, HI,
        {"role": "assistant", "thinking": "Hm.", "tool_calls": [call("look"), call("walk"), call("look", id="own")]},
        {"role": "tool", "tool_name": "walk", "content": "gone"}, {"role": "tool", "content": "seen"},
        {"role": "tool", "content": "seen too", "tool_call_id": "own"},
    ]  # fmt: skip
    chatted = chat(messages=turns, tools=[TOOL]).prompt
    system, _, asked, *outcomes = chatted.messages
    assert system["content"] == "Be kind.\n\nBe short."
    assert [one["id"] for one in asked["tool_calls"]] == ["call00001", "call00002", "own"]
    assert asked["reasoning_content"] == "Hm."
    assert [one["tool_call_id"] for one in outcomes] == ["call00002", "call00001", "own"]
    assert chatted.tools == (TOOL,)


def test_pictures_come_before_the_text():
    messages = chat(messages=[{**HI, "images": ["QUJD"]}]).prompt.messages
    assert taken_out(messages, "<p>") == ([{"role": "user", "content": "<p>Hi"}], ["data:image/png;base64,QUJD"])


def test_a_text_is_a_chat_unless_it_is_raw():
    def asked(**fields: Any) -> Any:
        return [ask.prompt for ask in read(GenerateRequest, fields).asks()]

    assert asked(prompt="Hi", raw=True) == ["Hi"]
    (kind,) = asked(prompt="Hi", system="Be kind.")
    assert kind.messages == ({"role": "system", "content": "Be kind."}, HI)
    assert asked(prompt="") == []
    for refused in ({"suffix": "end"}, {"template": "{{ .Prompt }}"}, {"context": [1, 2]}):
        with pytest.raises(Problem, match=next(iter(refused))):
            asked(prompt="Hi", **refused)


def writer(model: Any = ChatRequest, **fields: Any) -> OllamaWriter:
    times = ChoiceTimes(11.0, 12.0, 14.0, 17.0)
    return OllamaWriter("demo", read(model, fields), lambda token: b"ab"[token : token + 1], 10.0, lambda: times)


def test_a_stream_and_a_document_say_the_same():
    call = ToolCallPart("look", '{"at": 1}', "own")
    pieces = [Piece(0, (ReasoningPart("Hm."),)), Piece(0, (TextPart("Yes"), call)), Piece(0, (), (), "tool_calls")]
    sent = b"".join(map(writer().written, pieces)) + writer().end(pieces[-1], Usage(5, 0, 4))
    lines = [json.loads(line) for line in sent.splitlines()]
    assert [line["done"] for line in lines] == [False, False, False, True]
    message = writer().document(pieces, Usage(5, 0, 4))["message"]
    said = [line["message"] for line in lines]
    assert message["content"] == "".join(one["content"] for one in said) == "Yes"
    assert message["thinking"] == "".join(one.get("thinking", "") for one in said) == "Hm."
    assert message["tool_calls"] == said[2]["tool_calls"]
    assert said[2]["tool_calls"] == [{"id": "own", "function": {"name": "look", "arguments": {"at": 1}}}]


def test_log_probabilities_come_with_the_lines_and_in_the_document():
    likely = ((0, -0.5), (1, -1.0))
    pieces = [Piece(0, (TextPart("a"),), (TokenLogprobs(0, -0.5, likely),)), Piece(0, (), (), "stop")]
    asked = writer(logprobs=True, top_logprobs=1)
    line = json.loads(asked.written(pieces[0]))
    a = {"token": "a", "logprob": -0.5, "bytes": [97]}
    assert line["logprobs"] == asked.document(pieces, Usage(1))["logprobs"] == [{**a, "top_logprobs": [a]}]
    assert "logprobs" not in writer().document(pieces, Usage(1))
    with pytest.raises(Problem, match=r"^top_logprobs must be at most 20, not 25$"):
        writer(top_logprobs=25)


def test_options_are_as_ollamas_clients_write_them():
    sampling = {"top_k": 40.0, "num_predict": 6.0, "seed": -1.0, "temperature": 3, "num_ctx": 8192.0}
    ask = chat(options=sampling)
    assert (ask.sampling, ask.max_tokens) == ({"top_k": 40, "temperature": 3.0}, 6)
    with pytest.raises(Problem, match=r"^options.top_k must be a whole number, not 40.5$"):
        chat(options={"top_k": 40.5})


def test_the_last_line_has_the_reason_and_nanoseconds():
    last = writer(GenerateRequest).last(Piece(0, finish_reason="length"), Usage(5, 2, 4))
    assert last | {"total_duration": 0, "created_at": ""} == {
        "model": "demo", "created_at": "", "response": "", "done": True, "done_reason": "length", "total_duration": 0,
        "load_duration": 2 * 10**9, "prompt_eval_count": 5, "prompt_eval_duration": 2 * 10**9,
        "eval_count": 4, "eval_duration": 3 * 10**9,
    }  # fmt: skip
    datetime.fromisoformat(last["created_at"])


@pytest.mark.parametrize(("path", "asked"), [("chat", {"messages": [HI]}), ("generate", {"prompt": "Hi"})])
def test_lines_stream_by_default(path: str, asked: dict[str, Any], http: httpx.Client):
    options = {"num_predict": 4, "temperature": 0, "num_ctx": 99}
    response = http.post(f"/api/{path}", json={"model": "demo", **asked, "options": options, "keep_alive": "5m"})
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.headers["x-splitinfer-ignored"] == "num_ctx, keep_alive"
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    whole = http.post(f"/api/{path}", json={**asked, "options": options, "stream": False}).json()
    assert (whole["done_reason"], whole["eval_count"], whole["model"]) == ("length", 4, "demo")
    assert lines[-1]["prompt_eval_count"] == whole["prompt_eval_count"] > 0


def test_what_editors_look_for(http: httpx.Client, llm: LLM):
    assert tuple(map(int, http.get("/api/version").json()["version"].split("."))) >= (0, 6, 4)
    (listed,) = http.get("/api/tags").json()["models"]
    (loaded,) = http.get("/api/ps").json()["models"]
    assert listed["name"] == listed["model"] == loaded["name"] == "demo"
    assert listed["size"] == loaded["size_vram"] > 0
    assert len(listed["digest"]) == 64
    assert loaded["context_length"] == llm.context_length
    datetime.fromisoformat(loaded["expires_at"])
    for asked in ({"model": "demo"}, {"name": "demo:latest"}):
        shown = http.post("/api/show", json=asked).json()
        family = shown["model_info"]["general.architecture"]
        assert shown["model_info"][f"{family}.context_length"] == llm.context_length
        assert shown["details"] == listed["details"]
        assert shown["capabilities"][0] == "completion"
    loads = http.post("/api/generate", json={"model": "demo"}).json()
    assert (loads["done"], loads["done_reason"]) == (True, "load")
    assert http.post("/api/generate", json={"model": "demo", "keep_alive": 0}).json()["done_reason"] == "unload"
    assert http.get("/", headers={"accept": "*/*"}).text == "Ollama is running"


def test_errors_are_a_sentence(http: httpx.Client):
    unknown = http.post("/api/show", json={"model": "other"})
    assert (unknown.status_code, unknown.json()) == (404, {"error": "there is no model 'other' here, but 'demo'"})
    wrong = http.post("/api/chat", json={"messages": "Hi"})
    assert (wrong.status_code, wrong.json()) == (400, {"error": "messages must be a list, not 'Hi'"})
    assert http.post("/api/embed", json={}).json() == {"error": "there is no POST /api/embed here"}
