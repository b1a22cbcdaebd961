"""Conversations in forms that narrower chat templates take.

APIs let the system speak anywhere, and agents remind the model of things in the middle. Templates differ: some know no
system message, or refuse one that is not the first (QwenLM/Qwen3.8 #244; Claude Code fails by it, ollama/ollama
#17774), and some of these also refuse two turns of the user in a row. So where a template refuses a conversation, it is
given it once more with these as the user's words. They stay where they are: moved to the front, every reminder would
change the beginning of the prompt, whose KV is in the cache.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_BETWEEN = "\n\n"


def simpler_forms(messages: Sequence[Mapping[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Forms of a conversation that more templates take, the closest first; none if it has no system messages.

    >>> said = [("system", "s"), ("user", "u"), ("system", "t")]
    >>> for form in simpler_forms([{"role": role, "content": text} for role, text in said]):
    ...     [(one["role"], one["content"]) for one in form]
    [('system', 's'), ('user', 'u\\n\\nt')]
    [('user', 's\\n\\nu\\n\\nt')]
    """
    first, rest = list(messages[:1]), messages[1:]
    if any(message.get("role") == "system" for message in rest):
        yield _joined([*first, *map(_as_user, rest)])
    if first and first[0].get("role") == "system":
        yield _joined(list(map(_as_user, messages)))


def _as_user(message: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**message, "role": "user"} if message.get("role") == "system" else message


def _joined(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with turns of the user that follow each other as one."""
    made: list[dict[str, Any]] = []
    for message in messages:
        if made and made[-1].get("role") == message.get("role") == "user":
            made[-1]["content"] = _BETWEEN.join((made[-1].get("content") or "", message.get("content") or ""))
        else:
            made.append(dict(message))
    return made
