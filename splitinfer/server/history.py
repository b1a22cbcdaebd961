"""Replaces the blocks of a history that this server or its model cannot read by sentences. Pure.

Each request brings its whole conversation, and a block stays in the history. So if one block were refused, the
conversation could never go on. A request is refused only for the user's last message; any other block becomes a
sentence with as much as it says.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

NO_PICTURE = "[a picture, which this model cannot see]"
_MOST_TOLD = 2000  # characters of a block's text
_UNTOLD = frozenset(
    {"type", "id", "call_id", "tool_use_id", "status", "signature", "data", "encrypted_content", "caller", "file_data"}
)  # only their author reads these

Taken = Callable[[Any], bool]


def taken_by(kinds: Any) -> Taken:
    """Return a function that tells whether a block is one of ``kinds``, a type that pydantic knows."""
    known = TypeAdapter[Any](kinds)

    def taken(block: Any) -> bool:
        if not isinstance(block, dict) or (block.get("type") == "text" and isinstance(block.get("text"), str)):
            return True
        try:
            known.validate_python(block)
        except ValidationError:
            return False
        return True

    return taken


def told(content: Any, taken: Taken, role: str = "", inside: Taken | None = None) -> Any:
    """Return a message's content with a sentence in the place of each block that is not taken; other content than a
    list of blocks does not change. ``role``: the assistant's blocks are written without a break between them.
    ``inside``: decides of the blocks in a block, such as a tool's result."""

    def read(block: Any) -> Any:
        if taken(block):
            return block
        mended = {**block, "content": told(block["content"], inside)} if inside and "content" in block else block
        end = "\n" if role == "assistant" else ""
        return mended if taken(mended) else {"type": "text", "text": sentence(block) + end}

    return [*map(read, content)] if isinstance(content, list) else content


def sentence(block: Mapping[str, Any]) -> str:
    """Return the sentence in the place of a block.

    >>> sentence({"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}})
    '[server tool use: {"name": "web_search", "input": {"query": "x"}}]'
    >>> sentence({"type": "document", "title": "a.pdf", "source": {"type": "base64", "data": "..."}})
    '[a document, which this model cannot read: {"title": "a.pdf"}]'
    """
    kind, rest = f"{block.get('type') or 'block'}", _says(block)
    words = next((what for name, what in _MEDIA.items() if name in kind), None)
    if words is not None:
        rest = {} if words is NO_PICTURE else {key: rest[key] for key in ("title", "filename") if key in rest}
    more = f": {json.dumps(rest, ensure_ascii=False)[:_MOST_TOLD]}" if rest else ""
    return f"[{(words or kind.replace('_', ' ')).strip('[]')}{more}]"


_MEDIA = {
    "image": NO_PICTURE,
    "document": "a document, which this model cannot read",
    "file": "a document, which this model cannot read",
    "audio": "a recording, which this model cannot hear",
    "video": "a film, which this model cannot see",
}


def _says(value: Any) -> Any:
    """Return a value without the fields that only its author reads, and without fields that are then empty."""
    if isinstance(value, list):
        return [said for one in value if (said := _says(one)) not in ({}, [], "", None)]
    if not isinstance(value, Mapping):
        return value
    found = {name: _says(one) for name, one in value.items() if name not in _UNTOLD}
    return {name: one for name, one in found.items() if one not in ({}, [], "", None)}
