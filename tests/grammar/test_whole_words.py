"""Where a form has a few texts, only their own tokens are admitted: as the model's tokenizer splits them."""

import json

import pytest
from constrained import allowed, rules
from hypothesis import example, given
from hypothesis import strategies as st

from splitinfer import Grammar, SamplingParams
from splitinfer.grammar import answer_rules as rules_module
from splitinfer.llm.forms import AnswerForms

WORDS = st.text("aekingqust -é", min_size=1, max_size=12)


def answers(made: AnswerForms, grammar: object) -> list[list[int]]:
    """All answers that a form admits, each without its end."""
    walking, ends, found = rules(made, SamplingParams(grammar=grammar)), made._vocabulary.ends, list[list[int]]()
    left = [list[int]()]
    while left:
        answer = left.pop()
        for token in sorted(allowed(walking.masks(answer, len(answer))[0])):
            found += [answer] if token in ends else []
            left += [] if token in ends else [[*answer, token]]
    return found


def forces_others(made: AnswerForms, grammar: object, own: list[int]) -> bool:
    """Whether a form forces other tokens than these somewhere: those with which it begins another text, too."""
    walking = rules(made, SamplingParams(grammar=grammar))
    runs = ((at, walking.jump_forward(own[:at], len(own) - at)) for at in range(len(own)))
    return any(run != tuple(own[at : at + len(run)]) for at, run in runs)


def text(made: AnswerForms, tokens: list[int]) -> str:
    return b"".join(made._vocabulary.tokens[token] for token in tokens).decode()


def check(made: AnswerForms, grammar: object, texts: set[str]) -> None:
    """Every answer can be given, and has one way, its own tokens, unless the form forces a beginning that is split in
    another way."""
    found = answers(made, grammar)
    said = [text(made, one) for one in found]
    assert set(said) == texts
    for answer in sorted(texts):
        own = made._vocabulary.split(answer.encode())
        if not forces_others(made, grammar, own):
            assert own in found
            assert said.count(answer) == 1


@given(st.lists(WORDS, min_size=1, max_size=6, unique=True))
@example(["eg", "ege"])
@example(["t-gse", "t-gses", "t-gsesa"])  # "t-g" is forced; two of them are split "t-gs"
def test_a_choice_is_its_own_tokens(made: AnswerForms, texts: list[str]):
    check(made, Grammar.choice(texts), set(texts))


@given(st.lists(WORDS, min_size=2, max_size=6, unique=True))
@example(["iaa", "iag"])  # split "ia", "a" and "i", "ag"
def test_so_are_the_values_of_a_schema(made: AnswerForms, texts: list[str]):
    schema = {"type": "object", "properties": {"a": {"enum": texts}}, "required": ["a"], "additionalProperties": False}
    check(made, schema, {json.dumps({"a": one}, ensure_ascii=False, separators=(",", ":")) for one in texts})


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar.choice(["the king", "the queen", "a king"]),
        Grammar.regex("(yes|no|never), (sir|madam)"),
        {
            "type": "object",
            "properties": {"a": {"type": "boolean"}, "b": {"enum": [1, 12, "one"]}},
            "additionalProperties": False,
        },
        {"anyOf": [{"const": "warrior"}, {"const": "war"}, {"type": "null"}]},
    ],
)
def test_nothing_is_lost(made: AnswerForms, grammar: object, monkeypatch: pytest.MonkeyPatch):
    found = {text(made, one) for one in answers(made, grammar)}
    monkeypatch.setattr(rules_module, "whole_words", lambda _matcher, _vocabulary, mask, _before: mask)
    assert found == {text(made, one) for one in answers(made, grammar)}


@pytest.mark.parametrize(
    "schema", [{"type": "string"}, {"type": "integer"}, {"enum": [f"{i:04}x" for i in range(3000)]}]
)
def test_open_forms_are_left_as_they_are(made: AnswerForms, schema: object, monkeypatch: pytest.MonkeyPatch):
    start = made._vocabulary.split(b'"1')[:1]
    params = SamplingParams(grammar=schema)
    found = rules(made, params).masks(start, 0)
    monkeypatch.setattr(rules_module, "whole_words", lambda _matcher, _vocabulary, mask, _before: mask)
    assert found == rules(made, params).masks(start, 0)
