"""Times a few layers of a model, without its weights: the costs of one layer of each kind, of a step, and of the head.

    one layer of each kind    steps of one row and of a few sequences, each after as many positions as a short chat
                              has, as the first positions cost more than others; of a prompt's chunk; then one row and
                              a chunk after many positions, for the cost of attention
    several layers            if they take less than the sum of single layers, the difference is the fixed time of a
                              step; if more, their weights, unlike one layer's, do not stay in a cache between steps
    the last layer            if it takes longer than another layer of its kind, the difference is norm, head and
                              sampler; if it is the only one of its kind, its seconds are shared by bytes of weights

Other programs only make a step slower. So each piece of work gets several *trials*, at different times, and the
quickest ``COUNT`` of them count, if they agree: their median is the figure, and their range its uncertainty. Timing
ends once all pieces agree. A trial is the median of some steps: answers take the usual time and not the best, which is
0.7 of it where machines share processors. The first steps, which compile kernels, do not count.

The positions to attend to are not computed: a sequence opens with many copies of one block of keys and values. So steps
are timed after as many positions as long prompts have.

A layer's weights are made up before its steps. If the layers do not fit into memory together, a layer is freed when no
other step needs it, so that a model larger than the memory can be timed, too.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from splitinfer.core.plan import NewSequence, Slice, StepPlan
from splitinfer.core.sequence import SamplingParams
from splitinfer.core.serving_options import usual_token_budget
from splitinfer.engine.device.device import open_device
from splitinfer.engine.stage.runner import StageRunner
from splitinfer.machine.costs import Costs
from splitinfer.machine.profile import MachineProfile, Trials
from splitinfer.models.caches.kv_blocks import KVBlock, moved
from splitinfer.models.cut.cut import StageModel
from splitinfer.models.cut.structure import ModelStructure
from splitinfer.models.load.layer_kinds import DescribedModel
from splitinfer.models.load.loader import in_bunches

FEW = (1, 8, 32)  # rows of a step, each of another sequence
CHUNK = 128  # a step with this many rows or more is of one sequence
CHAT = 256  # positions before the timed steps of a few rows: those of a short chat
BEHIND = 2048  # positions for the cost of attention: half of the longest prompt that a plan reports
COUNT = 3  # the number of quickest trials that count
SETTLED = 1.15  # the trials agree if the slowest that counts takes at most this many times as long as the quickest
_TRIAL, _MOST_STEPS = 0.05, 8  # seconds of a trial, unless a step takes longer, and the most steps in it
_WARM = 2  # steps before the first trial
_LENGTHS = 8  # of sequences that are timed together
_MANY = 8  # layers that are timed together
_MOST_MADE = 2**30  # bytes of their weights
_MOST_STEP = 0.9  # the largest share of a step that its fixed time, the head and attending take: each layer has a cost
_TOGETHER = 64 * 2**20  # bytes of weights made at a time
_PARAMS = SamplingParams(temperature=0.7)  # draws noise for each row, as in most chats
_FIRST_ID = 5  # of the made-up prompts

OnStep = Callable[[int, int], None]  # steps done, and the expected total; raises to end the measuring


class Trial:
    """A stage of a few layers with sequences of made-up rows, timed with the runner of stages. Only the thread that
    made it uses it. ``num_ranks``: the number of ranks that share these layers."""

    def __init__(self, structure: ModelStructure, span: tuple[int, int], vocab_size: int, num_ranks: int = 1) -> None:
        stage = StageModel(structure.model, *span, structure, checks=False)
        self.device = open_device(0, (0, span[1] - span[0]), num_ranks, sums=False)
        self._runner = StageRunner(stage, 0, vocab_size, self.device)
        self._runner.choose_by_form()
        self._spec, self._vocab_size = stage.hidden_spec, vocab_size
        self._num_steps = self._num_sequences = 0
        self._lengths: dict[int, int] = {}
        self._opened = set[int]()
        self._block: KVBlock | None = None
        self.host = 0.0
        """The seconds of the last step during which the device waited for the host."""

    def open(self, count: int) -> list[int]:
        """Return the ids of ``count`` new sequences, which their first step opens."""
        first, self._num_sequences = self._num_sequences, self._num_sequences + count
        return list(range(first, self._num_sequences))

    def open_behind(self, length: int, count: int) -> list[int]:
        """Return the ids of ``count`` new sequences that already have ``length`` tokens each, a multiple of ``CHUNK``.
        Other sequences are forgotten."""
        pool = self._runner.pool
        if self._block is None:
            (first,) = self.open(1)
            self.step([first], CHUNK)
            self._block = pool.save(0, first, 0, CHUNK)
            mx.eval(self._block.arrays())
        self.close()
        for start in range(0, length, CHUNK):
            pool.put(start // CHUNK, moved(self._block, start))
        found = self.open(count)
        self._lengths = dict.fromkeys(found, length)
        return found

    def begin(self, sequences: Sequence[int]) -> None:
        """Compute the first tokens of new sequences. Their lengths differ, as those of chats do."""
        self._run(self._plan({i: 1 + at % _LENGTHS for at, i in enumerate(sequences)}))

    def step(self, sequences: Sequence[int], rows: int) -> float:
        """Compute a step of ``rows`` rows of each sequence, and return its seconds."""
        # A device that computes at launch leaves one machine alone no time to build graphs ahead.
        while not self.device.computes_at_launch and self._runner.prepare_next():
            pass
        return self._run(self._plan(dict.fromkeys(sequences, rows)))

    def _run(self, plan: StepPlan) -> float:
        hidden, began = self._hidden(plan.num_tokens), time.monotonic()
        launched = self._runner.launch(plan, hidden)
        self._runner.wait(launched)
        figures = self._runner.finish(launched).figures()
        self.host = time.monotonic() - began - (figures.ended - figures.started)
        return figures.ended - figures.started - figures.copying

    def close(self) -> None:
        """Forget all sequences."""
        self._lengths.clear()
        self._opened.clear()
        self._runner.reset()

    def _plan(self, rows: Mapping[int, int]) -> StepPlan:
        """Return a plan with so many rows of each sequence."""
        new = tuple(self._new(i) for i in rows if i not in self._opened)
        self._opened.update(rows)
        slices = []
        for i, count in rows.items():
            start = self._lengths.get(i, 0)
            slices.append(Slice(i, start, self._ids(i, start, start + count), 1))
            self._lengths[i] = start + count
        self._num_steps += 1
        return StepPlan(self._num_steps, new=new, slices=tuple(slices))

    def _ids(self, sequence: int, start: int, end: int) -> tuple[int, ...]:
        return tuple((_FIRST_ID + 7 * at + 31 * sequence) % self._vocab_size for at in range(start, end))

    def _new(self, sequence: int) -> NewSequence:
        length = self._lengths.get(sequence, 0)
        blocks, prefix = tuple(range(length // CHUNK)), self._ids(sequence, 0, length)
        return NewSequence(sequence, _PARAMS, sequence, blocks, prefix, num_prompt=1)

    def _hidden(self, rows: int) -> mx.array | None:
        """Return made-up hidden states [rows, d], or None on the first stage."""
        if self._spec is None:
            return None
        width, dtype = self._spec
        hidden = mx.random.normal((rows, width)).astype(dtype)
        mx.eval(hidden)
        return hidden


@dataclass(frozen=True, slots=True)
class Piece:
    """A step to time: ``rows`` rows after ``behind`` positions. Fewer than ``CHUNK`` rows belong to one sequence each,
    more belong to one sequence together."""

    rows: int
    behind: int = 0


@dataclass(slots=True)
class Tried:
    """The trials of a piece, in seconds."""

    trials: list[float] = field(default_factory=list)

    @property
    def _count(self) -> list[float]:
        return sorted(self.trials)[:COUNT]

    @property
    def seconds(self) -> float:
        """The median of the trials that count."""
        return median(self._count)

    @property
    def spread(self) -> float:
        """The slowest trial that counts divided by the quickest; infinite for a single trial."""
        return self._count[-1] / max(1e-9, self._count[0]) if len(self.trials) > 1 else math.inf

    @property
    def is_settled(self) -> bool:
        """Whether no more trials are needed."""
        return len(self.trials) >= COUNT and self.spread <= SETTLED


@dataclass(slots=True)
class Timed:
    """The timings of some layers: the trials of each piece, and the host's seconds for steps of one row."""

    pieces: dict[Piece, Tried] = field(default_factory=dict)
    hosts: Tried = field(default_factory=Tried)

    def by_rows(self) -> dict[int, float]:
        """Return the seconds of a step by its rows, each with the fewest positions that were timed."""
        found = dict[int, float]()
        for piece in sorted(self.pieces, key=lambda each: -each.behind):
            found[piece.rows] = self.pieces[piece].seconds
        return found

    def attending(self, rows: int) -> float:
        """Return the seconds for each position that a row attends to, in steps of ``rows`` rows; 0 if not timed."""
        each = sorted((piece.behind, tried.seconds) for piece, tried in self.pieces.items() if piece.rows == rows)
        if len(each) < 2:
            return 0.0
        (few, quick), *_, (many, slow) = each
        return max(0.0, slow - quick) / ((many - few) * rows)

    def fewest(self, rows: int) -> int:
        """Return the fewest positions before a timed step of ``rows`` rows."""
        return min(piece.behind for piece in self.pieces if piece.rows == rows)

    @property
    def behind(self) -> int:
        """The largest number of positions before a timed step."""
        return max((each.behind for each in self.pieces), default=0)


class Stopwatch:
    """Times layers of a model in at most about ``seconds`` seconds. ``room``: the bytes of weights that may be in
    memory; ``num_ranks``: the number of ranks that share these layers."""

    def __init__(
        self,
        described: DescribedModel,
        vocab_size: int,
        report: OnStep,
        seconds: float,
        room: int,
        num_ranks: int = 1,
    ) -> None:
        self._described, self._vocab_size, self._report = described, vocab_size, report
        self._num_ranks = num_ranks
        layers = described.profile.layers
        kinds = [layer.kind for layer in layers]
        self._last = len(kinds) - 1
        # The layer that represents each kind: not the first or last layer, if there is another one.
        self._of_kind = {
            kind: min((i for i, each in enumerate(kinds) if each == kind), key=lambda i: (i == self._last, i == 0, i))
            for kind in dict.fromkeys(kinds)
        }
        first = 1 if len(kinds) > 3 else 0
        end = min(first + _MANY, max(self._last, first + 2), len(kinds))
        weights = [layer.weights for layer in layers]
        while end - first > 1 and sum(weights[first:end]) > (room if end - first == 2 else min(room, _MOST_MADE)):
            end -= 1
        self._several = (first, end) if end - first > 1 else None
        singles = dict.fromkeys([*self._of_kind.values(), self._last])
        spans = [(i, i + 1) for i in singles] + ([] if self._several is None else [self._several])
        self._groups = _fitting(spans, weights, room)
        self._ends, self._done = time.monotonic() + seconds, 0
        self._trials: dict[tuple[int, int], Trial] = {}
        self._timed = {span: Timed() for span in spans}
        self._launches_ahead = False

    def measure(self) -> MachineProfile:
        """Time everything. Return a profile without a name: the costs of a layer of each kind, a step and the head."""
        for number, spans in enumerate(self._groups):
            now, others = time.monotonic(), len(self._groups) - number
            self._try(spans, now + max(0.0, self._ends - now) / others)
            self._give_up(spans, [span for group in self._groups[number + 1 :] for span in group])
        found = _fitted(self._described, self._of_kind, self._timed, self._several)
        hosts = next(timed.hosts for timed in self._timed.values())
        return replace(found, host=hosts.seconds, launches_ahead=self._launches_ahead)

    # -- trials --------------------------------------------------------------------------------

    def _try(self, spans: Sequence[tuple[int, int]], until: float) -> None:
        """Time some spans in turn, until all trials agree or the time is over. Each span gets at least two trials."""
        for number, span in enumerate(spans):
            now = time.monotonic()
            self._first(span, now + (until - now) / (len(spans) - number))
        every, rounds = [(span, each) for span in spans for each in self._timed[span].pieces.items()], 1
        while left := [(span, piece, tried) for span, (piece, tried) in every if not tried.is_settled]:
            timed = 0
            for span, piece, tried in left:
                if rounds < 2 or time.monotonic() + tried.seconds < until:
                    self._time(span, piece)
                    timed += 1
            if not timed:
                return
            rounds += 1

    def _first(self, span: tuple[int, int], until: float) -> None:
        """Make a span's layers, and time each of its pieces once, while there is time; at least two numbers of rows if
        the span has several."""
        self._make(span)
        trial = Trial(self._described.structure, span, self._vocab_size, self._num_ranks)
        self._trials[span] = trial
        self._launches_ahead = not trial.device.computes_at_launch
        pieces = self._timed[span].pieces
        for piece in self._pieces(span):
            left = until - time.monotonic()
            known = [(each, tried.seconds) for each, tried in pieces.items() if each.rows <= piece.rows]
            if len(known) > 1:
                like, seconds = max(known, key=lambda each: each[0].rows)
                if (1 + COUNT) * seconds * piece.rows / like.rows > left:
                    continue
            self._time(span, piece, warm=True)

    def _pieces(self, span: tuple[int, int]) -> list[Piece]:
        """Return the pieces of a span to time, the most important first."""
        layer, most = self._described.profile.layers[span[0]], self._described.profile.context_length
        behind = _whole(min(BEHIND, most - CHUNK - _MOST_STEPS))
        few = [Piece(rows, _whole(min(CHAT, behind // 2))) for rows in FEW]
        if span == self._several:
            return few[:1]
        if span[0] not in self._of_kind.values():
            return few
        chunks = [n for n in sorted({CHUNK, usual_token_budget(on_gpu=self._launches_ahead)}) if n <= most]
        more = [Piece(rows, behind) for rows in (1, *chunks) if behind > few[0].behind and rows + behind <= most]
        start = [Piece(rows) for rows in chunks] if layer.kv_per_token or not more else []
        return [*few, *start, *more]

    def _time(self, span: tuple[int, int], piece: Piece, *, warm: bool = False) -> None:
        """Make a trial of a piece: the median of some steps."""
        trial, timed = self._trials[span], self._timed[span]
        took, hosts, sequences = list[float](), list[float](), list[int]()
        before = (_WARM if piece.rows < CHUNK else 1) if warm else 0
        while len(took) < before + 1 or (len(took) < before + _MOST_STEPS and sum(took[before:]) < _TRIAL):
            if not sequences or piece.rows >= CHUNK:
                trial.close()
                several = piece.rows if piece.rows < CHUNK else 1
                sequences = trial.open_behind(piece.behind, several) if piece.behind else trial.open(several)
                if piece.rows < CHUNK:
                    trial.begin(sequences)
            self._done += 1
            self._report(self._done, self._done + self._left)
            took.append(trial.step(sequences, 1 if piece.rows < CHUNK else piece.rows))
            hosts.append(trial.host)
        trial.close()
        timed.pieces.setdefault(piece, Tried()).trials.append(median(took[before:]))
        if piece.rows == 1:
            timed.hosts.trials.append(median(hosts[before:]))

    @property
    def _left(self) -> int:
        """About how many steps are left to time, if trials agree."""
        every = [tried for timed in self._timed.values() for tried in timed.pieces.values()]
        return sum(max(0, COUNT - len(tried.trials)) for tried in every)

    # -- weights -------------------------------------------------------------------------------

    def _make(self, span: tuple[int, int]) -> None:
        """Make the weights of some layers, a few at a time."""
        layers = self._described.structure.layers[slice(*span)]
        for few in in_bunches([array for layer in layers for _, array in tree_flatten(layer.parameters())], _TOGETHER):
            mx.eval(few)
            self._report(self._done, self._done + 1)

    def _give_up(self, spans: Sequence[tuple[int, int]], still: Iterable[tuple[int, int]]) -> None:
        """Free the weights that no other span needs."""
        needed = {layer for other in still for layer in range(*other)}
        for number in {layer for span in spans for layer in range(*span)} - needed:
            layer = self._described.structure.layers[number]
            layer.update(tree_map(lambda array: mx.zeros(array.shape, array.dtype), layer.parameters()))
        for span in spans:
            del self._trials[span]
        mx.clear_cache()


def _whole(positions: int) -> int:
    """Return the multiple of ``CHUNK`` that is at most ``positions``, or 0."""
    return max(0, positions) // CHUNK * CHUNK


def _fitting(spans: Sequence[tuple[int, int]], weights: Sequence[int], room: int) -> list[list[tuple[int, int]]]:
    """Return the spans in groups whose layers together fit into ``room`` bytes. A single span may need more.

    >>> _fitting([(1, 2), (3, 4), (1, 3)], [9, 9, 9, 9], 18)
    [[(1, 2), (3, 4)], [(1, 3)]]
    """
    groups = list[list[tuple[int, int]]]()
    for span in spans:
        together = {layer for each in [*(groups[-1] if groups else []), span] for layer in range(*each)}
        if groups and sum(weights[layer] for layer in together) <= room:
            groups[-1].append(span)
        else:
            groups.append([span])
    return groups


def _fitted(
    described: DescribedModel,
    of_kind: Mapping[str, int],
    timed: Mapping[tuple[int, int], Timed],
    several: tuple[int, int] | None,
) -> MachineProfile:
    """Return the profile that fits the timings."""
    layers, model = described.profile.layers, described.profile
    last, last_of_kind = model.num_layers - 1, of_kind[layers[-1].kind]
    by_rows = {span: each.by_rows() for span, each in timed.items()}

    def alone(layer: int) -> dict[int, float]:
        place = layer if layer == last else of_kind[layers[layer].kind]
        return by_rows[place, place + 1]

    quickest, step, larger = min(alone(i)[1] for i in of_kind.values()), 0.0, 1.0
    if several is not None:
        apart, together = sum(alone(i)[1] for i in range(*several)), by_rows[several][1]
        step = (apart - together) / (several[1] - several[0] - 1)
        step, larger = min(max(0.0, step), _MOST_STEP * quickest), max(1.0, together / apart)
    few = {rows: alone(last)[rows] for rows in alone(last).keys() & alone(last_of_kind).keys() if rows < CHUNK}
    if last_of_kind == last:
        share = model.head / max(1, model.head + layers[-1].weights)
        head = {rows: share * (seconds - step) for rows, seconds in few.items()}
    else:
        head = {rows: max(0.0, seconds - alone(last_of_kind)[rows]) for rows, seconds in few.items()}
    found = dict[str, Costs]()
    for kind, place in of_kind.items():
        own, grows = timed[place, place + 1], layers[place].kv_per_token > 0
        behind = max((each.rows for each in own.pieces if each.behind and each.rows >= CHUNK), default=CHUNK)
        single, chunk = own.attending(1), own.attending(behind)
        seconds = dict[int, float]()
        for rows, took in alone(place).items():
            beside = step + (head.get(rows, head[1]) if place == last else 0.0)  # the head computes one row of a chunk
            if rows >= CHUNK:
                beside += chunk * rows * (rows + 1) / 2
            else:  # most rows of a chat attend to a whole window
                attended = own.fewest(rows) + (min(rows, _LENGTHS) + _MOST_STEPS) / 2
                beside += rows * single * (attended if grows else attended - own.behind)
            own_share = took - min(beside, _MOST_STEP * took)  # no layer is free, however busy the machine was
            seconds[rows] = own_share * (larger if rows == 1 else 1.0)
        found[kind] = Costs.through(_rising(seconds), *((single, chunk) if grows else ()))
    return MachineProfile("", found, step=step, head=Costs.through(_rising(head)), trials=_trials_of(timed))


def _trials_of(timed: Mapping[tuple[int, int], Timed]) -> Trials:
    """Return how well the trials agreed. A spread of 0 means that there were too few trials."""
    pieces = [(piece, tried.spread) for each in timed.values() for piece, tried in each.pieces.items()]
    few = max(spread for piece, spread in pieces if piece.rows < CHUNK)
    many = max((spread for piece, spread in pieces if piece.rows >= CHUNK), default=few)
    longest = max(piece.behind + piece.rows if piece.rows >= CHUNK else piece.behind + 1 for piece, _ in pieces)
    few, many = (spread if spread < math.inf else 0.0 for spread in (few, many))
    return Trials(few, many, longest)


def _rising(seconds: Mapping[int, float]) -> dict[int, float]:
    """Return the seconds by rows, raised so that they never decrease with more rows."""
    found, most = {}, 0.0
    for rows, value in sorted(seconds.items()):
        found[rows] = most = max(most, value)
    return found
