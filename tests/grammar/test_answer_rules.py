"""Rules of single answers: masks and forced tokens are functions of the tokens alone, and agree."""

import json

import pytest
from constrained import PROMPT, SCHEMA, admits, allowed, rules, schemas
from hypothesis import given
from hypothesis import strategies as st

from splitinfer import Grammar, SamplingParams
from splitinfer.errors import RequestError
from splitinfer.grammar.answer_rules import AnswerRules
from splitinfer.grammar.vocabulary import Thinking
from splitinfer.llm.forms import AnswerForms

END = 0
EVERY = frozenset(range(2048))


def written(walking: AnswerRules, draw: "st.DrawFn | None" = None, most: int = 200) -> list[int]:
    """An answer by the rules alone: of what may follow the last, or what ``draw`` takes."""
    answer = list[int]()
    while END not in answer and len(answer) < most:
        able = sorted(allowed(walking.masks(answer, len(answer))[0]))
        answer.append(able[0] if draw is None else draw(st.sampled_from(able)))
    return answer


@given(st.data(), schemas)
def test_masks_and_forced_tokens_agree_whatever_was_asked_before(
    made: AnswerForms, data: st.DataObject, schema: dict[str, object]
) -> None:
    params = SamplingParams(grammar=schema, max_tokens=300)
    answer = written(rules(made, params), data.draw, 120)
    fresh, wandering = rules(made, params), rules(made, params)
    masks = fresh.masks(answer, 0)
    for length in data.draw(st.lists(st.integers(0, len(answer)), max_size=8)):
        wrong = data.draw(st.lists(st.integers(0, 2047), max_size=3))
        admitted = wandering.admitted(answer[:length], wrong)
        before = [mask is None or token in allowed(mask) for token, mask in zip(wrong, masks[length:], strict=False)]
        assert not admitted or before[0]
        assert not wrong or wandering.refuses([*answer[:length], wrong[0]]) == (not before[0])
        forced = wandering.jump_forward(answer[:length], 5)
        assert list(forced) == answer[length : length + len(forced)]
        assert all(allowed(masks[length + i]) == {token} for i, token in enumerate(forced))
        assert wandering.masks(answer[:length], length) == masks[length : length + 1]
    assert len(wandering.admitted([], answer[:-1])) == len(answer) - 1


def test_json_has_no_blanks_unless_the_schema_wants_them(made: AnswerForms) -> None:
    forced = rules(made, SamplingParams(grammar=SCHEMA)).jump_forward([], 20)
    assert made._prompts.needed.decode(forced) == '{"name":"'
    flexible = {**SCHEMA, "x-guidance": {"whitespace_flexible": True}}
    after = made._prompts.needed.encode("{", adds_special=False)
    assert rules(made, SamplingParams(grammar=flexible)).admitted(
        after, made._prompts.needed.encode("\n", adds_special=False)
    )


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}, "x-guidance": {"lenient": True}}, "not"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}], "x-guidance": {"coerce_one_of": True}}, "oneOf"),
        ({"$ref": "https://example.org/schema"}, "example.org"),
        ({"enum": []}, "nsatisfiable"),
        (Grammar.json("false"), "nsatisfiable"),
        ({"$ref": "#"}, "no text that ends"),
        ({"type": "object", "minProperties": 2}, "minProperties of 2"),
        ({"type": "object", "properties": {"a": {"type": "integer", "required": True}}}, "required must be a list"),
        ({"type": "number", "multipleOf": 0.07}, "multiples of 0.07 have too many digits"),
        ({"const": 0.5, "multipleOf": 0.3}, "nsatisfiable"),
        ({"enum": ["a", "\u001b[0m"]}, "which no answer in a form has"),
        ({"properties": 5, "propertyNames": {"const": "a"}}, "not a JSON schema"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "object", "propertyNames": {"maxLength": 3, "pattern": "^a"}}, "propertyNames"),
        ({"type": "string", "pattern": "^(?=a)"}, "look"),
        (Grammar.lark('start: <|nobody|> "!"'), r"names <\|nobody\|>, but the model's special tokens are <\|end\|>"),
        (Grammar.regex("(?=a)b"), "look"),
        (Grammar.lark("start: nowhere"), "nowhere"),
        (Grammar.gbnf("root ::= nowhere"), "not GBNF: Rule 'nowhere' not found"),
        (Grammar.gbnf(r'root ::= "\ud800"'), "not GBNF: .* is not a character"),
        (Grammar.gbnf('other ::= "a"'), "not GBNF: No 'root' rule"),
        (Grammar.gbnf("".join(f"r{i} ::= r{i + 1}\n" for i in range(1001))), "may have 1,000 rules, not 1,001"),
        # Whoever looks at them by the square of their length takes minutes.
        (Grammar.json({"type": "string", "pattern": "[" * 250_000}), "regex"),
        (Grammar.gbnf("root ::= " + "[" * 250_000), "not GBNF"),
        (Grammar.gbnf("root ::= " + '"\\' * 125_000), "not GBNF"),
        (Grammar.gbnf("\n" * 250_000 + "x"), "not GBNF"),
    ],
)
def test_what_cannot_be_enforced_is_refused(made: AnswerForms, grammar: object, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        rules(made, SamplingParams(grammar=grammar))


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"format": "date"}, ["2024-02-29", "2000-02-29", "2023-12-31"], ["2023-02-29", "1900-02-29", "0000-01-01"]),
        ({"format": "date-time"}, ["2024-02-29T23:59:59.5Z"], ["2023-02-29T00:00:00Z", "2024-01-01T22:59:60Z"]),
        ({"format": "time"}, ["00:00:00+01:00"], ["23:58:60Z", "24:00:00Z"]),
        ({"format": "date", "pattern": "^20"}, ["2024-02-29"], ["1924-02-29", "2023-02-29"]),
        ({"format": "hostname"}, ["a.b-c.de", f"{'a' * 63}.b"], ["xn--X", "a..b", "-a", "a" * 64, "a" + ".b" * 127]),
        ({"format": "uri-reference"}, ["../a?b#c", "", "//h:80/x", "https://a.b/%20"], ["a b", "%2", "1:b", "\\"]),
        ({"format": "uri-template"}, ["/a/{b}{?c,d*}"], ["{a", "{}"]),
        ({"format": "json-pointer"}, ["", "/a~0b/0"], ["a", "/~2"]),
        ({"format": "relative-json-pointer"}, ["0#", "1/a"], ["/a", "01"]),
        ({"format": "regex"}, ["^(a|b)+\\d[a-z]*?$", "x{2}|."], ["(a", "a**", "[z-a]", "\\"]),
        ({"format": "password", "maxLength": 2}, ["a", "{}"], ["abc"]),
        ({"format": "cuid2", "pattern": "^[a-z]+$"}, ["ab"], ["A"]),
        ({"pattern": "^[a[b]$"}, ["[", "a", "b"], ["]"]),
        ({"pattern": "^[[:alpha:]]$"}, ["a]", ":]"], ["a", "b"]),
        ({"pattern": r"^[a&&\]b~~c][+--]$"}, ["&+", "~,", "]-", "a+"], ["a&", "+a"]),
        ({"pattern": r"^\s$"}, [" ", "\t", "\ufeff", "\u00a0", "\u3000"], ["\u0085", "a", "\u200b"]),
        ({"pattern": r"^\S$"}, ["a", "\u0085", "\u200b"], [" ", "\ufeff", "\u2028"]),
        ({"pattern": "^.$"}, ["a", "\u0085"], ["\n", "\r", "\u2028", "\u2029"]),
        ({"pattern": r"^[^\s,][\S-x][\s-]$"}, ["ab ", "-x-", "\u0085-\ufeff"], [" b ", ",a ", "a\ufeff ", "abw"]),
        ({"pattern": r"^[^][\d-f]$"}, ["\n-", "x7"], ["x:"]),
        ({"maxLength": 2.0, "minLength": 1.0}, ["ab"], ["", "abc"]),
        ({"then": {"maxLength": 1}, "else": False, "unevaluatedItems": True}, ["ab"], []),
        ({"if": {"maxLength": 1}}, ["ab"], []),
    ],
)
def test_texts_are_what_json_schema_says(made: AnswerForms, schema: object, right: list[str], wrong: list[str]) -> None:
    grammar = Grammar.json({"type": "array", "items": {"type": "string", **schema}, "uniqueItems": False})
    able = [value for value in (*right, *wrong) if admits(made, grammar, json.dumps([value], ensure_ascii=False))]
    assert able == right


NUMBERS = {"additionalProperties": {"type": "number"}}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        # A name that is declared comes once, however it could be spelt.
        ({"properties": {"age": {"const": 1}}}, ['{"age":1,"b":2}'], [r'{"age":1,"\u0061ge":2}', '{"age":2}']),
        ({"patternProperties": {"^a": {"const": 1}}}, ['{"ab":1}', '{"b":2}'], [r'{"\u0061b":2}', '{"ab":2}']),
        ({"propertyNames": {"type": "string"}, **NUMBERS}, ['{"x":1}'], ['{"x":true}']),
        ({"propertyNames": {"enum": ["x", "y"]}, **NUMBERS}, ['{"x":1}', "{}"], ['{"z":1}', '{"x":""}']),
        ({"propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"const": "x"}}}, ['{"x":1}'], ['{"y":1}']),
        ({"propertyNames": {"enum": ["b"]}, "properties": {"a": {}, "b": {"const": 1}}}, ['{"b":1}'], ['{"a":1}']),
        ({"propertyNames": {"pattern": "^[a-z]$"}, **NUMBERS}, ['{"x":1}'], ['{"X":1}', '{"x":""}']),
        ({"propertyNames": {"minLength": 2, "maxLength": 3}}, ['{"xy":1}'], ['{"x":1}', '{"wxyz":1}']),
        ({"properties": {"a": {"not": {}}}}, ['{"b":1}', "{}"], ['{"a":1}']),
        ({"enum": [0.5, 1.5, 0.3, "a"], "multipleOf": 0.25}, ["0.5", "1.5", '"a"'], ["0.3"]),
        ({"const": 0.5, "multipleOf": 0.25}, ["0.5"], []),
        ({"type": "number", "minimum": -3.4e38, "maximum": 3.4e38}, ["-1.5", "100000"], ["true"]),
        ({"type": "integer", "exclusiveMaximum": 2**64, "minimum": 0}, ["0", "77"], ["-1"]),
        ({"type": "array", "maxItems": 1, "uniqueItems": True}, ["[]", "[1]"], ["[1,1]"]),
    ],
)
def test_json_is_what_json_schema_says(made: AnswerForms, schema: object, right: list[str], wrong: list[str]) -> None:
    assert [value for value in (*right, *wrong) if admits(made, Grammar.json(schema), value)] == right


def test_special_tokens_of_lark_are_named_or_given_by_their_ids(made: AnswerForms) -> None:
    quoted = '"<|end|>" /<|end|>/ // "<|nobody|> \n'
    for written in ("<|end|>", "<[0]>"):
        walking = rules(made, SamplingParams(grammar=Grammar.lark(f'start: "a" {written} {quoted}')))
        ids = made._prompts.needed.encode("a", adds_special=False)
        assert allowed(walking.masks(ids, len(ids))[0]) == {END}


@pytest.mark.parametrize("grammar", ["{", "[1]", 3, {"a": {1, 2}}])
def test_what_is_no_grammar_is_refused(grammar: object) -> None:
    with pytest.raises(ValueError, match=r"grammar|schema"):
        SamplingParams(grammar=Grammar.json(grammar) if isinstance(grammar, str) else grammar)


def test_deep_schemas_are_refused() -> None:
    schema: dict[str, object] = {}
    for _ in range(500):
        schema = {"items": schema}
    with pytest.raises(ValueError, match="in each other"):
        SamplingParams(grammar=schema)


# -- reasoning -------------------------------------------------------------------------------------

THINK, CLOSE, WORDS = 1, (40, 41), (50, 51, 52)


def thoughtful(made: AnswerForms, close: tuple[int, ...] = CLOSE, **plan: object) -> AnswerRules:
    vocabulary = made._vocabulary
    thinking = Thinking((THINK,), close, close, WORDS)
    with_marks = type(vocabulary).__new__(type(vocabulary))
    with_marks.__dict__.update(vocabulary.__dict__, thinking=thinking)
    matcher = made._compiler.matcher(Grammar.choice(["king"]))
    return AnswerRules(with_marks, **{"matcher": matcher, "ends": frozenset([END]), **plan})


def test_reasoning_is_free_but_for_its_end(made: AnswerForms) -> None:
    walking = thoughtful(made, thinks=True)
    assert allowed(walking.masks([7, 7, 40, 7], 4)[0]) == EVERY - {END}
    king = made._prompts.needed.encode("king", adds_special=False)
    assert walking.jump_forward([7, 40, 41], 9) == tuple(king)
    assert walking.admitted([], [7, 40, 41, *king, 7]) == [False] * 3 + [True] * len(king)


def test_only_the_marker_s_own_tokens_end_reasoning_before_a_form(made: AnswerForms) -> None:
    """Its text in other tokens would end the reasoning for whoever reads the text."""
    tokens = made._vocabulary.tokens
    close = (tokens.index(b"the"), tokens.index(b"king"))
    marker = b"theking"
    letters = [tokens.index(marker[i : i + 1]) for i in range(len(marker))]
    walking = thoughtful(made, close, thinks=True)
    spelt = [7, *letters]
    masks = [allowed(mask) for mask in walking.masks(spelt, 0)]
    assert [token in mask for token, mask in zip(spelt, masks, strict=False)] == [True] * len(letters) + [False]
    assert walking.admitted([], spelt) == [False] * len(letters)
    assert not walking.refuses(spelt[:-1])
    assert walking.refuses(spelt)
    assert not walking.refuses([7, *close])
    assert close[1] in allowed(walking.masks([7, close[0]], 2)[0])
    ending = [i for i, raw in enumerate(tokens) if raw.startswith(marker[-1:])]
    assert not masks[-2].intersection(ending), "a token that begins with the marker's last letter may follow"
    free = thoughtful(made, close, thinks=True, matcher=None, budget=50)  # without a form nothing depends on it
    assert not free.refuses(spelt)


@pytest.mark.parametrize("budget", [0, 1, 3, 4, 9])
def test_a_budget_is_exact(made: AnswerForms, budget: int) -> None:
    walking, answer = thoughtful(made, thinks=True, budget=budget), list[int]()
    while not walking.jump_forward(answer, 1):
        answer.append(7)
    words = WORDS if budget >= len(WORDS) else ()
    assert len(answer) + len(words) == budget
    assert walking.jump_forward(answer, 5 + len(words))[: len(words) + 2] == (*words, *CLOSE)
    assert allowed(walking.masks(answer, len(answer))[0]) == {(*words, *CLOSE)[0]}


def test_a_budget_that_is_not_used_up_forces_nothing(made: AnswerForms) -> None:
    assert thoughtful(made, thinks=True, budget=9, matcher=None).jump_forward([7, *CLOSE, *[7] * 20], 9) == ()


def test_reasoning_may_be_opened_by_the_first_token_only(made: AnswerForms) -> None:
    walking = thoughtful(made, may_think=True, budget=5)
    assert THINK in allowed(walking.masks([], 0)[0])
    assert allowed(walking.masks([THINK], 1)[0]) == EVERY - {END}
    assert THINK not in allowed(thoughtful(made).masks([], 0)[0])


def test_no_end_before_min_tokens(made: AnswerForms) -> None:
    walking = rules(made, SamplingParams(min_tokens=2))
    masks = [allowed(mask) for mask in walking.masks([7, 7, 7], 0)]
    assert masks == [EVERY - {END}, EVERY - {END}, EVERY, EVERY]
    form_first = rules(made, SamplingParams(min_tokens=50, grammar=Grammar.choice(["king"])))
    assert written(form_first)[-1] == END
    assert rules(made, SamplingParams(min_tokens=1, stop_token_ids=(9,))).admitted([], [9, 3]) == []


def test_a_budget_changes_nothing_where_no_reasoning_is_marked(made: AnswerForms) -> None:
    assert made.rules(SamplingParams(thinking_budget=5), PROMPT, may_think=True) is None
