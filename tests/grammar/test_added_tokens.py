"""A form that has the text of an added token is kept, whatever tokenizers and llguidance take that token for."""

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import added_tokens
import pytest
from added_tokens import SHAPES
from constrained import PROMPT, allowed
from test_calls import FUNCTIONS, SYNTAXES, parsed

from splitinfer import Grammar, SamplingParams
from splitinfer.grammar.calls import call_grammar
from splitinfer.grammar.rules import AnswerRules
from splitinfer.llm.forms import AnswerForms

MOST = 400  # tokens of an answer
Form = Callable[[str], tuple[Grammar, Callable[[str], bool]]]


def _is(text: str) -> Callable[[str], bool]:
    return lambda answer: answer == text


def _object(name: str) -> tuple[Grammar, Callable[[str], bool]]:
    schema = {"type": "object", "properties": {name: {"const": 1}}, "required": [name], "additionalProperties": False}
    return Grammar.json(schema), lambda answer: json.loads(answer) == {name: 1}


FORMS: dict[str, Form] = {
    "const": lambda name: (Grammar.json({"const": f"{name}x{name}"}), lambda got: json.loads(got) == f"{name}x{name}"),
    "enum": lambda name: (
        Grammar.json({"enum": [f"{name}x", f"{name}y", "z"]}),
        lambda got: json.loads(got) in (f"{name}x", f"{name}y", "z"),
    ),
    "pattern": lambda name: (
        Grammar.json({"type": "string", "pattern": f"^a{re.escape(name)}[bc]$"}),
        lambda got: json.loads(got) in (f"a{name}b", f"a{name}c"),
    ),
    "a property's name": _object,
    "regex": lambda name: (
        Grammar.regex(f"{re.escape(name)}[0-9]"),
        lambda got: got[:-1] == name and got[-1].isdigit(),
    ),
    "choice": lambda name: (Grammar.choice([f"{name}a", f"b{name}"]), lambda got: got in (f"{name}a", f"b{name}")),
    "lark": lambda name: (Grammar.lark(f'start: "x" {json.dumps(name)} "y"'), _is(f"x{name}y")),
}


@pytest.fixture(scope="module", params=SHAPES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AnswerForms]:
    names, tokenizer = SHAPES[request.param]
    found = added_tokens.forms(added_tokens.save(tmp_path_factory.mktemp("shape"), tokenizer(names)))
    found.names = names  # type: ignore[attr-defined]
    rules(found, Grammar.choice(["a"]))  # begins what lasts longer than one test
    yield found
    found.close()


def rules(made: AnswerForms, grammar: Grammar) -> AnswerRules:
    found = made.rules(SamplingParams(grammar=grammar), PROMPT, may_think=False)
    assert found is not None
    return found


def written(made: AnswerForms, walking: AnswerRules, seed: int) -> str:
    """A random answer under the masks, forced tokens as drafts now and then, without its end."""
    drawn, answer = random.Random(seed), list[int]()
    ends = made._prompts.eos_tokens
    while len(answer) < MOST and not ends.intersection(answer):
        forced = walking.jump_forward(answer, 20) if drawn.random() < 0.5 else ()
        answer += forced or [drawn.choice(sorted(allowed(walking.masks(answer, len(answer))[0])))]
        assert not walking.refuses(answer), answer
    assert walking.failure is None
    tokenizer = made._prompts.tokenizer
    assert tokenizer is not None
    return b"".join(tokenizer.token_bytes(token) for token in answer if token not in ends).decode()


def _is_kept(made: AnswerForms, kind: str, name: str, seed: int) -> None:
    grammar, is_kept = FORMS[kind](name)
    answer = written(made, rules(made, grammar), seed)
    assert is_kept(answer), (name, answer)


def test_a_form_with_an_added_tokens_text_is_kept(made: AnswerForms) -> None:
    for i, name in enumerate(made.names):  # type: ignore[attr-defined]
        _is_kept(made, [*FORMS][i % len(FORMS)], name, i)


def test_forced_text_is_what_the_tokenizer_makes_of_it(made: AnswerForms) -> None:
    tokenizer = made._prompts.tokenizer
    assert tokenizer is not None
    for name in made.names:  # type: ignore[attr-defined]
        token = made._prompts.needed.encode(name, adds_special=False)[-1]
        forced = rules(made, Grammar.lark(f"start: {json.dumps(name)}")).jump_forward([], 50)
        assert b"".join(map(tokenizer.token_bytes, forced)).decode() == name
        is_text = token not in tokenizer.special_ids and tokenizer.token_bytes(token).decode() == name
        assert (forced == (token,)) == is_text, (name, forced)


@pytest.mark.parametrize("syntax", ["json", "tags", "pairs"])
def test_calls_parse_whatever_their_markers_are(syntax: str, tmp_path: Path) -> None:
    """As of Qwen and GLM, whose markers are one token that is not special."""
    one = SYNTAXES[syntax]
    names = sorted({*re.findall(r"</?[\w:|]+>|\[[A-Z_]+\]", " ".join(one.markers))})
    found = added_tokens.forms(added_tokens.save(tmp_path, SHAPES["markup"][1](names)))
    grammar = call_grammar(one, FUNCTIONS, found._as_lark)
    called = set()
    for seed in range(6):
        call = parsed(syntax, written(found, rules(found, grammar), seed))
        called.add(call["name"].removeprefix("functions."))
    found.close()
    assert called <= {function["name"] for function in FUNCTIONS}
    assert called
