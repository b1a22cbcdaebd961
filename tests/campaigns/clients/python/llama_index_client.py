"""`llama-index` over chat completions and completions."""

from typing import Any

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike
from probe import ANSWER, KEY, MODEL, QUESTION, TALE, URL, ability, run, same

like = OpenAILike(
    model=MODEL, api_base=f"{URL}/v1", api_key=KEY, is_chat_model=True, is_function_calling_model=True, max_retries=0
)


def get_weather(city: str) -> str:
    """Tells the weather."""
    return f"sunny in {city}"


@ability
def chat() -> None:
    same(str(like.complete(QUESTION)), TALE)


@ability
def stream() -> None:
    same("".join(chunk.delta or "" for chunk in like.stream_complete(QUESTION)), TALE)


@ability
def completions() -> None:
    plain: Any = OpenAILike(model=MODEL, api_base=f"{URL}/v1", api_key=KEY, is_chat_model=False, max_tokens=100)
    same(str(plain.complete("Tell")), TALE)


@ability
async def agent() -> None:
    same(str(await FunctionAgent(tools=[get_weather], llm=like).run(QUESTION)).endswith(ANSWER), True)


if __name__ == "__main__":
    run("llama-index-llms-openai-like")
