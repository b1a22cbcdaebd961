"""Functions in namespaces, for models that know a function by one name.

Clients put functions into groups: Codex does so with those of its sub-agents and of each MCP server. A model is told of
each under one name, made of both; a call goes to the client with the two names apart, and comes back with them in the
next request (openai 3.54.0, ``types/responses/namespace_tool.py``, ``response_function_tool_call.py``: namespace).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from splitinfer.server.problem import Problem

Tool = Mapping[str, Any]
"""A function in the flat form of responses, or a namespace with its ``tools``."""
_BETWEEN = "__"  # as Codex joins the names of MCP servers and tools; all that the API allows in a function's name


def told_name(namespace: str | None, name: str) -> str:
    """The one name of a function.

    >>> told_name("crm", "find"), told_name("mcp__files__", "read"), told_name(None, "find")
    ('crm__find', 'mcp__files__read', 'find')
    """
    return name if not namespace else f"{namespace.rstrip('_')}{_BETWEEN}{name}"


def flattened(tools: Sequence[Tool]) -> list[Tool]:
    """All functions, each under its one name. What a namespace says of itself is said with its first function.

    Raises:
        Problem: 400, two would have the same name.
    """
    found: list[Tool] = []
    for tool in tools:
        found += [tool] if tool["type"] == "function" else _in_namespace(tool)
    names = [one["name"] for one in found]
    for name in names:
        if names.count(name) > 1:
            raise Problem(400, f"two tools are called {name!r:.80}", param="tools")
    return found


def apart(tools: Sequence[Tool]) -> dict[str, tuple[str, str]]:
    """For the one name of each function in a namespace, the namespace and its name there."""
    return {
        told_name(tool["name"], function["name"]): (tool["name"], function["name"])
        for tool in tools
        if tool["type"] == "namespace"
        for function in tool["tools"]
    }


def _in_namespace(namespace: Tool) -> list[dict[str, Any]]:
    functions = [{**one, "name": told_name(namespace["name"], one["name"])} for one in namespace["tools"]]
    if functions and (said := namespace["description"]):
        functions[0]["description"] = f"{said}\n\n{functions[0].get('description', '')}".rstrip()
    return functions
