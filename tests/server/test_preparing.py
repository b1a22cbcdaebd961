"""What a prompt may cost: what cannot fit is refused before it is tokenized as a whole."""

from typing import Any

import pytest

from splitinfer.server.ask import MAX_MESSAGES, MAX_TOOLS, Chat, prompt_tokens
from splitinfer.server.problem import Problem

CONTEXT = 8192


class Letters:
    """A model whose tokens are runs of one letter; it counts what it tokenizes, in characters."""

    context_length = CONTEXT
    tokenizer = None

    def __init__(self) -> None:
        self.total = self.most = 0

    def encode(self, text: str) -> list[int]:
        self.total, self.most = self.total + len(text), max(self.most, len(text))
        return [1 for before, letter in zip(" " + text, text, strict=False) if before != letter]

    def render_chat(self, messages: Any, *, tools: Any = (), options: Any = None) -> str:
        del tools, options
        return "".join(message["content"] for message in messages)

    def encode_chat(
        self, messages: Any, *, tools: Any = (), options: Any = None, opens_answer: bool = True
    ) -> list[int]:
        del tools, options, opens_answer
        return [token for message in messages for token in self.encode(message["content"])]


def said(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize(
    "prompt",
    [
        "ab" * 10_000,  # too long, but soon tokenized: the engine says by how much
        "a" * 5_000_000,
        Chat((said("a" * 3_000_000), said("b" * 3_000_000))),
        Chat((said("x"),) * MAX_MESSAGES, ({"type": "function"},) * MAX_TOOLS),
        (7,) * 100_000,
    ],
)
def test_what_may_fit_is_tokenized(prompt: Any):
    assert prompt_tokens(Letters(), prompt)


@pytest.mark.parametrize(
    "prompt",
    [
        "ab" * 5_000_000,
        Chat((said("ab" * 5_000_000),)),
        Chat((said("x"),), ({"description": "ab" * 5_000_000},)),
        Chat((said("x"),), ({"parameters": {"ab" * 5_000_000: 1}},)),
        Chat((said("x"),), ({"parameters": {"enum": [int("12" * 2000)] * 1000}},)),
        Chat((said("x"),), options={"note": ["ab" * 5_000_000]}),
        Chat((said("x"),), options={"ab" * 5_000_000: True}),
    ],
)
def test_what_cannot_fit_is_refused_after_a_part_of_it(prompt: Any):
    llm = Letters()
    with pytest.raises(Problem, match="the prompt has over 16,384 tokens, but the context is 8,192") as caught:
        prompt_tokens(llm, prompt)
    assert caught.value.status == 400
    assert llm.total < 100_000
    assert llm.most <= 65_536


def test_a_conversation_has_no_more_messages_and_tools_than_templates_can_bear():
    for prompt, sentence in (
        (Chat((said("x"),) * (MAX_MESSAGES + 1)), "a conversation may have 4,096 messages, not 4,097"),
        (Chat((said("x"),), ({},) * (MAX_TOOLS + 1)), "a conversation may have 1,024 tools, not 1,025"),
    ):
        with pytest.raises(Problem, match=sentence):
            prompt_tokens(Letters(), prompt)
