"""`POST /v1/responses` and `/v1/responses/input_tokens`: a request as an `Ask`. Stateless: the whole conversation comes
with each request, and nothing is kept of it.

Agents list tools of kinds that only OpenAI's servers run, beside the functions that they run themselves; these are left
out, and the model is told of the functions.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from splitinfer.core.sequence import MAX_LOGPROBS
from splitinfer.server import values
from splitinfer.server.ask import Ask, Chat
from splitinfer.server.fields import (
    HONOURED,
    LEFT_OUT,
    Honoured,
    Ignored,
    Kinds,
    Object,
    Refused,
    Treatment,
    Values,
    honoured,
    is_empty,
    is_one_of,
)
from splitinfer.server.openai.chat import (
    AT_MOST_THE_CONTEXT,
    BY_KEYS,
    CACHE_ROOM,
    NOT_HELD,
    OF_OTHER_SERVERS,
    ONE_TIER,
    TEXT_FORMAT,
    allowed,
    may_call,
    sampling_of,
    template_options,
)
from splitinfer.server.openai.messages import CACHED, FOR_TEMPLATE
from splitinfer.server.openai.response_items import ITEMS, conversation
from splitinfer.server.problem import Problem, unsupported

_MOST_TOKENS = 2**31 - 1
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
_HOSTED = (
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
    "file_search",
    "code_interpreter",
    "image_generation",
    "mcp",
    "programmatic_tool_calling",
)
_RUN_BY_CLIENTS = (
    "custom",
    "namespace",
    "tool_search",
    "local_shell",
    "shell",
    "apply_patch",
    "computer",
    "computer_use",
    "computer_use_preview",
)
_OF_TOOLS = ("name", "description", "parameters", "strict")

_BY_SERVERS = Ignored("left out: OpenAI's servers run it, and the model is not told of it")
_OTHER_TOOL = Ignored("left out: the model is told of functions only, and so never calls it")
TOOLS = Kinds(
    "Tools of responses",
    "type",
    {
        "function": Honoured(
            inside=Object(
                "A function of responses",
                {
                    "type": HONOURED,
                    "name": HONOURED,
                    "description": HONOURED,
                    "parameters": HONOURED,
                    "strict": NOT_HELD,
                    "defer_loading": Ignored("the model is told of all functions at once"),
                    "output_schema": Ignored("what comes of a call is read as text"),
                    "allowed_callers": Refused(
                        "the model itself calls tools: nothing else runs here",
                        Values((), "a list with `direct`", lambda given: isinstance(given, list) and "direct" in given),
                    ),
                    "async": Refused("an answer is made of finished calls", is_one_of(False)),
                },
            )
        ),
        **dict.fromkeys(_HOSTED, _BY_SERVERS),
        **dict.fromkeys(_RUN_BY_CLIENTS, _OTHER_TOOL),
    },
    others=_OTHER_TOOL,
)
_NOT_FORCED = Refused("a model cannot be made to call a tool; auto and none are")
_CHOICES = Kinds(
    "Choice of tools in responses",
    "type",
    {
        "allowed_tools": Honoured(
            inside=Object(
                "A choice of allowed functions",
                {"type": HONOURED, "mode": Honoured("auto"), "tools": Honoured("the others are not told to the model")},
            )
        ),
        "function": _NOT_FORCED,
        "custom": _NOT_FORCED,
        "mcp": _NOT_FORCED,
        **dict.fromkeys(_HOSTED, _NOT_FORCED),
        **dict.fromkeys(_RUN_BY_CLIENTS, _NOT_FORCED),
    },
)
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
    "model": Honoured("any name; there is one model"),
    "input": Honoured("text, or messages, reasoning, calls and their results; text only", each=ITEMS),
    "instructions": HONOURED,
    "tools": Honoured("functions; other kinds are left out", each=TOOLS),
    "tool_choice": Honoured("auto and none, and which functions are allowed", _CHOICES),
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
    "metadata": Honoured("given back; nothing is stored"),
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
    "prompt_cache_key": CACHED,
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
    """

    model: str
    streams: bool = False
    said: Mapping[str, Any] = field(default_factory=dict)
    num_top: int | None = None
    packs_reasoning: bool = False
    pads: bool = False


def response_ask(body: Mapping[str, Any], model: str = "") -> tuple[Ask, Shape]:
    """What a request asks, and in what shape. ``model``: the name in the answer where the request has none.

    Raises:
        Problem: 400, in a sentence that names the field.
    """
    given = honoured(body, FIELDS)
    tools, parallel = _tools(given), values.flag("parallel_tool_calls", given.get("parallel_tool_calls", True))
    streams, pads = _streams(given)
    included = _included(given)
    num_top = _num_top(given, wanted=_PROBABILITIES in included)
    most = given.get("max_output_tokens")
    if most is not None:
        values.whole("max_output_tokens", most, 1, _MOST_TOKENS)
    sampling = sampling_of(given) | ({} if num_top is None else {"logprobs": num_top})
    ask = Ask(_chat(given, tools), sampling, most, one_call=not parallel)
    said = _said(given, tools, parallel=parallel, num_top=num_top)
    model = values.text("model", given.get("model", model))
    return ask, Shape(model, streams, said, num_top, _PACKED_REASONING in included, pads)


def counted_input(body: Mapping[str, Any]) -> Chat:
    """The conversation whose tokens are to be counted.

    Raises:
        Problem: 400, in a sentence that names the field.
    """
    given = honoured(body, COUNTED)
    return _chat(given, _tools(given))


def _chat(given: Mapping[str, Any], tools: list[Mapping[str, Any]]) -> Chat:
    if "input" not in given:
        raise Problem(400, "input must be given", param="input")
    messages = conversation(given.get("instructions"), given["input"])
    told = [{"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in tools]
    may = _callable(given, [tool["name"] for tool in tools])
    may_be_told = tuple(one for tool, one in zip(tools, told, strict=True) if tool["name"] in may)
    return Chat(messages, may_be_told, _options(given))


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


def _tools(given: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The functions, in this API's flat form."""
    tools = values.listing("tools", given.get("tools", []))
    return [_tool(f"tools[{i}]", one) for i, one in enumerate(tools) if one is not LEFT_OUT]


def _tool(name: str, given: Any) -> Mapping[str, Any]:
    tool = values.mapping(name, given)
    values.text(f"{name}.name", tool.get("name"))
    values.mapping(f"{name}.parameters", tool.get("parameters", {}))
    return {"type": "function", **{key: tool[key] for key in _OF_TOOLS if key in tool}}


def _callable(given: Mapping[str, Any], names: Sequence[str]) -> Collection[str]:
    """The names of the functions that the model may call."""
    choice = given.get("tool_choice", "auto")
    if isinstance(choice, dict):
        return allowed("tool_choice", choice, names, lambda one: one)
    return names if may_call(choice) else ()


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
    given: Mapping[str, Any], tools: list[Mapping[str, Any]], *, parallel: bool, num_top: int | None
) -> dict[str, Any]:
    """The fields of the request that an answer repeats. What a client left to the model's defaults is null."""
    metadata = values.mapping("metadata", given.get("metadata", {}))
    for name, value in metadata.items():
        values.text(f"metadata.{name:.64}", value)
    return {
        "instructions": given.get("instructions"),
        "max_output_tokens": given.get("max_output_tokens"),
        "metadata": metadata,
        "parallel_tool_calls": parallel,
        "reasoning": {"effort": _text_in(given, "reasoning", "effort"), "summary": None},
        "temperature": given.get("temperature"),
        "text": {"format": {"type": "text"}},
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": [{"parameters": None, "strict": None, **tool} for tool in tools],
        "top_logprobs": num_top or 0,
        "top_p": given.get("top_p"),
    }
