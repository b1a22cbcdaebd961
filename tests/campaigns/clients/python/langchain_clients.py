"""`langchain-openai` and `langchain-anthropic`."""

from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from probe import ANSWER, CITIES, KEY, MODEL, QUESTION, TALE, URL, ability, run, same


@tool
def get_weather(city: str) -> str:
    """Tells the weather."""
    return f"sunny in {city}"


def _models() -> dict[str, Any]:
    common: dict[str, Any] = {"model": MODEL, "max_retries": 0}
    return {
        "chat": ChatOpenAI(**common, base_url=f"{URL}/v1", api_key=KEY),
        "responses": ChatOpenAI(**common, base_url=f"{URL}/v1", api_key=KEY, use_responses_api=True),
        "anthropic": ChatAnthropic(**common, base_url=URL, api_key=KEY, max_tokens=500),
    }


def _round_trip(model: Any) -> None:
    bound = model.bind_tools([get_weather])
    messages: list[Any] = [HumanMessage(QUESTION)]
    first = bound.invoke(messages)
    same([(call["name"], call["args"]) for call in first.tool_calls], [("get_weather", {"city": "Oslo"})])
    messages += [first, ToolMessage("sunny", tool_call_id=first.tool_calls[0]["id"])]
    same(bound.invoke(messages).text, ANSWER)


def _streamed_round_trip(model: Any) -> None:
    bound = model.bind_tools([get_weather])
    messages: list[Any] = [HumanMessage(QUESTION)]
    whole: Any = None
    for chunk in bound.stream(messages):
        whole = chunk if whole is None else whole + chunk
    same([(call["name"], call["args"]) for call in whole.tool_calls], [("get_weather", {"city": "Oslo"})])
    messages += [whole, ToolMessage("sunny", tool_call_id=whole.tool_calls[0]["id"])]
    same("".join(chunk.text for chunk in bound.stream(messages)), ANSWER)


@ability
def invoke() -> None:
    for model in _models().values():
        answer = model.invoke(QUESTION)
        same(answer.text, TALE)
        same(answer.usage_metadata["output_tokens"] > 3, True)


@ability
def stream() -> None:
    for model in _models().values():
        same("".join(chunk.text for chunk in model.stream(QUESTION)), TALE)


@ability
async def stream_async() -> None:
    for model in _models().values():
        same("".join([chunk.text async for chunk in model.astream(QUESTION)]), TALE)


@ability
def tools_chat() -> None:
    _round_trip(_models()["chat"])
    _streamed_round_trip(_models()["chat"])


@ability
def tools_responses() -> None:
    _round_trip(_models()["responses"])
    _streamed_round_trip(_models()["responses"])


@ability
def tools_anthropic() -> None:
    _round_trip(_models()["anthropic"])
    _streamed_round_trip(_models()["anthropic"])


@ability
def logprobs() -> None:
    answer = _models()["chat"].bind(logprobs=True, top_logprobs=1).invoke(QUESTION)
    same(len(answer.response_metadata["logprobs"]["content"]) > 3, True)


@ability
def completions() -> None:
    model = OpenAI(model=MODEL, base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    same(model.invoke("Tell"), TALE)


@ability
def structured_output() -> None:
    from pydantic import BaseModel

    class Weather(BaseModel):
        city: CITIES

    for model in _models().values():
        same(isinstance(model.with_structured_output(Weather).invoke(QUESTION), Weather), True)


if __name__ == "__main__":
    run("langchain-openai")
