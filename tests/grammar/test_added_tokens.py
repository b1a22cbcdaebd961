"""A form that has the text of an added token is kept, whatever tokenizers and llguidance take that token for."""

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from constrained import PROMPT, allowed
from test_calls import FUNCTIONS, SYNTAXES, parsed
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from splitinfer import Grammar, SamplingParams
from splitinfer.grammar.answer_rules import AnswerRules
from splitinfer.grammar.calls import call_grammar
from splitinfer.llm.forms import AnswerForms
from splitinfer.text.tokenizer import Tokenizer as TextTokenizer

# -- tokenizers with added tokens of the shapes that models have -----------------------------------------

MARKUP = (
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
)
HTML = ("<b>", "</b>", "<h1>", "<table>", "<td>", "<br/>")
PIPES = ("<|im_start|>", "<|box|>", "<|tool|>")
SQUARE = ("[TOOL_CALLS]", "[ARGS]", "[INST]", "[/INST]")
NESTED = ("<b>", "<b><i>", "<<b>>", "<a>b>", "<b", "b>", "<tool_call>", "<tool_call>\n")
STRANGE = ("<a b>", "<>", "<\uff5cx\uff5c>", "\uff5cx\uff5c", "<é>", "<0x41>", "<[7]>", '<"q">', "<a\\b>", "<a/b>")
_WORDS = ("ab", "abc", "x<", "call", "tool", '":', '","', '{"', '"}', "name", "th", "in", "ink")
END = "<|end|>"


def byte_level(names: Sequence[str], **options: bool) -> Tokenizer:
    """As of GPT-2, Llama 3, Qwen, GLM, DeepSeek."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges, vocab = list[tuple[str, str]](), {letter: i for i, letter in enumerate(alphabet)}
    for word in _WORDS:
        for i in range(1, len(word)):
            if word[: i + 1] not in vocab:
                vocab[word[: i + 1]] = len(vocab)
                merges.append((word[:i], word[i]))
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return _with(made, names, **options)


def byte_fallback(names: Sequence[str], *, puts_blank: bool, **options: bool) -> Tokenizer:
    """As of Llama 2 (a blank is put before a text) and Gemma (its added tokens are in the vocabulary as well)."""
    letters = [chr(i) for i in range(33, 127)]
    pieces = [*(f"<0x{i:02X}>" for i in range(256)), "\u2581", *letters, *_WORDS, *([] if puts_blank else names)]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    merges = [(word[:i], word[i]) for word in _WORDS for i in range(1, len(word)) if word[: i + 1] in vocab]
    made = Tokenizer(models.BPE(vocab=vocab, merges=[pair for pair in merges if pair[0] in vocab], byte_fallback=True))
    blank = normalizers.Replace(" ", "\u2581")
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), blank]) if puts_blank else blank
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _with(made, names, **options)


def _with(made: Tokenizer, names: Sequence[str], **options: bool) -> Tokenizer:
    made.add_special_tokens([AddedToken(END, special=True)])
    settings = {"special": False, "normalized": False, **options}
    made.add_tokens([AddedToken(name, **settings) for name in names])
    return made


SHAPES: dict[str, tuple[tuple[str, ...], Callable[[Sequence[str]], Tokenizer]]] = {
    "markup": (MARKUP, byte_level),
    "markup, special": (MARKUP, lambda names: byte_level(names, special=True)),
    "pipes": (PIPES, byte_level),
    "pipes, special": (PIPES, lambda names: byte_level(names, special=True)),
    "square": (SQUARE, byte_level),
    "square, special": (SQUARE, lambda names: byte_level(names, special=True)),
    "names within names": (NESTED, byte_level),
    "strange names": (STRANGE, byte_level),
    "blanks are stripped": (MARKUP, lambda names: byte_level(names, lstrip=True, rstrip=True, normalized=True)),
    "byte fallback, in the vocabulary": (HTML, lambda names: byte_fallback(names, puts_blank=False)),
    "byte fallback, a blank before": (HTML, lambda names: byte_fallback(names, puts_blank=True)),
}
"""Eleven shapes: the names of the added tokens, and what makes the tokenizer."""


@dataclass
class Prompts:
    """What ``AnswerForms`` asks of a model's prompts."""

    tokenizer: TextTokenizer

    @property
    def eos_tokens(self) -> frozenset[int]:
        return self.tokenizer.eos_token_ids

    def end_tokens(self, _params: SamplingParams) -> frozenset[int]:
        return self.eos_tokens

    @property
    def needed(self) -> TextTokenizer:
        return self.tokenizer


def forms(folder: Path, made: Tokenizer) -> AnswerForms:
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return AnswerForms(Prompts(TextTokenizer.from_folder(folder)))  # type: ignore[arg-type]


# -- forms -----------------------------------------------------------------------------------------------

MOST = 400  # tokens of an answer
Form = Callable[[str], tuple[Grammar, Callable[[str], bool]]]


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
    "lark": lambda name: (Grammar.lark(f'start: "x" {json.dumps(name)} "y"'), lambda got: got == f"x{name}y"),
}


@pytest.fixture(scope="module", params=SHAPES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AnswerForms]:
    names, tokenizer = SHAPES[request.param]
    found = forms(tmp_path_factory.mktemp("shape"), tokenizer(names))
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
    return b"".join(tokenizer.token_bytes(token) for token in answer if token not in ends).decode()


def test_a_form_with_an_added_tokens_text_is_kept(made: AnswerForms) -> None:
    for i, name in enumerate(made.names):  # type: ignore[attr-defined]
        grammar, is_kept = [*FORMS.values()][i % len(FORMS)](name)
        answer = written(made, rules(made, grammar), i)
        assert is_kept(answer), (name, answer)


def test_forced_text_is_what_the_tokenizer_makes_of_it(made: AnswerForms) -> None:
    tokenizer = made._prompts.tokenizer
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
    found = forms(tmp_path, SHAPES["markup"][1](names))
    grammar = call_grammar(one, FUNCTIONS, found._as_lark)
    called = set()
    for seed in range(6):
        call = parsed(syntax, written(found, rules(found, grammar), seed))
        called.add(call["name"].removeprefix("functions."))
    found.close()
    assert called <= {function["name"] for function in FUNCTIONS}
    assert called
