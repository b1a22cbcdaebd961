"""Events whose length says little of what is in them.

Over TLS an observer sees how long each event is, and so how long each token (Weiss and others, "What Was Your Prompt? A
Remote Keylogging Attack on AI Assistants", USENIX Security 2024). Who asks for it gets a field of random letters that
makes the length of an event a multiple of ``STEP``.
"""

import json
import secrets
from collections.abc import Mapping
from typing import Any

STEP = 64  # bytes; a field without letters has 18


def padded(data: Mapping[str, Any]) -> dict[str, Any]:
    """The data of an event with its padding.

    >>> {len(json.dumps(padded({"delta": "a" * n}), separators=(",", ":"))) % STEP for n in range(200)}
    {0}
    """
    empty = {**data, "obfuscation": ""}
    written = json.dumps(empty, ensure_ascii=False, separators=(",", ":"))  # as `stream.event` writes it
    missing = -len(written.encode("utf-8", "replace")) % STEP
    return {**data, "obfuscation": secrets.token_urlsafe(missing)[:missing]}
