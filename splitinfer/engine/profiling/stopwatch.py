"""Times steps of chosen spans, one span after the other, in the seconds that there are.

A span's layers are made up when it is its turn, and given up when no other needs them, so a model that is larger than
the memory is timed, too. Every span gets a share of the seconds that are left; which numbers of rows these are spent on
is ``machine.timetable``'s.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from splitinfer.engine.profiling.trial import HELD_STEPS, Trial
from splitinfer.machine.device_queue import MAX_BUFFERS
from splitinfer.machine.spans import Chosen, Span, Timed, Timings
from splitinfer.machine.timetable import CHUNKS, ORDER, fewest, next_repeat, next_rows
from splitinfer.models.layer_kinds import DescribedModel
from splitinfer.models.loader import in_bunches

_REPEATS = 5  # of single rows behind much context
_CONTEXT_SHARE = 0.4  # of a span's seconds, for steps with much context
_SEQUENCES = (8, 4, 2, 1)  # that get much context: as many as there is time for
_MOST_CHUNKS = 4  # of context
_TOGETHER = 64 * 2**20  # bytes of weights made at a time
_USUAL = 3  # times that a step is timed, to say how far a measurement has come

Report = Callable[[int, int], None]  # steps done, and how many there may be; raises to end the measuring


class Stopwatch:
    """Times the chosen spans of a model, in about ``seconds`` seconds.

    Attributes:
        buffers: command buffers of a step for each layer.
        wait: seconds from the end of a step until a thread that waits for it goes on.
        launches_ahead: whether the device computes while its host goes on.
    """

    def __init__(
        self, described: DescribedModel, chosen: Chosen, vocab_size: int, report: Report, seconds: float
    ) -> None:
        self._described, self._chosen, self._vocab_size = described, chosen, vocab_size
        self._report, self._seconds, self._done = report, seconds, 0
        self._expected = len(chosen.spans) * len(ORDER) * _USUAL  # steps that there may be
        growing = {layer.kind for layer in described.profile.layers if layer.kv_per_token > 0}
        # The kind of a span that is its single layer, if layers of that kind attend to more with every token.
        self._kinds = {single: kind for kind, single in chosen.singles.items() if kind in growing}
        self._timings = Timings()
        self._allowed: Sequence[int] = ORDER  # rows that were timed on all spans so far
        self.buffers, self.wait, self.launches_ahead = 1.0, 0.0, False

    def time_all(self) -> Timings:
        spans = list(self._chosen.spans)
        ends = time.monotonic() + self._seconds
        for i, span in enumerate(spans):
            shares = [2.0 if each in self._kinds else 1.0 for each in spans[i:]]
            began = time.monotonic()
            self._time(span, began + max(0.0, ends - began) * shares[0] / sum(shares))
            self._give_up(span, spans[i + 1 :])
        return self._timings

    def _time(self, span: Span, until: float) -> None:
        self._make(span)
        trial = Trial(self._described.structure, span, self._vocab_size)
        kind, left = self._kinds.get(span), until - time.monotonic()
        self._timings.by_rows[span] = found = self._by_rows(
            trial, until if kind is None else until - _CONTEXT_SHARE * max(0.0, left)
        )
        self._allowed = [rows for rows in self._allowed if rows in found]
        if kind is not None and (with_context := self._with_context(trial, found, until - time.monotonic())):
            self._timings.contexts[kind] = with_context
        self.launches_ahead = not trial.device.computes_at_launch
        if self.launches_ahead and span == (self._chosen.long or span):
            self.buffers = _buffers(*trial.held(), span.num_layers)
        self.wait = trial.wait()
        trial.close()

    # -- steps ---------------------------------------------------------------------------------

    def _by_rows(self, trial: Trial, until: float) -> dict[int, Timed]:
        """Steps by rows, without much context."""
        timed = defaultdict[int, list[tuple[Timed, bool]]](list)  # and whether the device noted something
        known, sequences = dict[int, float](), dict[int, list[int]]()

        def measure(rows: int) -> None:
            if rows in CHUNKS or rows not in sequences:
                sequences[rows] = trial.open(1 if rows in CHUNKS else rows)
            one = self._step(trial, sequences[rows], rows if rows in CHUNKS else 1)
            timed[rows].append((one, trial.has_notes))
            known[rows] = _median(timed[rows])[1]

        while (rows := next_rows(known, until - time.monotonic(), self._allowed)) is not None:
            measure(rows)
            if len(timed) == 1 or len(timed[rows]) < fewest(known[rows]):  # a span's first step compiles kernels
                measure(rows)
        counts = {rows: len(each) for rows, each in timed.items()}
        while (rows := next_repeat(known, counts, until - time.monotonic())) is not None:
            measure(rows)
            counts[rows] += 1
        trial.close()
        return {rows: _median(each) for rows, each in timed.items()}

    def _with_context(self, trial: Trial, little: dict[int, Timed], seconds: float) -> list[Timed]:
        """Chunks further and further behind others, and single rows behind them: as many as there is time for."""
        chunks = sorted(rows for rows in little if rows in CHUNKS)
        if not chunks:
            return []
        rows, each = chunks[-1], little[chunks[-1]][1]
        count = next((n for n in _SEQUENCES if n in little and n * each <= seconds), 1)
        num_chunks = max(2, min(_MOST_CHUNKS, int(seconds / max(count * each, 1e-9))))
        sequences, found = trial.open(count), list[Timed]()
        for i, sequence in enumerate(sequences):
            for number in range(num_chunks):
                timed = self._step(trial, [sequence], rows)
                if i == 0 and number:
                    found.append(timed)
        singles = [self._step(trial, sequences, 1) for _ in range(_REPEATS + 1)][1:]
        found.append(sorted(singles, key=lambda one: one[1])[len(singles) // 2])
        trial.close()
        return found

    def _step(self, trial: Trial, sequences: list[int], rows: int) -> Timed:
        self._done += 1
        self._tell()
        return trial.step(sequences, rows)

    def _tell(self) -> None:
        self._report(self._done, max(self._done, self._expected))

    # -- weights -------------------------------------------------------------------------------

    def _make(self, span: Span) -> None:
        """Make the weights of a span's layers, a few at a time."""
        layers = self._described.structure.layers[span.start : span.end]
        for few in in_bunches(_parameters(layers), _TOGETHER):
            mx.eval(few)
            self._tell()

    def _give_up(self, span: Span, still: Iterable[Span]) -> None:
        """Let go of the weights that no other span needs."""
        needed = {layer for other in still for layer in range(other.start, other.end)}
        for number in set(range(span.start, span.end)) - needed:
            layer = self._described.structure.layers[number]
            layer.update(tree_map(lambda array: mx.zeros(array.shape, array.dtype), layer.parameters()))
        mx.clear_cache()


def _parameters(layers: Iterable[object]) -> list[mx.array]:
    return [array for layer in layers for _, array in tree_flatten(layer.parameters())]  # type: ignore[attr-defined]


def _median(timed: Sequence[tuple[Timed, bool]]) -> Timed:
    """The median of steps, without the first and without those with notes where there are others."""
    later = timed[1:]
    counted = [one for one, has_notes in later if not has_notes] or [one for one, _ in later or timed]
    return sorted(counted, key=lambda one: one[1])[len(counted) // 2]


def _buffers(held: float, total: float, num_layers: int) -> float:
    """The command buffers of a step for each layer, from how long launches of several steps were held: until all but
    ``MAX_BUFFERS`` were complete."""
    share_left = 1 - held / total if total > 0 else 1.0
    return MAX_BUFFERS / max(share_left, 0.01) / (HELD_STEPS * num_layers)
