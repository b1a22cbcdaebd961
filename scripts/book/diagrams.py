"""Diagrams of the book: rows of boxes, as SVG that can be read on light and dark pages.

A box is ``(start, length, words, colour)``, in units of a step; rows are machines, or the tokens of a prompt.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from xml.sax.saxutils import escape

Box = tuple[float, float, str, str]
Rows = Sequence[tuple[str, Sequence[Box]]]
_UNIT, _HEIGHT, _GAP, _LEFT = 74, 34, 10, 118  # pixels
_COLOURS = {"a": "#3f7fbf", "b": "#b8722c", "c": "#4d8f57", "void": "#8a8a8a", "lost": "#b04a4a"}


def drawn(rows: Rows, note: str = "") -> str:
    """The rows as SVG, with an arrow of time below; ``note`` is written behind it."""
    width = _LEFT + _UNIT * max(start + length for _, boxes in rows for start, length, _, _ in boxes) + _GAP
    height = (_HEIGHT + _GAP) * len(rows) + 2 * _GAP + 18
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" font-family="sans-serif" '
        f'font-size="13"><rect width="{width:.0f}" height="{height}" rx="6" fill="#f7f7f5"/>'
    ]
    for place, (name, boxes) in enumerate(rows):
        top = _GAP + place * (_HEIGHT + _GAP)
        lines.append(f'<text x="{_GAP}" y="{top + 22}" fill="#222">{escape(name)}</text>')
        lines += [_box(box, top) for box in boxes]
    lines.append(f'<text x="{_LEFT}" y="{height - _GAP}" fill="#555">{escape(note or "time →")}</text></svg>')
    return "\n".join(lines) + "\n"


def _box(box: Box, top: int) -> str:
    start, length, words, colour = box
    left, width = _LEFT + start * _UNIT, length * _UNIT - 3
    return (
        f'<rect x="{left:.0f}" y="{top}" width="{width:.0f}" height="{_HEIGHT}" rx="4" fill="{_COLOURS[colour]}"/>'
        f'<text x="{left + width / 2:.0f}" y="{top + 22}" text-anchor="middle" fill="#fff">{escape(words)}</text>'
    )


def _steps(words: Sequence[str], colours: str, *, start: float = 0, every: float = 1) -> list[Box]:
    return [(start + each * every, 1, word, colours) for each, word in enumerate(words)]


_TOKENS = [f"token {n}" for n in (1, 2, 3, 4)]
_CHUNKS = [f"chunk {n}" for n in range(1, 8)]
_ONE = [("coordinator", _steps(_TOKENS, "a", every=2)), ("worker", _steps(_TOKENS, "a", start=1, every=2))]
_PROMPT = [("coordinator", _steps(_CHUNKS, "a")), ("worker", _steps(_CHUNKS, "a", start=1))]
_A, _B = [f"A {n}" for n in (1, 2, 3, 4)], [f"B {n}" for n in (1, 2, 3)]
_MANY = [
    ("coordinator", _steps(_A, "a", every=2) + _steps(_B, "b", start=1, every=2)),
    ("worker", _steps(_A, "a", start=1, every=2) + _steps(_B, "b", start=2, every=2)),
]
_DRAFTED = [(1, 0.0), (2, 1.0), (3, 2.0), (4, 3.0), (5, 4.5), (6, 5.5)]  # a block and when it is drafted
_FLIGHT: Rows = [
    ("draft model", [(at, 0.5, str(n), "void" if n == 4 else "c") for n, at in _DRAFTED]),
    ("coordinator", [(at + 0.5, 0.95, f"block {n}", "void" if n == 4 else "a") for n, at in _DRAFTED]),
    ("worker", [
        (at + 1.5, 0.95, f"{n} wrong" if n == 3 else f"{n} right", "lost" if n == 3 else "a")
        for n, at in _DRAFTED if n != 4
    ]),
]  # fmt: skip
_KEPT: Rows = [
    ("first prompt", [(0, 2, "block 1", "a"), (2, 2, "block 2", "a"), (4, 2, "block 3", "a"), (6, 1, "rest", "void")]),
    ("kept", [(0, 2, "memory", "c"), (2, 2, "memory and disk", "c"), (4, 2, "disk", "c")]),
    ("next turn", [(0, 2, "found", "c"), (2, 2, "found", "c"), (4, 2, "from disk", "c"), (6, 1.2, "computed", "a")]),
    ("another prompt", [(0, 2, "found", "c"), (2, 2, "found", "c"), (4, 2.4, "computed", "b")]),
]
_REPLAY: Rows = [
    ("coordinator", [(0, 1, "token 7", "a"), (2, 1, "token 8", "a"), (5, 1, "1 to 8", "a"), (7, 1, "token 9", "a")]),
    ("worker", [(1, 1, "token 7", "a"), (3, 0.6, "lost", "lost"), (6, 1, "1 to 8", "a"), (8, 1, "token 9", "a")]),
    ("you read", [(2, 1, "7", "c"), (3, 4, "a pause", "void"), (7, 1, "8", "c"), (9, 1, "9", "c")]),
]
DIAGRAMS: Mapping[str, Callable[[], str]] = {
    "one-stream": partial(drawn, _ONE, "time → · one stream: each stage waits for the other"),
    "long-prompt": partial(drawn, _PROMPT, "time → · a long prompt: both stages compute from the second chunk on"),
    "groups": partial(drawn, _MANY, "time → · two groups of requests, A and B: no stage waits"),
    "drafts-in-flight": partial(drawn, _FLIGHT, "time → · block 3 was wrong: block 4, begun on it, is withdrawn"),
    "kept-blocks": partial(drawn, _KEPT, "tokens of a prompt → · blocks of 256 tokens"),
    "replay": partial(drawn, _REPLAY, "time → · the worker is back: 1 to 8 are computed again, none is read twice"),
}
