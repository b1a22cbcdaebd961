"""`pydantic-ai` over chat completions, responses and messages."""

from typing import Any

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from probe import ANSWER, CITIES, KEY, MODEL, QUESTION, TALE, URL, ability, run, same
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


def _models() -> dict[str, Any]:
    openai = OpenAIProvider(openai_client=AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0))
    claude = AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=URL, api_key=KEY, max_retries=0))
    return {
        "chat": OpenAIChatModel(MODEL, provider=openai),
        "responses": OpenAIResponsesModel(MODEL, provider=openai),
        "anthropic": AnthropicModel(MODEL, provider=claude),
    }


async def _tools(model: Any) -> None:
    agent = Agent(model)

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """Tells the weather."""
        return f"sunny in {city}"

    same((await agent.run(QUESTION)).output, ANSWER)
    async with agent.run_stream(QUESTION) as streamed:
        texts = [text async for text in streamed.stream_text()]
    same(texts[-1][-len(ANSWER) :] != "", True)


@ability
async def text() -> None:
    for model in _models().values():
        same((await Agent(model, instructions="Be kind.").run(QUESTION)).output, TALE)


@ability
async def stream() -> None:
    for model in _models().values():
        async with Agent(model).run_stream(QUESTION) as streamed:
            same(await streamed.get_output(), TALE)


@ability
async def tools_chat() -> None:
    await _tools(_models()["chat"])


@ability
async def tools_responses() -> None:
    await _tools(_models()["responses"])


@ability
async def tools_anthropic() -> None:
    await _tools(_models()["anthropic"])


@ability
async def output_types() -> None:
    class Weather(BaseModel):
        city: CITIES

    for model in _models().values():
        same(isinstance((await Agent(model, output_type=Weather).run(QUESTION)).output, Weather), True)


if __name__ == "__main__":
    run("pydantic-ai-slim")
