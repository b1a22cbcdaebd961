"""`openai-agents`: its two models, chat and responses, with a tool, a stream and an answer in a form."""

import agents
from agents import Agent, Runner, function_tool
from agents.models.openai_chatcompletions import OpenAIChatCompletionsModel
from agents.models.openai_responses import OpenAIResponsesModel
from openai import AsyncOpenAI
from probe import ANSWER, KEY, MODEL, QUESTION, TALE, URL, Weather, ability, get_weather, run, same

agents.set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
MODELS = (OpenAIChatCompletionsModel(MODEL, client), OpenAIResponsesModel(MODEL, client))
TOOLS = [function_tool(get_weather)]


@ability
async def texts() -> None:
    for model in MODELS:
        same((await Runner.run(Agent("a", instructions="Be kind.", model=model), QUESTION)).final_output, TALE)


@ability
async def tools() -> None:
    for model in MODELS:
        same((await Runner.run(Agent("a", tools=TOOLS, model=model), QUESTION)).final_output, ANSWER)


@ability
async def streams() -> None:
    for model in MODELS:
        streamed = Runner.run_streamed(Agent("a", tools=TOOLS, model=model), QUESTION)
        kinds = [event.type async for event in streamed.stream_events()]
        same((streamed.final_output, "raw_response_event" in kinds), (ANSWER, True))


@ability
async def forms() -> None:
    for model in MODELS:
        same(type((await Runner.run(Agent("a", output_type=Weather, model=model), QUESTION)).final_output), Weather)


run()
