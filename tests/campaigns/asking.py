"""Requests of every kind to a server under way, what becomes of each, and what its answer must say.

A canary is a prompt whose answer the library has given beforehand. A request that makes an answer asks for one in the
words of one of the APIs, so that each answer that is read is compared, whatever becomes of its neighbours:

    reads      all of the answer
    dawdles    reads nothing for a while
    goes       after a while, wherever the request is then: in the queue, in its prompt, in its answer
    cancelled  by its id, on another connection, after a while
"""

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx2 as httpx

from splitinfer.llm import LLM

FATES = {"reads": 10, "dawdles": 1, "goes": 5, "cancelled": 2}  # and how often each comes
SECONDS = 120.0  # for the next bytes, on a machine that is busy with other things
WORDS = ["the", "old king", "had", "a garden", "nobody", "and", "one small", "fox", "found", "the gate", "rain"]
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}
SILENT_TOOLS = {"tools": [TOOL], "tool_choice": "none"}  # of which the model is not told, so that it says the same

HI = [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True)
class Canary:
    """A prompt with what follows it, as a chat and as plain text. ``seed``: ``None`` is greedy."""

    prompt: str
    seed: int | None
    num_tokens: int
    chat: str = ""
    plain: str = ""

    @property
    def sampling(self) -> dict[str, Any]:
        return {"temperature": 0.0} if self.seed is None else {"temperature": 0.9, "seed": self.seed}


def canaries(count: int, most_words: int = 60) -> list[Canary]:
    """Prompts of up to ``most_words``, whose answers nobody knows yet; every third is greedy."""
    made = []
    for number in range(count):
        chance = random.Random(f"canary {number}")
        words = [chance.choice(WORDS) for _ in range(chance.choice((3, 10, most_words)))]
        made.append(Canary(" ".join(words), None if number % 3 == 0 else number, chance.choice((4, 12, 30))))
    return made


def known(llm: LLM, unknown: Sequence[Canary]) -> list[Canary]:
    """The same with what the library says; what requests do not say is what the model recommends."""
    chats = [llm.tokenizer.encode_chat([{"role": "user", "content": each.prompt}]) for each in unknown]
    params = [replace(llm.default_sampling, max_tokens=each.num_tokens, **each.sampling) for each in unknown]
    said, plain = llm.generate(chats, params), llm.generate([each.prompt for each in unknown], params)
    return [replace(one, chat=a.text, plain=b.text) for one, a, b in zip(unknown, said, plain, strict=True)]


@dataclass(frozen=True)
class Ask:
    """A request. ``expected``: the text of its (first) answer, as far as it is known. ``status``: that it must get."""

    path: str
    body: dict[str, Any] | None
    expected: str = ""
    status: int = 200

    @property
    def streams(self) -> bool:
        return bool(self.body and self.body.get("stream"))

    def with_body(self, **more: Any) -> "Ask":
        return replace(self, body={**(self.body or {}), **more})


@dataclass(frozen=True)
class Ended:
    """How an answer ended: "whole", "cut short", "refused", "turned away", "gone" or "lost"; and what was wrong."""

    ask: Ask
    how: str
    wrong: str = ""


# -- what is asked ---------------------------------------------------------------------------------

MORE: dict[str, tuple[dict[str, Any], ...]] = {
    "/v1/chat/completions": ({}, {"n": 3}, {"logprobs": True, "top_logprobs": 3}, SILENT_TOOLS),
    "/v1/completions": ({}, {"logprobs": 2}, {"n": 2}),
}
OTHERS = (  # that make no answer, or are wrong
    Ask("/v1/messages/count_tokens", {"messages": HI}),
    Ask("/tokenize", {"prompt": "a fox", "return_token_strs": True}),
    Ask("/v1/models", None),
    Ask("/v1/chat/completions", {"messages": []}, status=400),
    Ask("/v1/messages", {"max_tokens": -1, "messages": 7}, status=400),
    Ask("/v1/completions", {"prompt": [5] * 200_000}, status=400),
    Ask("/v1/nothing", {}, status=404),
)


def asks_of(canary: Canary) -> list[Ask]:
    """The same question in each API's words. Anthropic's knows no seeds, so there only greedy canaries are known."""
    said, most = [{"role": "user", "content": canary.prompt}], canary.num_tokens
    message = {"messages": said, "max_tokens": most, "temperature": canary.sampling["temperature"]}
    return [
        Ask("/v1/chat/completions", {"messages": said, "max_tokens": most, **canary.sampling}, canary.chat),
        Ask("/v1/completions", {"prompt": canary.prompt, "max_tokens": most, **canary.sampling}, canary.plain),
        Ask("/v1/responses", {"input": canary.prompt, "max_output_tokens": most, **canary.sampling}, canary.chat),
        Ask("/v1/messages", message, canary.chat if canary.seed is None else ""),
    ]


def streams_of(canary: Canary) -> list[Ask]:
    """As streams; only those whose answers are the library's."""
    asks = asks_of(canary)[: 4 if canary.seed is None else 3]
    return [ask.with_body(stream=True) for ask in asks]


def draw(chance: random.Random, said: Sequence[Canary]) -> Ask:
    if chance.random() < 0.15:
        return chance.choice(OTHERS)
    if chance.random() < 0.1:  # a prompt that nobody has asked before, and that takes several steps to read
        words = " ".join(chance.choice(WORDS) for _ in range(chance.randrange(60, 400)))
        return asks_of(Canary(words, None, 3))[0]
    ask = chance.choice(asks_of(chance.choice(said)))
    return ask.with_body(**chance.choice(MORE.get(ask.path, ({},))), stream=chance.random() < 0.6)


# -- what comes ------------------------------------------------------------------------------------


async def ended(
    http: httpx.AsyncClient, ask: Ask, fate: str = "reads", seconds: float = 0.0, name: str = "none"
) -> Ended:
    """Ask, and see to the request's fate after so many seconds. ``name``: its id."""

    async def cancel() -> None:
        await asyncio.sleep(seconds)
        await http.delete(f"/v1/requests/{name}")

    try:
        if fate == "goes":
            async with asyncio.timeout(seconds):
                return await _answered(http, ask, name)
        if fate == "cancelled":
            return (await asyncio.gather(_answered(http, ask, name, is_cancelled=True), cancel()))[0]
        return await _answered(http, ask, name, waits=seconds if fate == "dawdles" else 0.0)
    except TimeoutError:
        return Ended(ask, "gone")
    except httpx.HTTPError as error:
        return Ended(ask, "lost", f"{error!r}")


async def _answered(
    http: httpx.AsyncClient, ask: Ask, name: str, *, waits: float = 0.0, is_cancelled: bool = False
) -> Ended:
    method = "GET" if ask.body is None else "POST"
    async with http.stream(method, ask.path, json=ask.body, headers={"X-Request-Id": name}) as answer:
        await asyncio.sleep(waits)
        if ask.streams and answer.status_code == 200:
            lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line.startswith("data: ")]
            events = [json.loads(line) for line in lines if line != "[DONE]"]
            if not _is_last(ask.path, lines[-1]):
                return Ended(ask, "open", f"the last event is {lines[-1]:.300}")
            return _judged(ask, "".join(map(text_of, events)), _failure(events), is_cancelled)
        document = json.loads(await answer.aread())
    if answer.status_code in (429, 503):
        is_told = "retry-after" in answer.headers and _has_form(ask.path, document)
        how = "turned away" if answer.status_code == 429 else "refused"
        return Ended(ask, how, "" if is_told else f"{answer.status_code} {answer.headers} {document}")
    if answer.status_code != ask.status or (ask.status >= 400 and not _has_form(ask.path, document)):
        return Ended(ask, "whole", f"{answer.status_code} {document!r:.300}")
    return _judged(ask, text_of(document), "", is_cancelled)


def _judged(ask: Ask, text: str, failure: str, is_cancelled: bool) -> Ended:
    if failure:  # of a long answer only its beginning is known
        is_right = "shut down" in failure and text.startswith(ask.expected[: len(text)])
        return Ended(ask, "cut short", "" if is_right else f"{failure}: {text!r}")
    is_right = text == ask.expected or (is_cancelled and ask.expected.startswith(text)) or not ask.expected
    return Ended(ask, "whole", "" if is_right else f"it said {text!r}, not {ask.expected!r}; asked with {ask.body}")


def text_of(one: dict[str, Any]) -> str:
    """The text of a document's first choice, or what an event adds to it, of whichever API."""
    firsts = [choice for choice in one.get("choices") or () if choice["index"] == 0]
    if firsts:
        said = firsts[0].get("delta") or firsts[0].get("message") or {"content": firsts[0].get("text")}
        return str(said.get("content") or "")
    match one.get("type") or one.get("object"):
        case "response.output_text.delta":
            return str(one["delta"])
        case "content_block_delta":
            return str(one["delta"].get("text", ""))
        case "response":
            return "".join(part["text"] for item in one["output"] for part in item["content"])
        case "message":
            return "".join(block["text"] for block in one["content"] if block["type"] == "text")
    return ""


def _is_last(path: str, line: str) -> bool:
    if path in MORE:
        return line == "[DONE]"
    kinds = ("response.completed", "response.incomplete", "response.failed", "message_stop", "error")
    return line.startswith("{") and json.loads(line).get("type") in kinds


def _failure(events: Sequence[dict[str, Any]]) -> str:
    """The sentence with which a stream has failed; "" if it has not."""
    errors = (event.get("error") or (event.get("response") or {}).get("error") for event in events)
    return next((str(error["message"]) for error in errors if error), "")


def _has_form(path: str, document: Any) -> bool:
    error = document.get("error", {})
    is_anthropic = path.startswith("/v1/messages")
    return bool(error.get("message")) and (document.get("type") == "error" if is_anthropic else "code" in error)


# -- a server that is told to end ------------------------------------------------------------------


async def under_load(url: str, asks: Sequence[Ask], moment: float, tell: Callable[[], object]) -> list[Ended]:
    """How all of these end, where the server is told to end in their middle: ``moment`` seconds after all were under
    way and one has ended. Each that is asked after it must be refused, as long as anybody listens. ``tell``: returns at
    once."""
    async with httpx.AsyncClient(base_url=url, timeout=SECONDS) as http:
        asking = [asyncio.create_task(ended(http, ask)) for ask in asks]
        while (await http.get("/health")).json()["running"] + sum(task.done() for task in asking) < len(asks):
            await asyncio.sleep(0.01)
        await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(moment)
        tell()
        await asyncio.sleep(0.2)
        late = [await ended(http, ask) for ask in asks[:4]]
        wrong = "an answer was begun after the signal"
        return [
            *await asyncio.gather(*asking),
            *(each if each.how == "refused" else replace(each, wrong=wrong) for each in late if each.how != "lost"),
        ]
