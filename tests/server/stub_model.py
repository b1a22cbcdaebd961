"""What of ``LLM`` a server needs to read and refuse requests: a model that counts letters and whose queue is full."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import msgpack

from splitinfer.core.sampling_defaults import Recommended
from splitinfer.core.sequence import SamplingParams
from splitinfer.engine.figures.health import PipelineHealth
from splitinfer.errors import QueueFull
from splitinfer.settings import Settings
from splitinfer.text.conversations import TextCodec


class Model:
    """A token is a run of one letter. ``num_letters``: those that were tokenized."""

    context_length, fingerprint, has_tokenizer, max_running = 4096, "0", False, 4
    codec = TextCodec(lambda _: [], lambda _: "")
    settings, recommended_sampling = Settings(), Recommended({})
    answer_format = SimpleNamespace(parser=lambda *_, **__: None, call_start="")
    seeing = SimpleNamespace(
        taken_out=lambda messages: (messages, []), check=lambda _number: None, takes=lambda _url: True, mark=""
    )

    def __init__(self, failure: str | None = None, error: Exception | None = None) -> None:
        self.failure, self.error, self.num_letters = failure, error, 0

    def health(self) -> PipelineHealth:
        return PipelineHealth((), failure=self.failure)

    @property
    def tokenizer(self) -> "Model":
        return self

    def encode(self, text: str, **_: Any) -> list[int]:
        self.num_letters += len(text)
        return [1 for before, letter in zip(" " + text, text, strict=False) if before != letter]

    def write_chat(self, messages: Sequence[Mapping[str, Any]], **_: Any) -> tuple[list[int], str]:
        if self.error is not None:
            raise self.error
        text = "".join(str(message["content"]) for message in messages)
        return [*self.encode(text), 2, 2], text  # as another splits an answer

    def token_bytes(self, _token: int) -> bytes:
        return b"a"

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return "a" * len(tokens)

    def call_grammar(self, *_given: Any, **_more: Any) -> None:
        pass

    async def asubmit(self, _prompt: Any, params: SamplingParams, **_: Any) -> None:
        msgpack.packb(asdict(params))  # as the stages are sent it
        raise QueueFull("1 requests are waiting already")

    def seconds_until_room(self, _nth: int) -> float:
        return 1.0
