"""Times a few layers of a model, which need not be here: what one layer of each kind costs, a step, and the head.

    one layer of each kind    by rows: a decode, a few, a chunk; then chunks behind each other, and a decode behind
                              them, for what attending costs
    two layers                what they take less than each of them alone is the fixed time of a step
    the last layer            what it takes longer than another of its kind is norm, head and sampler; if it is the only
                              one of its kind, they share its seconds by the bytes of their weights

Each has a share of the seconds that there are. Layers are made up when it is their turn, and given up when no other
step needs them, so a model that is larger than the memory is timed, too.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from splitinfer.core.plan import NewSequence, Slice, StepPlan
from splitinfer.core.sequence import SamplingParams
from splitinfer.engine.device.device import open_device
from splitinfer.engine.stage.runner import StageRunner
from splitinfer.machine.costs import Costs
from splitinfer.machine.profile import MachineProfile
from splitinfer.models.cut import StageModel
from splitinfer.models.layer_kinds import DescribedModel
from splitinfer.models.loader import in_bunches
from splitinfer.models.structure import ModelStructure

ROWS = (1, 8, 32, 128, 512)
CHUNK = 128  # rows from which they are those of one sequence
_REPEATS = 5  # that count, behind a step that compiles kernels
_LONG = 0.25  # seconds of a step that is not repeated
_BEHIND = 4  # chunks of a sequence, behind which a decode is timed
_ATTENDING = 0.4  # of a layer's seconds, for that
_MOST_STEP = 0.9  # of the quickest layer's step: however noisy the timings are, no layer costs nothing
_TOGETHER = 64 * 2**20  # bytes of weights made at a time
_PARAMS = SamplingParams(temperature=0.7)  # noise is drawn for each row, as in most chats
_FIRST_ID = 5  # of the made-up prompts

Report = Callable[[int, int], None]  # steps done, and how many there may be; raises to end the measuring


class Trial:
    """A stage of a few layers, timed by the stage's own runner, and its sequences of made-up rows. One thread uses it,
    the one that made it. ``num_ranks``: that have these layers together."""

    def __init__(self, structure: ModelStructure, span: tuple[int, int], vocab_size: int, num_ranks: int = 1) -> None:
        stage = StageModel(structure.model, *span, structure, checks=False)
        self.device = open_device(0, (0, span[1] - span[0]), num_ranks, sums=False)
        self._runner = StageRunner(stage, 0, vocab_size, self.device)
        self._runner.choose_by_form()
        self._spec, self._vocab_size = stage.hidden_spec, vocab_size
        self._num_steps = self._num_sequences = 0
        self._lengths: dict[int, int] = {}
        self.host = 0.0
        """Seconds of the last step for which the device waited for its host."""

    def open(self, count: int) -> list[int]:
        """Open sequences; they come to be with their first step."""
        first, self._num_sequences = self._num_sequences, self._num_sequences + count
        return list(range(first, self._num_sequences))

    def step(self, sequences: Sequence[int], rows: int) -> float:
        """Compute a step of so many rows of each sequence; its seconds."""
        while self._runner.prepare_next():
            pass
        plan = self._plan(sequences, rows)
        hidden, began = self._hidden(plan.num_tokens), time.monotonic()
        launched = self._runner.launch(plan, hidden)
        self._runner.wait(launched)
        figures = self._runner.finish(launched).figures
        self.host = time.monotonic() - began - (figures.ended - figures.started)
        return figures.ended - figures.started - figures.copying

    def close(self) -> None:
        """Forget all sequences."""
        self._lengths.clear()
        self._runner.reset()

    def _plan(self, sequences: Sequence[int], rows: int) -> StepPlan:
        new = tuple(NewSequence(i, _PARAMS, seed=i, num_prompt=1) for i in sequences if i not in self._lengths)
        slices = []
        for i in sequences:
            start = self._lengths.get(i, 0)
            ids = tuple((_FIRST_ID + 7 * at + 31 * i) % self._vocab_size for at in range(start, start + rows))
            slices.append(Slice(i, start, ids, 1))
            self._lengths[i] = start + rows
        self._num_steps += 1
        return StepPlan(self._num_steps, new=new, slices=tuple(slices))

    def _hidden(self, rows: int) -> mx.array | None:
        """Made-up hidden states [rows, d]; ``None`` on the first stage."""
        if self._spec is None:
            return None
        width, dtype = self._spec
        hidden = mx.random.normal((rows, width)).astype(dtype)
        mx.eval(hidden)
        return hidden


@dataclass(frozen=True, slots=True)
class Timed:
    """Some layers: seconds of a step by its rows, for each position that a single row attends to, and for each that a
    row of a chunk does."""

    seconds: Mapping[int, float]
    decode: float = 0.0
    chunk: float = 0.0


class Stopwatch:
    """Times layers of a model in about ``seconds`` seconds. ``room``: bytes of weights that may be in memory;
    ``num_ranks``: that have these layers together."""

    def __init__(
        self,
        described: DescribedModel,
        vocab_size: int,
        report: Report,
        seconds: float,
        room: int,
        num_ranks: int = 1,
    ) -> None:
        self._described, self._vocab_size, self._report = described, vocab_size, report
        self._num_ranks = num_ranks
        kinds = [layer.kind for layer in described.profile.layers]
        self._last = len(kinds) - 1
        # The layer that stands for each kind: not the first or last one, if there is another.
        self._of_kind = {
            kind: min((i for i, each in enumerate(kinds) if each == kind), key=lambda i: (i == self._last, i == 0, i))
            for kind in dict.fromkeys(kinds)
        }
        first = 1 if len(kinds) > 3 else 0
        pair = described.profile.layers[first : first + 2]
        self._pair = (first, first + 2) if len(pair) == 2 and sum(each.weights for each in pair) <= room else None
        singles = dict.fromkeys([*self._of_kind.values(), self._last])
        self._spans = [(i, i + 1) for i in singles] + ([] if self._pair is None else [self._pair])
        self._ends, self._done, self._total = time.monotonic() + seconds, 0, len(self._spans) * len(ROWS) * _REPEATS
        self._launches_ahead = False
        self._hosts = list[float]()  # seconds of the host in steps of one row

    def measure(self) -> MachineProfile:
        """Time everything: what one layer of each kind, a step and the head cost on a machine without a name."""
        timed = dict[tuple[int, int], Timed]()
        for number, span in enumerate(self._spans):
            left = max(0.0, self._ends - time.monotonic()) / (len(self._spans) - number)
            timed[span] = self._time(span, time.monotonic() + left)
            self._give_up(span, self._spans[number + 1 :])
        found = _fitted(self._described, self._of_kind, timed, self._pair)
        return replace(found, host=median(self._hosts), launches_ahead=self._launches_ahead)

    # -- steps ---------------------------------------------------------------------------------

    def _time(self, span: tuple[int, int], until: float) -> Timed:
        self._make(span)
        trial = Trial(self._described.structure, span, self._vocab_size, self._num_ranks)
        self._launches_ahead = not trial.device.computes_at_launch
        if span == self._pair:
            return Timed({1: self._median(trial, 1, until)})
        if span[0] not in self._of_kind.values():
            return Timed(self._by_rows(trial, [rows for rows in ROWS if rows < CHUNK], until))
        if not self._described.profile.layers[span[0]].kv_per_token:
            return Timed(self._by_rows(trial, ROWS, until))
        left = until - time.monotonic()
        found = self._by_rows(trial, ROWS, until - _ATTENDING * left)
        chunks = [rows for rows in found if rows >= CHUNK and _BEHIND * found[rows] < until - time.monotonic()]
        return self._attending(trial, found, max(chunks)) if chunks else Timed(found)

    def _by_rows(self, trial: Trial, every: Sequence[int], until: float) -> dict[int, float]:
        """Seconds of steps that attend to little, of as many rows as there is time for, and of two numbers at least."""
        found = dict[int, float]()
        for rows in every:
            if len(found) > 1 and 2 * max(found.values()) * rows / max(found) > until - time.monotonic():
                break
            found[rows] = self._median(trial, rows, until)
            trial.close()
        return found

    def _median(self, trial: Trial, rows: int, until: float) -> float:
        """Seconds of a step of so many rows that attend to little: the median of some, behind the first one, which also
        compiles kernels. Long ones are not repeated."""
        took, sequences = list[float](), list[int]()
        while len(took) <= _REPEATS and (len(took) < 2 or (took[-1] < _LONG and time.monotonic() + took[-1] < until)):
            if rows >= CHUNK or not took:
                sequences = trial.open(1 if rows >= CHUNK else rows)
            took.append(self._step(trial, sequences, rows if rows >= CHUNK else 1))
        return median(took[1:])

    def _attending(self, trial: Trial, found: dict[int, float], rows: int) -> Timed:
        """The same with what chunks of so many rows behind each other take longer, and a single row behind them."""
        (sequence,) = trial.open(1)
        chunks = [self._step(trial, [sequence], rows) for _ in range(_BEHIND)]
        singles = [self._step(trial, [sequence], 1) for _ in range(1 + _REPEATS)][1:]
        trial.close()
        chunk = max(0.0, chunks[-1] - chunks[1]) / (rows * rows * (_BEHIND - 2))
        decode = max(0.0, median(singles) - found[1]) / (_BEHIND * rows)
        within = {each: chunk * each * (each + 1) / 2 if each >= CHUNK else 0.0 for each in found}
        return Timed({each: max(0.0, seconds - within[each]) for each, seconds in found.items()}, decode, chunk)

    def _step(self, trial: Trial, sequences: list[int], rows: int) -> float:
        self._done += 1
        self._report(self._done, max(self._done, self._total))
        seconds = trial.step(sequences, rows)
        self._hosts += [trial.host] if len(sequences) == rows == 1 else []
        return seconds

    # -- weights -------------------------------------------------------------------------------

    def _make(self, span: tuple[int, int]) -> None:
        """Make the weights of some layers, a few at a time."""
        layers = self._described.structure.layers[slice(*span)]
        for few in in_bunches([array for layer in layers for _, array in tree_flatten(layer.parameters())], _TOGETHER):
            mx.eval(few)
            self._report(self._done, max(self._done, self._total))

    def _give_up(self, span: tuple[int, int], still: Iterable[tuple[int, int]]) -> None:
        """Let go of the weights that no other span needs."""
        needed = {layer for other in still for layer in range(*other)}
        for number in set(range(*span)) - needed:
            layer = self._described.structure.layers[number]
            layer.update(tree_map(lambda array: mx.zeros(array.shape, array.dtype), layer.parameters()))
        mx.clear_cache()


def _fitted(
    described: DescribedModel,
    of_kind: Mapping[str, int],
    timed: Mapping[tuple[int, int], Timed],
    pair: tuple[int, int] | None,
) -> MachineProfile:
    """What the timings say of the device."""
    layers, model = described.profile.layers, described.profile
    last, last_of_kind = model.num_layers - 1, of_kind[layers[-1].kind]

    def alone(layer: int) -> Timed:
        place = layer if layer == last else of_kind[layers[layer].kind]
        return timed[place, place + 1]

    quickest = min(alone(i).seconds[1] for i in of_kind.values())
    more = 0.0 if pair is None else sum(alone(i).seconds[1] for i in range(*pair)) - timed[pair].seconds[1]
    step = min(max(0.0, more), _MOST_STEP * quickest)
    both = alone(last).seconds.keys() & alone(last_of_kind).seconds.keys()
    few = {rows: alone(last).seconds[rows] for rows in both if rows < CHUNK}
    if last_of_kind == last:
        share = model.head / max(1, model.head + layers[-1].weights)
        head = {rows: share * (seconds - step) for rows, seconds in few.items()}
    else:
        head = {rows: max(0.0, seconds - alone(last_of_kind).seconds[rows]) for rows, seconds in few.items()}
    found = dict[str, Costs]()
    for kind, place in of_kind.items():
        # Of a chunk the head computes one row.
        beside = {rows: step + (head.get(rows, head[1]) if place == last else 0.0) for rows in alone(place).seconds}
        seconds = {rows: max(0.0, took - beside[rows]) for rows, took in alone(place).seconds.items()}
        found[kind] = Costs.through(_rising(seconds), alone(place).decode, alone(place).chunk)
    return MachineProfile("", found, step=step, head=Costs.through(_rising(head)))


def _rising(seconds: Mapping[int, float]) -> dict[int, float]:
    """Seconds by rows, none less than those of fewer rows."""
    found, most = {}, 0.0
    for rows, value in sorted(seconds.items()):
        found[rows] = most = max(most, value)
    return found
