"""`pydantic-ai`: over chat, responses and messages, with a tool, a stream and an answer in each of its forms."""

from probe import ANSWER, KEY, MODEL, QUESTION, TALE, URL, Weather, ability, get_weather, run, same
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
async def forms() -> None:
    for model in (CHAT, RESPONSES):
        for form in (NativeOutput(Weather), Weather):  # the other is a call's arguments
            same(type((await Agent(model, output_type=form).run(QUESTION)).output), Weather)


run()
