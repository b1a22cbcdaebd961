"""`POST /v1/chat/completions`: a request as an `Ask`; ``chat_writer`` writes the answer."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from splitinfer.server.ask import MAX_TOOLS, Ask, AskedChat
from splitinfer.server.fields import AsGiven, Fields
from splitinfer.server.openai.forms import TextFormat
from splitinfer.server.openai.generating import (
    Choices,
    ForTemplate,
    FunctionChoice,
    Limit,
    Scored,
    Streaming,
    Told,
    Word,
    chosen,
)
from splitinfer.server.openai.messages import Answered, Messages, Outcome, Said, merged_systems, with_ids
from splitinfer.server.problem import invalid, unsupported


class Function(Fields):
    """What the model is told of a function. ``strict``: a call that the model begins keeps the schema; a request whose
    schema cannot be enforced is refused."""

    name: str
    description: Any = None
    parameters: dict[str, Any] | None = None
    strict: Any = None
    return_: Any = Field(None, alias="return")


class Tool(Fields):
    type: Literal["function"] = "function"
    function: Annotated[dict[str, Any], AsGiven(Function)]


class Conversation(ForTemplate):
    """What a template writes out. ``add_generation_prompt``: up to where the next answer begins; it is not where
    ``continue_final_message``, with which the answer goes on with the last message."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] = Field(default_factory=list)
    tool_choice: FunctionChoice = Word(type="auto")

    def written(self, messages: Sequence[Said | Answered | Outcome]) -> AskedChat:
        """Return the conversation.

        Raises:
            Problem: 400, fields contradict each other, or as ``chosen``.
        """
        goes_on, opens = self.continue_final_message, self.add_generation_prompt
        if goes_on and opens:
            raise invalid("continue_final_message", "continue_final_message needs add_generation_prompt to be false")
        told = merged_systems(with_ids(message.told() for message in messages))
        opens = not goes_on if opens is None else opens
        return AskedChat(told, self.functions()[0], self.template_options(), opens, continues=goes_on)

    def functions(self) -> tuple[Told, Told, bool]:
        """Return the result of ``chosen`` for this request."""
        return chosen([tool.function for tool in self.tools], self.tool_choice)


class ChatRequest(Conversation, Scored, Streaming):
    messages: Messages
    max_tokens: Limit = None
    max_completion_tokens: Limit = None  # takes precedence
    n: Choices = 1
    parallel_tool_calls: bool = True  # false: an answer ends after its first call
    response_format: TextFormat | None = None

    def asks(self) -> tuple[Ask]:
        chat = self.written(self.messages)
        if not chat.opens_answer and not chat.continues:
            raise unsupported("add_generation_prompt", "the prompt ends where the answer begins or goes on", False)
        sampling = self.sampling() | self.form(self.response_format, "response_format") | self.budget()
        most, one_call = self.max_completion_tokens or self.max_tokens, not self.parallel_tool_calls
        return (Ask(chat, sampling, most, self.n, one_call, *self.functions()[1:], self.stream),)
