"""Calls between a model's markers, as a whole or not at all.

mlx-lm's parsers search: they take what they find, and what stands beside it is gone; a file that contains the word that
ends a value would be cut there. So the text is first cut into calls, by what the syntax says a call looks like
(``SHAPES``), with nothing but space between them; each is parsed alone. A value goes on until a word that ends it
stands where the next argument begins or the call ends; such words inside it are hidden from the parser, and put back.

Syntaxes have the names of mlx-lm's parsers. A syntax that is not listed here is left to its parser.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_HIDDEN = "\ufdd2{}\ufdd3"
_JSON = json.JSONDecoder()
_OF_JSON = frozenset({"json_tools", "longcat", "glm47", "laguna", "mistral"})  # whose calls may be JSON alone


@dataclass(frozen=True, slots=True)
class Shape:
    """One call, as regular expressions: what begins it, what begins an argument's value and what ends one (``None``:
    the arguments are a JSON value), and what ends the call. ``words``: those that a parser finds in values, too.
    ``ends``: texts that end a value, and a call."""

    head: str
    argument: tuple[str, str] | None = None
    tail: str = ""
    words: tuple[str, ...] = ()
    ends: tuple[str, str] = ("", "")


_GLM = r"<{0}arg_key>(?:(?!</{0}arg_key>).)*</{0}arg_key>(?:\\n|\s)*<{0}arg_value>"
_NAMED = r"(?:(?!<\|sep\|>).)*<\|sep\|>"
SHAPES: Mapping[str, Shape] = {
    "qwen3_coder": Shape(
        r"<function=[^\s<>]+>?", (r"<parameter=[^<>]*>", "</parameter>"), "</function>",
        ("</parameter>", "</function>"), ("</parameter>", "</function>"),
    ),
    "glm47": Shape(
        r"[\w.-]+", (_GLM.format(""), "</arg_value>"), r"\Z", ("<arg_key>", "</arg_value>"), ("</arg_value>", "")
    ),
    "longcat": Shape(
        r"[\w.-]+", (_GLM.format("longcat_"), "</longcat_arg_value>"), r"\Z", ("</longcat_arg_value>",),
        ("</longcat_arg_value>", ""),
    ),
    "minimax_m2": Shape(
        r"<invoke name=[^<>]+>",
        (r"<parameter name=[^<>]+>", "</parameter>"),
        "</invoke>",
        ("</parameter>", "</invoke>"),
        ("</parameter>", "</invoke>"),
    ),
    "minicpm5": Shape(
        r"(?:<function\s+)?(?:name\s*=\s*)?(?:\"[^\"]*\"|'[^']*'|[^\s\"'<>]+)\s*>",
        (r"<param\s+name\s*=\s*[^<>]+>", "</param>"),
        r"(?:</function>|\Z)",
        ("</param>", "</function>"),
        ("</param>", "</function>"),
    ),
    "muse_spark": Shape(
        r"<atem:invoke\b[^<>]*>",
        (r"<atem:parameter\b[^<>]*>", "</atem:parameter>"),
        r"(?:</atem:invoke>|\Z)",
        ("</atem:parameter>", "</atem:invoke>"),
        ("</atem:parameter>", "</atem:invoke>"),
    ),
    "kimi_k3": Shape(
        r"<\|open\|>call" + _NAMED,
        (r"<\|open\|>(?:argument|json)" + _NAMED, r"<\|close\|>(?:argument|json)<\|sep\|>"),
        r"<\|close\|>call<\|sep\|>",
        ("<|close|>argument<|sep|>", "<|close|>json<|sep|>", "<|close|>call<|sep|>"),
        ("<|close|>argument<|sep|>", "<|close|>call<|sep|>"),
    ),
    "mistral": Shape(r"[\w-]+\s*\[ARGS\]\s*", words=("[ARGS]",)),
    "kimi_k2": Shape(
        r"(?:<\|tool_call_begin\|>)?\s*[^\s<>]+:\d+\s*<\|tool_call_argument_begin\|>\s*",
        tail=r"(?:<\|tool_call_end\|>|\Z)",
        words=("<|tool_call_end|>", "<|tool_call_argument_begin|>"),
        ends=("", "<|tool_call_end|>"),
    ),
    "harmony": Shape(r"[\w.-]+[^{]*?<\|message\|>", tail=r"\Z"),
}  # fmt: skip
_QUOTED_ARGUMENTS = re.compile(r"""\s*\[[\w.]+\((?:\w+=(?:"[^"]*"|'[^']*')(?:,\s*|(?=\))))*\)\]\s*""")
QUOTED = {"gemma4": '<|"|>', "function_gemma": "<escape>"}  # around texts, where values are in braces


_Piece = tuple[str, tuple[str, ...]]  # a call, and the words that are hidden in it


def calls_in(text: str, syntax: str, parse: Callable[[str], Any]) -> list[Any]:
    """The calls that a text consists of, as a parser returns them.

    Raises:
        Exception: it does not consist of calls; any that the parser raises.
    """
    if syntax in _OF_JSON and text.lstrip()[:1] in ("{", "["):
        wrap = "[{}]" if syntax == "mistral" else "{}"
        pieces: list[_Piece] = [(wrap.format(json.dumps(one, ensure_ascii=False)), ()) for one in _json_values(text)]
    elif syntax in QUOTED:
        pieces = list(_braced(text, QUOTED[syntax], is_flat=syntax == "function_gemma"))
    elif syntax in ("glm47", "laguna") and "<arg_key>" not in text:
        pieces = [(text, ())]  # which its parser takes as a whole in any case
    elif (shape := SHAPES.get("glm47" if syntax == "laguna" else syntax)) is not None:
        pieces = list(_shaped(text, shape))
    else:
        return _python_list(text, parse) if syntax == "pythonic" else _listed(parse(text))
    found = [_shown(one, words) for piece, words in pieces for one in _one(parse(piece))]
    if not found:
        raise ValueError("there is no call")
    return found


def _listed(found: Any) -> list[Any]:
    return found if isinstance(found, list) else [found]


def _one(found: Any) -> list[Any]:
    if len(calls := _listed(found)) != 1:
        raise ValueError("that is not one call")
    return calls


def _json_values(text: str) -> Iterator[Any]:
    at = 0
    while text[at:].strip():
        at += len(text[at:]) - len(text[at:].lstrip())
        value, at = _JSON.raw_decode(text, at)
        yield from _listed(value)


def _shaped(text: str, shape: Shape) -> Iterator[_Piece]:
    opens, closes = shape.argument or ("", "")
    argument = re.compile(rf"\s*({opens})(.*?)({closes})(?=\s*(?:{opens}|{shape.tail}))", re.DOTALL)
    head, tail = re.compile(rf"\s*{shape.head}", re.DOTALL), re.compile(rf"\s*{shape.tail}")
    at = 0
    while text[at:].strip():
        begins = _matched(head, text, at)
        piece, at = begins[0], begins.end()
        if shape.argument is None:
            _, end = _JSON.raw_decode(text, at)
            piece, at = piece + _hidden(text[at:end], shape.words), end
        while shape.argument is not None and (given := argument.match(text, at)):
            piece, at = piece + given[1] + _hidden(given[2], shape.words) + given[3], given.end()
        ends = _matched(tail, text, at)
        piece, at = piece + ends[0], ends.end()
        yield piece, shape.words


def _matched(pattern: re.Pattern[str], text: str, at: int) -> re.Match[str]:
    if (found := pattern.match(text, at)) is None:
        raise ValueError(f"that is not a part of a call: {text[at : at + 40]!r}")
    return found


def _braced(text: str, quote: str, *, is_flat: bool) -> Iterator[_Piece]:
    """Calls like ``call:NAME{...}``. ``is_flat``: the parser knows no braces inside them."""
    words = ("{", "}") if is_flat else ()
    texts = text.split(quote)
    texts[1::2] = [_hidden(one, ("{", "}")) for one in texts[1::2]]
    if len(texts) % 2 == 0:
        raise ValueError("a text does not end")
    plain, depth, begins = quote.join(texts), 0, 0
    for i, letter in enumerate(plain):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if depth > 1 and is_flat:
            raise ValueError("the parser cannot read values in braces")
        if letter == "}" and depth == 0:
            piece = plain[begins : i + 1].strip().removeprefix(",").strip()
            _matched(re.compile(r"call:[\w-]+\{"), piece, 0)
            yield (piece, words) if words else (_shown(piece, ("{", "}")), ())
            begins = i + 1
    if plain[begins:].strip():
        raise ValueError("there is more than calls")


def _python_list(text: str, parse: Callable[[str], Any]) -> list[Any]:
    found = _listed(parse(text))
    try:
        body = ast.parse(text.strip(), mode="eval").body
        is_all = isinstance(body, ast.List) and len(body.elts) == len(found)
    except SyntaxError:  # such as a text of several lines, which the parser reads by a pattern
        is_all = _QUOTED_ARGUMENTS.fullmatch(text) is not None
    if not is_all:
        raise ValueError("there is more than calls")
    return found


def _hidden(text: str, words: tuple[str, ...]) -> str:
    for i, word in enumerate(words):
        text = text.replace(word, _HIDDEN.format(i))
    return text


def _shown(value: Any, words: tuple[str, ...]) -> Any:
    """What a parser found, with the hidden words put back."""
    if isinstance(value, str):
        for i, word in enumerate(words):
            value = value.replace(_HIDDEN.format(i), word)
        return value
    if isinstance(value, Mapping):
        return {_shown(key, words): _shown(one, words) for key, one in value.items()}
    return [_shown(one, words) for one in value] if isinstance(value, list) else value
