"""Health, a text as tokens, and the log, in memory."""

import logging

import httpx2 as httpx
import pytest

from splitinfer.engine.figures.health import PipelineHealth, StageHealth, StageState
from splitinfer.llm import LLM
from splitinfer.server.ask import without_lines
from splitinfer.server.gate import Gate
from splitinfer.server.health import health_document
from splitinfer.server.keys import ApiKey, ApiKeys, digest
from splitinfer.server.service import Service
from splitinfer.text.tokenizer import Tokenizer

TALE = [{"role": "user", "content": "Once upon a time"}]
CHAT, KEY = "/v1/chat/completions", {"x-api-key": "secret"}


@pytest.fixture(scope="module")
def service(llm: LLM) -> Service:
    return Service(llm, "demo", Gate(keys=ApiKeys([ApiKey("laptop", digest("secret"))])))


STAGES = (StageHealth("front", 0, 6, StageState.READY), StageHealth("back", 6, 12, StageState.LOST))


@pytest.mark.parametrize(
    ("health", "drains", "status", "word", "reason"),
    [
        (PipelineHealth(STAGES), False, 200, "ok", None),
        (PipelineHealth(STAGES), True, 503, "draining", "the server was told to end, and takes no new request"),
        (PipelineHealth(STAGES, absent="back is gone."), False, 200, "ok", None),
        (PipelineHealth(STAGES, "stage back"), False, 503, "waiting", "requests wait for stage back"),
        (PipelineHealth(STAGES, failure="it failed"), True, 503, "failed", "it failed"),
    ],
)
def test_health_says_whether_requests_are_answered(
    health: PipelineHealth, drains: bool, status: int, word: str, reason: str | None
):
    found, document = health_document(health, 3, is_draining=drains)
    assert (found, document["status"], document.get("reason"), document["running"]) == (status, word, reason, 3)
    assert document["absent"] == health.absent
    assert document["stages"][1] == {"name": "back", "layers": [6, 12], "state": "lost"}


def test_health_needs_no_key_and_models_have_layout_and_context(http: httpx.Client, llm: LLM):
    health = http.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, "ok")
    assert [stage["state"] for stage in health.json()["stages"]] == ["ready", "ready"]
    (model,) = http.get("/v1/models", headers=KEY).json()["data"]
    assert model["context_length"] == llm.context_length
    assert model["default_parameters"]["temperature"] == 1.0
    assert model["default_parameters"]["enable_thinking"] is None
    assert model["layout"]["stages"] == [{"name": "s0", "layers": [0, 1]}, {"name": "s1", "layers": [1, 2]}]


def test_texts_chats_and_tokens(http: httpx.Client, llm: LLM):
    def post(path: str, **body: object) -> dict[str, object]:
        return http.post(path, headers=KEY, json=body).json()

    tokens = llm.tokenizer.encode("Once upon")
    found = post("/tokenize", prompt="Once upon", return_token_strs=True)
    assert (found["tokens"], found["count"], found["max_model_len"]) == (tokens, len(tokens), llm.context_length)
    assert "".join(found["token_strs"]) == "Once upon"  # type: ignore[arg-type]
    bare = post("/tokenize", prompt="Once upon", add_special_tokens=False)
    assert bare["tokens"] == llm.tokenizer.encode("Once upon", adds_special=False)
    assert post("/detokenize", tokens=tokens) == {"prompt": "Once upon"}
    assert post("/detokenize", tokens=[2**30])["error"]
    chat = llm.tokenizer.encode_chat(TALE)
    assert post("/detokenize", tokens=chat) == {"prompt": llm.tokenizer.render_chat(TALE)}, "with its special tokens"
    for more in ({}, {"add_generation_prompt": False, "stream": True, "max_tokens": 5}):
        opens = not more
        chat = llm.tokenizer.encode_chat(TALE, opens_answer=opens)
        assert post("/tokenize", messages=TALE, **more)["tokens"] == chat
        written = post("/apply-template", messages=TALE, **more)["prompt"]
        assert written == llm.tokenizer.render_chat(TALE, opens_answer=opens)
        assert llm.tokenizer.encode(str(written)) == chat
    info = http.get("/tokenizer_info", headers=KEY).json()
    assert llm.tokenizer.encode(info["eos_token"], adds_special=False) == [*llm.tokenizer.eos_token_ids]  # type: ignore[union-attr]
    assert info["model_max_length"] == llm.context_length
    assert {"bos_token", "pad_token", "chat_template", "tokenizer_class"} <= info.keys()


def test_a_line_for_each_request_and_nothing_of_a_prompt(
    service: Service, http: httpx.Client, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, logger="splitinfer")
    body = {"messages": [{"role": "user", "content": "a heron"}], "max_tokens": 3, "ignore_eos": True}
    for number, more in enumerate(({}, {"stream": True}), 1):
        caplog.clear()
        headers = {**KEY, "X-Request-Id": f"mine-{number}"}
        assert http.post(f"{CHAT}?q=heron", headers=headers, json=body | more).status_code == 200
        (said,) = [record.getMessage() for record in caplog.records]
        assert said.startswith(f"request mine-{number} laptop POST {CHAT} 200, ")
        assert "3 generated" in said
    for odd in ("mine 1", "mine\t200", "x" * 65, ""):
        assert http.get("/health", headers={"X-Request-Id": odd}).headers["x-request-id"].startswith("req_")
    assert http.get("/v1/heron%0Arequest", headers={"x-api-key": "wrong"}).status_code == 404
    assert "\n" not in caplog.records[-1].getMessage()
    assert "a heron" not in caplog.text
    service.logs_prompts = True
    try:
        http.post(CHAT, headers=KEY, json=body)
    finally:
        service.logs_prompts = False
    assert [record for record in caplog.records if " asks " in record.getMessage() and "a heron" in record.getMessage()]
    assert "secret" not in caplog.text


def test_a_fault_is_logged_without_what_it_quotes(
    http: httpx.Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    def faulty(_self: Tokenizer, text: str, **_options: bool) -> list[int]:
        raise KeyError(text)

    monkeypatch.setattr(Tokenizer, "encode", faulty)
    failed = http.post("/tokenize", headers=KEY, json={"prompt": "a heron"})
    assert (failed.status_code, "heron" in failed.text) == (500, False)
    assert "KeyError" in caplog.text
    assert "heron" not in caplog.text


def test_lines_that_differ_in_every_request_are_left_out_everywhere(http: httpx.Client):
    def header(number: int) -> str:
        return f"x-anthropic-billing-header: cc_version=2.1.{number}; cc_entrypoint=cli; cch={number};"

    def asked(path: str, body: object) -> object:
        answer = http.post(path, headers=KEY, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def prompts(system: str | None, blocks: list[str]) -> list[object]:
        first = [] if system is None else [{"role": "system", "content": system}]
        told = [{"type": "text", "text": one} for one in blocks]
        counted = asked("/v1/messages/count_tokens", {"messages": TALE, "system": told})
        return [asked("/apply-template", {"messages": [*first, *TALE]}), counted]

    plain = prompts("Be kind.", ["Be kind."])
    for number in (1, 23):
        assert prompts(f"{header(number)}\nBe kind.", [header(number), "Be kind."]) == plain
    assert prompts(header(4), [header(4)]) == prompts(None, [])
    assert prompts(f"Be kind.\n{header(5)}", ["Be kind.", header(5)]) != plain, "elsewhere it is a text"


@pytest.mark.parametrize(
    ("pattern", "text", "left"),
    [
        ("x:.*", "x: 1\n\nX: 2  \nBe kind.", ["Be kind."]),
        ("x:.*|today: .*", "today: May\nx: 1\n  Be kind.", ["Be kind."]),
        ("x:", "x: 1\nBe kind.", ["x: 1\nBe kind."]),
        ("", "x: 1\nBe kind.", ["x: 1\nBe kind."]),
        ("x:.*", "Be x: 1\nkind.", ["Be x: 1\nkind."]),
        ("(x:.*)?", "x: 1\n", []),  # it may match nothing
    ],
)
def test_only_whole_lines_at_the_beginning_are_left_out(pattern: str, text: str, left: list[str]):
    found = without_lines([{"role": "system", "content": text}], pattern)
    assert [message["content"] for message in found] == left
