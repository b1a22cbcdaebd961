"""`openai` for Python: chat completions, completions and responses."""

import json
from typing import Any

import openai
from probe import (
    ANSWER,
    ASKED,
    FUNCTION,
    KEY,
    MODEL,
    QUESTION,
    TALE,
    THOUGHT,
    URL,
    Weather,
    ability,
    refused,
    run,
    same,
)

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]
RESPONSE_TOOLS: list[Any] = [{"type": "function", **FUNCTION, "strict": False}]
OSLO = {"city": "Oslo"}


@ability
async def asynchronous() -> None:
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0) as other:
        chunks = [one async for one in await other.chat.completions.create(model=MODEL, messages=ASKED, stream=True)]
        same("".join(one.choices[0].delta.content or "" for one in chunks), TALE)
        async with other.responses.stream(model=MODEL, input=QUESTION) as events:
            async for _ in events:
                pass
            same((await events.get_final_response()).output_text, TALE)


@ability
def streams() -> None:
    with_usage: Any = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(model=MODEL, messages=ASKED, n=2, **with_usage))
    for index in (0, 1):
        same("".join(c.delta.content or "" for one in chunks for c in one.choices if c.index == index), TALE)
    same(chunks[-1].usage.completion_tokens > 2, True)
    events = list(client.responses.create(model=MODEL, input=QUESTION, stream=True))
    same("".join(event.delta for event in events if event.type == "response.output_text.delta"), TALE)


@ability
def stream_helpers() -> None:
    with client.chat.completions.stream(model=MODEL, messages=ASKED, tools=TOOLS) as chunks:
        kinds = {event.type for event in chunks}
        calls = chunks.get_final_completion().choices[0].message.tool_calls or []
    same({"tool_calls.function.arguments.done", "content.delta"} <= kinds, True)
    same(json.loads(calls[0].function.arguments), OSLO)
    with client.responses.stream(model=MODEL, input=ASKED, tools=RESPONSE_TOOLS) as events:
        types = {event.type for event in events}
        final = events.get_final_response()
    same({"response.function_call_arguments.done", "response.reasoning_text.delta"} <= types, True)
    same([item.type for item in final.output], ["reasoning", "message", "function_call"])


@ability
def tools() -> None:
    messages = list(ASKED)
    first = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS).choices[0]
    same(first.finish_reason, "tool_calls")
    messages.append(first.message)  # as the guides have it: the client's own object goes back
    messages.append({"role": "tool", "tool_call_id": (first.message.tool_calls or [])[0].id, "content": "sunny"})
    second = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS).choices[0]
    same((second.message.content, second.finish_reason), (ANSWER, "stop"))


@ability
def tools_of_responses() -> None:
    given: Any = list(ASKED)
    first = client.responses.create(model=MODEL, input=given, tools=RESPONSE_TOOLS, store=False)
    call: Any = first.output[-1]
    same((call.type, json.loads(call.arguments)), ("function_call", OSLO))
    given += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    same(client.responses.create(model=MODEL, input=given, tools=RESPONSE_TOOLS, store=False).output_text, ANSWER)


@ability
def reasoning() -> None:
    answer = client.chat.completions.create(model=MODEL, messages=ASKED, tools=TOOLS, reasoning_effort="low")
    same((answer.choices[0].message.model_extra or {})["reasoning_content"], THOUGHT)
    wanted: Any = {"reasoning": {"effort": "low", "summary": "auto"}, "include": ["reasoning.encrypted_content"]}
    response = client.responses.create(model=MODEL, input=ASKED, tools=RESPONSE_TOOLS, store=False, **wanted)
    first: Any = response.output[0]
    same((first.type, first.content[0].text, bool(first.encrypted_content)), ("reasoning", THOUGHT, True))


@ability
def raw_responses() -> None:
    own = {"X-Request-Id": "mine"}
    raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=ASKED, extra_headers=own)
    same((raw.headers["x-request-id"], raw.parse()._request_id), ("mine", "mine"))
    with client.chat.completions.with_streaming_response.create(model=MODEL, messages=ASKED) as streamed:
        same(json.loads(streamed.read())["choices"][0]["message"]["content"], TALE)


@ability
def errors() -> None:
    ask: Any = client.chat.completions.create
    for name, value in (("temperature", -1), ("n", 1000)):
        call = {"model": MODEL, "messages": ASKED, name: value}
        error = refused(openai.BadRequestError, name, lambda given=call: ask(**given))
        same((error.param, error.type), (name, "invalid_request_error"))
    long = [{"role": "user", "content": "a b " * 99999}]
    refused(openai.BadRequestError, "tokens", lambda: ask(model=MODEL, messages=long))
    refused(openai.NotFoundError, "embeddings", lambda: client.embeddings.create(model=MODEL, input="x"))
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]}]
    refused(openai.BadRequestError, "takes no pictures", lambda: ask(model=MODEL, messages=picture))


@ability
def parse() -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=ASKED, response_format=Weather)
    same(isinstance(answer.choices[0].message.parsed, Weather), True)
    tool = openai.pydantic_function_tool(Weather, name="get_weather")
    calls: Any = client.chat.completions.parse(model=MODEL, messages=ASKED, tools=[tool]).choices[0].message.tool_calls
    same(isinstance(calls[0].function.parsed_arguments, Weather), True)  # which city: the form keeps it off its script
    response = client.responses.parse(model=MODEL, input=QUESTION, text_format=Weather)
    same(isinstance(response.output_parsed, Weather), True)


if __name__ == "__main__":
    run("openai")
