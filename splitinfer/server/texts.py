"""`/tokenize`, `/detokenize` and `/apply-template`: requests and answers, as vLLM and llama.cpp have them. Pure.

vLLM's documentation ("OpenAI-Compatible Server", Tokenizer API) has the shapes of the first two, llama.cpp's server
("POST /apply-template") that of the third.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, create_model

from splitinfer.server.ask import Chat
from splitinfer.server.fields import EMPTY, Fields, Ignored, Refused, TokenId
from splitinfer.server.openai.chat import ChatRequest, Conversation
from splitinfer.server.openai.messages import Messages, template_messages
from splitinfer.server.problem import Problem, unsupported

_OneModel = Annotated[Any, Ignored("there is one model here")]
_TEXT_ONLY = Refused("the model is given text only", EMPTY)


class _Template(Conversation):
    model: _OneModel = None
    messages: Messages | None = Field(None, description="The conversation, text only")
    add_generation_prompt: bool = Field(True, description="The prompt ends where the next answer begins")
    continue_final_message: Annotated[Any, Refused("an answer cannot be begun for the model", (False,))] = None
    chat_template: Annotated[Any, Refused("the model has its own")] = None
    media_io_kwargs: Annotated[Any, _TEXT_ONLY] = None
    mm_processor_kwargs: Annotated[Any, _TEXT_ONLY] = None

    def chat(self) -> Chat:
        """The conversation.

        Raises:
            Problem: 400, there is none.
        """
        if self.messages is None:
            raise Problem(400, "messages must be given", param="messages")
        messages = template_messages(self.messages)
        return Chat(messages, self.told_tools(), self.template_options(), self.add_generation_prompt)


_OF_ANSWERS: dict[str, Any] = {
    name: (Annotated[Any, Ignored("nothing is generated")], None)
    for name, field in ChatRequest.model_fields.items()
    if name not in _Template.model_fields and not any(isinstance(one, Refused) for one in field.metadata)
}
TemplateRequest: type[_Template] = create_model("TemplateRequest", __base__=_Template, **_OF_ANSWERS)
"""A chat, as it is asked elsewhere: what concerns the answer is ignored."""


class _TextOrChat(_Template):
    prompt: str | None = Field(None, description="Text; give this or messages")
    return_token_strs: bool = Field(False, description="Also returns the text of each token")
    add_special_tokens: bool | None = Field(
        None, description="For a text: adds the tokenizer's special tokens. A chat has those of its template"
    )


TokenizeRequest: type[_TextOrChat] = create_model("TokenizeRequest", __base__=_TextOrChat, **_OF_ANSWERS)
"""A text, or a chat as for ``TemplateRequest``."""


class DetokenizeRequest(Fields):
    """Tokens that are to become text."""

    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
    model: _OneModel = None


@dataclass(frozen=True, slots=True)
class Text:
    """A text that is to be tokenized. ``adds_special``: with the special tokens that the tokenizer itself adds."""

    text: str
    adds_special: bool = True


def tokenize_ask(request: _TextOrChat) -> tuple[Chat | Text, bool]:
    """What is to be tokenized, a text or a chat, and whether each token's text is wanted.

    Raises:
        Problem: 400, fields contradict each other.
    """
    if (request.prompt is None) == (request.messages is None):
        raise Problem(400, "give either prompt or messages", param="prompt")
    wants_texts = request.return_token_strs
    if request.prompt is not None:
        return Text(request.prompt, request.add_special_tokens is not False), wants_texts
    if request.add_special_tokens:
        raise unsupported("add_special_tokens", "a chat has those that the model's template writes")
    return request.chat(), wants_texts


def tokenized(tokens: Sequence[int], context: int, texts: Sequence[bytes] | None) -> dict[str, Any]:
    """vLLM's document. ``texts``: of each token, if they are wanted; what is no text is replaced."""
    strings = None if texts is None else [text.decode("utf-8", "replace") for text in texts]
    return {"count": len(tokens), "max_model_len": context, "tokens": list(tokens), "token_strs": strings}
