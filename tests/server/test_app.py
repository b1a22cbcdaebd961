"""The server as its clients meet it: real sockets, the official client, two stages."""

import json
import socket
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import anthropic
import httpx2 as httpx
import openai
import pytest
from processes import until
from pydantic import BaseModel, Field

from splitinfer.core.sequence import SamplingParams
from splitinfer.llm import LLM
from splitinfer.server.gate import Gate
from splitinfer.server.keys import ApiKey, ApiKeys, digest
from splitinfer.server.running import Listen, Server
from splitinfer.server.service import Service

TALE = [{"role": "user", "content": "Once upon a time"}]
AT_MOST = 60.0  # seconds


def url(server: Server, path: str) -> str:
    return f"http://127.0.0.1:{server.port}{path}"


def is_idle(llm: LLM) -> bool:
    stats = llm.stats()
    return not stats["running"] and not stats["waiting"]


def expected(llm: LLM, **params: Any) -> str:
    return llm.generate([llm.encode_chat(TALE)], SamplingParams(**params))[0].text


def test_an_answer_is_the_librarys(client: openai.OpenAI, llm: LLM):
    answer = client.chat.completions.create(model="demo", messages=TALE, max_tokens=20, temperature=0)
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == (expected(llm, max_tokens=20), "length")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 20


def test_a_stream_is_the_same_answer(client: openai.OpenAI, llm: LLM):
    sampling = {"max_tokens": 20, "temperature": 0.8, "seed": 7, "presence_penalty": 0.5}
    options = {"include_usage": True}
    stream = client.chat.completions.create(
        model="demo", messages=TALE, stream=True, stream_options=options, logprobs=True, top_logprobs=2, **sampling
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == expected(llm, **sampling)
    tokens = [one for c in chunks if c.choices and c.choices[0].logprobs for one in c.choices[0].logprobs.content or ()]
    assert b"".join(bytes(one.bytes or ()) for one in tokens).decode() == text
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(tokens) == 20


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_sent_back_as_text_is_not_computed_again(client: openai.OpenAI, llm: LLM, stream: bool):
    """The answer is cut into letters, as its tokenizer would never do it."""
    letters = {str(token): 100 for word in ("t", "h", "e") for token in llm.encode(word)[-1:]}
    asked: list[Any] = [{"role": "user", "content": "Once upon a time" + "!" * stream}]
    sampling = {"max_tokens": 30, "seed": 5, "logit_bias": letters}
    if stream:
        chunks = client.chat.completions.create(model="demo", messages=asked, stream=True, **sampling)
        said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    else:
        said = client.chat.completions.create(model="demo", messages=asked, **sampling).choices[0].message.content
    assert len(llm.encode(said)) < len(said) == 30
    turn = [*asked, {"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
    usage = client.chat.completions.create(model="demo", messages=turn, max_tokens=1).usage
    assert usage.prompt_tokens_details.cached_tokens == len(llm.encode_chat(asked)) + 29
    edited = [*asked, {"role": "assistant", "content": said[:20]}, {"role": "user", "content": "And then?"}]
    usage = client.chat.completions.create(model="demo", messages=edited, max_tokens=1).usage
    assert usage.prompt_tokens == len(llm.encode_chat(edited))


def test_several_choices(client: openai.OpenAI):
    answer = client.chat.completions.create(model="demo", messages=TALE, max_tokens=8, n=3, seed=1, temperature=1.2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3
    alone = client.chat.completions.create(model="demo", messages=TALE, max_tokens=8, seed=2, temperature=1.2)
    assert answer.choices[1].message.content == alone.choices[0].message.content


def test_models(client: openai.OpenAI, llm: LLM):
    (model,) = client.models.list().data
    assert (model.id, model.model_extra and model.model_extra["context_length"]) == ("demo", llm.context_length)
    assert client.models.retrieve("demo").id == "demo"
    with anthropic.Anthropic(base_url=str(client.base_url).removesuffix("v1/"), api_key="none") as theirs:
        (same,) = theirs.models.list().data
        assert (same.id, same.max_input_tokens, same.type) == ("demo", llm.context_length, "model")
        assert theirs.models.retrieve("demo").display_name == "demo"
    with pytest.raises(openai.NotFoundError, match="there is no model 'other' here, but 'demo'"):
        client.models.retrieve("other")


class Hero(BaseModel, extra="forbid"):
    kind: Literal["king", "shepherd"]
    age: Annotated[int, Field(ge=1, le=99)]


PING: Any = {"type": "function", "function": {"name": "ping", "parameters": {"type": "object", "properties": {}}}}


def test_answers_have_the_form_of_a_model(client: openai.OpenAI):
    """By the official clients' own helpers, which send a schema and read the answer by it."""
    sampling: Any = {"model": "demo", "temperature": 1.0, "seed": 3}
    chat = client.chat.completions.parse(messages=TALE, response_format=Hero, max_tokens=40, **sampling)
    assert isinstance(chat.choices[0].message.parsed, Hero)
    del sampling["seed"]
    response = client.responses.parse(input="Who?", text_format=Hero, max_output_tokens=40, **sampling)
    assert isinstance(response.output_parsed, Hero)
    plain = client.chat.completions.create(
        messages=TALE, response_format={"type": "json_object"}, max_tokens=60, logit_bias={"95": 100}, **sampling
    )
    assert isinstance(json.loads(str(plain.choices[0].message.content)), dict)
    with anthropic.Anthropic(base_url=str(client.base_url).removesuffix("v1/"), api_key="none") as theirs:
        form: Any = {"format": {"type": "json_schema", "schema": Hero.model_json_schema()}}
        said = theirs.messages.create(model="demo", max_tokens=40, messages=TALE, output_config=form)
        assert Hero.model_validate_json(said.content[0].text)


def test_what_is_not_honoured_is_a_400_that_names_it(client: openai.OpenAI):
    schema = {"name": "n", "schema": {"type": "array", "uniqueItems": True}}
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        client.chat.completions.create(
            model="demo", messages=TALE, response_format={"type": "json_schema", "json_schema": schema}
        )
    with pytest.raises(openai.BadRequestError, match="the model has no syntax for calls"):
        client.chat.completions.create(model="demo", messages=TALE, tools=[PING], tool_choice="required")
    with pytest.raises(openai.BadRequestError, match=r"the prompt has [\d,]+ tokens, but the context is") as caught:
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "a b " * 5000}])
    assert caught.value.code == "context_length_exceeded"


def test_a_client_that_goes_is_noticed_in_prefill_and_in_a_stream(server: Server, llm: LLM):
    for stream in (True, False):
        body = {"model": "demo", "messages": TALE, "max_tokens": 3000, "stream": stream, "ignore_eos": True}
        raw = json.dumps(body).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
            until(lambda: not is_idle(llm), "it is under way")
        until(lambda: is_idle(llm) and server.service.num_running == 0, "it is over")


def test_a_request_is_cancelled_by_its_id(server: Server, llm: LLM):
    body = {"model": "demo", "messages": TALE, "max_tokens": 3000, "stream": True, "ignore_eos": True}
    path = url(server, "/v1/chat/completions")
    with httpx.stream("POST", path, json=body, headers={"X-Request-Id": "mine-1"}, timeout=AT_MOST) as response:
        assert response.headers["x-request-id"] == "mine-1"
        lines = response.iter_lines()
        next(lines)
        assert httpx.delete(url(server, "/v1/requests/mine-1")).json() == {"cancelled": True}
        assert [line for line in lines if line][-1] == "data: [DONE]"
    until(lambda: is_idle(llm), "it is over")
    assert httpx.delete(url(server, "/v1/requests/mine-1")).status_code == 404


# -- keys ------------------------------------------------------------------------------------------


@pytest.fixture
def guarded(llm: LLM) -> Iterator[Server]:
    keys = ApiKeys([ApiKey("laptop", digest("secret"), concurrent=1)])
    gate = Gate(origins=frozenset({"https://chat.example"}), keys=keys)
    server = Server(Service(llm, "demo", gate), Listen(port=0))
    yield server
    server.close()


def test_a_site_that_is_allowed_gets_its_headers(guarded: Server):
    asks = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
    preflight = httpx.options(url(guarded, "/v1/chat/completions"), headers=asks)
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == "https://chat.example"
    assert "access-control-allow-credentials" not in preflight.headers
    refused = httpx.get(url(guarded, "/v1/models"), headers={"Origin": "https://chat.example"})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://chat.example")


# -- Anthropic's API -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def claude(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.port}", api_key="none", max_retries=0) as made:
        yield made


def test_a_message_is_the_librarys_answer(claude: anthropic.Anthropic, llm: LLM):
    message = claude.messages.create(model="demo", max_tokens=20, messages=TALE, extra_body={"temperature": 0})
    assert message.content[0].type == "text"
    assert (message.content[0].text, message.stop_reason) == (expected(llm, max_tokens=20), "max_tokens")
    assert message.usage.output_tokens == 20


def test_a_stream_of_events_is_the_same_message(claude: anthropic.Anthropic, llm: LLM):
    body = {"temperature": 0}
    with claude.messages.stream(model="demo", max_tokens=20, messages=TALE, extra_body=body) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == expected(llm, max_tokens=20)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 20)


def test_a_stop_sequence_is_named(claude: anthropic.Anthropic, llm: LLM):
    stop = expected(llm, max_tokens=20).split()[5]
    body = {"temperature": 0}
    message = claude.messages.create(
        model="demo", max_tokens=20, messages=TALE, stop_sequences=[stop, "never"], extra_body=body
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)


def test_tokens_are_counted(claude: anthropic.Anthropic, llm: LLM):
    counted = claude.messages.count_tokens(model="demo", messages=TALE, system="Be kind.")
    assert counted.input_tokens == len(llm.encode_chat([{"role": "system", "content": "Be kind."}, *TALE]))
