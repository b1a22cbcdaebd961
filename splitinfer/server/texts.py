"""`/tokenize`, `/detokenize` and `/apply-template`: requests and answers, as vLLM and llama.cpp have them. Pure.

vLLM's documentation ("OpenAI-Compatible Server", Tokenizer API) has the shapes of the first two, llama.cpp's server
("POST /apply-template") that of the third.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from splitinfer.server import values
from splitinfer.server.ask import Chat
from splitinfer.server.common_fields import FOR_TEMPLATE
from splitinfer.server.fields import HONOURED, Honoured, Ignored, Refused, Treatment, honoured, is_empty, is_one_of
from splitinfer.server.openai.chat import CHOICES, FIELDS, template_options, told_tools
from splitinfer.server.openai.messages import template_messages
from splitinfer.server.problem import Problem, unsupported

_ONE_MODEL = Ignored("there is one model here")
_TEXT_ONLY = Refused("the model is given text only", is_empty)
_CHAT: Mapping[str, Treatment] = {
    "model": _ONE_MODEL,
    "messages": FIELDS["messages"],
    "tools": FIELDS["tools"],
    "tool_choice": Honoured("auto and none, and which tools are allowed", CHOICES),
    "add_generation_prompt": HONOURED,
    "continue_final_message": Refused("an answer cannot be begun for the model", is_one_of(False)),
    "chat_template": Refused("the model has its own"),
    "chat_template_kwargs": HONOURED,
    "enable_thinking": FOR_TEMPLATE,
    "reasoning_effort": FOR_TEMPLATE,
    "verbosity": FOR_TEMPLATE,
    "media_io_kwargs": _TEXT_ONLY,
    "mm_processor_kwargs": _TEXT_ONLY,
}
_OF_ANSWERS = {
    name: Ignored("nothing is generated")
    for name, treatment in FIELDS.items()
    if name not in _CHAT and not isinstance(treatment, Refused)
}
TEMPLATE_FIELDS: Mapping[str, Treatment] = {**_CHAT, **_OF_ANSWERS}
TOKENIZE_FIELDS: Mapping[str, Treatment] = {
    **TEMPLATE_FIELDS,
    "prompt": HONOURED,
    "return_token_strs": HONOURED,
    "add_special_tokens": Honoured("of a text; a chat has those that its template writes"),
}
DETOKENIZE_FIELDS: Mapping[str, Treatment] = {"model": _ONE_MODEL, "tokens": HONOURED}


@dataclass(frozen=True, slots=True)
class Text:
    """A text that is to be tokenized. ``adds_special``: with the special tokens that the tokenizer itself adds."""

    text: str
    adds_special: bool = True


def tokenize_ask(body: Mapping[str, Any]) -> tuple[Chat | Text, bool]:
    """What is to be tokenized, a text or a chat, and whether each token's text is wanted.

    Raises:
        Problem: 400, in a sentence that names the field.
    """
    given = honoured(body, TOKENIZE_FIELDS)
    if ("prompt" in given) == ("messages" in given):
        raise Problem(400, "give either prompt or messages", param="prompt")
    wants_texts = values.flag("return_token_strs", given.get("return_token_strs", False))
    adds_special = values.flag("add_special_tokens", given.get("add_special_tokens", "prompt" in given))
    if "prompt" in given:
        return Text(values.text("prompt", given["prompt"]), adds_special), wants_texts
    if adds_special:
        raise unsupported("add_special_tokens", "a chat has those that the model's template writes")
    return _chat(given), wants_texts


def template_ask(body: Mapping[str, Any]) -> Chat:
    """The chat that is to be written out.

    Raises:
        Problem: 400, in a sentence that names the field.
    """
    return _chat(honoured(body, TEMPLATE_FIELDS))


def detokenize_ask(body: Mapping[str, Any]) -> list[int]:
    """The tokens that are to become text.

    Raises:
        Problem: 400, in a sentence that names the field.
    """
    given = honoured(body, DETOKENIZE_FIELDS)
    tokens = values.listing("tokens", given.get("tokens"))
    return [values.whole("tokens", token, 0, values.MOST_TOKENS) for token in tokens]


def tokenized(tokens: Sequence[int], context: int, texts: Sequence[bytes] | None) -> dict[str, Any]:
    """vLLM's document. ``texts``: of each token, if they are wanted; what is no text is replaced."""
    strings = None if texts is None else [text.decode("utf-8", "replace") for text in texts]
    return {"count": len(tokens), "max_model_len": context, "tokens": list(tokens), "token_strs": strings}


def _chat(given: Mapping[str, Any]) -> Chat:
    return Chat(
        template_messages(given.get("messages")),
        told_tools(given),
        template_options(given),
        values.flag("add_generation_prompt", given.get("add_generation_prompt", True)),
    )
