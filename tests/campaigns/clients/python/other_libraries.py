"""`smolagents`, `dspy`, `haystack-ai`, `autogen`, `aisuite`: a chat each, and a tool where the library runs it."""

import importlib.util
from collections.abc import Callable
from typing import Any

from probe import ASKED, KEY, MODEL, QUESTION, TALE, URL, ability, run, same


def if_there(module: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """An ability that is tried where a module is installed."""
    return ability if importlib.util.find_spec(module) is not None else lambda function: function


@if_there("smolagents")
def smolagents() -> None:
    from smolagents import ChatMessage, OpenAIServerModel

    model = OpenAIServerModel(model_id=MODEL, api_base=f"{URL}/v1", api_key=KEY)
    message = ChatMessage(role="user", content=[{"type": "text", "text": QUESTION}])
    same(model.generate([message]).content, TALE)
    same("".join(delta.content or "" for delta in model.generate_stream([message])), TALE)


@if_there("dspy")
def dspy() -> None:
    import dspy as library

    lm = library.LM(f"openai/{MODEL}", api_base=f"{URL}/v1", api_key=KEY, cache=False, num_retries=0)
    found = lm(QUESTION)[0]
    same(found if isinstance(found, str) else found["text"], TALE)


@if_there("haystack")
def haystack() -> None:
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.utils import Secret

    seen: list[str] = []
    generator = OpenAIChatGenerator(
        model=MODEL, api_base_url=f"{URL}/v1", api_key=Secret.from_token(KEY), max_retries=0,
        streaming_callback=lambda chunk: seen.append(chunk.content),
    )  # fmt: skip
    same(generator.run([ChatMessage.from_user(QUESTION)])["replies"][0].text, TALE)
    same("".join(seen), TALE)


@if_there("autogen_ext")
async def autogen() -> None:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    def get_weather(city: str) -> str:
        """Tells the weather."""
        return f"sunny in {city}"

    info = {
        "vision": False,
        "function_calling": True,
        "json_output": False,
        "family": "unknown",
        "structured_output": False,
    }
    client: Any = OpenAIChatCompletionClient(model=MODEL, base_url=f"{URL}/v1", api_key=KEY, model_info=info)
    agent = AssistantAgent("a", model_client=client, tools=[get_weather], reflect_on_tool_use=True)
    told = (await agent.run(task=QUESTION)).messages
    same("ToolCallExecutionEvent" in [type(message).__name__ for message in told], True)
    same(told[-1].content, TALE)  # it reflects without the tools


@if_there("aisuite")
def aisuite() -> None:
    import aisuite as library

    client = library.Client({"openai": {"api_key": KEY, "base_url": f"{URL}/v1"}})
    same(client.chat.completions.create(model=f"openai:{MODEL}", messages=ASKED).choices[0].message.content, TALE)


if __name__ == "__main__":
    run("pip")
