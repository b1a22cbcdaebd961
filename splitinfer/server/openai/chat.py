"""`POST /v1/chat/completions`: a request as an `Ask`, and an answer as a document or as chunks of a stream."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from splitinfer.core.sequence import MAX_LOGPROBS
from splitinfer.server import values
from splitinfer.server.ask import MAX_CHOICES, MAX_MESSAGES, MAX_TOOLS, Ask, Chat
from splitinfer.server.common_fields import BY_KEYS, CACHED, FOR_TEMPLATE, NAME, NOT_FORCED
from splitinfer.server.fields import (
    HONOURED,
    Honoured,
    Ignored,
    Kinds,
    Object,
    Refused,
    Size,
    Treatment,
    Values,
    honoured,
    is_empty,
    is_one_of,
)
from splitinfer.server.openai.messages import MESSAGES, template_messages
from splitinfer.server.problem import Problem, unsupported

MAX_STOPS = 16  # OpenAI's own limit is 4


def is_text_format(value: Any) -> bool:
    """Whether a response format asks for nothing but text."""
    return isinstance(value, dict) and value.get("type") == "text"


TEXT_FORMAT = Values(shown='`{"type": "text"}`', matches=is_text_format)
_NO_STORE = "nothing is stored here"
AT_MOST_THE_CONTEXT = Honoured("no more than the context has room for")
# of OpenAI's API ("Create a model response", metadata)
METADATA = Size(entries=16, names=64, characters=512)
MODEL = Honoured("any name; there is one model", size=NAME)
CACHE_KEY = replace(CACHED, size=NAME)
ONE_TIER = Ignored("there is one tier, and the answer says so; priority is the header X-Splitinfer-Priority")
CACHE_ROOM = Ignored("the cache keeps what it has room for")
NOT_HELD = Honoured("told to the model as it is; calls are not held to the schema")
_FUNCTION = Object(
    "A function",
    {
        "name": HONOURED,
        "description": HONOURED,
        "parameters": HONOURED,
        "strict": NOT_HELD,
        "return": FOR_TEMPLATE,
    },
)
TOOLS = Kinds(
    "Tools",
    "type",
    {
        "function": Honoured(
            inside=Object("A tool", {"type": HONOURED, "function": Honoured(inside=_FUNCTION), "cache_control": CACHED})
        ),
        "custom": Refused("tools are functions"),
    },
)
_ALLOWED = Object(
    "Allowed tools",
    {"mode": Honoured("auto"), "tools": Honoured("the others are not told to the model", size=Size(MAX_TOOLS))},
)
CHOICES = Kinds(
    "Choice of tools",
    "type",
    {
        "allowed_tools": Honoured(
            inside=Object("A choice of allowed tools", {"type": HONOURED, "allowed_tools": Honoured(inside=_ALLOWED)})
        ),
        "function": NOT_FORCED,
        "custom": NOT_FORCED,
    },
)
STREAM_OPTIONS = Object(
    "Options of a stream",
    {
        "include_usage": HONOURED,
        "include_obfuscation": Honoured("where it is true; without it nothing is added"),
        "continuous_usage_stats": Refused("usage comes once, at the end", is_one_of(False)),  # vLLM's
    },
)
# Not OpenAI's, but known by many servers and clients. These may have the values that they have there by default.
OF_OTHER_SERVERS: Mapping[str, Treatment] = {
    "top_k": HONOURED,
    "min_p": HONOURED,
    "repetition_penalty": HONOURED,
    "stop_token_ids": HONOURED,
    "ignore_eos": HONOURED,
    "min_tokens": Refused(
        "an answer ends where the model ends it, or with ignore_eos at its most tokens", is_one_of(0)
    ),
    "length_penalty": Refused("there is no search for answers", is_one_of(1, 1.0)),
    "use_beam_search": Refused("there is no search for answers", is_one_of(False)),
    "skip_special_tokens": Refused("special tokens are no text", is_one_of(True)),
    "spaces_between_special_tokens": Refused("special tokens are no text", is_one_of(True)),
    "include_stop_str_in_output": Refused("an answer ends before the text that stops it", is_one_of(False)),
    "priority": Refused("it is the header X-Splitinfer-Priority", is_one_of(0)),
    "cache_prompt": CACHED,
}
FIELDS: Mapping[str, Treatment] = {
    "model": MODEL,
    "messages": Honoured("text only", each=MESSAGES, size=Size(MAX_MESSAGES)),
    "max_tokens": AT_MOST_THE_CONTEXT,
    "max_completion_tokens": AT_MOST_THE_CONTEXT,
    "temperature": HONOURED,
    "top_p": HONOURED,
    "n": Honoured(f"at most {MAX_CHOICES}"),
    "seed": HONOURED,
    "stop": Honoured(f"at most {MAX_STOPS}"),
    "stream": HONOURED,
    "stream_options": Honoured(inside=STREAM_OPTIONS),
    "logprobs": HONOURED,
    "top_logprobs": HONOURED,
    "logit_bias": HONOURED,
    "presence_penalty": HONOURED,
    "frequency_penalty": HONOURED,
    "tools": Honoured("functions", each=TOOLS, size=Size(MAX_TOOLS)),
    "tool_choice": Honoured("auto and none, and which tools are allowed", CHOICES),
    "parallel_tool_calls": HONOURED,
    "reasoning_effort": FOR_TEMPLATE,
    "verbosity": FOR_TEMPLATE,
    "response_format": Refused("answers cannot be held to a format", TEXT_FORMAT),
    "audio": Refused("answers are text"),
    "modalities": Refused("answers are text", is_one_of(["text"])),
    "prediction": Refused("drafts come from the layout's draft model"),
    "web_search_options": Refused("nothing is searched for here"),
    "moderation": Refused("nothing is moderated here"),
    "functions": Refused("it is deprecated; give tools", is_empty),
    "function_call": Refused("it is deprecated; give tool_choice", is_one_of("none", "auto")),
    "store": Refused(_NO_STORE, is_one_of(False)),
    "metadata": Ignored(f"it is for finding what is stored, and {_NO_STORE}", METADATA),
    "user": BY_KEYS,
    "safety_identifier": BY_KEYS,
    "service_tier": ONE_TIER,
    "prompt_cache_key": CACHE_KEY,
    "prompt_cache_options": CACHE_ROOM,
    "prompt_cache_retention": CACHE_ROOM,
    **OF_OTHER_SERVERS,
    "chat_template_kwargs": HONOURED,
    "enable_thinking": FOR_TEMPLATE,
    "add_generation_prompt": Refused("a chat ends where its answer begins", is_one_of(True)),
    "continue_final_message": Refused("a chat ends where its answer begins", is_one_of(False)),
    "add_special_tokens": Refused("the model's template writes its own", is_one_of(False)),
    "echo": Refused("a chat has no text that could be repeated", is_one_of(False)),
    "best_of": Refused("answers are not ranked", is_one_of(1)),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """What a client is shown of an answer. ``num_top``: most likely tokens beside each; ``None``: no probabilities.
    ``pads``: chunks hide how long their text is. ``names_tier``: the tier of service is said."""

    model: str
    streams: bool = False
    includes_usage: bool = False
    num_top: int | None = None
    pads: bool = False
    names_tier: bool = False


def chat_ask(body: Mapping[str, Any], model: str = "") -> tuple[Ask, Shape]:
    """What a request asks, and in what shape. ``model``: the name in the answer where the request has none.

    Raises:
        Problem: 400, in a sentence that names the field.
    """
    given = honoured(body, FIELDS)
    tools, options = told_tools(given), template_options(given)
    if "messages" not in given:
        raise Problem(400, "messages must be given", param="messages")
    chat = Chat(template_messages(given["messages"]), tools, options)
    shape = replace(shape_of(given, _num_top(given), model), names_tier=body.get("service_tier") is not None)
    sampling = sampling_of(given) | ({} if shape.num_top is None else {"logprobs": shape.num_top})
    one_call = not values.flag("parallel_tool_calls", given.get("parallel_tool_calls", True))
    return Ask(chat, sampling, _max_tokens(given), num_choices(given), one_call), shape


def shape_of(given: Mapping[str, Any], num_top: int | None, model: str) -> Shape:
    """The shape of what is sent. ``model``: its name where the request has none."""
    streams = values.flag("stream", given.get("stream", False))
    options = values.mapping("stream_options", given.get("stream_options", {}))
    if options and not streams:
        raise Problem(400, "stream_options is for streams only", param="stream_options")
    usage = values.flag("stream_options.include_usage", options.get("include_usage", False))
    pads = values.flag("stream_options.include_obfuscation", options.get("include_obfuscation", False))
    return Shape(values.text("model", given.get("model", model)), streams, usage, num_top, pads)


def sampling_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of ``SamplingParams`` that have the same names in the API, checked for their types."""
    found: dict[str, Any] = {}
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        if name in given:
            found[name] = values.number(name, given[name])
    if "top_k" in given:
        found["top_k"] = max(0, values.whole("top_k", given["top_k"], -1, values.MOST_TOKENS))  # -1 is off elsewhere
    if "seed" in given:
        found["seed"] = values.whole("seed", given["seed"], -(2**63), 2**64 - 1) % 2**64
    if "stop" in given:
        found["stop"] = values.texts("stop", given["stop"], MAX_STOPS)
    if "stop_token_ids" in given:
        ids = values.listing("stop_token_ids", given["stop_token_ids"])
        found["stop_token_ids"] = tuple(values.whole("stop_token_ids", one, 0, values.MOST_TOKENS) for one in ids)
    if "ignore_eos" in given:
        found["ignore_eos"] = values.flag("ignore_eos", given["ignore_eos"])
    if "logit_bias" in given:
        found["logit_bias"] = values.biases("logit_bias", given["logit_bias"])
    return found


def num_choices(given: Mapping[str, Any]) -> int:
    """How many answers are wanted."""
    return values.whole("n", given.get("n", 1), 1, MAX_CHOICES)


def _max_tokens(given: Mapping[str, Any]) -> int | None:
    name = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
    return values.whole(name, given[name], 1, values.MOST_TOKENS) if name in given else None


def _num_top(given: Mapping[str, Any]) -> int | None:
    wanted = values.flag("logprobs", given.get("logprobs", False))
    if "top_logprobs" not in given:
        return 0 if wanted else None
    number = values.whole("top_logprobs", given["top_logprobs"], 0, MAX_LOGPROBS)
    if not wanted and number:
        raise Problem(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    return number if wanted else None


def told_tools(given: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """The functions that the model is told of: those that it may call, none where it shall not."""
    tools = [function_tool(f"tools[{i}]", one) for i, one in enumerate(values.listing("tools", given.get("tools", [])))]
    choice = given.get("tool_choice", "auto")
    if isinstance(choice, dict):
        name = "tool_choice.allowed_tools"
        names = [one["function"]["name"] for one in tools]
        may = allowed(name, values.mapping(name, choice.get("allowed_tools")), names, lambda one: one.get("function"))
        return tuple(one for one in tools if one["function"]["name"] in may)
    return tuple(tools) if may_call(choice) else ()


def may_call(choice: Any) -> bool:
    """Whether the model may call tools.

    Raises:
        Problem: 400, it shall have to.
    """
    if choice not in ("auto", "none"):
        raise unsupported("tool_choice", NOT_FORCED.why, choice)
    return bool(choice == "auto")


def allowed(
    name: str, given: Mapping[str, Any], known: Iterable[str], named: Callable[[Mapping[str, Any]], Any]
) -> frozenset[str]:
    """The names of the tools that a choice allows. ``named``: the object with the name in one of its entries.

    Raises:
        Problem: 400, the model shall have to call one of them, or there is none of a name.
    """
    if given.get("mode", "auto") != "auto":
        raise unsupported(f"{name}.mode", NOT_FORCED.why, given["mode"])
    found, there = set[str](), frozenset(known)
    for i, one in enumerate(values.listing(f"{name}.tools", given.get("tools"))):
        where = f"{name}.tools[{i}]"
        own = values.text(f"{where}.name", values.mapping(where, named(values.mapping(where, one))).get("name"))
        if own not in there:
            raise values.wrong(f"{where}.name", "the name of one of the tools", own)
        found.add(own)
    return frozenset(found)


def function_tool(name: str, given: Any) -> Mapping[str, Any]:
    """A function that the model may call, as templates know it. ``given``: as ``TOOLS`` has left it."""
    function = values.mapping(f"{name}.function", values.mapping(name, given).get("function"))
    values.text(f"{name}.function.name", function.get("name"))
    values.mapping(f"{name}.function.parameters", function.get("parameters", {}))
    return {"type": "function", "function": function}


def template_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """What the template is told beside the conversation: the client's own values, and how much to reason."""
    options = dict(values.mapping("chat_template_kwargs", given.get("chat_template_kwargs", {})))
    for name in options.keys() & {"messages", "tools", "tokenize", "add_generation_prompt", "chat_template"}:
        raise unsupported(f"chat_template_kwargs.{name}", "it is set by the request itself")
    if "enable_thinking" in given:
        options["enable_thinking"] = values.flag("enable_thinking", given["enable_thinking"])
    if "verbosity" in given:
        options["verbosity"] = values.text("verbosity", given["verbosity"])
    return options | effort_options(given.get("reasoning_effort"), options)


def effort_options(effort: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """What a template is told of how much to reason: its word, and whether to at all."""
    if effort is None:
        return {}
    word = values.text("reasoning_effort", effort)
    thinks = {} if "enable_thinking" in options else {"enable_thinking": word != "none"}
    return {"reasoning_effort": word, **thinks}
