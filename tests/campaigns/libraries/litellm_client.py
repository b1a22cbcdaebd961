"""`litellm`: OpenAI's chat and responses, Anthropic's messages."""

import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it fetches one from the network

import litellm
from probe import (
    ANSWER,
    ASKED,
    FUNCTION,
    KEY,
    MODEL,
    QUESTION,
    TALE,
    THOUGHT,
    URL,
    Weather,
    ability,
    refused,
    run,
    same,
)

litellm.suppress_debug_info = True
OPENAI: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": KEY, "num_retries": 0}
HOSTED: dict[str, Any] = {"model": f"hosted_vllm/{MODEL}", "api_base": f"{URL}/v1", "api_key": KEY}
CLAUDE: dict[str, Any] = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": KEY, "max_tokens": 500}
OLLAMA: dict[str, Any] = {"model": f"ollama_chat/{MODEL}", "api_base": URL, "num_retries": 0}
TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]


@ability
def texts() -> None:
    for options in (OPENAI, HOSTED, CLAUDE, OLLAMA, {**OLLAMA, "model": f"ollama/{MODEL}"}):
        same(litellm.completion(**options, messages=ASKED).choices[0].message.content, TALE)
    same(litellm.responses(**OPENAI, input=QUESTION).output[0].content[0].text, TALE)
    plain = {**OPENAI, "model": f"text-completion-openai/{MODEL}"}
    same(litellm.text_completion(**plain, prompt="Tell", max_tokens=100).choices[0].text, TALE)


@ability
def streams() -> None:
    for options in (OPENAI, HOSTED, CLAUDE, OLLAMA):
        with_usage: Any = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(litellm.completion(**options, messages=ASKED, **with_usage))
        same("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices), TALE)
        same(chunks[-1].usage.completion_tokens > 3, True)


@ability
def tools() -> None:
    for options in (OPENAI, HOSTED, CLAUDE, OLLAMA):
        messages = list(ASKED)
        first = litellm.completion(**options, messages=messages, tools=TOOLS).choices[0]
        same((options["model"], first.finish_reason), (options["model"], "tool_calls"))
        call = first.message.tool_calls[0]
        same(json.loads(call.function.arguments), {"city": "Oslo"})
        same(first.message.reasoning_content, THOUGHT)
        messages += [first.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
        same(litellm.completion(**options, messages=messages, tools=TOOLS).choices[0].message.content, ANSWER)


@ability
def structured_output() -> None:
    for options in (OPENAI, HOSTED):
        answer = litellm.completion(**options, messages=ASKED, response_format=Weather)
        Weather.model_validate_json(answer.choices[0].message.content)


@ability
def errors() -> None:
    long = [{"role": "user", "content": "a b " * 99999}]
    refused(litellm.BadRequestError, "tokens", lambda: litellm.completion(**OPENAI, messages=long))


if __name__ == "__main__":
    run()
