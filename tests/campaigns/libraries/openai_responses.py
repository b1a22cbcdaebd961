"""`openai` for Python: responses."""

import json
from typing import Any

import openai
from probe import ANSWER, ASKED, FUNCTION, KEY, MODEL, QUESTION, TALE, THOUGHT, URL, ability, refused, run, same

client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
TOOLS: list[Any] = [{"type": "function", **FUNCTION, "strict": False}]


@ability
def create() -> None:
    response = client.responses.create(model=MODEL, input=QUESTION, instructions="Be kind.")
    same((response.output_text, response.status), (TALE, "completed"))


@ability
def stream() -> None:
    events = list(client.responses.create(model=MODEL, input=QUESTION, stream=True))
    same("".join(event.delta for event in events if event.type == "response.output_text.delta"), TALE)


@ability
def stream_helper() -> None:
    with client.responses.stream(model=MODEL, input=ASKED, tools=TOOLS) as events:
        kinds = {event.type for event in events}
        final = events.get_final_response()
    same({"response.function_call_arguments.done", "response.reasoning_text.delta"} <= kinds, True)
    same([item.type for item in final.output], ["reasoning", "message", "function_call"])


@ability
async def stream_async() -> None:
    async with (
        openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0) as other,
        other.responses.stream(model=MODEL, input=QUESTION) as events,
    ):
        async for _ in events:
            pass
        same((await events.get_final_response()).output_text, TALE)


@ability
def tools() -> None:
    given = list(ASKED)
    first = client.responses.create(model=MODEL, input=given, tools=TOOLS, store=False)
    call = first.output[-1]
    assert call.type == "function_call"
    same(json.loads(call.arguments), {"city": "Oslo"})
    given += first.output
    given.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    same(client.responses.create(model=MODEL, input=given, tools=TOOLS, store=False).output_text, ANSWER)


@ability
def reasoning() -> None:
    wanted: Any = {"effort": "low", "summary": "auto"}
    include: Any = ["reasoning.encrypted_content"]
    first = client.responses.create(
        model=MODEL, input=ASKED, tools=TOOLS, reasoning=wanted, include=include, store=False
    ).output[0]
    assert first.type == "reasoning"
    assert first.content
    same((first.content[0].text, bool(first.encrypted_content)), (THOUGHT, True))


@ability
def logprobs() -> None:
    response = client.responses.create(
        model=MODEL, input=QUESTION, include=["message.output_text.logprobs"], top_logprobs=2
    )
    part = response.output[0].content[0]
    same(len(part.logprobs) > 3, True)


@ability
def counts() -> None:
    counted = client.responses.input_tokens.count(model=MODEL, input=QUESTION)
    response = client.responses.create(model=MODEL, input=QUESTION)
    assert response.usage is not None
    same(counted.input_tokens, response.usage.input_tokens)


@ability
def errors() -> None:
    ask: Any = client.responses.create
    for name, value in (
        ("previous_response_id", "resp_1"), ("background", True), ("store", True), ("conversation", "conv_1"),
        ("truncation", "auto"),
    ):  # fmt: skip
        error = refused(openai.BadRequestError, name, lambda n=name, v=value: ask(model=MODEL, input="x", **{n: v}))
        same(error.param, name)
    refused(openai.NotFoundError, "resp_1", lambda: client.responses.retrieve("resp_1"))


@ability
def parse() -> None:
    from pydantic import BaseModel

    class Weather(BaseModel):
        city: str

    answer = client.responses.parse(model=MODEL, input=QUESTION, text_format=Weather)
    same(isinstance(answer.output_parsed, Weather), True)


if __name__ == "__main__":
    run("openai")
