"""`POST /v1/responses` and `/v1/responses/input_tokens`: a request as an `Ask`. Stateless: the whole conversation comes
with each request, and nothing is kept of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from splitinfer.core.sampling_defaults import Recommended
from splitinfer.core.sequence import MAX_LOGPROBS
from splitinfer.server import values
from splitinfer.server.ask import MAX_MESSAGES, MAX_TOOLS, Ask, Chat
from splitinfer.server.common_fields import BY_KEYS, FOR_TEMPLATE
from splitinfer.server.fields import (
    HONOURED,
    Honoured,
    Ignored,
    Object,
    Refused,
    Size,
    Treatment,
    honoured,
    is_empty,
    is_one_of,
)
from splitinfer.server.openai.chat import (
    AT_MOST_THE_CONTEXT,
    CACHE_KEY,
    CACHE_ROOM,
    METADATA,
    MODEL,
    OF_OTHER_SERVERS,
    ONE_TIER,
    TEXT_FORMAT,
    sampling_of,
    template_options,
)
from splitinfer.server.openai.response_items import ITEMS, conversation
from splitinfer.server.openai.response_tools import CHOICES, TOOLS, Function, callable_names, functions_of
from splitinfer.server.problem import Problem, unsupported

_MAX_ITEMS = 4 * MAX_MESSAGES  # reasoning, text and calls are items of their own, and become one message
_NO_STORE = "nothing is stored here; give the whole conversation as input"

_PROBABILITIES, _PACKED_REASONING = "message.output_text.logprobs", "reasoning.encrypted_content"
_OF_OTHER_TOOLS = (
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
_REPEATED = {"max_tool_calls": int, "prompt_cache_key": str, "safety_identifier": str, "user": str}  # though ignored
_SAMPLING = {"temperature": 1.0, "top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_REASONING = Object(
    "Reasoning of responses",
    {
        "effort": FOR_TEMPLATE,
        "summary": Ignored("reasoning is given whole"),
        "generate_summary": Ignored("reasoning is given whole"),
        "context": Ignored("the model's template decides which reasoning it keeps"),
        "mode": Refused("there is one mode, standard", is_one_of("standard")),
    },
)
_TEXT = Object(
    "Text of responses",
    {
        "format": Refused("answers cannot be held to a format", TEXT_FORMAT),
        "verbosity": FOR_TEMPLATE,
    },
)

COUNTED: Mapping[str, Treatment] = {
    "model": MODEL,
    "input": Honoured(
        "text, or messages, reasoning, calls and their results; text only", each=ITEMS, size=Size(_MAX_ITEMS)
    ),
    "instructions": HONOURED,
    "tools": Honoured("functions, also in namespaces; other kinds are left out", each=TOOLS, size=Size(MAX_TOOLS)),
    "tool_choice": Honoured("auto and none, and which functions are allowed", CHOICES),
    "parallel_tool_calls": HONOURED,
    "reasoning": Honoured(inside=_REASONING),
    "text": Honoured(inside=_TEXT),
    "conversation": Refused(_NO_STORE),
    "previous_response_id": Refused(_NO_STORE),
    "personality": Refused("the model has none; give instructions"),
    "truncation": Refused("a conversation is taken as it is", is_one_of("disabled")),
    # not OpenAI's, but known by many servers and clients
    "chat_template_kwargs": HONOURED,
    "enable_thinking": FOR_TEMPLATE,
}
FIELDS: Mapping[str, Treatment] = {
    **{name: treatment for name, treatment in COUNTED.items() if name != "personality"},
    "max_output_tokens": AT_MOST_THE_CONTEXT,
    "temperature": HONOURED,
    "top_p": HONOURED,
    "top_logprobs": Honoured(f"with {_PROBABILITIES} in include"),
    "include": Honoured(f"{_PROBABILITIES}; {_PACKED_REASONING}, which is readable and in no way secret"),
    "stream": HONOURED,
    "stream_options": Honoured(
        inside=Object(
            "Options of a stream of responses",
            {"include_obfuscation": Honoured("where it is true; without it nothing is added")},
        )
    ),
    "metadata": Honoured("given back; nothing is stored", size=METADATA),
    "store": Refused(_NO_STORE, is_one_of(False)),
    "background": Refused(_NO_STORE, is_one_of(False)),
    "background_options": Refused(_NO_STORE, is_empty),
    "prompt": Refused(_NO_STORE),
    "moderation": Refused("nothing is moderated here"),
    "access_programs": Refused("there are none here", is_empty),
    "image": Refused("the model is given text only", is_empty),
    "context_management": Refused("a conversation is taken as it is", is_empty),
    "max_tool_calls": Ignored("it is for tools that OpenAI's servers run, of which there are none here"),
    "user": BY_KEYS,
    "safety_identifier": BY_KEYS,
    "client_metadata": BY_KEYS,  # Codex sends it (codex-rs, `ResponsesApiRequest`); no field of the official types
    "service_tier": ONE_TIER,
    "prompt_cache_key": CACHE_KEY,
    "prompt_cache_options": Honoured(
        inside=Object(
            "Options of the cache",
            {
                "mode": CACHE_ROOM,
                "ttl": CACHE_ROOM,
                "comparison_response_id": Refused("nothing is stored here that could be compared"),
                "prewarm": Refused("ask for one token instead: it leaves the prompt in the cache", is_one_of(False)),
            },
        )
    ),
    "prompt_cache_retention": CACHE_ROOM,
    # not OpenAI's, but known by many servers and clients
    "seed": HONOURED,
    "stop": HONOURED,
    "logit_bias": HONOURED,
    "presence_penalty": HONOURED,
    "frequency_penalty": HONOURED,
    **OF_OTHER_SERVERS,
}


@dataclass(frozen=True, slots=True)
class Shape:
    """What a client is shown of an answer.

    said: fields of the request that the answer repeats, as the API has them.
    num_top: most likely tokens beside each; ``None``: no probabilities.
    packs_reasoning: reasoning is also given in the form that clients hand back unread.
    pads: events hide how long their text is.
    spaces: of functions in a namespace, by the names that the model is told, the namespace and the name in it.
    """

    model: str
    streams: bool = False
    said: Mapping[str, Any] = field(default_factory=dict)
    num_top: int | None = None
    packs_reasoning: bool = False
    pads: bool = False
    spaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def with_sampling(self, ask: Ask, defaults: Recommended) -> Self:
        """The shape of an answer that also says how its tokens were chosen, with the model's own values where the
        request has none."""
        values = {**_SAMPLING, **defaults.values, **ask.sampling}
        return replace(self, said={**self.said, **{name: values[name] for name in _SAMPLING}})


def response_ask(body: Mapping[str, Any], model: str = "") -> tuple[Ask, Shape]:
    """What a request asks, and in what shape. ``model``: the name in the answer where the request has none.

    Raises:
        Problem: 400, in a sentence that names the field.
    """
    given = honoured(body, FIELDS)
    functions = functions_of(given)
    parallel = values.flag("parallel_tool_calls", given.get("parallel_tool_calls", True))
    streams, pads = _streams(given)
    included = _included(given)
    num_top = _num_top(given, wanted=_PROBABILITIES in included)
    most = given.get("max_output_tokens")
    if most is not None:
        values.whole("max_output_tokens", most, 1, values.MOST_TOKENS)
    sampling = sampling_of(given) | ({} if num_top is None else {"logprobs": num_top})
    ask = Ask(_chat(given, functions), sampling, most, one_call=not parallel)
    said = _said(body, given, functions, parallel=parallel, num_top=num_top)
    spaces = {one.told_name: (one.namespace, one.name) for one in functions if one.namespace is not None}
    model = values.text("model", given.get("model", model))
    return ask, Shape(model, streams, said, num_top, _PACKED_REASONING in included, pads, spaces)


def counted_input(body: Mapping[str, Any]) -> Chat:
    """The conversation whose tokens are to be counted.

    Raises:
        Problem: 400, in a sentence that names the field.
    """
    given = honoured(body, COUNTED)
    return _chat(given, functions_of(given))


def _chat(given: Mapping[str, Any], functions: list[Function]) -> Chat:
    if "input" not in given:
        raise Problem(400, "input must be given", param="input")
    messages, may = conversation(given.get("instructions"), given["input"]), callable_names(given, functions)
    told = [{"name": one.told_name, **one.told} for one in functions if one.told_name in may]
    return Chat(messages, tuple({"type": "function", "function": one} for one in told), _options(given))


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the template is told of reasoning and of how much to say."""
    told = {
        "reasoning_effort": _text_in(given, "reasoning", "effort"),
        "verbosity": _text_in(given, "text", "verbosity"),
    }
    return template_options({**given, **{name: value for name, value in told.items() if value is not None}})


def _text_in(given: Mapping[str, Any], name: str, key: str) -> str | None:
    value = values.mapping(name, given.get(name, {})).get(key)
    return None if value is None else values.text(f"{name}.{key}", value)


def _included(given: Mapping[str, Any]) -> frozenset[str]:
    included = values.texts("include", values.listing("include", given.get("include", [])), 32)
    for i, one in enumerate(included):
        if one not in (_PROBABILITIES, _PACKED_REASONING, *_OF_OTHER_TOOLS):
            raise unsupported(f"include[{i}]", f"there are {_PROBABILITIES} and {_PACKED_REASONING}", one)
    return frozenset(included)


def _num_top(given: Mapping[str, Any], *, wanted: bool) -> int | None:
    number = values.whole("top_logprobs", given.get("top_logprobs", 0), 0, MAX_LOGPROBS)
    if number and not wanted:
        raise Problem(400, f"top_logprobs needs {_PROBABILITIES} in include", param="top_logprobs")
    return number if wanted else None


def _streams(given: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether the answer is a stream, and whether its events hide how long their text is."""
    streams = values.flag("stream", given.get("stream", False))
    options = values.mapping("stream_options", given.get("stream_options", {}))
    if options and not streams:
        raise Problem(400, "stream_options is for streams only", param="stream_options")
    return streams, values.flag("stream_options.include_obfuscation", options.get("include_obfuscation", False))


def _said(
    body: Mapping[str, Any],
    given: Mapping[str, Any],
    functions: list[Function],
    *,
    parallel: bool,
    num_top: int | None,
) -> dict[str, Any]:
    """The fields of the request that an answer repeats, also those that change nothing here."""
    metadata = values.mapping("metadata", given.get("metadata", {}))
    for name, value in metadata.items():
        values.text(f"metadata.{name:.64}", value)
    return {
        **{name: body[name] if type(body.get(name)) is kind else None for name, kind in _REPEATED.items()},
        "instructions": given.get("instructions"),
        "max_output_tokens": given.get("max_output_tokens"),
        "metadata": metadata,
        "parallel_tool_calls": parallel,
        "reasoning": {"effort": _text_in(given, "reasoning", "effort"), "summary": None},
        "text": {"format": {"type": "text"}},
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": [{"description": None, "parameters": None, "strict": None, **one.document} for one in functions],
        "top_logprobs": num_top or 0,
    }
