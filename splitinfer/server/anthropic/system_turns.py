"""The system's turns among Anthropic's messages: words, and changes of what holds from there on.

A turn may hold for the user's next question only, add tools or take them away, and say with how much effort the model
shall answer (beta `mid-conversation-tool-changes`; anthropic 2.12.0, ``types/beta/beta_system_message_param.py``). What
counts for an answer is what holds at its end: the model is told of the tools that there are then.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from splitinfer.server import values
from splitinfer.server.anthropic.blocks import text_of
from splitinfer.server.fields import LEFT_OUT

_CHANGES = ("tool_addition", "tool_removal")
Tool = Mapping[str, Any]


def words_of(name: str, turn: Mapping[str, Any], *, user_follows: bool) -> str | None:
    """What a turn says; ``None``: nothing, or nothing any more. ``user_follows``: a turn of the user is behind it.

    Raises:
        Problem: 400, it is malformed.
    """
    clear_at, content = turn.get("clear_at", "never"), turn.get("content", "")
    if clear_at not in ("never", "next_user_message"):
        raise values.wrong(f"{name}.clear_at", "never or next_user_message", clear_at)
    if isinstance(content, list):
        content = [LEFT_OUT if _is_change(block) else block for block in content]
    text = text_of(f"{name}.content", content)
    is_over = clear_at != "never" and user_follows
    return text if text and not is_over else None


def changed_tools(
    tools: Sequence[Tool], turns: Sequence[Any], defined: Callable[[str, Any], Tool | None]
) -> list[Tool]:
    """The tools that there are behind all turns. ``defined``: reads one that is defined among them, under a name for
    its errors.

    Raises:
        Problem: 400, a change is malformed.
    """
    known = {_name(tool): tool for tool in tools}
    there = dict(known)
    for where, change in _changes(turns):
        tool = values.mapping(f"{where}.tool", change.get("tool"))
        if tool["type"] == "tool_definition":
            if (made := defined(f"{where}.tool.definition", tool.get("definition"))) is not None:
                known[_name(made)] = there[_name(made)] = made
            continue
        name = values.text(f"{where}.tool.name", tool.get("name"))
        if change["type"] == "tool_removal":
            there.pop(name, None)
        elif name in known:
            there[name] = known[name]
    return list(there.values())


def effort_of(turns: Sequence[Any], effort: Any) -> Any:
    """With how much effort the model shall answer: what the last turn says that says it, else ``effort``."""
    for turn in turns:
        config = turn.get("output_config") if isinstance(turn, dict) and turn.get("role") == "system" else None
        if isinstance(config, dict) and "effort" in config:
            effort = config["effort"]
    return effort


def _changes(turns: Sequence[Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The changes of tools, with their names."""
    return [
        (f"messages[{i}].content[{j}]", block)
        for i, turn in enumerate(turns)
        if isinstance(turn, dict) and turn.get("role") == "system" and isinstance(turn.get("content"), list)
        for j, block in enumerate(turn["content"])
        if _is_change(block)
    ]


def _is_change(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") in _CHANGES


def _name(tool: Tool) -> str:
    return str(tool["function"]["name"])
