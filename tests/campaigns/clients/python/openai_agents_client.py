"""`openai-agents` over responses and chat completions."""

from typing import Any

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from probe import ANSWER, KEY, MODEL, QUESTION, TALE, URL, ability, run, same

set_tracing_disabled(True)


@function_tool
def get_weather(city: str) -> str:
    """Tells the weather."""
    return f"sunny in {city}"


def _models() -> list[Any]:
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    return [OpenAIResponsesModel(MODEL, client), OpenAIChatCompletionsModel(MODEL, client)]


@ability
async def text() -> None:
    for model in _models():
        same((await Runner.run(Agent("a", instructions="Be kind.", model=model), QUESTION)).final_output, TALE)


@ability
async def tools() -> None:
    for model in _models():
        agent = Agent("a", model=model, tools=[get_weather])
        same((await Runner.run(agent, QUESTION)).final_output, ANSWER)


@ability
async def tools_streamed() -> None:
    for model in _models():
        result = Runner.run_streamed(Agent("a", model=model, tools=[get_weather]), QUESTION)
        async for _ in result.stream_events():
            pass
        same(result.final_output, ANSWER)


if __name__ == "__main__":
    run("openai-agents")
