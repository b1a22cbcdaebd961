"""`ollama` for Python, whose types check every line."""

from typing import Any

import ollama
from probe import ANSWER, ASKED, FUNCTION, MODEL, TALE, THOUGHT, URL, Weather, ability, refused, run, same

client = ollama.Client(URL)
TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]


@ability
def texts() -> None:
    whole = client.chat(MODEL, ASKED, options={"num_ctx": 4096}, keep_alive="5m")
    same((whole.message.content, whole.done, whole.done_reason), (TALE, True, "stop"))
    same(all((whole.total_duration, whole.prompt_eval_count, whole.eval_count, whole.eval_duration)), True)
    same(client.generate(MODEL, ASKED[0]["content"], system="Be kind.").response, TALE)
    same(client.chat(MODEL, ASKED, options={"num_predict": 2}).done_reason, "length")


@ability
def streams() -> None:
    lines = list(client.chat(MODEL, ASKED, stream=True))
    same("".join(line.message.content or "" for line in lines), TALE)
    same([line.done for line in lines[-2:]], [False, True])
    same("".join(line.response for line in client.generate(MODEL, ASKED[0]["content"], stream=True)), TALE)


@ability
async def asynchronous() -> None:
    async with ollama.AsyncClient(URL) as other:
        same("".join([line.message.content or "" async for line in await other.chat(MODEL, ASKED, stream=True)]), TALE)


@ability
def tools() -> None:
    messages = list(ASKED)
    for streams_ in (False, True):
        told = client.chat(MODEL, messages, tools=TOOLS, stream=streams_)
        lines: list[Any] = list(told) if streams_ else [told]
        calls = [call.function for line in lines for call in line.message.tool_calls or ()]
        same([(call.name, call.arguments) for call in calls], [("get_weather", {"city": "Oslo"})])
        same("".join(line.message.thinking or "" for line in lines), THOUGHT)
    messages += [client.chat(MODEL, messages, tools=TOOLS).message]
    messages += [{"role": "tool", "tool_name": "get_weather", "content": "sunny"}]
    same(client.chat(MODEL, messages, tools=TOOLS).message.content, ANSWER)


@ability
def forms() -> None:
    form = {**Weather.model_json_schema(), "additionalProperties": False}
    said = client.chat(MODEL, ASKED, format=form, options={"num_predict": 100})
    same(Weather.model_validate_json(said.message.content or "").city in ("Oslo", "Bergen"), True)


@ability
def models() -> None:
    same([one.model for one in client.list().models], [MODEL])
    same([one.model for one in client.ps().models], [MODEL])
    shown = client.show(MODEL)
    same({"completion", "tools", "thinking"} <= set(shown.capabilities or ()), True)
    family = (shown.modelinfo or {})["general.architecture"]
    same((shown.modelinfo or {})[f"{family}.context_length"] > 0, True)
    same(client.generate(MODEL).done_reason, "load")


@ability
def errors() -> None:
    same(refused(ollama.ResponseError, "no model", lambda: client.show("other")).status_code, 404)
    refused(ollama.ResponseError, "mirostat", lambda: client.chat(MODEL, ASKED, options={"mirostat": 1}))
    same(refused(ollama.ResponseError, "embed", lambda: client.embed(MODEL, "text")).status_code, 404)


run()
