"""Health, sessions, a text as tokens, and the log, over real sockets."""

import logging
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx2 as httpx
import pytest
from processes import until

from splitinfer.core.layout import Layout, StageSpec
from splitinfer.engine.coordinator.health import PipelineHealth, StageHealth, StageState
from splitinfer.llm import LLM
from splitinfer.server.gate import Gate
from splitinfer.server.guard import line
from splitinfer.server.health import health_document, layout_summary
from splitinfer.server.keys import ApiKey, ApiKeys, digest
from splitinfer.server.running import Listen, Server
from splitinfer.server.service import Service
from splitinfer.server.spans import Usage

TALE = [{"role": "user", "content": "Once upon a time"}]
KEY = {"x-api-key": "secret"}


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Server]:
    gate = Gate(keys=ApiKeys([ApiKey("laptop", digest("secret"))]))
    server = Server(Service(llm, "demo", gate), Listen(port=0))
    yield server
    server.close()


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}") as client:
        yield client


# -- health ----------------------------------------------------------------------------------------

STAGES = (StageHealth("front", 0, 6, StageState.READY), StageHealth("back", 6, 12, StageState.LOST))


@pytest.mark.parametrize(
    ("health", "drains", "status", "word", "reason"),
    [
        (PipelineHealth(STAGES), False, 200, "ok", None),
        (PipelineHealth(STAGES), True, 503, "draining", "the server was told to end, and takes no new request"),
        (PipelineHealth(STAGES, "stage back"), False, 503, "waiting", "requests wait for stage back"),
        (PipelineHealth(STAGES, failure="it failed"), True, 503, "failed", "it failed"),
    ],
)
def test_health_says_whether_requests_are_answered(
    health: PipelineHealth, drains: bool, status: int, word: str, reason: str | None
):
    found, document = health_document(health, 3, is_draining=drains)
    assert (found, document["status"], document.get("reason"), document["running"]) == (status, word, reason, 3)
    assert document["stages"][1] == {"name": "back", "layers": [6, 12], "state": "lost"}


def test_health_needs_no_key_and_models_have_layout_and_context(client: httpx.Client, llm: LLM):
    health = client.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, "ok")
    assert [stage["state"] for stage in health.json()["stages"]] == ["ready", "ready"]
    (model,) = client.get("/v1/models", headers=KEY).json()["data"]
    assert model["context_length"] == llm.context_length
    assert model["layout"]["stages"] == [{"name": "s0", "layers": [0, 6]}, {"name": "s1", "layers": [6, 12]}]


def test_a_layout_is_told_without_addresses_and_keys():
    worker = StageSpec("back", 6, 12, "tcp://10.0.0.7:5577", key="ab" * 32)
    said = str(layout_summary(Layout((StageSpec("front", 0, 6), worker))))
    assert "10.0.0.7" not in said
    assert "abab" not in said


def test_who_drains_says_so_with_the_time_to_come_back(server: Server, client: httpx.Client):
    server.begin_draining()
    try:
        refused = client.post("/v1/chat/completions", headers=KEY, json={"messages": TALE})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "10")
        assert client.get("/health").json()["status"] == "draining"
    finally:
        server.service.is_draining = False


# -- sessions --------------------------------------------------------------------------------------


def test_a_key_buys_a_session(client: httpx.Client):
    assert client.post("/session", json={}).status_code == 401
    bought = client.post("/session", headers=KEY, json={})
    assert bought.json() == {"session": True, "name": "laptop", "scopes": ["use"]}
    assert "HttpOnly" in bought.headers["set-cookie"]
    assert "secret" not in bought.headers["set-cookie"]
    assert client.get("/v1/models").status_code == 200, "by the cookie"
    assert client.post("/session", json={}).status_code == 401, "a session does not prolong itself"
    foreign = client.get("/v1/models", headers={"Origin": "http://localhost:1"})
    assert foreign.status_code == 403, "whatever cookie it carries"
    name = client.cookies["splitinfer_session"]
    assert client.delete("/session").json() == {"ended": True}
    stolen = {"Cookie": f"splitinfer_session={name}"}
    assert client.get("/v1/models", headers=stolen).status_code == 401


# -- a text as tokens ------------------------------------------------------------------------------


def test_texts_chats_and_tokens(client: httpx.Client, llm: LLM):
    found = client.post("/tokenize", headers=KEY, json={"prompt": "Once upon", "return_token_strs": True}).json()
    tokens = llm.encode("Once upon")
    assert found["tokens"] == tokens
    assert (found["count"], found["max_model_len"]) == (len(tokens), llm.context_length)
    assert "".join(found["token_strs"]) == "Once upon"
    assert client.post("/detokenize", headers=KEY, json={"tokens": tokens}).json() == {"prompt": "Once upon"}
    info = client.get("/tokenizer_info", headers=KEY).json()
    assert llm.encode(info["eos_token"], adds_special=False) == [*llm.tokenizer.eos_token_ids]
    assert info["model_max_length"] == llm.context_length
    assert {"bos_token", "pad_token", "chat_template", "tokenizer_class"} <= info.keys()
    bare = {"prompt": "Once upon", "add_special_tokens": False}
    assert client.post("/tokenize", headers=KEY, json=bare).json()["tokens"] == llm.encode(
        "Once upon", adds_special=False
    )
    chat = client.post("/tokenize", headers=KEY, json={"messages": TALE}).json()
    assert chat["tokens"] == llm.encode_chat(TALE)
    written = client.post("/apply-template", headers=KEY, json={"messages": TALE}).json()["prompt"]
    assert llm.encode(written) == chat["tokens"]
    closed = {"messages": TALE, "add_generation_prompt": False, "stream": True, "max_tokens": 5}
    shorter = client.post("/apply-template", headers=KEY, json=closed).json()["prompt"]
    assert written.startswith(shorter)
    assert shorter == llm.render_chat(TALE, opens_answer=False)
    assert client.post("/tokenize", headers=KEY, json=closed).json()["tokens"] == llm.encode_chat(
        TALE, opens_answer=False
    )


def test_an_id_outside_the_vocabulary(client: httpx.Client):
    refused = client.post("/detokenize", headers=KEY, json={"tokens": [2**30]})
    assert refused.status_code == 400


# -- the log ---------------------------------------------------------------------------------------


def logged(caplog: pytest.LogCaptureFixture, word: str) -> str:
    """The line with a word, which is written when the response is over."""

    def found() -> list[str]:
        return [record.getMessage() for record in caplog.records if word in record.getMessage()]

    until(found, f"a line with {word!r}", 10)
    return found()[0]


def test_a_line_for_each_request_and_nothing_of_a_prompt(
    server: Server, client: httpx.Client, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, logger="splitinfer")
    body = {"messages": [{"role": "user", "content": "a heron"}], "max_tokens": 3, "ignore_eos": True}
    for number, more in enumerate(({}, {"stream": True}), 1):
        headers = {**KEY, "X-Request-Id": f"mine-{number}"}
        assert client.post("/v1/chat/completions?q=heron", headers=headers, json=body | more).status_code == 200
        said = logged(caplog, f"request mine-{number} ")
        assert said.startswith(f"request mine-{number} laptop POST /v1/chat/completions 200, ")
        assert "3 generated" in said
    assert client.get("/v1/heron%0Arequest", headers={"x-api-key": "wrong"}).status_code == 404
    assert "\n" not in logged(caplog, " - GET /v1/")
    assert "a heron" not in caplog.text
    server.service.logs_prompts = True
    try:
        client.post("/v1/chat/completions", headers=KEY, json=body)
    finally:
        server.service.logs_prompts = False
    assert "a heron" in logged(caplog, " asks ")
    assert "secret" not in caplog.text


def test_a_fault_is_logged_without_what_it_quotes(
    server: Server, client: httpx.Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    def faulty(_self: LLM, text: str, **_options: bool) -> list[int]:
        raise KeyError(text)

    monkeypatch.setattr(LLM, "encode", faulty)
    failed = client.post("/tokenize", headers=KEY, json={"prompt": "a heron"})
    assert (failed.status_code, "heron" in failed.text) == (500, False)
    assert "KeyError" in caplog.text
    assert "heron" not in caplog.text


def test_a_line():
    usage = Usage(20_412, 5_120, 311)
    expected = "request r k POST /a%0Ab 200, 5,120 of 20,412 prompt tokens cached, 311 generated, 14.2 s"
    assert line("r", "k", "POST", "/a\nb", 200, usage, 14.21) == expected
    assert len(line("r", "k", "GET", "/" + "é" * 999, 404, None, 0)) < 120


# -- TLS -------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("openssl") is None, reason="nothing here makes certificates")
def test_over_tls_the_cookie_is_for_tls_only(llm: LLM, tmp_path: Path):
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    made += f" -addext subjectAltName=DNS:localhost -keyout {key} -out {certificate}"
    subprocess.run(made.split(), check=True, capture_output=True, timeout=60)
    gate = Gate(keys=ApiKeys([ApiKey("laptop", digest("secret"))]))
    server = Server(Service(llm, "demo", gate), replace(Listen(port=0), certificate=certificate, key=key))
    try:
        trusts = ssl.create_default_context(cafile=str(certificate))
        bought = httpx.post(f"https://localhost:{server.port}/session", headers=KEY, json={}, verify=trusts)
        assert (bought.status_code, bought.headers["set-cookie"].endswith("; Secure")) == (200, True)
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://localhost:{server.port}/health")
    finally:
        server.close()
