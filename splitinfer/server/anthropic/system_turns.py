"""The system's turns among Anthropic's messages: words, and changes of what holds from there on.

A turn may hold for the user's next question only, add tools or take them away, and say with how much effort the model
shall answer (beta `mid-conversation-tool-changes`; anthropic 2.12.0, ``types/beta/beta_system_message_param.py``). What
counts for an answer is what holds at its end: the model is told of the tools that there are then.
"""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from splitinfer.server.anthropic.blocks import DefinedTool, Effort, SystemContent, Tool, ToolChange, text_of
from splitinfer.server.fields import Fields


class SystemTurn(Fields):
    """A system turn"""

    role: Literal["system"]
    content: SystemContent = ""
    clear_at: Literal["never", "next_user_message"] = Field(
        "never", description="`next_user_message` leaves the turn out when a user turn follows"
    )
    output_config: Effort | None = None

    def words(self, *, user_follows: bool) -> str | None:
        """What it says; ``None``: nothing, or nothing any more. ``user_follows``: a turn of the user is behind it."""
        if self.clear_at != "never" and user_follows:
            return None
        if isinstance(self.content, str):
            return self.content or None
        return text_of([block for block in self.content if not isinstance(block, ToolChange)]) or None

    @property
    def changes(self) -> list[ToolChange]:
        """Its changes of tools."""
        return [] if isinstance(self.content, str) else [one for one in self.content if isinstance(one, ToolChange)]


def changed_tools(tools: Sequence[Tool], turns: Sequence[SystemTurn]) -> list[Tool]:
    """The tools that there are behind all turns."""
    known = {tool.name: tool for tool in tools}
    there = dict(known)
    for change in (change for turn in turns for change in turn.changes):
        tool = change.tool
        if isinstance(tool, DefinedTool):
            if tool.definition is not None:
                known[tool.definition.name] = there[tool.definition.name] = tool.definition
        elif change.type == "tool_removal":
            there.pop(tool.name, None)
        elif tool.name in known:
            there[tool.name] = known[tool.name]
    return list(there.values())


def last_effort(turns: Sequence[SystemTurn], effort: str | None) -> str | None:
    """With how much effort the model shall answer: what the last turn says that says it, else ``effort``."""
    said = [turn.output_config.effort for turn in turns if turn.output_config is not None]
    return next((one for one in reversed(said) if one is not None), effort)
