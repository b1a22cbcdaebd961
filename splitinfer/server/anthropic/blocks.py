"""Blocks of Anthropic's messages: what becomes of their fields, and their text.

Text is in blocks of text, in documents that are text, and in results of a client's own search. Everything else is for
models that see, or was made by tools that Anthropic's servers run.
"""

from collections.abc import Mapping
from typing import Any

from splitinfer.server import values
from splitinfer.server.common_fields import CACHED
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
)


def _is_direct(caller: Any) -> bool:
    return isinstance(caller, dict) and caller.get("type") == "direct"


def _is_off(citations: Any) -> bool:
    return isinstance(citations, dict) and citations.get("enabled") in (None, False)


_TEXT_ONLY = Refused("the model is given text only")
_BY_SERVERS = Refused("only Anthropic's servers can run it, or read what came of it")
_NO_CITATIONS = Refused("answers do not cite", Values((), '`{"enabled": false}`', _is_off))
_BLOCK: Mapping[str, Treatment] = {"type": HONOURED, "cache_control": CACHED}
_TEXT = Honoured(
    inside=Object(
        "A block of text",
        {**_BLOCK, "text": HONOURED, "citations": Ignored("they say where the text is from, and are for people")},
    )
)
TEXTS = Kinds("Blocks of text", "type", {"text": _TEXT, "image": _TEXT_ONLY})
_CHANGED_TOOL = Kinds(
    "What a change of tools names",
    "type",
    {
        "tool_reference": Honoured(inside=Object("A tool by its name", {"type": HONOURED, "name": HONOURED})),
        "tool_definition": Honoured(
            inside=Object("A tool that is defined", {"type": HONOURED, "definition": Honoured("as one of `tools`")})
        ),
        "mcp_tool_reference": Refused("nothing is run here"),
        "mcp_toolset_reference": Refused("nothing is run here"),
    },
)
SYSTEM_BLOCKS = Kinds(
    "Blocks of the system",
    "type",
    {
        "text": _TEXT,
        "image": _TEXT_ONLY,
        "tool_addition": Honoured(
            "the model is told of the tool",
            Object("A block that adds a tool", {**_BLOCK, "tool": Honoured(inside=_CHANGED_TOOL)}),
        ),
        "tool_removal": Honoured(
            "the model is no longer told of the tool",
            Object("A block that removes a tool", {**_BLOCK, "tool": Honoured(inside=_CHANGED_TOOL)}),
        ),
    },
)
_SOURCES = Kinds(
    "Sources of a document",
    "type",
    {
        "text": Honoured(
            inside=Object("A text as a source", {"type": HONOURED, "data": HONOURED, "media_type": HONOURED})
        ),
        "content": Honoured(
            inside=Object("Blocks as a source", {"type": HONOURED, "content": Honoured("text, or blocks", each=TEXTS)})
        ),
        "base64": _TEXT_ONLY,
        "url": Refused("nothing is fetched here"),
        "file": Refused("nothing is stored here"),
    },
)
_DOCUMENT = Honoured(
    "text",
    Object(
        "A document",
        {
            **_BLOCK,
            "title": HONOURED,
            "context": HONOURED,
            "source": Honoured(inside=_SOURCES),
            "citations": _NO_CITATIONS,
        },
    ),
)
_SEARCH_RESULT = Honoured(
    inside=Object(
        "A result of a search",
        {
            **_BLOCK,
            "title": HONOURED,
            "source": HONOURED,
            "content": Honoured(each=TEXTS),
            "citations": _NO_CITATIONS,
        },
    )
)
_IN_RESULTS = Kinds(
    "Blocks of a result",
    "type",
    {
        "text": _TEXT,
        "document": _DOCUMENT,
        "search_result": _SEARCH_RESULT,
        "tool_reference": Honoured(
            "its name; the model is told of all tools at once",
            Object("A reference to a tool", {**_BLOCK, "tool_name": HONOURED}),
        ),
        "image": _TEXT_ONLY,
        "browser_state": _TEXT_ONLY,
    },
)
_BY_MODEL = Refused(
    "the model itself calls tools: nothing else runs here", Values((), '`{"type": "direct"}`', _is_direct)
)
_NO_TOOLSET = Refused("toolsets are known to Anthropic's models only")
BLOCKS = Kinds(
    "Blocks of a message",
    "type",
    {
        "text": _TEXT,
        "document": _DOCUMENT,
        "search_result": _SEARCH_RESULT,
        "thinking": Honoured(
            inside=Object(
                "A block of thinking",
                {
                    "type": HONOURED,
                    "thinking": HONOURED,
                    "signature": Ignored("it proves to Anthropic whose thinking it is"),
                },
            )
        ),
        "redacted_thinking": Ignored("left out: nobody but its author can read it"),
        "tool_use": Honoured(
            inside=Object(
                "A block with a call",
                {
                    **_BLOCK,
                    "id": HONOURED,
                    "name": HONOURED,
                    "input": HONOURED,
                    "caller": _BY_MODEL,
                    "toolset_name": _NO_TOOLSET,
                },
            )
        ),
        "tool_result": Honoured(
            inside=Object(
                "A block with a result",
                {
                    **_BLOCK,
                    "tool_use_id": HONOURED,
                    "content": Honoured("text, or blocks", each=_IN_RESULTS),
                    "is_error": Honoured("where there is no text that says it"),
                    "toolset_name": _NO_TOOLSET,
                },
            )
        ),
        "image": _TEXT_ONLY,
        "container_upload": _BY_SERVERS,
        "server_tool_use": _BY_SERVERS,
        "web_search_tool_result": _BY_SERVERS,
        "web_fetch_tool_result": _BY_SERVERS,
        "code_execution_tool_result": _BY_SERVERS,
        "bash_code_execution_tool_result": _BY_SERVERS,
        "text_editor_code_execution_tool_result": _BY_SERVERS,
        "tool_search_tool_result": _BY_SERVERS,
    },
)


def text_of(name: str, content: Any) -> str:
    """Text, or the text of blocks, as ``honoured`` has left them.

    Raises:
        Problem: 400, a block is malformed.
    """
    if isinstance(content, str):
        return content
    blocks = enumerate(values.listing(name, content))
    return "\n".join(block_text(f"{name}[{i}]", one) for i, one in blocks if one is not LEFT_OUT)


def block_text(name: str, given: Any) -> str:
    """The text of one block.

    Raises:
        Problem: 400, it is malformed.
    """
    block = values.mapping(name, given)
    match block["type"]:
        case "document":
            return _with_heading(name, block, ("title", "context"), _source_text(f"{name}.source", block.get("source")))
        case "search_result":
            text = text_of(f"{name}.content", block.get("content"))
            return _with_heading(name, block, ("title", "source"), text)
        case "tool_reference":
            return values.text(f"{name}.tool_name", block.get("tool_name"))
        case _:
            return values.text(f"{name}.text", block.get("text"))


def _source_text(name: str, given: Any) -> str:
    source = values.mapping(name, given)
    if source["type"] == "text":
        return values.text(f"{name}.data", source.get("data"))
    return text_of(f"{name}.content", source.get("content"))


def _with_heading(name: str, block: Mapping[str, Any], fields: tuple[str, ...], text: str) -> str:
    heading = [values.text(f"{name}.{field}", block[field]) for field in fields if field in block]
    return "\n".join([*heading, text])
