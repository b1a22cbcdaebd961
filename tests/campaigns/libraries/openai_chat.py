"""`openai` for Python: chat completions and completions."""

import json
from typing import Any

import openai
from probe import ANSWER, ASKED, FUNCTION, KEY, MODEL, TALE, THOUGHT, URL, ability, refused, run, same

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]


@ability
def chat() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ASKED)
    same((answer.choices[0].message.content, answer.choices[0].finish_reason), (TALE, "stop"))


@ability
async def chat_async() -> None:
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0) as other:
        answer = await other.chat.completions.create(model=MODEL, messages=ASKED)
        same(answer.choices[0].message.content, TALE)
        chunks = [one async for one in await other.chat.completions.create(model=MODEL, messages=ASKED, stream=True)]
        same("".join(one.choices[0].delta.content or "" for one in chunks), TALE)


@ability
def stream() -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=ASKED, stream=True, stream_options={"include_usage": True}, n=2
        )
    )
    for index in (0, 1):
        parts = [c.delta.content or "" for one in chunks for c in one.choices if c.index == index]
        same("".join(parts), TALE)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 2


@ability
def stream_helper() -> None:
    with client.chat.completions.stream(model=MODEL, messages=ASKED, tools=TOOLS) as events:
        kinds = [event.type for event in events]
        final = events.get_final_completion()
    same("tool_calls.function.arguments.done" in kinds and "content.delta" in kinds, True)
    calls = final.choices[0].message.tool_calls
    assert calls is not None
    same(json.loads(calls[0].function.arguments), {"city": "Oslo"})


@ability
def tools() -> None:
    messages = list(ASKED)
    first = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS).choices[0]
    same(first.finish_reason, "tool_calls")
    assert first.message.tool_calls is not None
    messages.append(first.message)  # as the guides have it: the client's own object goes back
    messages.append({"role": "tool", "tool_call_id": first.message.tool_calls[0].id, "content": "sunny"})
    second = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS).choices[0]
    same((second.message.content, second.finish_reason), (ANSWER, "stop"))


@ability
def reasoning() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ASKED, tools=TOOLS, reasoning_effort="low")
    same((answer.choices[0].message.model_extra or {})["reasoning_content"], THOUGHT)


@ability
def logprobs() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ASKED, logprobs=True, top_logprobs=2)
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    same("".join(one.token for one in found.content[:-1]), TALE)
    same({len(one.top_logprobs) for one in found.content}, {2})


@ability
def completions() -> None:
    answer = client.completions.create(model=MODEL, prompt="Tell me", max_tokens=100, logprobs=1)
    same(answer.choices[0].text, TALE)
    chunks = list(client.completions.create(model=MODEL, prompt=["Tell me", "more"], max_tokens=100, stream=True))
    for index in (0, 1):
        same("".join(c.text for one in chunks for c in one.choices if c.index == index), TALE)


@ability
def models() -> None:
    same([model.id for model in client.models.list()], [MODEL])
    same(client.models.retrieve(MODEL).id, MODEL)


@ability
def raw_response() -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL, messages=ASKED, extra_headers={"X-Request-Id": "mine"}
    )
    same((raw.headers["x-request-id"], raw.parse()._request_id), ("mine", "mine"))
    with client.chat.completions.with_streaming_response.create(model=MODEL, messages=ASKED) as streamed:
        same(json.loads(streamed.read())["choices"][0]["message"]["content"], TALE)


@ability
def errors() -> None:
    ask: Any = client.chat.completions.create
    for name, value in (
        ("store", True),
        ("prediction", {"type": "content", "content": "There was"}),
        ("temperature", -1),
        ("n", 1000),
    ):
        error = refused(
            openai.BadRequestError, name, lambda n=name, v=value: ask(model=MODEL, messages=ASKED, **{n: v})
        )
        same((error.param, error.type), (name, "invalid_request_error"))
    refused(
        openai.BadRequestError,
        "tokens",
        lambda: ask(model=MODEL, messages=[{"role": "user", "content": "a b " * 99999}]),
    )
    refused(openai.NotFoundError, "embeddings", lambda: client.embeddings.create(model=MODEL, input="x"))
    refused(openai.BadRequestError, "messages[0].content[0]", lambda: ask(
        model=MODEL,
        messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]}],
    ))  # fmt: skip


@ability
def parse() -> None:
    from pydantic import BaseModel

    class Weather(BaseModel):
        city: str

    answer = client.chat.completions.parse(model=MODEL, messages=ASKED, response_format=Weather)
    same(isinstance(answer.choices[0].message.parsed, Weather), True)


@ability
def parse_of_strict_tools() -> None:
    from pydantic import BaseModel

    class Weather(BaseModel):
        city: str

    tool = openai.pydantic_function_tool(Weather, name="get_weather")
    answer = client.chat.completions.parse(model=MODEL, messages=ASKED, tools=[tool])
    calls = answer.choices[0].message.tool_calls
    assert calls
    same(calls[0].function.parsed_arguments, Weather(city="Oslo"))


@ability
def cancel() -> None:
    body = {"ignore_eos": True}
    for _ in range(3):
        open_stream = client.chat.completions.create(model=MODEL, messages=ASKED, stream=True, extra_body=body)
        next(iter(open_stream))
        open_stream.close()
    same(client.chat.completions.create(model=MODEL, messages=ASKED).choices[0].message.content, TALE)


if __name__ == "__main__":
    run("openai")
