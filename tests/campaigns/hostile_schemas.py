"""A hundred schemas that nobody means well with: deep, wide, exponential, recursive, and huge regular expressions."""

from collections.abc import Iterator
from typing import Any

from splitinfer.core.grammar import Grammar

Form = dict[str, Any] | Grammar


def hostile() -> Iterator[Form]:
    """Twenty of each kind, the harder the later."""
    for n in range(1, 21):
        yield _deep(12 * n)
        yield _wide(500 * n)
        yield _exponential(3 * n)
        yield _recursive(3 * n)
        yield _pattern(n)


def _deep(depth: int) -> Form:
    schema: dict[str, Any] = {"type": "integer"}
    for number in range(depth):
        schema = {"type": "object", "properties": {f"p{number}": schema}, "required": [f"p{number}"]}
    return schema


def _wide(width: int) -> Form:
    names = [f"property_{i}" for i in range(width)]
    return {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": names[::2]}


def _exponential(depth: int) -> Form:
    """Each definition has the one below twice: 2**depth in all."""
    below = {
        f"d{i}": {"anyOf": [{"type": "array", "items": {"$ref": f"#/$defs/d{i - 1}"}}, {"$ref": f"#/$defs/d{i - 1}"}],
                  "allOf": [{"$ref": f"#/$defs/d{i - 1}"}, {"type": ["array", "integer"]}]}
        for i in range(1, depth + 1)
    }  # fmt: skip
    return {"$defs": {"d0": {"type": "integer"}, **below}, "$ref": f"#/$defs/d{depth}"}


def _recursive(count: int) -> Form:
    """Definitions that have all of each other, and themselves."""
    refs = [{"$ref": f"#/$defs/r{i}"} for i in range(count)]
    each = {"type": "object", "properties": {f"k{i}": {"anyOf": refs} for i in range(count)}}
    return {"$defs": {f"r{i}": each for i in range(count)}, "anyOf": refs}


def _pattern(n: int) -> Form:
    patterns = (
        f"(a|aa){{{500 * n}}}b",
        f"((x+x+){{{n}}}){{{n}}}y",
        "(" + "|".join(f"w{i}[a-z]{{1,{n}}}" for i in range(800 * n)) + ")*z",
        f"[a-z]*[a-m][a-z]{{{2 * n}}}",  # 2**n states, 40 at most
    )
    return Grammar.regex(patterns[n % 4])
