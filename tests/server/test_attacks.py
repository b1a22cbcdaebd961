"""What one client can do to the others: each of these once ended the server, held it up, or was a fault of its own."""

import asyncio
import json
import threading
from collections.abc import MutableMapping
from typing import Any

import pytest
from asgi import answer, scope_of
from mutating import JSON, TALE, Asked

from splitinfer.llm import LLM
from splitinfer.server.body import Bodies
from splitinfer.server.gate import Gate
from splitinfer.server.guard import Guard
from splitinfer.server.keys import ApiKey, ApiKeys, digest
from splitinfer.server.running import make_app
from splitinfer.server.service import Service

CHAT, ASK = "/v1/chat/completions", {"messages": TALE, "max_tokens": 2}


@pytest.fixture(scope="module")
def application(llm: LLM) -> Guard:
    return make_app(Service(llm, "demo"))


def asked(
    application: Guard, path: str, body: Any, *headers: tuple[str, str], method: str = "POST"
) -> tuple[int, str, int]:
    """The status, the sentence of the error, and how long the answer is, in bytes."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    mine = () if "Content-Type" in dict(headers) else (JSON,)
    said = asyncio.run(answer(application, Asked(method, path, (*mine, *headers), raw)))
    document = said.json if isinstance(said.json, dict) else {}
    return said.status, (document.get("error") or {}).get("message", ""), len(said.body)


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        (CHAT, {**ASK, "stop": ["a" * 10_000_000]}, "a stop string may have 4096 characters, not 10000000"),
        (CHAT, {**ASK, "stop_token_ids": [1] * 300_000}, "stop_token_ids may have 1024 ids, not 300000"),
        (CHAT, {**ASK, "logit_bias": {"9" * 5000: 1}}, "logit_bias must be an object whose keys are token ids"),
        (CHAT, {**ASK, "logit_bias": {str(i): 1 for i in range(300_000)}}, "logit_bias may have 1,024 token ids, not "),
        (CHAT, {**ASK, "chat_template_kwargs": {"return_tensors": "np"}}, "return_tensors is not a chat template sett"),
        (CHAT, {**ASK, "chat_template_kwargs": {"padding": "max_length", "max_length": 10**9}},
        "max_length is not a chat template setting"),
        (CHAT, {**ASK, "chat_template_kwargs": {"self": 1}}, "self is not a chat template setting"),
        (CHAT, {**ASK, "n": 128}, "n must be at most 16, not 128"),
        (CHAT, {**ASK, "a" * 100_000: 1}, "there is no field 'aaa"),
        ("/v1/completions", {"prompt": [10**400]}, "token id 1000"),
        ("/detokenize", {"tokens": [5] * 5000}, "tokens has 5,000 ids, but the context is 4,096"),
        ("/tokenize", {"prompt": "ab cd " * 400_000}, "the prompt has over 8,192 tokens, but the context is 4,096"),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "ab cd " * 400_000}]},
        "prompt is too long: the prompt has over 8,192 tokens"),
        ("/v1/responses/input_tokens", {"input": "ab cd " * 400_000}, "the prompt has over 8,192 tokens"),
    ],
)  # fmt: skip
def test_what_costs_too_much_is_refused_in_a_sentence(application: Guard, path: str, body: Any, sentence: str):
    status, said, size = asked(application, path, body)
    assert (status, said[: len(sentence)]) == (400, sentence)
    assert size < 3000
    assert asked(application, CHAT, ASK)[0] == 200, "the next one is answered"


@pytest.mark.parametrize(
    ("headers", "status", "sentence"),
    [
        ([("Content-Encoding", "gzip")], 415, "the body must be sent as it is, not with Content-Encoding: gzip"),
        ([("Content-Type", "application/json"), ("Content-Type", "text/plain")], 400,
        "the header content-type is there"),
        ([("Origin", "https://attacker.example"), ("Origin", "http://localhost")], 400,
        "the header origin is there twice"),
        ([("X-Api-Key", "a"), ("X-Api-Key", "b")], 400, "the header x-api-key is there twice"),
        ([("X-Splitinfer-Priority", "high")], 400, "the header x-splitinfer-priority must be a number from -100"),
    ],
)  # fmt: skip
def test_headers_that_contradict_each_other(
    application: Guard, headers: list[tuple[str, str]], status: int, sentence: str
):
    found, said, _ = asked(application, CHAT, ASK, *headers)
    assert (found, said[: len(sentence)]) == (status, sentence)


@pytest.mark.timeout(15)
def test_a_cookie_of_backslashes_holds_nobody_up(application: Guard):
    """Python before 3.11.10 and 3.12.6 takes half a minute for one, on the event loop, whoever sends it."""
    for value in ('a="' + "\\" * 60_000 + '"', 'a="' + '\\"' * 30_000 + '"'):
        assert asked(application, CHAT, ASK, ("Cookie", value))[0] == 200


def test_a_method_is_refused_with_those_that_are_taken(application: Guard):
    said = asyncio.run(answer(application, Asked("P" * 30_000, CHAT)))
    assert (said.status, said.headers["allow"], len(said.body) < 300) == (405, "POST", True)


def test_bodies_are_bounded_together(llm: LLM):
    inner, bodies = make_app(Service(llm, "demo")), Bodies(most=3000)
    application = Guard(inner._app, Gate(), {}, bodies)
    body = json.dumps({**ASK, "user": "u"}).encode() + b" " * 2000

    async def both() -> list[int]:
        stays, began = asyncio.Event(), asyncio.Event()

        async def receive() -> dict[str, Any]:
            if not began.is_set():
                began.set()
                return {"type": "http.request", "body": body, "more_body": True}
            await stays.wait()
            stays.clear()
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: MutableMapping[str, Any]) -> None:
            statuses.append(message.get("status", 0))

        statuses = list[int]()
        first = asyncio.create_task(application(scope_of(Asked("POST", CHAT, (JSON,), body)), receive, send))
        await began.wait()
        second = await answer(application, Asked("POST", CHAT, (JSON,), body))
        assert (second.headers["retry-after"], second.json["error"]["type"]) == ("2", "rate_limit_error")
        stays.set()
        await first
        third = await answer(application, Asked("POST", CHAT, (JSON,), body))
        return [second.status, statuses[0], third.status]

    assert asyncio.run(both()) == [429, 200, 200]
    assert bodies.held == 0


def test_counting_and_tokenizing_count_as_requests(llm: LLM):
    keys = ApiKeys([ApiKey("slow", digest("secret"), requests_per_minute=1)])
    for path, body in (
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [5]}),
        ("/apply-template", {"messages": TALE}),
        ("/v1/messages/count_tokens", {"messages": TALE}),
        ("/v1/responses/input_tokens", {"input": "a"}),
    ):
        service = Service(llm, "demo", Gate(keys=keys))
        statuses = [asked(make_app(service), path, body, ("X-Api-Key", "secret"))[0] for _ in range(2)]
        assert statuses == [200, 429], path
        assert service.num_running == 0


def test_streams_go_on_while_a_long_text_is_tokenized(llm: LLM):
    """Each token of a stream is decoded by the tokenizer, which another thread uses for seconds."""
    tokens, decoded = llm.encode("Once"), list[str]()

    def decode() -> None:
        detokenizer = llm._prompts.detokenizer()
        assert detokenizer is not None
        decoded.append("".join(map(detokenizer.add, tokens)) + detokenizer.flush() + llm.decode(tokens))

    beside = threading.Thread(target=decode, daemon=True)
    with llm._prompts._lock:  # as encoding holds it
        beside.start()
        beside.join(30)
        assert decoded == ["OnceOnce"]
