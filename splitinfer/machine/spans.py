"""Which few layers of a model to time, and what one layer of each kind, the embedding, the head and a step cost. Pure.

A machine cannot hold a model that is to be cut, and need not: layers of one kind cost the same. So *spans* are timed,
stages of a few layers, and the rest are differences:

    one layer of each kind    a layer and the fixed time of a step
    a longer span             the same steps once in place of several times: the difference to its layers, each timed
                              alone, is the fixed time; and weights enough that they do not stay in the processor's
                              caches from one step to the next
    the first layer           what it takes longer than another of its kind is the embedding's
    the last layer            what it takes longer is norm, head and sampler

Where the last layer is the only one of its kind, it and the head share its seconds in proportion to the bytes of their
weights. No difference counts as less than nothing.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from splitinfer.core.costs.shape import Shape
from splitinfer.core.costs.stage import StageCosts
from splitinfer.machine.profile import ModelProfile

_LONG, _LONGEST = 2, 8  # layers of the longer span, at least and at most
_ENOUGH = 256 * 2**20  # bytes of weights that no processor's caches hold
_MOST_STEP = 0.9  # of the quickest layer's step: however noisy the timings are, no layer costs nothing
_STEP_ROWS = 8  # up to which steps are short enough that their fixed time shows


@dataclass(frozen=True, slots=True)
class Span:
    """The layers [start, end) of a model, timed as a stage."""

    start: int
    end: int

    @property
    def num_layers(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Chosen:
    """What is timed. ``singles``: a layer of each kind; ``long``: several layers, ``None`` for a model of one;
    ``first``, ``last``: those with embedding and head."""

    singles: Mapping[str, Span]
    long: Span | None
    first: Span
    last: Span

    @property
    def spans(self) -> tuple[Span, ...]:
        """All of them, none twice, in the order in which they are timed: a layer of each kind, the first and the last
        one, and the long one, for which there need not be time for many rows."""
        long = [] if self.long is None else [self.long]
        return tuple(dict.fromkeys([*self.singles.values(), self.first, self.last, *long]))


def choose(model: ModelProfile, room: int) -> Chosen:
    """Choose what to time. ``room``: bytes of weights that may be in memory.

    The layers of a span are together in memory; of the others one at a time is.
    """
    kinds, last = [layer.kind for layer in model.layers], model.num_layers - 1
    long = _long(model, kinds, room)
    inside = range(0) if long is None else range(long.start, long.end)
    singles = {}
    for kind in dict.fromkeys(kinds):
        own = [i for i, each in enumerate(kinds) if each == kind]
        best = min(own, key=lambda i: (i == last, i == 0, i not in inside, i))
        singles[kind] = Span(best, best + 1)
    return Chosen(singles, long, Span(0, 1), Span(last, last + 1))


def _long(model: ModelProfile, kinds: Sequence[str], room: int) -> Span | None:
    """Some consecutive layers, without the last one where that leaves two: of many kinds, and of weights enough."""
    most = max(1, model.num_layers - 1) if model.num_layers > 2 else model.num_layers
    length = min(_LONG, most)
    while length < min(most, _LONGEST) and _weights(model, 0, length) < _ENOUGH:
        length += 1
    while length > 1 and max(_weights(model, i, i + length) for i in range(most - length + 1)) > room:
        length -= 1
    if length < 2:
        return None
    starts = range(most - length + 1)
    best = max(starts, key=lambda i: (len(set(kinds[i : i + length])), i != 0, -i))
    return Span(best, best + length)


def _weights(model: ModelProfile, start: int, end: int) -> int:
    return sum(layer.weights for layer in model.layers[start:end])


Timed = tuple[Shape, float]  # a step's shape and its seconds


@dataclass(slots=True)
class Timings:
    """Steps that were timed: on each span by rows, with little context; and with much, on the single layer of a kind,
    of numbers of rows that were timed with little, too."""

    by_rows: dict[Span, dict[int, Timed]] = field(default_factory=dict)
    contexts: dict[str, list[Timed]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fitted:
    """What one layer of each kind, a step, the embedding and the head cost."""

    layers: dict[str, StageCosts]
    step: float
    embedding: StageCosts
    head: StageCosts


def fit(model: ModelProfile, chosen: Chosen, timings: Timings) -> Fitted:
    """What the timings say. Numbers of rows that were not timed on every span but the long one are left to lines
    through the others.

    Raises:
        ValueError: nothing was timed.
    """
    by_rows, kinds = timings.by_rows, [layer.kind for layer in model.layers]
    rows = _common(by_rows, [span for span in chosen.spans if span != chosen.long])
    on_all = _common(by_rows, chosen.spans)
    if not on_all:
        raise ValueError("no step was timed")
    step = _step(chosen, kinds, by_rows, [n for n in on_all if n <= _STEP_ROWS] or on_all[:1])
    beside_step = {
        span: {n: max(0.0, by_rows[span][n][1] - step) for n in rows} for span in chosen.spans if span != chosen.long
    }
    seconds = {kind: beside_step[single] for kind, single in chosen.singles.items()}
    head = _head(model, chosen, by_rows, beside_step)
    if chosen.singles[kinds[-1]] == chosen.last:  # of a chunk the head computes one row
        seconds[kinds[-1]] = {n: max(0.0, beside_step[chosen.last][n] - head.get(n, head[rows[0]])) for n in rows}
    embedding = dict[int, float]()
    if chosen.singles[kinds[0]] != chosen.first:
        embedding = {n: max(0.0, beside_step[chosen.first][n] - seconds[kinds[0]][n]) for n in rows}
    layers = {}
    for kind, weights in {layer.kind: layer.weights for layer in model.layers}.items():
        little = by_rows[chosen.singles[kind]]
        slopes = _slopes(little, timings.contexts.get(kind, []))
        if kind not in timings.contexts and weights:
            per_byte = seconds[kind][rows[0]] / weights  # keys and values are read as quickly as weights
            slopes = max(layer.kv_per_token for layer in model.layers if layer.kind == kind) * per_byte, 0.0
        layers[kind] = _costs({n: seconds[kind][n] - _attended(little[n][0], slopes) for n in rows}, slopes)
    return Fitted(layers, step, _costs(embedding), _costs(head))


_ByRows = Mapping[Span, Mapping[int, Timed]]


def _common(by_rows: _ByRows, spans: Sequence[Span]) -> list[int]:
    """The numbers of rows that were timed on all of some spans."""
    return sorted(set.intersection(*(set(by_rows.get(span, {})) for span in spans)))


def _step(chosen: Chosen, kinds: Sequence[str], by_rows: _ByRows, rows: Sequence[int]) -> float:
    """The seconds that a step takes whatever layers it has, from short steps."""
    if chosen.long is None:
        return 0.0
    own = {chosen.first.start: chosen.first, chosen.last.start: chosen.last}
    alone = [own.get(i, chosen.singles[kinds[i]]) for i in range(chosen.long.start, chosen.long.end)]
    more = [sum(by_rows[span][n][1] for span in alone) - by_rows[chosen.long][n][1] for n in rows]
    quickest = min(by_rows[span][n][1] for span in chosen.singles.values() for n in rows)
    return min(max(0.0, statistics.median(more) / (len(alone) - 1)), _MOST_STEP * quickest)


def _head(
    model: ModelProfile, chosen: Chosen, by_rows: _ByRows, beside_step: Mapping[Span, Mapping[int, float]]
) -> dict[int, float]:
    """The head's seconds for single rows."""
    last, single = model.layers[-1], chosen.singles[model.layers[-1].kind]
    found = {n: each for n, each in beside_step[chosen.last].items() if not by_rows[chosen.last][n][0].chunk_context}
    if single == chosen.last:
        return {n: each * model.head / max(1, model.head + last.weights) for n, each in found.items()}
    return {n: max(0.0, each - beside_step[single][n]) for n, each in found.items()}


def _costs(seconds: Mapping[int, float], slopes: tuple[float, float] = (0.0, 0.0)) -> StageCosts:
    """Costs through seconds by rows, which are made to rise, and for each position attended to by single rows and by
    rows of chunks."""
    if not seconds:
        return StageCosts.line(0.0, 0.0)
    rising, most = {}, 0.0
    for rows, value in sorted(seconds.items()):
        rising[rows] = most = max(most, value)
    return StageCosts.through(rising, *slopes)


def _attended(shape: Shape, slopes: tuple[float, float]) -> float:
    """Seconds for the positions that a step attends to."""
    return shape.decode_context * slopes[0] + shape.chunk_context * slopes[1]


def _slopes(little: Mapping[int, Timed], much: Sequence[Timed]) -> tuple[float, float]:
    """Seconds for each position that single rows and rows of chunks attend to: what steps took beyond those of as many
    rows with little context."""
    decode, chunk = list[tuple[int, float]](), list[tuple[int, float]]()
    for shape, seconds in much:
        before, usual = little[shape.rows]
        if shape.chunk_context:
            chunk.append((shape.chunk_context - before.chunk_context, seconds - usual))
        else:
            decode.append((shape.decode_context - before.decode_context, seconds - usual))
    return _slope(decode), _slope(chunk)


def _slope(points: Sequence[tuple[int, float]]) -> float:
    """The line through the origin by least squares; never falling."""
    squares = sum(x * x for x, _ in points)
    return max(0.0, sum(x * y for x, y in points) / squares) if squares else 0.0
