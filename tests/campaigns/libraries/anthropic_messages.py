"""`anthropic` for Python."""

from typing import Any

import anthropic
from probe import ANSWER, ASKED, KEY, MODEL, SCHEMA, TALE, THOUGHT, URL, ability, refused, run, same

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
TOOLS: list[Any] = [{"name": "get_weather", "description": "Tells the weather.", "input_schema": SCHEMA}]
HEAD: dict[str, Any] = {"model": MODEL, "max_tokens": 500}


@ability
def create() -> None:
    message = client.messages.create(**HEAD, messages=ASKED, system="Be kind.")
    block = message.content[0]
    assert block.type == "text"
    same((block.text, message.stop_reason), (TALE, "end_turn"))


@ability
def stream() -> None:
    events = list(client.messages.create(**HEAD, messages=ASKED, stream=True))
    same((events[0].type, events[-1].type), ("message_start", "message_stop"))


@ability
def stream_helper() -> None:
    with client.messages.stream(**HEAD, messages=ASKED, tools=TOOLS) as events:
        kinds = {event.type for event in events}
        final = events.get_final_message()
    same({"text", "thinking", "input_json", "content_block_stop"} <= kinds, True)
    same([block.type for block in final.content], ["thinking", "text", "tool_use"])
    call = final.content[-1]
    assert call.type == "tool_use"
    same(call.input, {"city": "Oslo"})


@ability
async def stream_async() -> None:
    async with (
        anthropic.AsyncAnthropic(base_url=URL, api_key=KEY, max_retries=0) as other,
        other.messages.stream(**HEAD, messages=ASKED) as events,
    ):
        same("".join([text async for text in events.text_stream]), TALE)


@ability
def tools() -> None:
    messages = list(ASKED)
    first = client.messages.create(**HEAD, messages=messages, tools=TOOLS)
    same(first.stop_reason, "tool_use")
    messages.append({"role": "assistant", "content": first.content})
    result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": [{"type": "text", "text": "sun"}]}
    messages.append({"role": "user", "content": [result]})
    second = client.messages.create(**HEAD, messages=messages, tools=TOOLS)
    same((second.content[0].text, second.stop_reason), (ANSWER, "end_turn"))


@ability
def tool_runner() -> None:
    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Tells the weather.

        Args:
            city: Where.
        """
        return f"sunny in {city}"

    final = client.beta.messages.tool_runner(**HEAD, messages=ASKED, tools=[get_weather]).until_done()
    same(final.content[0].text, ANSWER)


@ability
def thinking() -> None:
    wanted: Any = {"type": "enabled", "budget_tokens": 1024}
    message = client.messages.create(model=MODEL, max_tokens=2048, messages=ASKED, tools=TOOLS, thinking=wanted)
    same((message.content[0].type, message.content[0].thinking), ("thinking", THOUGHT))


@ability
def cache_control() -> None:
    text = {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}
    message = client.messages.create(**HEAD, messages=ASKED, system=[text])
    same(message.content[0].text, TALE)


@ability
def beta() -> None:
    message = client.beta.messages.create(
        **HEAD, messages=ASKED, betas=["interleaved-thinking-2025-05-14", "context-1m-2025-08-07"]
    )
    same(message.content[0].text, TALE)


@ability
def counts() -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=ASKED, tools=TOOLS)
    message = client.messages.create(**HEAD, messages=ASKED, tools=TOOLS)
    usage = message.usage
    same(counted.input_tokens, usage.input_tokens + (usage.cache_read_input_tokens or 0))


@ability
def models() -> None:
    same([model.id for model in client.models.list()], [MODEL])
    same(client.models.retrieve(MODEL).id, MODEL)


@ability
def errors() -> None:
    ask: Any = client.messages.create
    refused(
        anthropic.BadRequestError,
        "container",
        lambda: ask(**HEAD, messages=ASKED, extra_body={"container": "box"}),
    )
    refused(
        anthropic.BadRequestError, "temperature", lambda: ask(**HEAD, messages=ASKED, extra_body={"temperature": -1})
    )
    refused(
        anthropic.BadRequestError, "tokens", lambda: ask(**HEAD, messages=[{"role": "user", "content": "a b " * 99999}])
    )
    error = refused(anthropic.NotFoundError, "batches", lambda: client.messages.batches.create(requests=[]))
    same(error.body["type"], "error")


@ability
def parse() -> None:
    from pydantic import BaseModel

    class Weather(BaseModel):
        city: str

    answer = client.messages.parse(**HEAD, messages=ASKED, output_format=Weather)
    same(isinstance(answer.parsed_output, Weather), True)


@ability
def cancel() -> None:
    for _ in range(3):
        with client.messages.stream(**HEAD, messages=ASKED) as events:
            next(iter(events))
    same(client.messages.create(**HEAD, messages=ASKED).content[0].text, TALE)


if __name__ == "__main__":
    run("anthropic")
