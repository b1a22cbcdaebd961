"""The tools of a response: what becomes of them, and the functions that the model is told of.

Agents list tools of kinds that only OpenAI's servers run, beside the functions that they run themselves; these are left
out. Functions may also stand in namespaces (Codex's, for tools of MCP servers). Templates know names alone, so that the
model is told of ``namespace__name``; a call has both again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from splitinfer.server import values
from splitinfer.server.ask import MAX_TOOLS
from splitinfer.server.common_fields import NOT_FORCED
from splitinfer.server.fields import (
    HONOURED,
    LEFT_OUT,
    Honoured,
    Ignored,
    Kinds,
    Object,
    Refused,
    Size,
    Values,
    is_one_of,
)
from splitinfer.server.openai.chat import NOT_HELD, allowed, may_call

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
    "tool_search",
    "local_shell",
    "shell",
    "apply_patch",
    "computer",
    "computer_use",
    "computer_use_preview",
)
_TOLD = ("description", "parameters", "strict")

_BY_SERVERS = Ignored("left out: OpenAI's servers run it, and the model is not told of it")
_OTHER_TOOL = Ignored("left out: the model is told of functions only, and so never calls it")
_FUNCTION = Honoured(
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
)
_IN_NAMESPACES = Kinds(
    "Tools of a namespace", "type", {"function": _FUNCTION, "custom": _OTHER_TOOL}, others=_OTHER_TOOL
)
TOOLS = Kinds(
    "Tools of responses",
    "type",
    {
        "function": _FUNCTION,
        "namespace": Honoured(
            "its functions are told as `namespace__name`",
            Object(
                "A namespace of functions",
                {
                    "type": HONOURED,
                    "name": HONOURED,
                    "description": Ignored("its functions have descriptions of their own"),
                    "tools": Honoured(
                        "functions",
                        each=_IN_NAMESPACES,
                        size=Size(MAX_TOOLS),
                    ),
                },
            ),
        ),
        **dict.fromkeys(_HOSTED, _BY_SERVERS),
        **dict.fromkeys(_RUN_BY_CLIENTS, _OTHER_TOOL),
    },
    others=_OTHER_TOOL,
)
CHOICES = Kinds(
    "Choice of tools in responses",
    "type",
    {
        "allowed_tools": Honoured(
            inside=Object(
                "A choice of allowed functions",
                {
                    "type": HONOURED,
                    "mode": Honoured("auto"),
                    "tools": Honoured("the others are not told to the model", size=Size(MAX_TOOLS)),
                },
            )
        ),
        "function": NOT_FORCED,
        "custom": NOT_FORCED,
        "mcp": NOT_FORCED,
        **dict.fromkeys(_HOSTED, NOT_FORCED),
        **dict.fromkeys(_RUN_BY_CLIENTS, NOT_FORCED),
    },
)


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the client. ``told``: what the model is told of it beside its name."""

    name: str
    told: Mapping[str, Any]
    namespace: str | None = None

    @property
    def told_name(self) -> str:
        """The name that the model is told."""
        return told_name(self.name, self.namespace)

    @property
    def document(self) -> dict[str, Any]:
        """The function in this API's flat form."""
        return {"type": "function", "name": self.told_name, **self.told}


def told_name(name: str, namespace: str | None) -> str:
    """The one name of a function in a namespace.

    >>> told_name("search", None), told_name("search", "docs"), told_name("search", "mcp__docs__")
    ('search', 'docs__search', 'mcp__docs__search')
    """
    return name if namespace is None else f"{namespace.removesuffix('__')}__{name}"


def functions_of(given: Mapping[str, Any]) -> list[Function]:
    """The functions of a request, as ``TOOLS`` has left them.

    Raises:
        Problem: 400, one is malformed.
    """
    return _functions("tools", given.get("tools", []), None)


def _functions(name: str, given: Any, namespace: str | None) -> list[Function]:
    found: list[Function] = []
    for i, one in enumerate(values.listing(name, given)):
        if one is LEFT_OUT:
            continue
        where, tool = f"{name}[{i}]", values.mapping(f"{name}[{i}]", one)
        own = values.text(f"{where}.name", tool.get("name"))
        if tool["type"] == "namespace":
            found += _functions(f"{where}.tools", tool.get("tools"), own)
        else:
            values.mapping(f"{where}.parameters", tool.get("parameters", {}))
            found.append(Function(own, {key: tool[key] for key in _TOLD if key in tool}, namespace))
    return found


def callable_names(given: Mapping[str, Any], functions: Sequence[Function]) -> frozenset[str]:
    """The names of the functions that the model may call, as it is told them.

    Raises:
        Problem: 400, it shall have to call one, or there is none of a name.
    """
    choice, names = given.get("tool_choice", "auto"), [one.told_name for one in functions]
    if isinstance(choice, dict):
        return allowed("tool_choice", choice, names, lambda one: one)
    return frozenset(names if may_call(choice) else ())
