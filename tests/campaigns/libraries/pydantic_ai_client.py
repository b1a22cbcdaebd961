"""`pydantic-ai`: over chat, responses and messages, with a tool, a stream and an answer in each of its forms."""

from probe import ANSWER, KEY, MODEL, QUESTION, TALE, URL, Weather, ability, run, same
from pydantic_ai import Agent, NativeOutput, Tool
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

OPENAI = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
CHAT, RESPONSES = OpenAIChatModel(MODEL, provider=OPENAI), OpenAIResponsesModel(MODEL, provider=OPENAI)
MESSAGES = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key=KEY))
MODELS: tuple[Model, ...] = (CHAT, RESPONSES, MESSAGES)


def get_weather(city: str) -> str:
    """Tells the weather."""
    same(city, "Oslo")
    return "sunny"


@ability
async def texts() -> None:
    for model in MODELS:
        same((await Agent(model).run(QUESTION)).output, TALE)


@ability
async def tools() -> None:
    for model in MODELS:
        same((await Agent(model, tools=[Tool(get_weather, strict=False)]).run(QUESTION)).output, ANSWER)


@ability
async def streams() -> None:
    for model in MODELS:
        async with Agent(model, tools=[Tool(get_weather, strict=False)]).run_stream(QUESTION) as streamed:
            same(await streamed.get_output(), ANSWER)


@ability
async def native_output() -> None:
    for model in (CHAT, RESPONSES):
        same(type((await Agent(model, output_type=NativeOutput(Weather)).run(QUESTION)).output), Weather)


@ability
async def output_by_a_call() -> None:
    for model in (CHAT, RESPONSES):
        same(type((await Agent(model, output_type=Weather).run(QUESTION)).output), Weather)


run()
