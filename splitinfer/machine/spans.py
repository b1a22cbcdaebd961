"""Which few layers of a model to time, and what one layer of each kind, the embedding, the head and a step cost. Pure.

A machine cannot hold a model that is to be cut, and need not: layers of one kind cost the same. So *spans* are timed,
stages of a few layers, and each gives an equation for every shape of a step:

    seconds of a span = step + (layers of each kind) * (seconds of one) + embedding + head, as far as it has them

    one layer of each kind    what a layer costs, with the step's fixed time
    a longer span             the same again with more layers: what a step costs that has none; and weights enough that
                              they do not stay in the processor's caches from one step to the next
    the first layer           with the embedding
    the last layer            with norm, head and sampler

The equations are solved without negative seconds. What they leave open (a kind that only the last layer has) is
divided in proportion to the bytes of weights.
"""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from splitinfer.core.scheduler.cost_model import Shape, StageCosts, solved
from splitinfer.machine.profile import ModelProfile

_LONG, _LONGEST = 2, 8  # layers of the longer span, at least and at most
_ENOUGH = 256 * 2**20  # bytes of weights that no processor's caches hold
_STEP_ROWS = 8  # up to which steps are short enough that their fixed time shows
_PULL, _LEAST = 1e-6, 1e-2  # weight of the division by bytes beside an equation; least share that is counted with
_STEP, _EMBEDDING, _HEAD = "(step)", "(embedding)", "(head)"


@dataclass(frozen=True, slots=True)
class Span:
    """The layers [start, end) of a model, timed as a stage."""

    start: int
    end: int

    @property
    def num_layers(self) -> int:
        """The number of layers."""
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
    spans = list(timings.by_rows)
    rows = _common(timings, [span for span in spans if span != chosen.long or len(spans) == 1])
    on_all = _common(timings, spans)
    if not on_all:
        raise ValueError("no step was timed")
    step = _step(model, timings, spans, [count for count in on_all if count <= _STEP_ROWS] or on_all[:1])
    found = _by_term(model, timings, rows, step)
    layers = {}
    for kind, weights in {layer.kind: layer.weights for layer in model.layers}.items():
        little = timings.by_rows[chosen.singles[kind]]
        slopes = _slopes(little, timings.contexts.get(kind, []))
        if kind not in timings.contexts and weights:
            per_byte = found[kind][rows[0]] / weights  # keys and values are read as quickly as weights
            slopes = max(layer.kv_per_token for layer in model.layers if layer.kind == kind) * per_byte, 0.0
        layers[kind] = _costs(
            {count: found[kind][count] - _attended(little[count][0], slopes) for count in rows}, slopes
        )
    return Fitted(layers, step, _costs(found.get(_EMBEDDING, {})), _costs(found.get(_HEAD, {})))


def _common(timings: Timings, spans: Sequence[Span]) -> list[int]:
    """The numbers of rows that were timed on all of some spans."""
    return sorted(set.intersection(*(set(timings.by_rows[span]) for span in spans))) if spans else []


def _step(model: ModelProfile, timings: Timings, spans: Sequence[Span], rows: Sequence[int]) -> float:
    """The seconds that a step takes whatever layers it has, from short steps."""
    terms = {span: _terms(model, span) for span in spans}
    shares = _shares(model)
    solved = [_solve(terms, {span: timings.by_rows[span][count][1] for span in spans}, shares) for count in rows]
    return statistics.median(each.get(_STEP, 0.0) for each in solved)


def _by_term(model: ModelProfile, timings: Timings, rows: Sequence[int], step: float) -> dict[str, dict[int, float]]:
    """Seconds by rows of each term. Of a chunk the head computes one row, so its costs are those of single rows."""
    shares, found = _shares(model), dict[str, dict[int, float]]()
    for count in rows:
        terms, left, head = {}, {}, found.get(_HEAD, {}).get(rows[0], 0.0)
        for span, timed in timings.by_rows.items():
            if count not in timed:
                continue
            shape, seconds = timed[count]
            terms[span] = {name: n for name, n in _terms(model, span).items() if name != _STEP}
            has_chunk_head = bool(shape.chunk_context) and terms[span].pop(_HEAD, None) is not None
            left[span] = max(0.0, seconds - step - (head if has_chunk_head else 0.0))
        for name, value in _solve(terms, left, shares).items():
            found.setdefault(name, {})[count] = value
    return found


def _terms(model: ModelProfile, span: Span) -> dict[str, float]:
    """What a span's seconds are the sum of, and how often."""
    terms: dict[str, float] = {_STEP: 1.0, **Counter(layer.kind for layer in model.layers[span.start : span.end])}
    if span.start == 0:
        terms[_EMBEDDING] = 1.0
    if span.end == model.num_layers:
        terms[_HEAD] = 1.0
    return terms


def _shares(model: ModelProfile) -> dict[str, float]:
    """Bytes of weights that a step of one row reads, of each term. Of the embedding it reads a row."""
    bytes_of: dict[str, float] = {layer.kind: float(layer.weights) for layer in model.layers}
    return {**bytes_of, _STEP: 0.0, _EMBEDDING: float(model.hidden_row), _HEAD: float(model.head)}


def _solve(
    terms: Mapping[Span, Mapping[str, float]], seconds: Mapping[Span, float], shares: Mapping[str, float]
) -> dict[str, float]:
    """The terms' seconds: least squares of relative errors, none negative. A weak pull leads to a division in
    proportion to ``shares`` where the equations leave it open."""
    names = list(dict.fromkeys(name for each in terms.values() for name in each))
    total, size = sum(seconds.values()), sum(shares[n] * k for each in terms.values() for n, k in each.items())
    guess = {name: shares[name] * total / size if size else 0.0 for name in names}
    weights = {span: 1 / value**2 if value > 0 else 0.0 for span, value in seconds.items()}
    scale, usual = sum(weights.values()) or 1.0, total / len(names) or 1.0
    keep = names
    while keep:
        matrix = [
            [sum(weights[s] * each.get(a, 0) * each.get(b, 0) for s, each in terms.items()) for b in keep] for a in keep
        ]
        vector = [sum(weights[s] * each.get(a, 0) * seconds[s] for s, each in terms.items()) for a in keep]
        for i, name in enumerate(keep):
            pull = _PULL * scale * usual / max(guess[name], _LEAST * usual)
            matrix[i][i] += pull
            vector[i] += pull * guess[name]
        found = dict(zip(keep, solved(matrix, vector), strict=True))
        worst = min(keep, key=lambda name: found[name])
        if found[worst] >= 0:
            return {name: found.get(name, 0.0) for name in names}
        keep = [name for name in keep if name != worst]
    return dict.fromkeys(names, 0.0)


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
