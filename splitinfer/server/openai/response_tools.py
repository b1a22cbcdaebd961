"""The tools of a response: the functions that the model is told of.

Agents list tools of kinds that only OpenAI's servers run, beside the functions that they run themselves; these are left
out. Functions may also stand in namespaces (Codex's, for tools of MCP servers). Templates know names alone, so that the
model is told of ``namespace__name``; a call has both again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from splitinfer.server.ask import MAX_TOOLS
from splitinfer.server.fields import Fields, Ignored, Kinds, Refused
from splitinfer.server.openai.chat import NOT_HELD
from splitinfer.server.openai.generating import NOT_FORCED, Entries, allowed

_TOLD = ("description", "parameters", "strict")
_OTHER_TOOL = "the model sees functions only, so it never calls it"


def names_direct(callers: Any) -> bool:
    """Whether the model itself may call a tool."""
    return isinstance(callers, list) and "direct" in callers


class ResponseFunction(Fields):
    """A function of responses"""

    type: Literal["function"]
    name: str
    description: Any = Field(None, description="Shown to the model")
    parameters: dict[str, Any] | None = Field(None, description="Its schema, shown to the model")
    strict: Any = Field(None, description=NOT_HELD)
    defer_loading: Annotated[Any, Ignored("the model sees all functions from the start")] = None
    output_schema: Annotated[Any, Ignored("the result of a call is read as text")] = None
    allowed_callers: Annotated[
        Any,
        Refused("only the model calls tools; nothing else runs here", is_neutral=names_direct, said='["direct"]'),
    ] = None
    async_: Annotated[Any, Refused("an answer is made of finished calls", (False,)), Field(alias="async")] = None


class Namespace(Fields):
    """A namespace of functions"""

    type: Literal["namespace"]
    name: str = Field(description="The model sees its functions as `namespace__name`")
    description: Annotated[Any, Ignored("its functions have their own descriptions")] = None
    tools: Annotated[
        list[Annotated[ResponseFunction | None, Kinds("type", others=_OTHER_TOOL)]],
        Field(max_length=MAX_TOOLS, fail_fast=True),
    ]


class AllowedFunctions(Fields):
    """A choice of allowed functions"""

    type: Literal["allowed_tools"]
    mode: Annotated[Any, Refused(NOT_FORCED, ("auto",))] = "auto"
    tools: Entries = Field(description="The other tools are not shown to the model")


ResponseTools = Annotated[
    list[Annotated[ResponseFunction | Namespace | None, Kinds("type", others=_OTHER_TOOL)]],
    Field(max_length=MAX_TOOLS, fail_fast=True),
]
FunctionChoice = Annotated[
    str | AllowedFunctions, Kinds("type", words=("auto", "none"), no_words=NOT_FORCED)
]  # fmt: skip


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


def functions_of(
    tools: Sequence[ResponseFunction | Namespace | None], namespace: str | None = None
) -> list[Function]:  # fmt: skip
    """The functions of a request, also those in namespaces."""
    found: list[Function] = []
    for tool in tools:
        if isinstance(tool, Namespace):
            found += functions_of(tool.tools, tool.name)
        elif tool is not None:
            told = {name: getattr(tool, name) for name in _TOLD if name in tool.model_fields_set}
            found.append(Function(tool.name, told, namespace))
    return found


def callable_names(choice: str | AllowedFunctions, functions: Sequence[Function]) -> frozenset[str]:
    """The names of the functions that the model may call, as it is told them.

    Raises:
        Problem: 400, a choice allows one that is not there.
    """
    names = [one.told_name for one in functions]
    if isinstance(choice, str):
        return frozenset(names if choice == "auto" else ())
    return allowed("tool_choice", choice.tools, names)
