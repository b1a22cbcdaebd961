"""Harmony, the form in which gpt-oss models write answers: messages, each on a channel, and calls of tools as messages
to these ("OpenAI harmony response format", OpenAI's cookbook).

    <|channel|>analysis<|message|>The user wants ...<|end|><|start|>assistant<|channel|>final<|message|>It is ...
    <|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>

So *analysis* is reasoning, a message to ``functions.NAME`` is a call, and everything else is text. The model varies
headers more than its template does, so ``SYNTAX`` is not found by rendering: an exception. Conversations are written by
the model's own template, which takes one text beside a call, as reasoning, and drops it when the question is answered.
"""

from collections.abc import Mapping
from typing import Any

from splitinfer.core.call_syntax import ARGUMENTS, NAME, AnswerSyntax, CallSyntax

_MARKERS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_ENDS = ("<|call|>", "<|return|>")
_FINAL = "<|channel|>final<|message|>"
THINKING = ("<|channel|>analysis<|message|>", _FINAL, "<|end|><|start|>assistant" + _FINAL)
"""What begins reasoning, what begins the final message, and all that leads from the one to it."""

_HEADER = r"(?:\s[^{<]*)?(?:<\|(?:channel|constrain)\|>[^{<]*)*<\|message\|>"
SYNTAX = AnswerSyntax(
    CallSyntax(
        f"{NAME} <|constrain|>json<|message|>{ARGUMENTS}",
        before="<|channel|>commentary to=functions.",
        head=rf"(?:<\|start\|>assistant)?(?:<\|channel\|>[a-z]+)?\s*to=functions\.(?P<name>{NAME})"
        rf"{_HEADER}",
    ),
    ("<|channel|>analysis<|message|>", "<|end|>"),
    (
        "<|start|>assistant",
        "<|channel|>final",
        "<|channel|>commentary",
        "<|constrain|>json",
        "<|message|>",
        *_MARKERS[4:],
    ),
    reasoning_name="thinking",
    takes_objects=True,
)
_EFFORTS = {"none": "low", "minimal": "low", "low": "low", "medium": "medium"}  # others are high


def reads_harmony(wrapper: Any) -> bool:
    """Return whether the tokenizer (mlx-lm's ``TokenizerWrapper``) has all of Harmony's markers, and have it end
    answers by them."""
    vocabulary = wrapper.get_vocab()
    if not all(marker in vocabulary for marker in _MARKERS):
        return False
    wrapper.eos_token_ids = {*wrapper.eos_token_ids, *(vocabulary[marker] for marker in _ENDS)}
    return True


def told(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as the model's template takes it."""
    made = {**message, "content": message.get("content") or ""}
    if message.get("tool_calls") and made["content"]:
        made |= {"thinking": "\n\n".join(filter(None, (made.get("thinking"), made["content"]))), "content": ""}
    return made


def described(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool with the description that the template demands."""
    function = tool.get("function", {})
    return {**tool, "function": {**function, "description": function.get("description") or ""}}


def settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return values for the template, with one of its efforts."""
    effort = options.get("reasoning_effort")
    return {**options, **({} if effort is None else {"reasoning_effort": _EFFORTS.get(str(effort), "high")})}
