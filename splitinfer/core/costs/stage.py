"""What a step costs one stage: a table of seconds by rows, learned from its steps as they run.

    seconds = table[rows]  +  decode * (positions that single rows attend to)
                           +  chunk * (positions that the rows of chunks attend to)

A step reads the weights once, whatever its number of rows, so a few rows are nearly free and many are not. Where that
changes differs between machines. So the table has a place for each number of rows up to ``EXACT``, then four for each
octave. A place holds decayed means of its steps. Between two places seconds are interpolated; beyond the last one they
go on rising as before it. More rows never cost less: places that say so are averaged.

The two slopes come from steps of the same place: they relate the differences of seconds from the place's mean to the
differences of positions attended to. Single rows and chunks use different kernels, so each has its own slope.

Machines drift; the means follow within some tens of steps. A step that was held up counts as at most 1.5 times the
usual time, and the first steps of a place are dropped once a much quicker one has come. ``margin`` covers the rest: one
in twenty of the last steps took longer than predicted by this factor.
"""

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from splitinfer.core.costs.shape import Shape

EXACT = 16  # rows up to which each number has a place of its own
_LEAST_WEIGHT = 0.1  # of one step in the means of its place
_LITTLE = 0.2  # the exponent of a ratio that is an outlier and the first of its place
_MOST_OFF = 1.5  # times the prediction: larger ratios, and ones below the inverse, are outliers and clipped
_FIRSTS = 5  # steps of a place, all of which may have been held up
_FORGETTING = 0.998  # a step's weight in the slopes is multiplied by this with each step after it
_FEW = 0.01  # of the most positions, squared: smaller differences of positions explain nothing
_LAST = 64  # steps from which the margin is computed
_QUANTILE = 0.95
LEAST_MARGIN, _MOST_MARGIN = 1.02, 1.5
_TRUSTED_AFTER = 4  # steps
_FURTHER = 2  # predictions are trusted up to this multiple of the most rows seen
_AT_MOST = 0.9  # of a place's seconds are for the positions that it attends to


@dataclass(slots=True)
class _Place:
    """Decayed means of the steps with about the same number of rows."""

    rows: float = 0.0
    seconds: float = 0.0
    decode: float = 0.0
    chunk: float = 0.0
    count: int = 0

    def add(self, shape: Shape, seconds: float) -> None:
        self.count += 1
        weight = max(_LEAST_WEIGHT, 1 / self.count)
        self.rows += weight * (shape.rows - self.rows)
        self.seconds += weight * (seconds - self.seconds)
        self.decode += weight * (shape.decode_context - self.decode)
        self.chunk += weight * (shape.chunk_context - self.chunk)


@dataclass(slots=True)
class _Slope:
    """Seconds for each position: decayed sums of positions attended to and seconds, as differences from the means of
    their places."""

    squares: float = 0.0
    products: float = 0.0

    def add(self, attended: float, seconds: float) -> None:
        self.squares = _FORGETTING * self.squares + attended * attended
        self.products = _FORGETTING * self.products + attended * seconds

    def at(self, most: float) -> float:
        """Return the slope, if a step attended to at most ``most`` positions."""
        return max(0.0, self.products) / (self.squares + _FEW * most * most) if self.squares else 0.0


@dataclass(slots=True)
class StageCosts:
    """One stage's seconds by the shape of a step. ``took`` refines them."""

    num_seen: int = 0
    most_rows: int = 0
    most_decode: int = 0  # positions that the single rows of a step attended to
    most_chunk: int = 0  # the same for the rows of its chunks
    _places: dict[int, _Place] = field(default_factory=dict)
    decode: float = 0.0  # seconds for each of these positions
    chunk: float = 0.0
    _of_decodes: _Slope = field(default_factory=_Slope)
    _of_chunks: _Slope = field(default_factory=_Slope)
    _line: list[tuple[float, float]] | None = None  # the table by rows, without the positions' part
    _off: deque[float] = field(default_factory=lambda: deque(maxlen=_LAST))  # measured to predicted, last steps

    # -- what it predicts ----------------------------------------------------------------------

    def at(self, shape: Shape) -> float:
        """Return the predicted seconds of a step of this shape; 0 before the first step."""
        return self._of_rows(shape.rows) + self._attending(shape.decode_context, shape.chunk_context)

    def _of_rows(self, rows: float) -> float:
        """Return the seconds of a step that attends to nothing."""
        return _on_line(self._by_rows(), rows)

    def _by_rows(self) -> list[tuple[float, float]]:
        """Return the table by rows. Other threads read it while the loop learns, so they take the list as a whole."""
        line = self._line
        if line is None:
            points = sorted((one.rows, one.seconds - self._attending(one.decode, one.chunk), one.count)
                            for one in [*self._places.values()])  # fmt: skip
            self._line = line = _rising(points)
        return line

    def _attending(self, decode: float, chunk: float) -> float:
        """Return the seconds for the positions that a step attends to. They are capped, because the first steps say
        nothing about the cost of many times as many positions."""
        decode, chunk = min(decode, _FURTHER * self.most_decode), min(chunk, _FURTHER * self.most_chunk)
        return self.decode * decode + self.chunk * chunk

    @property
    def sizes(self) -> list[int]:
        """The numbers of rows, up to ``EXACT``, that steps have had."""
        return sorted(rows for rows in [*self._places] if rows <= EXACT)

    @property
    def measured(self) -> dict[int, float]:
        """Seconds for each of ``sizes``, with the mean positions of its steps."""
        places = ((rows, self._places[rows]) for rows in self.sizes)
        return {rows: self._of_rows(rows) + self._attending(place.decode, place.chunk) for rows, place in places}

    @property
    def margin(self) -> float:
        """The ratio of measured to predicted seconds that one in twenty of the last steps exceeded."""
        if len(self._off) < _TRUSTED_AFTER:
            return _MOST_MARGIN
        last = sorted([*self._off])
        worst = last[min(len(last) - 1, int(_QUANTILE * len(last)))]
        return min(max(worst, LEAST_MARGIN), _MOST_MARGIN)

    @property
    def spread(self) -> float:
        """The spread of the middle half of the last steps: the highest ratio of measured to predicted seconds over the
        lowest. 0 before enough steps."""
        last = sorted([*self._off])
        return last[3 * len(last) // 4] / last[len(last) // 4] if len(last) >= _TRUSTED_AFTER else 0.0

    @property
    def trusted_rows(self) -> int:
        """The most rows for which predictions are reliable."""
        return _FURTHER * self.most_rows if self.num_seen >= _TRUSTED_AFTER else 0

    def knows(self, shape: Shape) -> bool:
        """Return whether the prediction for this shape is reliable."""
        is_near = shape.chunk_context <= _FURTHER * self.most_chunk
        return is_near and 0 < self.trusted_rows >= shape.rows

    # -- what was measured ---------------------------------------------------------------------

    def took(self, shape: Shape, seconds: float) -> None:
        """Learn from one step of this shape."""
        if shape.rows < 1 or not 0 < seconds < math.inf:
            return
        key, expected = _key(shape.rows), self.at(shape)
        place = self._places.get(key)
        if expected > 0 and shape.rows <= self.most_rows and self.knows(shape):
            off = _clipped(seconds / expected)
            self._off.append(off)
            if place is None and seconds > _MOST_OFF * expected:
                seconds = expected * off**_LITTLE
        self.num_seen += 1
        self.most_rows = max(self.most_rows, shape.rows)
        self.most_decode = max(self.most_decode, shape.decode_context)
        self.most_chunk = max(self.most_chunk, shape.chunk_context)
        if place is not None:
            usual = self._usual(place, shape)
            if place.count <= _FIRSTS and seconds < usual / _MOST_OFF:
                place = None  # the steps before this one were held up
            else:
                seconds = usual * _clipped(seconds / usual)
                self._learn_slopes(place, shape, seconds)
        if place is None:
            place = self._places[key] = _Place()
        place.add(shape, seconds)
        self._set_slopes()
        self._line = None

    def _usual(self, place: _Place, shape: Shape) -> float:
        """Return the seconds of a step of a place that attends to the positions of ``shape``."""
        more = self._attending(shape.decode_context, shape.chunk_context) - self._attending(place.decode, place.chunk)
        more += self._of_rows(shape.rows) - self._of_rows(place.rows)
        return max(place.seconds + more, (1 - _AT_MOST) * place.seconds)

    def _learn_slopes(self, place: _Place, shape: Shape, seconds: float) -> None:
        decode, chunk = shape.decode_context - place.decode, shape.chunk_context - place.chunk
        seconds -= place.seconds + self._of_rows(shape.rows) - self._of_rows(place.rows)
        if shape.chunk_context or place.chunk:
            self._of_chunks.add(chunk, seconds - self.decode * decode)
        else:
            self._of_decodes.add(decode, seconds)

    def _set_slopes(self) -> None:
        """Set both slopes so that the positions explain at most ``_AT_MOST`` of any place's seconds."""
        places = self._places.values()
        if self._of_decodes.squares:
            most = (_AT_MOST * one.seconds / one.decode for one in places if one.decode)
            self.decode = min(self._of_decodes.at(self.most_decode), *most, math.inf)
        if self._of_chunks.squares:
            most = ((_AT_MOST * one.seconds - self.decode * one.decode) / one.chunk for one in places if one.chunk)
            self.chunk = max(0.0, min(self._of_chunks.at(self.most_chunk), *most, math.inf))

    # -- as numbers ----------------------------------------------------------------------------

    def as_dict(self) -> dict[str, Any]:
        """Return the table as plain numbers."""
        return {
            "seconds": [list(point) for point in self._by_rows()],
            "decode": self.decode,
            "chunk": self.chunk,
            "most_rows": self.most_rows,
        }


def _key(rows: int) -> int:
    """Return the place of a number of rows: the number itself, or the next of four to an octave.

    >>> [_key(rows) for rows in (16, 17, 33, 512, 513)]
    [16, 20, 40, 512, 640]
    """
    if rows <= EXACT:
        return rows
    step = 1 << ((rows - 1).bit_length() - 3)
    return -(-rows // step) * step


def _rising(points: Sequence[tuple[float, float, float]]) -> list[tuple[float, float]]:
    """Return the (rows, seconds) of weighted points; neighbours whose seconds fall are averaged.

    >>> _rising([(1, 1.0, 1), (2, 3.0, 1), (3, 2.0, 1), (4, 4.0, 1)])
    [(1, 1.0), (2, 2.5), (3, 2.5), (4, 4.0)]
    """
    pools: list[tuple[list[float], float, float]] = []  # rows, seconds, weight
    for rows, seconds, weight in points:
        pool = [rows], seconds, weight
        while pools and pools[-1][1] > pool[1]:
            before = pools.pop()
            total = before[2] + pool[2]
            pool = [*before[0], *pool[0]], (before[1] * before[2] + pool[1] * pool[2]) / total, total
        pools.append(pool)
    return [(rows, pool[1]) for pool in pools for rows in pool[0]]


def _on_line(line: Sequence[tuple[float, float]], x: float) -> float:
    """Return the y at ``x`` on the lines between points. Beyond the last point it rises as it did over the upper half
    of x."""
    if not line:
        return 0.0
    last, end = line[-1]
    if x <= line[0][0] or len(line) == 1:
        return line[0][1]
    if x >= last:
        a, low = line[max(0, bisect_right(line, (last / 2, math.inf)) - 1)]
        return end + (end - low) * (x - last) / (last - a)
    i = bisect_left(line, (x, -math.inf))
    (a, low), (b, high) = line[i - 1], line[i]
    return min(high, low + (high - low) * (x - a) / (b - a))  # rounding may add a bit


def _clipped(ratio: float) -> float:
    return min(max(ratio, 1 / _MOST_OFF), _MOST_OFF)
