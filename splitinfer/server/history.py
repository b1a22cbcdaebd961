"""Replaces the blocks of a history that this server or its model cannot read by sentences. Pure.

Each request brings its whole conversation, and a block stays in the history. So if one block were refused, the
conversation could never go on. A request is refused only for the user's last message; any other block becomes a
sentence with as much as it says.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BeforeValidator, TypeAdapter, ValidationError

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


def history(mended: Callable[[dict[str, Any], bool], dict[str, Any]]) -> BeforeValidator:
    """Return an annotation for a conversation's list: replaces each object by ``mended(object, was just sent)``. Only
    the last message was just sent, and only if it is the user's."""

    def read(given: Any) -> Any:
        if not isinstance(given, list):
            return given
        last = len(given) - 1
        return [
            mended(one, i == last and one.get("role") == "user") if isinstance(one, dict) else one
            for i, one in enumerate(given)
        ]

    return BeforeValidator(read)


def told(message: dict[str, Any], taken: Taken, field: str = "content") -> dict[str, Any]:
    """Return a message with a sentence in place of each block of ``field`` that is not taken. The assistant's blocks
    are joined without a break, so there the sentence ends with one."""
    if not isinstance(content := message.get(field), list):
        return message
    end = "\n" if message.get("role") == "assistant" else ""
    blocks = [one if taken(one) else {"type": "text", "text": sentence(one) + end} for one in content]
    return {**message, field: blocks}


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
