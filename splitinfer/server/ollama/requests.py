"""`POST /api/chat` and `/api/generate`: a request as an `Ask`.

Ollama's calls of tools have no ids, which templates may write: they get some (``with_ids``). Pictures are base64 beside
a message's text, and come before it.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from splitinfer.core.grammar import Grammar
from splitinfer.pictures.marks import in_lines, marked
from splitinfer.server.ask import MAX_MESSAGES, AnswerRequest, Ask, AskedChat
from splitinfer.server.fields import Fields, ListOf, NoEffect, not_a
from splitinfer.server.openai.chat import Conversation
from splitinfer.server.openai.forms import grammar_of
from splitinfer.server.openai.generating import Sampling, Scored
from splitinfer.server.openai.messages import Call, merged_systems, with_ids
from splitinfer.server.refused import OLLAMA_OPTIONS


class Options(Sampling):
    """``num_predict``: tokens of the answer; below 0: as many as there is room for. Ollama reads every number as a
    fraction, so 40.0 is whole; its temperatures end at 100, not at 2."""

    refused = OLLAMA_OPTIONS
    temperature: float | None = None
    num_predict: int | None = None
    repeat_penalty: float | None = None

    @model_validator(mode="before")
    @classmethod
    def _whole(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: int(one) if isinstance(one, float) and one.is_integer() else one for name, one in given.items()}

    def sampling(self) -> dict[str, Any]:
        own = {} if self.repeat_penalty is None else {"repetition_penalty": self.repeat_penalty or 1.0}
        return super().sampling() | own


def _format(given: Any) -> Any:
    if given not in (None, "", "json") and not isinstance(given, dict):
        raise not_a('"json" or a schema', given)
    return given or None


def _thinks(given: Any) -> Any:
    if given is not None and not isinstance(given, bool | str):
        raise not_a("true, false or a level", given)
    return None if given == "" else given


class Generating(Conversation, Scored, AnswerRequest):
    """``think``: whether the model reasons, or how much. ``format``: "json", or a schema."""

    stream: bool = True
    options: Options = Options()
    format: Annotated[Any, PlainValidator(_format)] = None
    think: Annotated[bool | str | None, PlainValidator(_thinks)] = None
    keep_alive: NoEffect = None

    def template_options(self, verbosity: str | None = None) -> dict[str, Any]:
        options = super().template_options(verbosity)
        if isinstance(self.think, bool):
            return {**options, "enable_thinking": self.think}
        return options if self.think is None else {**options, "enable_thinking": True, "reasoning_effort": self.think}

    def asked(self, prompt: AskedChat | str) -> Ask:
        """Return the request for the engine.

        Raises:
            Problem: 400, the format is not a schema.
        """
        form = {}
        if self.format is not None:
            form["grammar"] = Grammar.json() if self.format == "json" else grammar_of(self.format, "format")
        most = self.options.num_predict
        sampling, limit = self.options.sampling() | form | self.budget(), None if (most or -1) < 0 else most
        sampling |= {} if self.num_top is None else {"logprobs": self.num_top}
        may_call = self.functions()[1:] if isinstance(prompt, AskedChat) and prompt.tools else ()
        return Ask(prompt, sampling, limit, 1, False, *may_call)


def _as_text(given: Any) -> Any:
    return json.dumps(given, ensure_ascii=False) if isinstance(given, dict | list) else given


class Turn(Fields):
    role: Literal["system", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_as_text)] = ""
    thinking: str | None = None
    images: ListOf[str] = Field(default_factory=list)
    tool_calls: ListOf[Call] = Field(default_factory=list)
    tool_name: str | None = None
    tool_call_id: str = ""

    def told(self) -> dict[str, Any]:
        told: dict[str, Any] = {"role": self.role, "content": with_images(self.content, self.images)}
        if self.thinking:
            told["reasoning_content"] = self.thinking
        if self.tool_calls:
            told["tool_calls"] = [call.told() for call in self.tool_calls]
        named = {} if self.tool_name is None else {"name": self.tool_name}
        return told | ({"tool_call_id": self.tool_call_id, **named} if self.role == "tool" else {})


def with_images(text: str, images: Sequence[str]) -> str:
    return in_lines([*(marked(f"data:image/png;base64,{one}") for one in images), *([text] if text else [])])


class ChatRequest(Generating):
    messages: Annotated[list[Turn], Field(max_length=MAX_MESSAGES, fail_fast=True)] = Field(default_factory=list)

    def asks(self) -> tuple[Ask, ...]:
        messages = merged_systems(with_ids(turn.told() for turn in self.messages))
        chat = AskedChat(messages, self.functions()[0], self.template_options())
        return (self.asked(chat),) if messages else ()


class GenerateRequest(Generating):
    prompt: str = ""
    system: str = ""
    raw: bool = False
    images: ListOf[str] = Field(default_factory=list)

    def asks(self) -> tuple[Ask, ...]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        user = {"role": "user", "content": with_images(self.prompt, self.images)}
        chat = AskedChat((*system, user), (), self.template_options())
        return (self.asked(self.prompt if self.raw else chat),) if user["content"] else ()
