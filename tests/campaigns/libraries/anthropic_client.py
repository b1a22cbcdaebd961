"""`anthropic` for Python."""

from typing import Any

import anthropic
from probe import ANSWER, ASKED, KEY, MODEL, SCHEMA, TALE, URL, Weather, ability, refused, run, same

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
TOOLS: list[Any] = [{"name": "get_weather", "description": "Tells the weather.", "input_schema": SCHEMA}]
HEAD: dict[str, Any] = {"model": MODEL, "max_tokens": 500}
BETAS = ["interleaved-thinking-2025-05-14", "context-1m-2025-08-07"]


def text_of(message: Any) -> str:
    return str(message.content[0].text)


@ability
def create() -> None:
    message = client.messages.create(**HEAD, messages=ASKED, system="Be kind.")
    same((text_of(message), message.stop_reason), (TALE, "end_turn"))
    cached: Any = [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]
    same(text_of(client.messages.create(**HEAD, messages=ASKED, system=cached)), TALE)
    same(text_of(client.beta.messages.create(**HEAD, messages=ASKED, betas=BETAS)), TALE)
    same(([model.id for model in client.models.list()], client.models.retrieve(MODEL).id), ([MODEL], MODEL))


@ability
def streams() -> None:
    events = list(client.messages.create(**HEAD, messages=ASKED, stream=True))
    same((events[0].type, events[-1].type), ("message_start", "message_stop"))
    with client.messages.stream(**HEAD, messages=ASKED, tools=TOOLS) as helped:
        kinds = {event.type for event in helped}
        final = helped.get_final_message()
    same({"text", "thinking", "input_json", "content_block_stop"} <= kinds, True)
    same([block.type for block in final.content], ["thinking", "text", "tool_use"])
    call: Any = final.content[-1]
    same(call.input, {"city": "Oslo"})


@ability
async def asynchronous() -> None:
    async with (
        anthropic.AsyncAnthropic(base_url=URL, api_key=KEY, max_retries=0) as other,
        other.messages.stream(**HEAD, messages=ASKED) as events,
    ):
        same("".join([text async for text in events.text_stream]), TALE)


@ability
def tools() -> None:
    messages = list(ASKED)
    first: Any = client.messages.create(**HEAD, messages=messages, tools=TOOLS)
    same(first.stop_reason, "tool_use")
    result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": [{"type": "text", "text": "sun"}]}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = client.messages.create(**HEAD, messages=messages, tools=TOOLS)
    same((text_of(second), second.stop_reason), (ANSWER, "end_turn"))


@ability
def tool_runner() -> None:
    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Tells the weather.

        Args:
            city: Where.
        """
        return f"sunny in {city}"

    same(text_of(client.beta.messages.tool_runner(**HEAD, messages=ASKED, tools=[get_weather]).until_done()), ANSWER)


@ability
def errors() -> None:
    ask: Any = client.messages.create
    for name, value in (("container", "box"), ("temperature", -1)):
        body = {name: value}
        refused(anthropic.BadRequestError, name, lambda b=body: ask(**HEAD, messages=ASKED, extra_body=b))
    long = [{"role": "user", "content": "a b " * 99999}]
    refused(anthropic.BadRequestError, "tokens", lambda: ask(**HEAD, messages=long))
    error = refused(anthropic.NotFoundError, "batches", lambda: client.messages.batches.create(requests=[]))
    same(error.body["type"], "error")


@ability
def parse() -> None:
    answer = client.messages.parse(**HEAD, messages=ASKED, output_format=Weather, extra_body={"temperature": 0})
    same(isinstance(answer.parsed_output, Weather), True)


if __name__ == "__main__":
    run("anthropic")
