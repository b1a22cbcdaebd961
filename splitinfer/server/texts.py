"""`/tokenize`, `/detokenize` and `/apply-template`: requests and answers, as vLLM and llama.cpp have them. Pure.

vLLM's documentation ("OpenAI-Compatible Server", Tokenizer API) has the shapes of the first two, llama.cpp's server
("POST /apply-template") that of the third.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from splitinfer.server import values
from splitinfer.server.ask import Chat
from splitinfer.server.fields import HONOURED, Honoured, Ignored, Refused, Treatment, honoured, is_one_of
from splitinfer.server.openai.messages import template_messages
from splitinfer.server.problem import Problem

_MOST_TOKENS = 2**31 - 1
_ONE_MODEL = Ignored("there is one model here")
_CHAT: Mapping[str, Treatment] = {
    "model": _ONE_MODEL,
    "messages": Honoured("text only"),
    "tools": HONOURED,
    "chat_template_kwargs": HONOURED,
    "add_generation_prompt": Refused("a chat ends where its answer begins", is_one_of(True)),
    "continue_final_message": Refused("a chat ends where its answer begins", is_one_of(False)),
}
TEMPLATE_FIELDS = _CHAT
TOKENIZE_FIELDS: Mapping[str, Treatment] = {
    **_CHAT,
    "prompt": HONOURED,
    "return_token_strs": HONOURED,
    "add_special_tokens": Refused("the tokenizer adds those of its own", is_one_of(True)),
}
DETOKENIZE_FIELDS: Mapping[str, Treatment] = {"model": _ONE_MODEL, "tokens": HONOURED}


def tokenize_ask(body: Mapping[str, Any]) -> tuple[Chat | str, bool]:
    """What is to be tokenized, a text or a chat, and whether each token's text is wanted.

    Raises:
        Problem: 400, in a sentence that names the field.
    """
    given = honoured(body, TOKENIZE_FIELDS)
    if ("prompt" in given) == ("messages" in given):
        raise Problem(400, "give either prompt or messages", param="prompt")
    wants_texts = values.flag("return_token_strs", given.get("return_token_strs", False))
    return values.text("prompt", given["prompt"]) if "prompt" in given else _chat(given), wants_texts


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
    return [values.whole("tokens", token, 0, _MOST_TOKENS) for token in tokens]


def tokenized(tokens: Sequence[int], context: int, texts: Sequence[bytes] | None) -> dict[str, Any]:
    """vLLM's document. ``texts``: of each token, if they are wanted; what is no text is replaced."""
    strings = None if texts is None else [text.decode("utf-8", "replace") for text in texts]
    return {"count": len(tokens), "max_model_len": context, "tokens": list(tokens), "token_strs": strings}


def _chat(given: Mapping[str, Any]) -> Chat:
    tools = tuple(values.mapping("tools", one) for one in values.listing("tools", given.get("tools", [])))
    options = values.mapping("chat_template_kwargs", given.get("chat_template_kwargs", {}))
    for name in options.keys() & {"messages", "tools", "tokenize", "add_generation_prompt", "chat_template"}:
        raise Problem(400, f"chat_template_kwargs.{name} is set by the request itself", param="chat_template_kwargs")
    return Chat(template_messages(given.get("messages")), tools, options)
