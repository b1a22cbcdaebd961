"""Requests of every kind, and what their answers must say: as text, and in each API's form.

A canary is a request whose answer is known from the library. Every kind of request that makes an answer asks for one,
so that each answer that is read is compared, whatever becomes of its neighbours.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from client import Event

from splitinfer.core.sequence import SamplingParams
from splitinfer.llm import LLM

NUM_TOKENS = (4, 12, 30)
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "description": "Looks up a word.", "parameters": {"type": "object"}},
}
WORDS = (
    "the",
    "old king",
    "had",
    "a garden",
    "where nobody went",
    "and",
    "one small",
    "fox",
    "found",
    "the gate",
    "rain",
)
_STREAMS_END = ("response.completed", "response.incomplete")


@dataclass(frozen=True)
class Canary:
    """A prompt with what follows it, as a chat and as plain text. ``seed``: ``None`` is greedy."""

    prompt: str
    seed: int | None
    num_tokens: int
    chat: str = ""
    plain: str = ""

    def params(self, recommended: SamplingParams) -> SamplingParams:
        """For the library; what requests do not say is what the model recommends."""
        return replace(recommended, max_tokens=self.num_tokens, temperature=self.temperature, seed=self.seed)

    @property
    def temperature(self) -> float:
        return 0.0 if self.seed is None else 0.9

    @property
    def sampling(self) -> dict[str, Any]:
        """For OpenAI's APIs."""
        seed = {} if self.seed is None else {"seed": self.seed}
        return {"temperature": self.temperature, **seed}


def canaries(count: int, most_words: int = 60) -> list[Canary]:
    """Prompts of one word to ``most_words``; every third is greedy."""
    made = []
    for number in range(count):
        chance = random.Random(f"canary {number}")
        words = [chance.choice(WORDS) for _ in range(chance.choice((3, 10, most_words)))]
        made.append(Canary(" ".join(words), None if number % 3 == 0 else number, chance.choice(NUM_TOKENS)))
    return made


def known(llm: LLM, unknown: Sequence[Canary]) -> list[Canary]:
    """The same with what the library says."""
    chats = [llm.tokenizer.encode_chat([{"role": "user", "content": each.prompt}]) for each in unknown]
    params = [each.params(llm.default_sampling) for each in unknown]
    said = [output.text for output in llm.generate(chats, params)]
    plain = [output.text for output in llm.generate([each.prompt for each in unknown], params)]
    return [
        Canary(each.prompt, each.seed, each.num_tokens, chat, text)
        for each, chat, text in zip(unknown, said, plain, strict=True)
    ]


@dataclass(frozen=True)
class Ask:
    """A request. ``expected``: the text of its (first) answer; ``None``: it has none. ``status``: that it must get.
    ``held_back``: what an answer that is cancelled may say behind that: all but the end of a stop string."""

    kind: str
    path: str
    body: Any
    api: str = ""
    expected: str | None = None
    streams: bool = False
    method: str = "POST"
    status: int = 200
    held_back: str = ""

    def may_say(self, text: str) -> bool:
        """Whether an answer that is cancelled may be this text."""
        return ((self.expected or "") + self.held_back).startswith(text)

    @property
    def is_answered(self) -> bool:
        """Whether the engine answers it."""
        return self.expected is not None


# -- kinds -----------------------------------------------------------------------------------------


def asks_of(canary: Canary) -> list[Ask]:
    """The same question in each API's words. Anthropic's knows no seeds, so there only greedy canaries are known."""
    said, most = [{"role": "user", "content": canary.prompt}], canary.num_tokens
    message = {"messages": said, "max_tokens": most, "temperature": canary.temperature}
    return [
        Ask("chat", "/v1/chat/completions", {"messages": said, "max_tokens": most, **canary.sampling}, "chat",
            canary.chat),
        Ask("completion", "/v1/completions", {"prompt": canary.prompt, "max_tokens": most, **canary.sampling},
            "completions", canary.plain),
        Ask("response", "/v1/responses", {"input": canary.prompt, "max_output_tokens": most, **canary.sampling},
            "responses", canary.chat),
        Ask("message", "/v1/messages", message, "messages", canary.chat if canary.seed is None else ""),
    ]  # fmt: skip


def streams_of(canary: Canary) -> list[Ask]:
    """As streams; only those whose answers are known."""
    return [streamed(ask) for ask in asks_of(canary) if ask.api != "messages" or canary.seed is None]


def chat(canary: Canary, chance: random.Random) -> Ask:
    """A chat, some with more choices, probabilities, tools or a stop string."""
    kind, more = chance.choice(
        (
            ("chat", {}),
            ("chat n=3", {"n": 3}),
            ("chat logprobs", {"logprobs": True, "top_logprobs": 3}),
            ("chat tools", {"tools": [TOOL], "tool_choice": "auto"}),
            ("chat stop", _stop(canary)),
        )
    )
    ask = asks_of(canary)[0]
    expected, stop, _ = canary.chat.partition(more["stop"][0]) if "stop" in more else (canary.chat, "", "")
    ask = replace(ask, kind=kind, body=ask.body | more, expected=expected, held_back=stop[:-1])
    return _maybe_streamed(ask, chance)


def completion(canary: Canary, chance: random.Random) -> Ask:
    """Plain text, of one prompt or of three; or its tokens are chosen with the library's probabilities told."""
    kind, more = chance.choice(
        (
            ("completion", {}),
            ("completion prompts=3", {"prompt": [canary.prompt, "It rained.", canary.prompt]}),
            ("completion logprobs", {"logprobs": 2}),
        )
    )
    ask = asks_of(canary)[1]
    return _maybe_streamed(replace(ask, kind=kind, body=ask.body | more), chance)


def response(canary: Canary, chance: random.Random) -> Ask:
    """A response."""
    return _maybe_streamed(asks_of(canary)[2], chance)


def message(canary: Canary, chance: random.Random) -> Ask:
    """A message of Anthropic's API."""
    return _maybe_streamed(asks_of(canary)[3], chance)


def long_prompt(canary: Canary, chance: random.Random) -> Ask:
    """A prompt that nobody has asked before, and that takes several steps to read."""
    words = " ".join(chance.choice(WORDS) for _ in range(chance.randrange(60, 400)))
    body = {"messages": [{"role": "user", "content": words}], "max_tokens": 3, "temperature": 0}
    return _maybe_streamed(Ask("long prompt", "/v1/chat/completions", body, "chat", ""), chance)


def counted(canary: Canary, chance: random.Random) -> Ask:
    """What needs no answer of the model."""
    said = [{"role": "user", "content": canary.prompt}]
    return chance.choice(
        (
            Ask("count_tokens", "/v1/messages/count_tokens", {"messages": said}),
            Ask("input_tokens", "/v1/responses/input_tokens", {"input": canary.prompt}),
            Ask("tokenize", "/tokenize", {"prompt": canary.prompt, "return_token_strs": True}),
            Ask("detokenize", "/detokenize", {"tokens": [1, 2, 3]}),
            Ask("apply-template", "/apply-template", {"messages": said}),
            Ask("models", "/v1/models", None, method="GET"),
            Ask("health", "/health", None, method="GET"),
        )
    )


def wrong(canary: Canary, chance: random.Random) -> Ask:
    """What is refused."""
    return chance.choice(
        (
            Ask("no message", "/v1/chat/completions", {"messages": []}, status=400),
            Ask("wrong message", "/v1/messages", {"max_tokens": -1, "messages": 7}, "messages", status=400),
            Ask("too long", "/v1/completions", {"prompt": [5] * 200_000}, status=400),
            Ask("nothing there", "/v1/nothing", {}, status=404),
            Ask("wrong method", "/v1/responses", None, method="GET", status=405),
        )
    )


KINDS: tuple[tuple[Callable[[Canary, random.Random], Ask], int], ...] = (
    (chat, 6), (completion, 3), (response, 3), (message, 3), (long_prompt, 2), (counted, 3), (wrong, 1),
)  # fmt: skip
"""Kinds, and how often each comes."""


def _stop(canary: Canary) -> dict[str, Any]:
    """A stop string in the middle of what is said, if there is one."""
    middle = len(canary.chat) // 2
    stop = canary.chat[middle : middle + 3]
    return {"stop": [stop]} if stop.strip() else {}


def _maybe_streamed(ask: Ask, chance: random.Random) -> Ask:
    return streamed(ask) if chance.random() < 0.6 else ask


def streamed(ask: Ask) -> Ask:
    """The same as a stream."""
    return replace(ask, kind=f"{ask.kind}, stream", body={**ask.body, "stream": True}, streams=True)


# -- answers ---------------------------------------------------------------------------------------


def text_of_document(api: str, document: Any) -> str:
    """The text of a whole answer's first choice."""
    match api:
        case "chat":
            return document["choices"][0]["message"]["content"] or ""
        case "completions":
            return document["choices"][0]["text"]
        case "responses":
            items = [part for item in document["output"] for part in item["content"]]
            return "".join(part["text"] for part in items)
        case _:
            return "".join(block["text"] for block in document["content"] if block["type"] == "text")


def text_of_events(api: str, events: Sequence[Event]) -> str:
    """The text of a stream's first choice, so far."""
    found = [event.data for event in events if isinstance(event.data, dict)]
    match api:
        case "chat":
            return "".join(one["delta"].get("content") or "" for one in _firsts(found))
        case "completions":
            return "".join(one["text"] for one in _firsts(found))
        case "responses":
            return "".join(each["delta"] for each in found if each["type"] == "response.output_text.delta")
        case _:
            deltas = [each["delta"] for each in found if each["type"] == "content_block_delta"]
            return "".join(delta.get("text", "") for delta in deltas)


def _firsts(chunks: Sequence[Any]) -> list[Any]:
    return [one for chunk in chunks for one in chunk.get("choices", ()) if one["index"] == 0]


def complaint(ask: Ask, events: Sequence[Event]) -> str:
    """What is wrong with a whole stream; "" if nothing is."""
    if not events:
        return "a stream without events"
    last = events[-1].data
    if failure := failure_of(events):
        return f"a stream failed: {failure}"
    match ask.api:
        case "chat" | "completions":
            every = [one for each in events if isinstance(each.data, dict) for one in each.data["choices"]]
            choices = {one["index"] for one in every}
            ended = {one["index"] for one in every if one["finish_reason"] is not None}
            is_whole = last == "[DONE]" and choices == ended
        case "responses":
            is_whole = last["type"] in _STREAMS_END
        case _:
            is_whole = last["type"] == "message_stop"
    return "" if is_whole else f"a stream ends with {json.dumps(last)[:200]}"


def failure_of(events: Sequence[Event]) -> str:
    """The sentence with which a stream has failed; "" if it has not."""
    for event in events:
        data = event.data if isinstance(event.data, dict) else {}
        error = data.get("error") or data.get("response", {}).get("error")
        if error:
            return str(error["message"])
    return ""


def has_error_form(path: str, document: Any) -> bool:
    """Whether a refusal has the form of its API."""
    error = document.get("error", {})
    is_anthropic = path.startswith("/v1/messages")
    return bool(error.get("message")) and (document.get("type") == "error" if is_anthropic else "code" in error)
