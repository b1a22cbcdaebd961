"""Harmony, the form in which gpt-oss models write answers: messages, each on a channel, and calls of tools as messages
to these ("OpenAI harmony response format", OpenAI's cookbook).

    <|channel|>analysis<|message|>The user wants ...<|end|><|start|>assistant<|channel|>final<|message|>It is ...
    <|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>

So *analysis* is reasoning, a message to ``functions.NAME`` is a call, and everything else is text: mlx-lm's state
machine tells them apart by the transitions given here. Conversations are written by the model's own template, which
takes one text beside a call, as reasoning, and drops that once the question is answered.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

_MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_ENDS = ("<|call|>", "<|return|>")
_FINAL = "<|channel|>final<|message|>"
THINKING = ("<|channel|>analysis<|message|>", _FINAL, "<|end|><|start|>assistant" + _FINAL)
"""What begins reasoning, what begins the final message, and all that leads from the one to it."""

_CALL = (" to=functions.", "tool")
_CHANNELS = [
    ("<|channel|>analysis", "header of reasoning"), ("<|channel|>commentary", "header"), ("<|channel|>final", "header"),
]  # fmt: skip
_NEXT = [("<|end|>", "normal"), ("<|start|>assistant", "header")]
TRANSITIONS = {
    "begin": [*_CHANNELS, *_NEXT, _CALL],
    "normal": [*_CHANNELS, *_NEXT],
    "header": [*_CHANNELS, _CALL, ("<|message|>", "normal")],
    "header of reasoning": [_CALL, ("<|message|>", "reasoning")],
    "reasoning": _NEXT,
    "tool": [("<|call|>", "normal"), ("<|end|>", "normal")],
}
_EFFORTS = {"none": "low", "minimal": "low", "low": "low", "medium": "medium"}  # others are high
_HEAD = re.compile(r"([\w.-]+)[^{]*<\|message\|>")


def reads_harmony(wrapper: Any) -> bool:
    """Have answers read as Harmony, if the tokenizer (mlx-lm's ``TokenizerWrapper``) has all its markers."""
    vocabulary = wrapper.get_vocab()
    if not all(marker in vocabulary for marker in _MARKERS):
        return False
    wrapper._response_format = {"transitions": TRANSITIONS, "initial_state": "begin"}
    wrapper._tool_parser, wrapper._tool_call_start, wrapper._tool_call_end = parse_tool_call, _CALL[0], ""
    wrapper.eos_token_ids = {*wrapper.eos_token_ids, *(vocabulary[marker] for marker in _ENDS)}
    return True


def parse_tool_call(text: str, _tools: Any = None) -> dict[str, Any]:
    """One call, as mlx-lm's parsers return it: ``NAME <|constrain|>json<|message|>{...}``.

    Raises:
        ValueError: it is not a call.
    """
    if (head := _HEAD.match(text)) is None:
        raise ValueError("that is not a message to a function")
    return {"name": head[1], "arguments": json.loads(text[head.end() :])}


def told(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as the model's template takes them."""
    return [_told(message) for message in messages]


def _told(message: Mapping[str, Any]) -> dict[str, Any]:
    made = {**message, "content": message.get("content") or ""}
    if message.get("role") == "assistant" and (thought := made.pop("reasoning_content", "")):
        made["thinking"] = thought
    if message.get("tool_calls") and made["content"]:
        made |= {"thinking": "\n\n".join(filter(None, (made.get("thinking"), made["content"]))), "content": ""}
    return made


def described(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool with the description that the template demands."""
    function = tool.get("function", {})
    return {**tool, "function": {**function, "description": function.get("description") or ""}}


def settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Values for the template, with one of its efforts."""
    effort = options.get("reasoning_effort")
    return {**options, **({} if effort is None else {"reasoning_effort": _EFFORTS.get(str(effort), "high")})}
