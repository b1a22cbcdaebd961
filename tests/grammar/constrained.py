"""A tiny random model with a real tokenizer, grammars for it, and what plain mlx-lm gives under their masks."""

import math
import shutil
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import numpy as np
import tiny
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from splitinfer import Grammar, SamplingParams
from splitinfer.core.rng import position_key
from splitinfer.demo import TARGET
from splitinfer.grammar.answer_rules import AnswerRules
from splitinfer.llm.forms import AnswerForms
from splitinfer.llm.prompts import Prompts
from splitinfer.models.folder.hub import open_model
from tests.text.templates import folder_with

VOCABULARY = 2048
PROMPT = [5, 90, 7, 300, 41, 8, 1000, 77, 3, 250, 60, 12]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["warrior", "magician", "shepherd"]},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "kind", "age", "tags"],
    "additionalProperties": False,
}


def save(folder: Path, name: str = "llama", **changes: Any) -> Path:
    """A random model with the built-in model's tokenizer: nothing but a mask makes it write JSON."""
    tiny.save(folder, name, **{"vocab_size": VOCABULARY, **changes})
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TARGET / file, folder / file)
    return folder


def save_with_markers(folder: Path, markers: Seq[str], template: str, *, special: bool) -> Path:
    """The same with more tokens and a chat template."""
    return folder_with(save(folder, vocab_size=VOCABULARY + len(markers)), template, markers, special=special)


def forms(folder: Path = TARGET) -> AnswerForms:
    return AnswerForms(Prompts(open_model(str(folder))))


@contextmanager
def open_forms() -> Iterator[AnswerForms]:
    """``forms`` of the built-in model, closed in the end."""
    made = forms()
    try:
        rules(made, SamplingParams(grammar={}))  # begins what lasts longer than one test
        yield made
    finally:
        made.close()


def rules(made: AnswerForms, params: SamplingParams) -> AnswerRules:
    found = made.rules(params, PROMPT, may_think=False)
    assert found is not None
    return found


def admits(made: AnswerForms, grammar: Grammar, text: str) -> bool:
    """Whether a text is an answer in a form."""
    matcher, tokens = made._compiler.matcher(grammar), made._prompts.needed.encode(text, adds_special=False)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def allowed(mask: bytes | None) -> set[int]:
    if mask is None:
        return set(range(VOCABULARY))
    return {int(i) for i in np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little").nonzero()[0]}


def plain(folder: Path, tokens: Seq[int], params: SamplingParams, end: int = 0, *, weighs: bool = True) -> list[int]:
    """What mlx-lm samples a token at a time, under each place's mask, with the random keys of the positions; of
    alternatives, the one whose tokens are the likeliest together."""
    model, _ = load_model(folder)
    model.set_dtype(mx.float32)
    cache, made = make_prompt_cache(model), forms(folder)
    walking = made.rules(params, tokens, may_think=False, weighs=weighs)
    made.close()

    def probability(text: Seq[int]) -> float:
        logits = model(mx.array([[*tokens, *answer, *text[:-1]]]))[0, -len(text) :]
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return math.exp(sum(logprobs[row, token].item() for row, token in enumerate(text)))

    def own(text: Seq[int], texts: Seq[Seq[int]]) -> float:
        """Its probability without that of the texts that it begins."""
        longer = [one for one in texts if one != text and one[: len(text)] == text]
        nearest = [one for one in longer if not any(one != other == one[: len(other)] for other in longer)]
        return probability(text) - sum(map(probability, nearest))

    answer, following = list[int](), mx.array([list(tokens)])
    while len(answer) < params.max_tokens and end not in answer:
        logits = model(following, cache=cache)[0, -1]
        if walking is not None:
            texts = walking.alternatives(answer)
            if texts and len(answer) + max(map(len, texts)) <= params.max_tokens:
                walking.decide(answer, max(texts, key=lambda text: own(text, texts)))
            able = allowed(walking.masks(answer, len(answer))[0])
            logits = mx.where(mx.array([token in able for token in range(VOCABULARY)]), logits, -mx.inf)
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        if params.temperature:
            key = mx.array(position_key(params.seed or 0, len(tokens) + len(answer)), dtype=mx.uint32)
            logprobs = logprobs * (1.0 / params.temperature) + mx.random.gumbel((VOCABULARY,), key=key)
        answer.append(int(mx.argmax(logprobs).item()))
        following = mx.array([[answer[-1]]])
    return answer


PATTERNS = ("^[a-z]{2,5}$", "^\\d{3}-\\d{4}$", "^(ab|cd)+$", "x.?y", "^[A-Z][a-z]*( [A-Z][a-z]*){0,2}$", "^\\S{1,4}$")
LEAVES: tuple[dict[str, Any], ...] = (
    {"type": "boolean"}, {"type": "null"}, {"type": "integer", "minimum": -5, "maximum": 250},
    {"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 99},
    {"type": "number", "minimum": 0, "maximum": 1}, {"type": "number", "exclusiveMinimum": -2.5, "maximum": 3.75},
    {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 8}, {"type": "string", "maxLength": 0},
    {"type": "string", "minLength": 3, "maxLength": 9}, {"type": "string", "maxLength": 20},
    {"enum": ["a", "the king", "ä ö", 3, 2.5, None, True, [1, 2], {"k": "v"}]},
    {"const": "yes"}, {"const": {"a": [1, None]}}, {"enum": [-1, 0, 1.5, 1e3]},
    {"enum": ["quote \" and \\ slash", "line\nbreak", "tab\t"]}, {"type": ["string", "null"], "maxLength": 4},
    {"type": ["integer", "boolean"], "minimum": 0, "maximum": 5},
)  # fmt: skip


def composed(drawn: Random, depth: int = 3) -> dict[str, Any]:
    """A schema made of others."""
    return {"$defs": {f"d{i}": _composed(drawn, 0) for i in range(3)}, **_composed(drawn, depth)}


def _composed(drawn: Random, depth: int) -> dict[str, Any]:
    kind = drawn.choice(("leaf", "object", "object", "array", "anyOf", "ref")) if depth else "leaf"
    match kind:
        case "object":
            names = drawn.sample(["id", "name", "the key", "x_1", "ä", "items", "type", "$ref2"], drawn.randint(0, 4))
            properties = {name: _composed(drawn, depth - 1) for name in names}
            required = [name for name in names if drawn.random() < 0.6]
            drawn.shuffle(required)
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case "array":
            low = drawn.randint(0, 2)
            return {
                "type": "array",
                "items": _composed(drawn, depth - 1),
                "minItems": low,
                "maxItems": low + drawn.randint(0, 2),
            }
        case "anyOf":
            return {"anyOf": [_composed(drawn, depth - 1) for _ in range(drawn.randint(1, 3))]}
        case "ref":
            return {"anyOf": [{"$ref": f"#/$defs/d{drawn.randint(0, 2)}"}, _composed(drawn, depth - 1)]}
    leaves = (*LEAVES, *({"type": "string", "pattern": one} for one in PATTERNS), {"type": "string", "format": "date"})
    return drawn.choice(leaves)


schemas = st.builds(composed, st.randoms(use_true_random=False), st.integers(0, 2))
